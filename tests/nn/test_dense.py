"""Maps of rows: by oneDNN and by PyTorch's matrix product they are the same map, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from weft.nn import Linear, dense, linear, use_onednn

MAP = "_MapBackward"


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dense, "MIN_PRODUCTS", 1)
    yield
    use_onednn(True)


@pytest.fixture(params=["one thread", "several threads", "no oneDNN"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way in which a map is done."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if request.param == "several threads" else 1)
    monkeypatch.setattr(dense, "LARGE_PRODUCTS", 1)
    if request.param == "no oneDNN":
        monkeypatch.setattr(dense, "_inner_product", None)
    yield request.param
    torch.set_num_threads(threads)


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


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = example(40, 12, 9, "none")
    weight.requires_grad_()
    use_onednn(False)
    assert type(linear(x, weight).grad_fn).__name__ != MAP
    use_onednn(True)
    monkeypatch.setattr(dense, "MIN_PRODUCTS", 10**6)
    assert type(linear(x, weight).grad_fn).__name__ != MAP


def test_module_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs, x = Linear(12, 9), torch.nn.Linear(12, 9), torch.randn(40, 12)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
