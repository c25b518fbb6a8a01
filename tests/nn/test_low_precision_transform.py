"""Maps of rows of bfloat16: as of the same rows in float32, rounded once, with gradients of parameters in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.nn.layers import linear_transform
from weft.nn.layers.linear_transform import apply_rowwise, linear, plus, sum_rows

Rows, Parameters = list[Tensor], list[Tensor]
MAPS: dict[str, Callable[[Rows, Parameters], Tensor]] = {
    "linear": lambda rows, given: linear(rows[0], given[0]),
    "linear with a bias": lambda rows, given: linear(rows[0], given[0], given[1]),
    "linear with rows": lambda rows, given: linear(rows[0], given[0], rows[1]),
    "plus": lambda rows, given: plus(rows[1], given[1]),
    "apply_rowwise": lambda rows, given: apply_rowwise(
        lambda x, y, b: x.tanh() * b.exp() + y, [rows[1], rows[2]], [given[1]]
    ),
    "sum_rows": lambda rows, given: sum_rows(rows[1]) * given[1],
}


def drawn(num_rows: int) -> tuple[Rows, Parameters]:
    random = torch.Generator().manual_seed(num_rows)
    widths = ((num_rows, 24), (num_rows, 19), (num_rows, 19))
    rows = [torch.randn(size, generator=random).bfloat16().requires_grad_() for size in widths]
    return rows, [torch.randn(size, generator=random).requires_grad_() for size in ((24, 19), (19,))]


@pytest.mark.parametrize("num_rows", [1, 7, 8, 41, 1200])
@pytest.mark.parametrize("name", MAPS)
def test_rounded_once(name: str, num_rows: int) -> None:
    """Whatever the number of parts that rows are widened in; 1200 rows are oneDNN's."""
    rows, parameters = drawn(num_rows)
    wide = [one.detach().float().requires_grad_() for one in rows]
    y, wanted = MAPS[name](rows, parameters), MAPS[name](wide, parameters)
    rounded = name != "sum_rows"
    assert y.dtype == (torch.bfloat16 if rounded else torch.float32)
    check_rounded(y, wanted, narrow=rounded)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    leaves, wide_leaves = [*rows, *parameters], [*wide, *parameters]
    found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    expected = torch.autograd.grad(wanted, wide_leaves, grad.float(), allow_unused=True)
    for leaf, one, other in zip(leaves, found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == leaf.dtype
            check_rounded(one, other, narrow=leaf.dtype == torch.bfloat16)


def check_rounded(found: Tensor, wanted: Tensor, *, narrow: bool) -> None:
    """The nearest number, or a neighbour where float32's own rounding moves one over the middle."""
    size = float(wanted.detach().abs().max())
    share = 2**-8 if narrow else 0
    assert ((found.float() - wanted).abs() <= share * wanted.abs() + 2e-5 * size).all()


def test_no_wide_copy_of_all_rows_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    product = linear_transform._product
    monkeypatch.setattr(linear_transform, "_product", lambda x, *rest: sizes.append(len(x)) or product(x, *rest))
    rows, parameters = drawn(41)
    linear(rows[0], *parameters)
    assert sum(sizes) == 41
    assert max(sizes) == 6


def test_other_types_do_not_meet() -> None:
    """As in PyTorch: only narrow rows are widened, and only to the type of their sums."""
    double, single, half = (torch.ones(5, 5, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float16))
    for rows, weight in ((double, single), (single, double), (half, double)):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(rows, weight)
        with pytest.raises(RuntimeError, match="dtype"):
            apply_rowwise(torch.matmul, [rows], [weight])
    assert plus(single, double[0]).dtype == torch.float64


def test_no_rows_at_all() -> None:
    rows, parameters = drawn(0)
    for name, one in MAPS.items():
        made = one(rows, parameters)
        assert len(made) == (19 if name == "sum_rows" else 0)
        made.sum().backward()
