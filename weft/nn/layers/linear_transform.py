"""Maps of rows, `x W + b`, by whichever library is the faster one here (`weft.runtime.kernel_selection`), also of narrow rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.nn.grad import conv2d_weight

from weft.runtime.alignment import empty_aligned, needs_padding, row_stride
from weft.runtime.kernel_selection import selected_kernel
from weft.utils.dtypes import is_low_precision, sum_dtype

PART_ROWS = 16  # from measuring 4 to 256
PARTS = 8
"""In which narrow rows are widened, so that there is no wide copy of all of them."""
_inner_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def has_onednn() -> bool:
    """Whether PyTorch has oneDNN's inner product here."""
    return _inner_product is not None


def linear(x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False) -> Tensor:
    """`x W` and what is added to it: x [n, in_width], weight [in_width, out_width] -> [n, out_width].

    added: rows [n, out_width], or one bias [out_width] for all. Where x is narrower than W, the result is as x is: made
    in W's type and rounded once. summed: sums over edges read the result, whose rows may have gaps then
    (`weft.runtime.alignment`).

    PyTorch's matrix product goes to MKL, which is slow where few columns come out, and on some processors leaves the
    widest vectors unused. oneDNN's inner product, by which PyTorch's compiler has such maps done, is not.
    """
    if weight.dtype != torch.float32 or x.device.type != "cpu":
        return linear_by("torch", "mkl", x, weight, added, summed=summed)
    parts = PARTS if is_low_precision(x.dtype) else 1
    sizes = (torch.get_num_threads(), x.numel() * weight.shape[1] / parts, *weight.shape)
    return linear_by(selected_kernel("map", *sizes), selected_kernel("map_weights", *sizes), x, weight, added, summed=summed)


def linear_by(
    by: str, weights_by: str, x: Tensor, weight: Tensor, added: Tensor | None = None, *, summed: bool = False
) -> Tensor:
    """`linear` by some implementations of `map` and `map_weights`, see `weft.runtime.kernel_selection`."""
    narrow = is_lower_precision(x, weight)
    gaps = summed and added is None and not narrow and needs_padding(x, weight.shape[1])
    if by == "torch" and not narrow and not gaps:
        return x @ weight if added is None else torch.addmm(added, x, weight)
    if narrow:
        y: Tensor = _NarrowMap.apply(x, weight, added, by, weights_by)  # type: ignore[no-untyped-call]
    else:
        y = _Map.apply(x, weight, added, by, weights_by, gaps)  # type: ignore[no-untyped-call]
    return y


