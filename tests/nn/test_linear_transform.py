"""Maps of rows: by oneDNN and by PyTorch's matrix product they are the same map, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.nn import Linear, linear
from weft.nn.layers import linear_transform
from weft.runtime.kernel_selection import DEFAULT, IMPLEMENTATIONS, SizeClasses, select_kernels

MAP = "_LinearFunctionBackward"
WAYS = [(by, weights_by) for by in IMPLEMENTATIONS["map"][1:] for weights_by in IMPLEMENTATIONS["map_weights"]]


@pytest.fixture(autouse=True)
def maps_of_ours() -> Iterator[None]:
    """Also those of a few rows."""
    use_everywhere("onednn", "onednn")
    yield
    select_kernels(DEFAULT)


def use_everywhere(by: str, weights_by: str) -> None:
    """Has maps of all sizes done so."""
    kinds = {
        kind: SizeClasses(floors=((0,),) * 4, names=(name,))
        for kind, name in (("map", by), ("map_weights", weights_by))
    }
    select_kernels(replace(DEFAULT, kinds={**DEFAULT.kinds, **kinds}))


@pytest.fixture(params=[(way, threads) for way in (*WAYS, ("no oneDNN", "")) for threads in (1, 2)], ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each way in which a map is done."""
    (way, weights_by), threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if way == "no oneDNN":
        monkeypatch.setattr(linear_transform, "_inner_product", None)
    else:
        use_everywhere(way, weights_by)
    yield
    torch.set_num_threads(before)


def example(rows: int, width: int, out_width: int, added: str) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = {"none": (), "bias": ((out_width,),), "rows": ((rows, out_width),)}
    return [torch.randn(shape) for shape in ((rows, width), (width, out_width), *shapes[added])]


@pytest.mark.parametrize("added", ["none", "bias", "rows"])
@pytest.mark.parametrize(("rows", "width", "out_width"), [(300, 33, 17), (1, 5, 3), (50, 1, 4), (50, 4, 1), (0, 4, 3)])
@pytest.mark.usefixtures("way")
def test_equals_float64(rows: int, width: int, out_width: int, added: str) -> None:
    """In float32, to rounding, and every gradient with it."""
    tensors = [tensor.requires_grad_() for tensor in example(rows, width, out_width, added)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    y, expected = linear(*tensors), linear(*doubles)
    assert type(y.grad_fn).__name__ == MAP or not rows
    assert type(expected.grad_fn).__name__ != MAP
    grad = torch.randn(rows, out_width)
    for ours, true in zip(
        (y, *torch.autograd.grad(y, tensors, grad)),
        (expected, *torch.autograd.grad(expected, doubles, grad.double())),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-4)


def test_rows_of_any_layout() -> None:
    x, weight, bias = example(40, 12, 9, "bias")
    wide = torch.cat([x, x], 1)[:, :12]
    torch.testing.assert_close(linear(wide, weight.t().contiguous().t(), bias), torch.addmm(bias, x, weight))
    loss = linear(wide, weight.requires_grad_()).sum()  # an expanded gradient
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(12, 9))


def test_only_the_gradients_asked_for() -> None:
    x, weight, bias = example(40, 12, 9, "bias")
    linear(x, weight, bias.requires_grad_()).sum().backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.full((9,), 40.0))
    assert weight.grad is None


def test_what_is_chosen_serves() -> None:
    """PyTorch's own map where it is chosen, by the number of multiplications or for all."""
    x, weight = example(40, 12, 9, "none")
    weight.requires_grad_()
    use_everywhere("torch", "mkl")
    assert type(linear(x, weight).grad_fn).__name__ != MAP
    select_kernels(DEFAULT)
    assert type(linear(x, weight).grad_fn).__name__ != MAP
    x, weight = example(256, 64, 16, "none")
    weight.requires_grad_()
    assert type(linear(x, weight).grad_fn).__name__ == MAP
    select_kernels(DEFAULT.without_onednn())
    assert type(linear(x, weight).grad_fn).__name__ != MAP


def test_the_default_is_what_it_was() -> None:
    """oneDNN from 2^18 multiplications; for weights from 2^22, on several threads, and from 16 columns."""
    maps, weights = DEFAULT.kinds["map"], DEFAULT.kinds["map_weights"]
    assert [maps.at((1, 2**18 - less, 3, 1000)) for less in (0, 1)] == ["onednn", "torch"]
    wide = (2, 2**22, 16, 16)
    assert weights.at(wide) == weights.at((64, 2**40, 999, 999)) == "onednn"
    assert {weights.at((*wide[:place], wide[place] - 1, *wide[place + 1 :])) for place in range(4)} == {"mkl"}


def test_module_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs, x = Linear(12, 9), torch.nn.Linear(12, 9), torch.randn(40, 12)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
