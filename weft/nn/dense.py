"""Maps of rows, `x W + b`, by whichever of PyTorch's libraries is the faster one here (`weft.core.choices`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_weight

from weft.core.choices import chosen

PART_ROWS = 16  # from measuring 4 to 256
_inner_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def has_onednn() -> bool:
    """Whether PyTorch has oneDNN's inner product here."""
    return _inner_product is not None


def linear(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """`x W` and what is added to it: x [n, in_width], weight [in_width, out_width] -> [n, out_width].

    added: rows [n, out_width], or one bias [out_width] for all.

    PyTorch's matrix product goes to MKL, which is slow where few columns come out, and on some processors leaves the
    widest vectors unused. oneDNN's inner product, by which PyTorch's compiler has such maps done, is not.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return linear_by("torch", "", x, weight, added)
    sizes = (torch.get_num_threads(), x.numel() * weight.shape[1], *weight.shape)
    return linear_by(chosen("map", *sizes), chosen("map_weights", *sizes), x, weight, added)


def linear_by(by: str, weights_by: str, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """`linear` by some implementations of `map` and `map_weights`, see `weft.core.choices`."""
    if by != "torch":
        y: Tensor = _Map.apply(x, weight, added, by, weights_by)  # type: ignore[no-untyped-call]
        return y
    return x @ weight if added is None else torch.addmm(added, x, weight)


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, by: str, weights_by: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.one_for_all = added is not None and added.dim() == 1
        ctx.by = by, weights_by
        if ctx.one_for_all or added is None:
            return _product(x, weight, added, by)
        return _product(x, weight, None, by).add_(added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by, weights_by = ctx.by
        needs_x, needs_weight, needs_added = ctx.needs_input_grad[:3]
        grad_added = grad_y.sum(0) if ctx.one_for_all else grad_y
        return (
            _product(grad_y, weight.t(), None, by) if needs_x else None,
            _weight_gradient(x, grad_y, weights_by) if needs_weight else None,
            grad_added if needs_added else None,
            None,
            None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, by: str) -> Tensor:
    if by == "onednn" and _inner_product is not None:
        y: Tensor = _inner_product(x.contiguous(), weight.t().contiguous(), bias, "none", [], "")
        return y
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _weight_gradient(x: Tensor, grad_y: Tensor, by: str) -> Tensor:
    """The gradient `x^T grad_y` of the weight: x [n, in_width], grad_y [n, out_width] -> [in_width, out_width].

    oneDNN's is that of a 1 x 1 convolution's weight, which takes up to four times as long where n has no equal parts: a
    few rows are apart. In MKL's product the narrower one goes first: it takes up to twenty times as long where eight
    columns come last.
    """
    if by != "onednn" or _inner_product is None or len(x) < PART_ROWS:
        return (grad_y.t() @ x).t() if grad_y.shape[1] < x.shape[1] else x.t() @ grad_y
    even, size = len(x) // PART_ROWS * PART_ROWS, (grad_y.shape[1], x.shape[1])
    found: Tensor = conv2d_weight(_pixels(x[:even]), (*size, 1, 1), _pixels(grad_y[:even]))
    return found.view(size).t() + x[even:].t() @ grad_y[even:]


def _pixels(x: Tensor) -> Tensor:
    """Rows [n, width] as an image of n x 1 pixels, [1, width, n, 1], each pixel's channels side by side."""
    return x.contiguous().view(1, len(x), 1, x.shape[1]).permute(0, 3, 1, 2)
