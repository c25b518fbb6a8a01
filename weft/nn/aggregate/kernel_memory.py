"""What aggregates and dropout allocate and keep: stand-ins without data that take as much memory as the real ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn.aggregate.aggregate import Aggregate
from weft.nn.aggregate.attention import Attend, AttendEdges
from weft.nn.aggregate.reduce import Max

SUM_BYTES = 4
"""Of a number that rows are summed in, at least."""


@dataclass(frozen=True, kw_only=True)
class KernelMemory:
    """Bytes that an aggregate takes on a rank beside its result and the gradients of its rows."""

    forward: int = 0
    """While it runs."""
    saved: int = 0
    """From then on, until the backward pass has come by."""
    backward: int = 0
    """While that runs."""
    saves_rows: int = 0
    """How many times the rows that it aggregates are kept for the backward pass, and whether all others are: rows that
    are not contiguous are copied each time."""
    saves_result: bool = False
    """Whether its result is."""

    def moved(self, *, forward: int = 0, saved: int = 0, backward: int = 0) -> KernelMemory:
        """With what an exchange takes besides."""
        return replace(
            self, forward=self.forward + forward, saved=self.saved + saved, backward=self.backward + backward
        )


def estimate_kernel_memory(
    op: Aggregate, *, num_targets: int, num_edges: int, width: int, itemsize: int, steps: int = 1
) -> KernelMemory:
    """That of the CPU's kernels on a block (weft.kernels.cpu)."""
    result, more = num_targets * width * itemsize, steps - 1
    one_more = result if more else 0
    if isinstance(op, Attend):
        logits = num_targets * op.heads * max(itemsize, SUM_BYTES)
        saved = 2 * logits + result * (1 + 2 * more)
        return KernelMemory(saved=saved, backward=3 * logits + one_more, saves_rows=1, saves_result=True)
    if isinstance(op, AttendEdges):
        logits = (num_edges + num_targets) * op.heads * itemsize
        both = 0 if op.separate_left else result  # gradients of h, by the sum and by the logits
        return KernelMemory(
            saved=logits + result * more,
            forward=logits,
            backward=logits + both + one_more,
            saves_rows=1 if op.separate_left else 2,
        )
    if isinstance(op, Max):
        return KernelMemory(saved=result * steps, backward=one_more)
    return KernelMemory(forward=one_more, backward=one_more)


class StandIn(torch.autograd.Function):
    """The result [n, F] of an aggregate of tensors, the first of which is what it aggregates."""

    @staticmethod
    def forward(ctx: Any, footprint: KernelMemory, num_targets: int, *read: Tensor) -> Tensor:
        scratch = blank(footprint.forward)
        result = read[0].new_empty(num_targets, read[0].shape[1])
        kept = [blank(footprint.saved)]
        del scratch
        if footprint.saves_rows:
            kept += [one.contiguous() for one in (*read, *read[:1] * (footprint.saves_rows - 1))]
        if footprint.saves_result:
            kept.append(result)
        ctx.save_for_backward(*kept)
        ctx.footprint, ctx.like = footprint, [(one.shape, one.dtype) for one in read]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        scratch, needs = blank(ctx.footprint.backward), ctx.needs_input_grad[2:]
        found = [
            torch.empty(shape, dtype=dtype, device="meta") if needed else None
            for (shape, dtype), needed in zip(ctx.like, needs, strict=True)
        ]
        del scratch
        return None, None, *found


class DropoutStandIn(torch.autograd.Function):
    """The result of keyed dropout; with relu, its gradient reads the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: bool) -> Tensor:
        y = torch.empty_like(x)
        if relu:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return torch.empty_like(grad), None


def blank(num_bytes: int) -> Tensor:
    """So much memory, without data."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
