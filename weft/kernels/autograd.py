"""The kernels as functions of autograd: forward and backward on a backend, of arguments that have been checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, AttentionInputs, Backend, Pairs, Scale, SumBackend
from weft.utils.random import RandomKey


class SpmmFunction(torch.autograd.Function):
    """A sum over in-edges, see `spmm`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, backend: SumBackend, adj: Adjacency, scale: Scale, weighted: bool, wide: bool
    ) -> Tensor:
        ctx.args = backend, adj, scale, weighted
        return backend.spmm(adj, x.detach(), scale, weighted, wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        backend, adj, scale, weighted = ctx.args
        return backend.spmm_transposed(adj, grad_y, scale, weighted), None, None, None, None, None


class SpmmMaxFunction(torch.autograd.Function):
    """A maximum over in-edges, and the place of each; see `spmm_max_places`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: Backend, adj: Adjacency) -> tuple[Tensor, Tensor]:
        y, position = backend.spmm_max(adj, x.detach().contiguous())
        ctx.args = backend, adj
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(position)
        ctx.save_for_backward(position)
        return y, position

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, _grad_position: None) -> tuple[Tensor | None, ...]:
        if grad_y is None:
            return None, None, None
        backend, adj = ctx.args
        (position,) = ctx.saved_tensors
        return backend.spmm_max_backward(adj, position, grad_y.contiguous()), None, None


class AttendFunction(torch.autograd.Function):
    """Attention whose logits are sums of one of the source and one of the target; see `attend`."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, logit_src: Tensor, logit_dst: Tensor, backend: Backend, over: Attention, needs_logits: bool
    ) -> Tensor:
        inputs = (tensor.detach().contiguous() for tensor in (h, logit_src, logit_dst))
        x, *logits = inputs
        y, kept = backend.attend(over, x, *logits, needs_logits=needs_logits)
        ctx.args = backend, over
        ctx.save_for_backward(x if needs_logits else None, *logits, y if needs_logits else None, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        backend, over = ctx.args
        saved = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
        needs_h, needs_src, needs_dst = ctx.needs_input_grad[:3]
        grad_h, grads = backend.attend_backward(
            over,
            AttentionInputs(*saved[:4]),  # type: ignore[arg-type]
            saved[4:],
            grad_y.contiguous(),
            needs_h=needs_h,
            needs_logits=needs_src or needs_dst,
        )
        logits = (None, None) if grads is None else (one.to(grad_y.dtype) for one in grads)
        return grad_h, *logits, None, None, None


class PairLogits(torch.autograd.Function):
    """Logits of edges from rows of both ends; see `pair_logits`."""

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        attention: Tensor,
        edge_map: Tensor | None,
        backend: Backend,
        over: Pairs,
    ) -> Tensor:
        given = (left, right, attention, edge_map)
        inputs = [None if x is None else x.detach().contiguous() for x in given]
        ctx.args = backend, over
        ctx.save_for_backward(*inputs)
        return backend.pair_logits(over, *inputs)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        backend, over = ctx.args
        grads = backend.pair_backward(over, *ctx.saved_tensors, grad_logits.contiguous())
        return (*grads, None, None)


class AttendEdgesFunction(torch.autograd.Function):
    """Attention by logits of edges; see `attend_edges`."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, logits: Tensor, backend: Backend, over: Attention) -> Tensor:
        y, alpha, inputs = backend.attend_edges(over, h.detach().contiguous(), logits.detach().contiguous())
        ctx.args = backend, over
        ctx.save_for_backward(alpha, *inputs)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        backend, over = ctx.args
        alpha, *inputs = ctx.saved_tensors
        return (*backend.attend_edges_backward(over, alpha, inputs, grad_y.contiguous()), None, None)


class KeyedDropout(torch.autograd.Function):
    """Dropout whose mask is derived again in the backward pass; see `keyed_dropout`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, backend: Backend, key: RandomKey, p: float, first_column: int
    ) -> Tensor:
        ctx.args = rows, backend, key, p, first_column
        return backend.keyed_dropout(x.detach().contiguous(), rows, key, p, first_column, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        rows, backend, key, p, first_column = ctx.args
        grad_x = backend.keyed_dropout(grad_y.contiguous(), rows, key, p, first_column, False)
        return grad_x, None, None, None, None, None


class ReluDropout(torch.autograd.Function):
    """The same of `max(x, 0)`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, backend: Backend, key: RandomKey, p: float, first_column: int
    ) -> Tensor:
        y = backend.keyed_dropout(x.detach().contiguous(), rows, key, p, first_column, True)
        ctx.args = backend, p
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        backend, p = ctx.args
        (y,) = ctx.saved_tensors
        return backend.relu_dropout_backward(y, grad_y.contiguous(), p), None, None, None, None, None
