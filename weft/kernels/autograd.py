"""Autograd functions of the kernels. They call a backend forward and backward; `ops` has checked the arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, AttentionInputs, Backend, Pairs, Scale, SumBackend
from weft.utils.random import RandomKey


class SpmmFunction(torch.autograd.Function):
    """Sum over in-edges; see `ops.spmm`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, backend: SumBackend, adj: Adjacency, scale: Scale, weighted: bool, in_sum_dtype: bool
    ) -> Tensor:
        ctx.args = backend, adj, scale, weighted
        return backend.spmm(adj, x.detach(), scale, weighted, in_sum_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        backend, adj, scale, weighted = ctx.args
        return backend.spmm_transposed(adj, grad_y, scale, weighted), None, None, None, None, None


class SpmmMaxFunction(torch.autograd.Function):
    """Maximum over in-edges, and the position of each maximum; see `ops.spmm_max_positions`."""

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
    """Attention whose logits are a term of the source plus a term of the target; see `ops.attend`."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, logit_src: Tensor, logit_dst: Tensor, backend: Backend, spec: Attention, needs_logits: bool
    ) -> Tensor:
        inputs = (tensor.detach().contiguous() for tensor in (h, logit_src, logit_dst))
        x, *logits = inputs
        y, saved = backend.attend(spec, x, *logits, needs_logits=needs_logits)
        ctx.args = backend, spec
        ctx.save_for_backward(x if needs_logits else None, *logits, y if needs_logits else None, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        backend, spec = ctx.args
        saved = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
        needs_h, needs_src, needs_dst = ctx.needs_input_grad[:3]
        grad_h, grads = backend.attend_backward(
            spec,
            AttentionInputs(*saved[:4]),  # type: ignore[arg-type]
            saved[4:],
            grad_y.contiguous(),
            needs_h=needs_h,
            needs_logits=needs_src or needs_dst,
        )
        logits = (None, None) if grads is None else (grad.to(grad_y.dtype) for grad in grads)
        return grad_h, *logits, None, None, None


class PairLogits(torch.autograd.Function):
    """Logits of edges, computed from the rows of both endpoints; see `ops.pair_logits`."""

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        attention: Tensor,
        edge_map: Tensor | None,
        backend: Backend,
        spec: Pairs,
    ) -> Tensor:
        tensors = (left, right, attention, edge_map)
        inputs = [None if x is None else x.detach().contiguous() for x in tensors]
        ctx.args = backend, spec
        ctx.save_for_backward(*inputs)
        return backend.pair_logits(spec, *inputs)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        backend, spec = ctx.args
        grads = backend.pair_backward(spec, *ctx.saved_tensors, grad_logits.contiguous())
        return (*grads, None, None)


class DotLogits(torch.autograd.Function):
    """Dot products of the rows of both endpoints of edges; see `ops.dot_logits`."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, backend: Backend, spec: Attention) -> Tensor:
        inputs = [x.detach().contiguous() for x in (left, right)]
        ctx.args = backend, spec
        ctx.save_for_backward(*inputs)
        return backend.dot_logits(spec, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        backend, spec = ctx.args
        return (*backend.dot_backward(spec, *ctx.saved_tensors, grad_logits.contiguous()), None, None)


class AttendEdgesFunction(torch.autograd.Function):
    """Attention with one logit per edge and head; see `ops.attend_edges`."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, logits: Tensor, backend: Backend, spec: Attention) -> Tensor:
        y, alpha, inputs = backend.attend_edges(spec, h.detach().contiguous(), logits.detach().contiguous())
        ctx.args = backend, spec
        ctx.save_for_backward(alpha, *inputs)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        backend, spec = ctx.args
        alpha, *inputs = ctx.saved_tensors
        return (*backend.attend_edges_backward(spec, alpha, inputs, grad_y.contiguous()), None, None)


class KeyedDropout(torch.autograd.Function):
    """Dropout that computes its mask again in the backward pass instead of saving it; see `ops.keyed_dropout`."""

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
    """Keyed dropout of `max(x, 0)`. The backward pass reads the mask from the result: a zero has no gradient."""

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
