"""Linear transforms of rows, `x W + b`, by the fastest library on this machine (`weft.runtime.kernel_selection`).

Rows may have lower precision (bfloat16) than weights (float32). Where the processor multiplies bfloat16 and adds up in
float32, weights are rounded to bfloat16 for the products. Elsewhere, rows are transformed part by part in float32, so
that no float32 copy of all rows exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.nn.grad import conv2d_weight

from weft.nn.sparse_rows import SparseRows
from weft.runtime.kernel_selection import selected_kernel
from weft.runtime.memory.alignment import empty_aligned, needs_padding, row_stride
from weft.utils.dtypes import is_low_precision, sum_dtype

ROW_MULTIPLE = 16
"""Number of rows passed to oneDNN's weight gradient is a multiple of this, the best of 4 to 256 as measured."""
NUM_PARTS = 8
"""Number of parts in which low-precision rows are converted to float32."""
_inner_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def has_onednn() -> bool:
    """Return whether this PyTorch has oneDNN's inner product."""
    return _inner_product is not None


@cache
def has_bfloat16_products() -> bool:
    """Return whether the processor multiplies bfloat16 in one instruction, which adds up in float32."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def linear(x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
    """Return `x W + added` [n, out_width].

    PyTorch's matrix product calls MKL, which is slow for few output columns and, on some processors, does not use the
    widest vector instructions. oneDNN's inner product, which torch.compile uses, has neither problem.

    Args:
        x: Rows [n, in_width]. If their precision is lower than W's, products are added up in the type of W, and the
            result is rounded to the type of x.
        weight: W, [in_width, out_width].
        added: Rows [n, out_width], or a bias [out_width]; None: nothing is added.
        summed: True if the result is only summed over edges; its rows may then be padded to cache lines
            (`weft.runtime.memory.alignment`).
    """
    if isinstance(x, SparseRows):
        return x.transformed(weight.t(), added)
    if weight.dtype != torch.float32 or x.device.type != "cpu":
        return linear_by("torch", "mkl", x, weight, added, summed=summed)
    parts = NUM_PARTS if is_low_precision(x.dtype) else 1
    sizes = (torch.get_num_threads(), x.numel() * weight.shape[1] / parts, *weight.shape)
    return linear_by(
        selected_kernel("map", *sizes), selected_kernel("map_weights", *sizes), x, weight, added, summed=summed
    )


def linear_by(
    kernel: str, weight_kernel: str, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False
) -> Tensor:
    """Return the result of `linear`, computed by given implementations (see `weft.runtime.kernel_selection`).

    Args:
        kernel: Implementation of the product, and of the gradient of x.
        weight_kernel: Implementation of the gradient of the weight.
        x: Rows [n, in_width].
        weight: [in_width, out_width].
        added: Rows [n, out_width], or a bias [out_width]; None: nothing is added.
        summed: True if the result is only summed over edges, so that its rows may be padded.
    """
    low_precision = is_lower_precision(x, weight)
    padded = summed and added is None and not low_precision and needs_padding(x, weight.shape[1])
    if kernel == "torch" and not low_precision and not padded:
        return x @ weight if added is None else torch.addmm(added, x, weight)
    if low_precision:
        y: Tensor = _LowPrecisionLinear.apply(x, weight, added, kernel, weight_kernel)  # type: ignore[no-untyped-call]
    else:
        y = _LinearFunction.apply(x, weight, added, kernel, weight_kernel, padded)  # type: ignore[no-untyped-call]
    return y


def apply_rowwise(run: Callable[..., Tensor], rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Return `run(*rows, *parameters)` [n, out_width], for a function that computes each row by itself.

    If rows have lower precision than the parameters, the function runs in the parameters' type, and its result is
    rounded once to the type of the rows. The backward pass runs it again, so no rows of higher precision are saved.

    Args:
        run: The function. It has no side effects and uses no other tensors that need a gradient.
        rows: Tensors [n, .].
        parameters: Tensors that all rows use.
    """
    if not is_lower_precision(rows[0], parameters[0]):
        return run(*rows, *parameters)
    y: Tensor = _UpcastRowwise.apply(run, len(rows), *rows, *parameters)  # type: ignore[no-untyped-call]
    return y


