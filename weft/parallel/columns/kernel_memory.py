"""Memory of an aggregate in chunks: a function on meta tensors that allocates and saves as much as `ColumnPass`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn import Aggregate, Attend, AttendEdges, Max
from weft.runtime.memory.tensor_peak import blank

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
    saves_rows: bool = False
    """True if the tensors that it reads are saved for backward; one that is not contiguous is copied."""
    saves_result: bool = False
    """True if the result is saved for backward."""


def rerun_bytes(op: Aggregate, *, num_targets: int, num_edges: int, width: int, itemsize: int) -> int:
    """Return the bytes that running an aggregate again for its backward pass takes on the CPU, next to rows and result.

    Args:
        op: The aggregate.
        num_targets: Number of targets of the chunk.
        num_edges: Number of its edges.
        width: Number of columns of the aggregated rows.
        itemsize: Bytes of a number in these.
    """
    result = num_targets * width * itemsize
    if isinstance(op, Attend):  # five tensors of logits, and the part of the result from positive arguments
        return 5 * num_targets * op.heads * max(itemsize, SUM_BYTES) + result
    if isinstance(op, AttendEdges):  # weights and their gradients; gradients of h twice, by the sum and by the logits
        return 2 * (num_edges + num_targets) * op.heads * itemsize + result * (not op.separate_left)
    return result if isinstance(op, Max) else 0  # positions of maxima


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
            saved += [tensor.contiguous() for tensor in read]
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
