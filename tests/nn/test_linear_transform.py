"""Linear transforms give equal results and gradients with oneDNN and with PyTorch's matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.nn import Linear, linear
from weft.nn.layers import linear_transform
from weft.runtime.kernel_selection import DEFAULT, IMPLEMENTATIONS, SizeClasses, select_kernels

GRAD_FN = "_LinearFunctionBackward"
KERNELS = [
    (kernel, weights_kernel)
    for kernel in IMPLEMENTATIONS["map"][1:]
    for weights_kernel in IMPLEMENTATIONS["map_weights"]
]


@pytest.fixture(autouse=True)
def onednn_for_all_sizes() -> Iterator[None]:
    """Use oneDNN for all transforms, also for those of a few rows."""
    select_for_all_sizes("onednn", "onednn")
    yield
    select_kernels(DEFAULT)


def select_for_all_sizes(kernel: str, weights_kernel: str) -> None:
    """Compute transforms of all sizes with `kernel`, and gradients of weights with `weights_kernel`."""
    kinds = {
        kind: SizeClasses(floors=((0,),) * 4, names=(name,))
        for kind, name in (("map", kernel), ("map_weights", weights_kernel))
    }
    select_kernels(replace(DEFAULT, kinds={**DEFAULT.kinds, **kinds}))


@pytest.fixture(params=[(pair, threads) for pair in (*KERNELS, ("no oneDNN", "")) for threads in (1, 2)], ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test with every pair of kernels, and without oneDNN, on one and two threads."""
    (kernel, weights_kernel), threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if kernel == "no oneDNN":
        monkeypatch.setattr(linear_transform, "_inner_product", None)
    else:
        select_for_all_sizes(kernel, weights_kernel)
    yield
    torch.set_num_threads(before)


def example(rows: int, width: int, out_width: int, added: str) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = {"none": (), "bias": ((out_width,),), "rows": ((rows, out_width),)}
    return [torch.randn(shape) for shape in ((rows, width), (width, out_width), *shapes[added])]


@pytest.mark.parametrize("added", ["none", "bias", "rows"])
@pytest.mark.parametrize(("rows", "width", "out_width"), [(300, 33, 17), (1, 5, 3), (50, 1, 4), (50, 4, 1), (0, 4, 3)])
@pytest.mark.usefixtures("kernels")
def test_equals_float64(rows: int, width: int, out_width: int, added: str) -> None:
    """Results and gradients in float32 equal those in float64 up to rounding."""
    tensors = [tensor.requires_grad_() for tensor in example(rows, width, out_width, added)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    y, expected = linear(*tensors), linear(*doubles)
    assert type(y.grad_fn).__name__ == GRAD_FN or not rows
    assert type(expected.grad_fn).__name__ != GRAD_FN
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


def test_only_required_gradients_are_computed() -> None:
    x, weight, bias = example(40, 12, 9, "bias")
    linear(x, weight, bias.requires_grad_()).sum().backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.full((9,), 40.0))
    assert weight.grad is None


def test_the_selected_kernel_runs() -> None:
    """PyTorch's matrix product runs if it is selected, for few multiplications or for all sizes."""
    x, weight = example(40, 12, 9, "none")
    weight.requires_grad_()
    select_for_all_sizes("torch", "mkl")
    assert type(linear(x, weight).grad_fn).__name__ != GRAD_FN
    select_kernels(DEFAULT)
    assert type(linear(x, weight).grad_fn).__name__ != GRAD_FN
    x, weight = example(256, 64, 16, "none")
    weight.requires_grad_()
    assert type(linear(x, weight).grad_fn).__name__ == GRAD_FN
    select_kernels(DEFAULT.without_onednn())
    assert type(linear(x, weight).grad_fn).__name__ != GRAD_FN


def test_default_thresholds() -> None:
    """oneDNN runs from 2^18 multiplications; for gradients of weights from 2^22, 2 threads and 16 columns."""
    transforms, weights = DEFAULT.kinds["map"], DEFAULT.kinds["map_weights"]
    assert [transforms.at((1, 2**18 - less, 3, 1000)) for less in (0, 1)] == ["onednn", "torch"]
    smallest = (2, 2**22, 16, 16)
    assert weights.at(smallest) == weights.at((64, 2**40, 999, 999)) == "onednn"
    assert {weights.at((*smallest[:axis], smallest[axis] - 1, *smallest[axis + 1 :])) for axis in range(4)} == {"mkl"}


def test_the_module_equals_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs, x = Linear(12, 9), torch.nn.Linear(12, 9), torch.randn(40, 12)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
