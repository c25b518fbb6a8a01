"""Maps of rows, `x W + b`, by whichever of PyTorch's libraries is the faster one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_weight

MIN_PRODUCTS = 1 << 22  # below this many multiplications, the call costs more than they do
PART_ROWS = 16  # from measuring 4 to 256
_onednn = torch.backends.mkldnn.is_available()


def use_onednn(on: bool) -> None:
    """Whether this process gives large maps to oneDNN, where PyTorch has it."""
    global _onednn
    _onednn = on and torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """`x W` and what is added to it: x [n, in_width], weight [in_width, out_width] -> [n, out_width].

    added: rows [n, out_width], or one bias [out_width] for all.

    A 1 x 1 convolution is the same map, and PyTorch gives it to oneDNN, which uses the widest vectors of any processor.
    Its matrix product goes to MKL, which does so on Intel's only.
    """
    known = x.dtype == torch.float32 and x.device.type == "cpu"
    if _onednn and known and x.numel() * weight.shape[1] >= MIN_PRODUCTS:
        y: Tensor = _Convolution.apply(x, weight, added)  # type: ignore[no-untyped-call]
        return y
    return x @ weight if added is None else torch.addmm(added, x, weight)


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.one_for_all = added is not None and added.dim() == 1
        if ctx.one_for_all or added is None:
            return _convolve(x, weight, added)
        return _convolve(x, weight, None).add_(added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_added = ctx.needs_input_grad
        grad_added = grad_y.sum(0) if ctx.one_for_all else grad_y
        return (
            _convolve(grad_y, weight.t(), None) if needs_x else None,
            _convolve_weight(x, grad_y) if needs_weight else None,
            grad_added if needs_added else None,
        )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.conv2d(_pixels(x), weight.t()[:, :, None, None], bias)
    return y.permute(0, 2, 3, 1).reshape(len(x), weight.shape[1])


def _convolve_weight(x: Tensor, grad_y: Tensor) -> Tensor:
    """The gradient `x^T grad_y` of the weight: x [n, in_width], grad_y [n, out_width] -> [in_width, out_width].

    oneDNN works on equal parts of n, and takes up to four times as long where it finds none: a few rows are apart.
    """
    even, size = len(x) // PART_ROWS * PART_ROWS, (grad_y.shape[1], x.shape[1])
    beyond = x[even:].t() @ grad_y[even:]
    if not even:
        return beyond
    found: Tensor = conv2d_weight(_pixels(x[:even]), (*size, 1, 1), _pixels(grad_y[:even]))
    return found.view(size).t() + beyond


def _pixels(x: Tensor) -> Tensor:
    """Rows [n, width] as an image of n x 1 pixels, [1, width, n, 1], each pixel's channels side by side."""
    return x.contiguous().view(1, len(x), 1, x.shape[1]).permute(0, 3, 1, 2)
