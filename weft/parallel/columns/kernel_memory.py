"""Memory of an aggregate in chunks: a function on meta tensors that allocates and saves as much as `ColumnPass`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn import Aggregate, Attend, AttendEdges, Max

SUM_BYTES = 4
"""Smallest number of bytes of a number in which rows are summed (float32)."""


@dataclass(frozen=True, kw_only=True)
class KernelMemory:
    """Bytes that an aggregate needs on a rank, in addition to its result and the gradients of its rows."""

    forward: int = 0
    """Temporary bytes during the forward pass."""
    saved: int = 0
    """Bytes saved for backward, live from the end of forward until this operation's backward."""
    backward: int = 0
    """Temporary bytes during the backward pass."""
    saves_rows: int = 0
    """Number of times that the aggregated rows are saved for backward. Above 0, all other tensors that it reads are
    saved once. Each save of a tensor that is not contiguous is a copy."""
    saves_result: bool = False
    """True if the result is saved for backward."""


def estimate_kernel_memory(
    op: Aggregate, *, num_targets: int, num_edges: int, width: int, itemsize: int, steps: int = 1
) -> KernelMemory:
    """Return the memory of the CPU kernels (weft.kernels.cpu) on a block.

    Args:
        op: The aggregate.
        num_targets: Number of targets of the block.
        num_edges: Number of its edges.
        width: Number of columns of the aggregated rows.
        itemsize: Bytes of a number in these.
        steps: Number of times that the aggregate is applied.
    """
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
    """Function on meta tensors with the memory use of an aggregate: returns rows [n, F].

    Its arguments are the `KernelMemory`, n, and the tensors that the aggregate reads, the aggregated rows first.
    """

    @staticmethod
    def forward(ctx: Any, memory: KernelMemory, num_targets: int, *read: Tensor) -> Tensor:
        scratch = blank(memory.forward)
        result = read[0].new_empty(num_targets, read[0].shape[1])
        saved = [blank(memory.saved)]
        del scratch
        if memory.saves_rows:
            saved += [tensor.contiguous() for tensor in (*read, *read[:1] * (memory.saves_rows - 1))]
        if memory.saves_result:
            saved.append(result)
        ctx.save_for_backward(*saved)
        ctx.memory, ctx.like = memory, [(tensor.shape, tensor.dtype) for tensor in read]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        scratch, needs = blank(ctx.memory.backward), ctx.needs_input_grad[2:]
        grads = [
            torch.empty(shape, dtype=dtype, device="meta") if needed else None
            for (shape, dtype), needed in zip(ctx.like, needs, strict=True)
        ]
        del scratch
        return None, None, *grads


def blank(num_bytes: int) -> Tensor:
    """Return a meta tensor of `num_bytes` bytes."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
