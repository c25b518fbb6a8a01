"""Maps of rows, `x W + b`, by whichever of PyTorch's libraries is the faster one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_weight

MIN_PRODUCTS = 1 << 18  # below this many multiplications, the call costs more than they do
LARGE_PRODUCTS = 1 << 22  # from which oneDNN pays for gradients of weights
NARROW = 16  # below so many columns it does not
PART_ROWS = 16  # from measuring 4 to 256
_inner_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
_onednn = True


def use_onednn(on: bool) -> None:
    """Whether large maps of this process are those of this module, by oneDNN where PyTorch has it, or PyTorch's own."""
    global _onednn
    _onednn = on


def linear(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """`x W` and what is added to it: x [n, in_width], weight [in_width, out_width] -> [n, out_width].

    added: rows [n, out_width], or one bias [out_width] for all.

    PyTorch's matrix product goes to MKL, which is slow where few columns come out, and on some processors leaves the
    widest vectors unused. oneDNN's inner product, by which PyTorch's compiler has such maps done, is not.
    """
    known = x.dtype == torch.float32 and x.device.type == "cpu"
    if _onednn and known and x.numel() * weight.shape[1] >= MIN_PRODUCTS:
        y: Tensor = _Map.apply(x, weight, added)  # type: ignore[no-untyped-call]
        return y
    return x @ weight if added is None else torch.addmm(added, x, weight)


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.one_for_all = added is not None and added.dim() == 1
        if ctx.one_for_all or added is None:
            return _product(x, weight, added)
        return _product(x, weight, None).add_(added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_added = ctx.needs_input_grad
        grad_added = grad_y.sum(0) if ctx.one_for_all else grad_y
        return (
            _product(grad_y, weight.t(), None) if needs_x else None,
            _weight_gradient(x, grad_y) if needs_weight else None,
            grad_added if needs_added else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _inner_product is not None:
        y: Tensor = _inner_product(x.contiguous(), weight.t().contiguous(), bias, "none", [], "")
        return y
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _weight_gradient(x: Tensor, grad_y: Tensor) -> Tensor:
    """The gradient `x^T grad_y` of the weight: x [n, in_width], grad_y [n, out_width] -> [in_width, out_width].

    Large ones of several threads are oneDNN's, as that of a 1 x 1 convolution's weight, which takes up to four times as
    long where n has no equal parts: a few rows are apart. In MKL's product the narrower one goes first: it takes up to
    twenty times as long where eight columns come last.
    """
    wide = min(x.shape[1], grad_y.shape[1]) >= NARROW and x.numel() * grad_y.shape[1] >= LARGE_PRODUCTS
    if _inner_product is None or not wide or torch.get_num_threads() == 1:
        return (grad_y.t() @ x).t() if grad_y.shape[1] < x.shape[1] else x.t() @ grad_y
    even, size = len(x) // PART_ROWS * PART_ROWS, (grad_y.shape[1], x.shape[1])
    found: Tensor = conv2d_weight(_pixels(x[:even]), (*size, 1, 1), _pixels(grad_y[:even]))
    return found.view(size).t() + x[even:].t() @ grad_y[even:]


def _pixels(x: Tensor) -> Tensor:
    """Rows [n, width] as an image of n x 1 pixels, [1, width, n, 1], each pixel's channels side by side."""
    return x.contiguous().view(1, len(x), 1, x.shape[1]).permute(0, 3, 1, 2)