def plus(x: Tensor, added: Tensor | None) -> Tensor:
    """Return `x + added`, in the type of x.

    Args:
        x: Rows [n, F].
        added: Rows [n, F] of the same type, or a bias [F]; None: nothing is added.
    """
    if added is None or not is_lower_precision(x, added):
        return x if added is None else x + added
    y: Tensor = _LowPrecisionPlus.apply(x, added)  # type: ignore[no-untyped-call]
    return y


def is_lower_precision(rows: Tensor, parameter: Tensor) -> bool:
    """Return whether rows have a low-precision type, and a parameter has the type in which these are summed.

    Args:
        rows: Rows of any type.
        parameter: A parameter that they are combined with.
    """
    return is_low_precision(rows.dtype) and parameter.dtype == sum_dtype(rows.dtype)


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum [F] of rows [n, F], in float32 if the rows have lower precision."""
    dtype = sum_dtype(x.dtype)
    return x.sum(0) if x.dtype == dtype else torch.stack([x[part].to(dtype).sum(0) for part in _parts(x)]).sum(0)


class Linear(nn.Linear):
    """nn.Linear that computes with `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def _save(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, kernel: str, weight_kernel: str) -> None:
    """Save for backward what the gradient of a linear transform needs."""
    ctx.save_for_backward(x, weight)
    ctx.has_bias = added is not None and added.dim() == 1
    ctx.kernels = kernel, weight_kernel


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, kernel: str, weight_kernel: str, padded: bool
    ) -> Tensor:
        _save(ctx, x, weight, added, kernel, weight_kernel)
        if padded:
            return _aligned_product(x, weight, kernel)
        if ctx.has_bias or added is None:
            return _product(x, weight, added, kernel)
        return _product(x, weight, None, kernel).add_(added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (kernel, weight_kernel) = ctx.saved_tensors, ctx.kernels
        needs_x, needs_weight, needs_added = ctx.needs_input_grad[:3]
        grad_y = grad_y.contiguous()  # one copy for both products
        grad_added = grad_y.sum(0) if ctx.has_bias else grad_y
        return (
            _product(grad_y, weight.t(), None, kernel) if needs_x else None,
            _weight_gradient(x, grad_y, weight_kernel) if needs_weight else None,
            grad_added if needs_added else None,
            None,
            None,
            None,
        )


def _parts(x: Tensor) -> list[slice]:
    """Return the ranges of rows that are converted to float32 together."""
    step = max(-(-len(x) // NUM_PARTS), 1)
    return [slice(first, min(first + step, len(x))) for first in range(0, max(len(x), 1), step)]


def _multiplies(x: Tensor) -> bool:
    """Return whether products of low-precision rows are computed without a conversion to float32."""
    return x.dtype == torch.bfloat16 and x.device.type != "cuda" and has_bfloat16_products()


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, kernel: str, weight_kernel: str) -> Tensor:
        _save(ctx, x, weight, added, kernel, weight_kernel)
        if _multiplies(x):
            y = x @ weight.to(x.dtype)
            return y if added is None else y.add_(added)
        y = x.new_empty(len(x), weight.shape[1])
        for part in _parts(x):
            upcast = _product(x[part].to(weight.dtype), weight, added if ctx.has_bias else None, kernel)
            if added is not None and not ctx.has_bias:
                upcast += added[part]
            y[part] = upcast
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (kernel, weight_kernel) = ctx.saved_tensors, ctx.kernels
        needs_x, needs_weight, needs_added = ctx.needs_input_grad[:3]
        grad_added = sum_rows(grad_y) if ctx.has_bias else grad_y
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        if _multiplies(x):
            grad_x = grad_y @ weight.t().to(x.dtype) if needs_x else None
            for part in _parts(x) if grad_weight is not None else ():  # the sum of a part is rounded
                grad_weight += x[part].t() @ grad_y[part]
            return grad_x, grad_weight, grad_added if needs_added else None, None, None
        grad_x = torch.empty_like(x) if needs_x else None
        for part in _parts(x):
            upcast = grad_y[part].to(weight.dtype)
            if grad_x is not None:
                grad_x[part] = _product(upcast, weight.t(), None, kernel)
            if grad_weight is not None:
                grad_weight += _weight_gradient(x[part].to(weight.dtype), upcast, weight_kernel)
        return grad_x, grad_weight, grad_added if needs_added else None, None, None


class _LowPrecisionPlus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor) -> Tensor:  # noqa: ARG004
        y = torch.empty_like(x)
        for part in _parts(x):
            y[part] = x[part] + added
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return grad_y, sum_rows(grad_y)


class _UpcastRowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], num_rows: int, *tensors: Tensor) -> Tensor:
        ctx.run, ctx.num_rows = run, num_rows
        ctx.save_for_backward(*tensors)
        rows, parameters = tensors[:num_rows], tensors[num_rows:]
        parts = (run(*_upcast(rows, part), *parameters).to(rows[0].dtype) for part in _parts(rows[0]))
        return torch.cat([*parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        # Part by part: run again on a part of the rows in float32 and differentiate. Gradients of rows are written to
        # their part, in low precision; gradients of parameters are summed over the parts, in float32.
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        rows, parameters = tensors[: ctx.num_rows], tensors[ctx.num_rows :]
        all_grads = [
            torch.zeros_like(tensor) if needed else None for tensor, needed in zip(tensors, needs, strict=True)
        ]
        grads, num_row_grads = [grad for grad in all_grads if grad is not None], sum(needs[: ctx.num_rows])
        for part in _parts(grad_y):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (*_upcast(rows, part), *parameters)]
                y = ctx.run(*leaves)
            inputs = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
            part_grads = torch.autograd.grad(y, inputs, grad_y[part].to(y.dtype))
            for number, (total, grad) in enumerate(zip(grads, part_grads, strict=True)):
                if number < num_row_grads:
                    total[part] = grad
                else:
                    total += grad
        return None, None, *all_grads


def _upcast(rows: Sequence[Tensor], part: slice) -> list[Tensor]:
    return [tensor[part].to(sum_dtype(tensor.dtype)) for tensor in rows]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: str) -> Tensor:
    if kernel == "onednn" and _inner_product is not None:
        y: Tensor = _inner_product(x.contiguous(), weight.t().contiguous(), bias, "none", [], "")
        return y
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _aligned_product(x: Tensor, weight: Tensor, kernel: str) -> Tensor:
    """Return `x W` in rows that begin at cache lines (see `weft.runtime.memory.alignment`)."""
    width = weight.shape[1]
    if kernel != "onednn":
        return torch.mm(x, weight, out=empty_aligned(x, len(x), width))
    padding = row_stride(width, x.itemsize) - width
    return _product(x, pad(weight, (0, padding)), None, kernel)[:, :width]


def _weight_gradient(x: Tensor, grad_y: Tensor, kernel: str) -> Tensor:
    """Return the weight's gradient `x^T grad_y` [in_width, out_width] for x [n, in_width], grad_y [n, out_width]."""
    # onednn: the weight gradient of a 1 x 1 convolution on an image x with n pixels. It is up to 4 times as slow if n
    # is no multiple of ROW_MULTIPLE, so the last rows are added by a product. onednn_transposed: x and grad_y exchange
    # roles, which is faster for some sizes. mkl: the tensor with fewer columns comes first, because a product with
    # eight output columns is up to 20 times as slow.
    if kernel == "onednn_transposed":
        return _weight_gradient(grad_y, x, "onednn").t()
    if kernel != "onednn" or _inner_product is None or len(x) < ROW_MULTIPLE:
        return (grad_y.t() @ x).t() if grad_y.shape[1] < x.shape[1] else x.t() @ grad_y
    even, size = len(x) // ROW_MULTIPLE * ROW_MULTIPLE, (grad_y.shape[1], x.shape[1])
    grad: Tensor = conv2d_weight(_pixels(x[:even]), (*size, 1, 1), _pixels(grad_y[:even]))
    return grad.view(size).t() + x[even:].t() @ grad_y[even:]


def _pixels(x: Tensor) -> Tensor:
    """Return rows [n, width] as an image [1, width, n, 1] of n x 1 pixels, whose channels are contiguous."""
    return x.contiguous().view(1, len(x), 1, x.shape[1]).permute(0, 3, 1, 2)
