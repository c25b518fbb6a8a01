"""Transforms of bfloat16 rows equal those in float32, rounded once; gradients of parameters are in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.nn.layers import linear_transform
from weft.nn.layers.linear_transform import apply_rowwise, linear, plus, sum_rows

Rows, Parameters = list[Tensor], list[Tensor]
TRANSFORMS: dict[str, Callable[[Rows, Parameters], Tensor]] = {
    "linear": lambda rows, parameters: linear(rows[0], parameters[0]),
    "linear with a bias": lambda rows, parameters: linear(rows[0], parameters[0], parameters[1]),
    "linear with rows": lambda rows, parameters: linear(rows[0], parameters[0], rows[1]),
    "plus": lambda rows, parameters: plus(rows[1], parameters[1]),
    "apply_rowwise": lambda rows, parameters: apply_rowwise(
        lambda x, y, b: x.tanh() * b.exp() + y, [rows[1], rows[2]], [parameters[1]]
    ),
    "sum_rows": lambda rows, parameters: sum_rows(rows[1]) * parameters[1],
}


def random_inputs(num_rows: int) -> tuple[Rows, Parameters]:
    random = torch.Generator().manual_seed(num_rows)
    widths = ((num_rows, 24), (num_rows, 19), (num_rows, 19))
    rows = [torch.randn(size, generator=random).bfloat16().requires_grad_() for size in widths]
    return rows, [torch.randn(size, generator=random).requires_grad_() for size in ((24, 19), (19,))]


@pytest.mark.parametrize("num_rows", [1, 7, 8, 41, 1200])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_rounded_once(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are rounded once, however many blocks of rows are converted to float32; 1200 rows use oneDNN."""
    monkeypatch.setattr(linear_transform, "has_bfloat16_products", lambda: False)
    rows, parameters = random_inputs(num_rows)
    wide = [row.detach().float().requires_grad_() for row in rows]
    y, wanted = TRANSFORMS[name](rows, parameters), TRANSFORMS[name](wide, parameters)
    rounded = name != "sum_rows"
    assert y.dtype == (torch.bfloat16 if rounded else torch.float32)
    check_rounded(y, wanted, narrow=rounded)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    leaves, wide_leaves = [*rows, *parameters], [*wide, *parameters]
    gradients = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    expected = torch.autograd.grad(wanted, wide_leaves, grad.float(), allow_unused=True)
    for leaf, gradient, other in zip(leaves, gradients, expected, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None and other is not None:
            assert gradient.dtype == leaf.dtype
            check_rounded(gradient, other, narrow=leaf.dtype == torch.bfloat16)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 1200])
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name.startswith("linear")])
def test_products_of_bfloat16(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is rounded at most three times: the weight, the product, and the product with the added rows."""
    monkeypatch.setattr(linear_transform, "has_bfloat16_products", lambda: True)
    rows, parameters = random_inputs(num_rows)
    wide, sizes = ([convert(row.detach()).requires_grad_() for row in rows] for convert in (Tensor.float, magnitude))
    weights = [magnitude(parameter.detach()).requires_grad_() for parameter in parameters]
    results = [TRANSFORMS[name](*inputs) for inputs in ((rows, parameters), (wide, parameters), (sizes, weights))]
    grad = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    results[0].backward(grad)
    gradients = [leaf.grad for leaf in (*rows, *parameters)]
    for parameter in parameters:
        parameter.grad = None
    results[1].backward(grad.float())
    results[2].backward(magnitude(grad))
    expected = zip(gradients, (*wide, *parameters), (*sizes, *weights), strict=True)
    triples = [(gradient, leaf.grad, size.grad) for gradient, leaf, size in expected if gradient is not None]
    for result, wanted, size in [tuple(results), *triples]:
        assert ((result.float() - wanted).abs() <= 3 * 2**-8 * size).all()


def magnitude(values: Tensor) -> Tensor:
    return values.float().abs()


def check_rounded(result: Tensor, wanted: Tensor, *, narrow: bool) -> None:
    """Check for the nearest bfloat16 number, or its neighbour if rounding in float32 crossed the midpoint."""
    size = float(wanted.detach().abs().max())
    tolerance = 2**-8 if narrow else 0
    assert ((result.float() - wanted).abs() <= tolerance * wanted.abs() + 2e-5 * size).all()


def test_no_float32_copy_of_all_rows_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_transform, "has_bfloat16_products", lambda: False)
    sizes = []
    product = linear_transform._product
    monkeypatch.setattr(linear_transform, "_product", lambda x, *rest: sizes.append(len(x)) or product(x, *rest))
    rows, parameters = random_inputs(41)
    linear(rows[0], *parameters)
    assert sum(sizes) == 41
    assert max(sizes) == 6


def test_other_dtypes_cannot_be_mixed() -> None:
    """Mixed dtypes are refused as in PyTorch; only bfloat16 rows are converted, and only to float32."""
    double, single, half = (torch.ones(5, 5, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float16))
    for rows, weight in ((double, single), (single, double), (half, double)):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(rows, weight)
        with pytest.raises(RuntimeError, match="dtype"):
            apply_rowwise(torch.matmul, [rows], [weight])
    assert plus(single, double[0]).dtype == torch.float64


def test_no_rows_at_all() -> None:
    rows, parameters = random_inputs(0)
    for name, transform in TRANSFORMS.items():
        result = transform(rows, parameters)
        assert len(result) == (19 if name == "sum_rows" else 0)
        result.sum().backward()