def apply_rowwise(run: Callable[..., Tensor], rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`run(*rows, *parameters)` of rows [n, .], each by itself, to rows [n, out_width].

    Where rows are narrower than the parameters, so is the result: made in the parameters' type and rounded once. Its
    gradient makes it again, so that no wider rows are kept. run: without effects; closes over no tensor that wants one.
    """
    if not is_lower_precision(rows[0], parameters[0]):
        return run(*rows, *parameters)
    y: Tensor = _Widened.apply(run, len(rows), *rows, *parameters)  # type: ignore[no-untyped-call]
    return y


def plus(x: Tensor, added: Tensor | None) -> Tensor:
    """Rows x and what is added to them, if anything: rows of their type, or one bias for all. As narrow as x is."""
    if added is None or not is_lower_precision(x, added):
        return x if added is None else x + added
    y: Tensor = _NarrowPlus.apply(x, added)  # type: ignore[no-untyped-call]
    return y


def is_lower_precision(rows: Tensor, parameter: Tensor) -> bool:
    """Whether rows are narrow, and a parameter is of the type that they are widened to."""
    return is_low_precision(rows.dtype) and parameter.dtype == sum_dtype(rows.dtype)


def sum_rows(x: Tensor) -> Tensor:
    """The sum [F] of rows [n, F], in the type of sums."""
    dtype = sum_dtype(x.dtype)
    return x.sum(0) if x.dtype == dtype else torch.stack([x[part].to(dtype).sum(0) for part in _parts(x)]).sum(0)


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def _keep(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, by: str, weights_by: str) -> None:
    """What the gradient of a map asks for."""
    ctx.save_for_backward(x, weight)
    ctx.one_for_all = added is not None and added.dim() == 1
    ctx.by = by, weights_by


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, by: str, weights_by: str, gaps: bool
    ) -> Tensor:
        _keep(ctx, x, weight, added, by, weights_by)
        if gaps:
            return _product_on_lines(x, weight, by)
        if ctx.one_for_all or added is None:
            return _product(x, weight, added, by)
        return _product(x, weight, None, by).add_(added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (by, weights_by) = ctx.saved_tensors, ctx.by
        needs_x, needs_weight, needs_added = ctx.needs_input_grad[:3]
        grad_y = grad_y.contiguous()  # once for all that it is multiplied with
        grad_added = grad_y.sum(0) if ctx.one_for_all else grad_y
        return (
            _product(grad_y, weight.t(), None, by) if needs_x else None,
            _weight_gradient(x, grad_y, weights_by) if needs_weight else None,
            grad_added if needs_added else None,
            None,
            None,
            None,
        )


def _parts(x: Tensor) -> list[slice]:
    """The rows that are widened together."""
    step = max(-(-len(x) // PARTS), 1)
    return [slice(first, min(first + step, len(x))) for first in range(0, max(len(x), 1), step)]


class _NarrowMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, by: str, weights_by: str) -> Tensor:
        _keep(ctx, x, weight, added, by, weights_by)
        y = x.new_empty(len(x), weight.shape[1])
        for part in _parts(x):
            wide = _product(x[part].to(weight.dtype), weight, added if ctx.one_for_all else None, by)
            if added is not None and not ctx.one_for_all:
                wide += added[part]
            y[part] = wide
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (by, weights_by) = ctx.saved_tensors, ctx.by
        needs_x, needs_weight, needs_added = ctx.needs_input_grad[:3]
        grad_x, grad_weight = torch.empty_like(x) if needs_x else None, torch.zeros_like(weight)
        for part in _parts(x):
            wide = grad_y[part].to(weight.dtype)
            if grad_x is not None:
                grad_x[part] = _product(wide, weight.t(), None, by)
            if needs_weight:
                grad_weight += _weight_gradient(x[part].to(weight.dtype), wide, weights_by)
        grad_added = sum_rows(grad_y) if ctx.one_for_all else grad_y
        return grad_x, grad_weight if needs_weight else None, grad_added if needs_added else None, None, None


class _NarrowPlus(torch.autograd.Function):
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


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], num_rows: int, *given: Tensor) -> Tensor:
        ctx.run, ctx.num_rows = run, num_rows
        ctx.save_for_backward(*given)
        rows, parameters = given[:num_rows], given[num_rows:]
        parts = (run(*_widened(rows, part), *parameters).to(rows[0].dtype) for part in _parts(rows[0]))
        return torch.cat([*parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Part by part: parameters' gradients are added up in the type of sums."""
        given, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        rows, parameters = given[: ctx.num_rows], given[ctx.num_rows :]
        found = [torch.zeros_like(one) if needed else None for one, needed in zip(given, needs, strict=True)]
        grads, num_row_grads = [one for one in found if one is not None], sum(needs[: ctx.num_rows])
        for part in _parts(grad_y):
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in (*_widened(rows, part), *parameters)]
                y = ctx.run(*leaves)
            wanted = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
            made = torch.autograd.grad(y, wanted, grad_y[part].to(y.dtype))
            for number, (into, grad) in enumerate(zip(grads, made, strict=True)):
                if number < num_row_grads:
                    into[part] = grad
                else:
                    into += grad
        return None, None, *found


def _widened(rows: Sequence[Tensor], part: slice) -> list[Tensor]:
    return [one[part].to(sum_dtype(one.dtype)) for one in rows]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, by: str) -> Tensor:
    if by == "onednn" and _inner_product is not None:
        y: Tensor = _inner_product(x.contiguous(), weight.t().contiguous(), bias, "none", [], "")
        return y
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _product_on_lines(x: Tensor, weight: Tensor, by: str) -> Tensor:
    """`x W` in rows that begin at cache lines, see `weft.runtime.alignment`."""
    width = weight.shape[1]
    if by != "onednn":
        return torch.mm(x, weight, out=empty_aligned(x, len(x), width))
    gap = row_stride(width, x.itemsize) - width
    return _product(x, pad(weight, (0, gap)), None, by)[:, :width]


def _weight_gradient(x: Tensor, grad_y: Tensor, by: str) -> Tensor:
    """The gradient `x^T grad_y` of the weight: x [n, in_width], grad_y [n, out_width] -> [in_width, out_width].

    oneDNN's is that of a 1 x 1 convolution's weight, which takes up to four times as long where n has no equal parts: a
    few rows are apart. One side is the image, the other its gradient, and either way may be the faster one. In MKL's
    product the narrower one goes first: it takes up to twenty times as long where eight columns come last.
    """
    if by == "onednn_transposed":
        return _weight_gradient(grad_y, x, "onednn").t()
    if by != "onednn" or _inner_product is None or len(x) < PART_ROWS:
        return (grad_y.t() @ x).t() if grad_y.shape[1] < x.shape[1] else x.t() @ grad_y
    even, size = len(x) // PART_ROWS * PART_ROWS, (grad_y.shape[1], x.shape[1])
    found: Tensor = conv2d_weight(_pixels(x[:even]), (*size, 1, 1), _pixels(grad_y[:even]))
    return found.view(size).t() + x[even:].t() @ grad_y[even:]


def _pixels(x: Tensor) -> Tensor:
    """Rows [n, width] as an image of n x 1 pixels, [1, width, n, 1], each pixel's channels side by side."""
    return x.contiguous().view(1, len(x), 1, x.shape[1]).permute(0, 3, 1, 2)
