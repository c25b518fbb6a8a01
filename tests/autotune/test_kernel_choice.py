"""Kernel selection: the fastest kernel whose results are correct and identical in each run, by planted timings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.autotune.test_probe import SMALL_SAMPLES
from weft.autotune import kernel_choice, select_fastest_kernels
from weft.autotune.kernel_choice import Kernel, class_centers, fastest, sample_rows, sum_classes
from weft.autotune.probe import Stopwatch
from weft.comm import Group
from weft.cost import Prices, Profile
from weft.kernels import ops, torch_sparse
from weft.nn import linear
from weft.nn.layers import linear_transform
from weft.runtime import kernel_selection
from weft.runtime.kernel_selection import DEFAULT, KernelSelection, SizeClasses, selected_kernel
from weft.training.planning import probe_command
from weft.utils.errors import InputError

X = torch.arange(6.0)


def kernel_returning(*results: Tensor) -> Kernel:
    """Return a kernel that returns these results in order, and repeats the last one."""
    remaining = [*results]
    return lambda: [remaining.pop(0) if len(remaining) > 1 else remaining[0]]


def timer(kernels: Mapping[str, Kernel], seconds: Mapping[str, Sequence[float]]) -> Callable[[Kernel], float]:
    """Return a timer that returns the planted seconds of each kernel, turn by turn."""
    names = {id(kernel): name for name, kernel in kernels.items()}
    remaining = {name: [*turns] for name, turns in seconds.items()}
    return lambda kernel: remaining[names[id(kernel)]].pop(0)


def selected(kernels: Mapping[str, Kernel], **seconds: float | Sequence[float]) -> str:
    planted = {
        name: [value] * kernel_choice.TURNS if isinstance(value, float) else value for name, value in seconds.items()
    }
    return fastest(kernels, timer(kernels, planted))


def test_the_fastest_by_its_best_turn() -> None:
    kernels = {name: kernel_returning(X) for name in ("a", "b", "c")}
    assert selected(kernels, a=3.0, b=1.0, c=2.0) == "b"
    assert selected(kernels, a=3.0, b=[9.0, 1.0, 9.0], c=[2.0, 2.0, 2.0]) == "b", (
        "turns that other processes slow down do not count"
    )
    assert selected(kernels, a=1.0, b=1 - kernel_choice.MARGIN / 2, c=1.0) == "a", (
        "a difference within the margin does not count"
    )
    assert selected(kernels, a=1.0, b=1 - kernel_choice.MARGIN * 2, c=1.0) == "b"


def test_linear_transforms_are_measured_on_the_rows_of_their_class() -> None:
    """Samples of the last class exceed the cache; no sample has so many rows that it takes seconds."""
    for products in class_centers(kernel_choice.PRODUCTS):
        last = products > kernel_choice.PRODUCTS[-1]
        for columns, width in product(*map(class_centers, (kernel_choice.SIDES, kernel_choice.SIDES))):
            weights = round(columns) * round(width)
            rows = sample_rows(products, weights)
            assert 1 <= rows <= kernel_choice.MAX_ROWS
            assert rows * weights <= max(kernel_choice.MAX_PRODUCTS, weights) * 1.01
            if last:
                assert rows >= min(kernel_choice.CLASS_ROWS, 0.99 * kernel_choice.MAX_PRODUCTS / weights)
            elif rows < kernel_choice.MAX_ROWS:
                assert abs(rows * weights - products) <= weights


def test_kernels_take_turns_in_alternating_order() -> None:
    kernels, order = {name: kernel_returning(X) for name in ("a", "b")}, []
    names = {id(kernel): name for name, kernel in kernels.items()}

    def timed(kernel: Kernel) -> float:
        order.append(names[id(kernel)])
        return 1.0

    fastest(kernels, timed)
    assert "".join(order) == "abba"


def test_kernels_with_wrong_or_varying_results_are_not_selected() -> None:
    """However fast it is, a kernel that adds with atomic operations or omits an edge is not selected."""
    kernels = {
        "a": kernel_returning(X),
        "atomics": kernel_returning(X, X, X + 1e-6 * X),
        "wrong": kernel_returning(X + 1),
    }
    assert selected(kernels, a=9.0) == "a"  # the others are not timed
    kernels = {
        "atomics": kernel_returning(X, X, X, X + 1e-6 * X),
        "b": kernel_returning(X + 1e-6 * X),
        "nan": kernel_returning(X * torch.nan),
    }
    assert selected(kernels, b=9.0) == "b", "the first kernel is checked as well"
    assert selected({"atomics": kernel_returning(X, X, X + 1e-6 * X)}) == "atomics", "the only kernel is selected"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use size classes with such small samples that measuring takes no time."""
    for name, value in {"PRODUCTS": (64.0, 1024.0), "SIDES": (1.0, 8.0), "WIDTHS": (1.0, 4.0, 16.0)}.items():
        monkeypatch.setattr(kernel_choice, name, value)
    for name, value in {"SOURCES": (64.0,), "SHARES": (1.0,), "DEGREES": (4.0,)}.items():
        monkeypatch.setattr(kernel_choice, name, value)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    kernel_selection.select_kernels(DEFAULT)


def plant_fastest(monkeypatch: pytest.MonkeyPatch, best: Callable[[Sequence[Tensor]], str]) -> list[set[str]]:
    """Make the kernel fastest that `best` names for the first kernel's results; return the sets of kernels compared."""
    offered: list[set[str]] = []

    def select(kernels: Mapping[str, Kernel], seconds: object) -> str:
        del seconds
        offered.append({*kernels})
        first, *others = [kernel() for kernel in kernels.values()]
        assert all(torch.allclose(a, b, atol=1e-4) for other in others for a, b in zip(first, other, strict=True))
        return best(first)

    monkeypatch.setattr(kernel_choice, "fastest", select)
    return offered


@pytest.mark.usefixtures("small")
def test_selection_by_class_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients come first, because linear transforms use their kernels; classes depend on the threads."""
    large = 512.0

    def best(results: Sequence[Tensor]) -> str:
        if len(results) == 1:
            return "onednn" if min(results[0].shape) >= 8 else "mkl"
        y, grad_x, _ = results
        return "torch" if y.numel() * grad_x.shape[1] < large else "mkl"

    offered = plant_fastest(monkeypatch, best)
    torch.set_num_threads(1)
    on_one_thread = select_fastest_kernels(DEFAULT)
    assert on_one_thread.origin.startswith("weft probe, 20")
    assert on_one_thread.kinds["map"].names == ("torch",) * 4 + ("mkl",) * 4
    assert on_one_thread.kinds["map_weights"].names == ("mkl", "mkl", "mkl", "onednn") * 2
    assert on_one_thread.kinds["sum"] == DEFAULT.kinds["sum"]
    assert (
        offered
        == [{*kernel_choice.available_implementations("map_weights")}] * 8
        + [{*kernel_choice.available_implementations("map")}] * 8
    )
    torch.set_num_threads(2)
    large = 0.0
    on_two_threads = select_fastest_kernels(on_one_thread)
    assert on_two_threads.kinds["map"].floors[0] == (1.0, 2.0)
    assert on_two_threads.kinds["map"].names == on_one_thread.kinds["map"].names + ("mkl",) * 8
    assert on_two_threads.kinds["map"].at((1, 100, 4, 4)) == "torch" != on_two_threads.kinds["map"].at((2, 100, 4, 4))
    assert KernelSelection.from_record(on_two_threads.record()) == on_two_threads
    kernel_selection.select_kernels(on_two_threads)
    assert selected_kernel("map_weights", 2, 9999, 100, 100) == "onednn"
    if linear_transform.has_onednn():
        y = linear(torch.rand(9, 9), torch.rand(9, 9, requires_grad=True))
        assert y.grad_fn is not None
        assert y.grad_fn.kernels == ("mkl", "onednn")  # type: ignore[attr-defined]


@pytest.mark.usefixtures("small")
def test_sums_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel is compared first, so Triton's is selected only where it is faster."""
    if not ops.triton_backend():
        pytest.skip("no Triton")
    offered = plant_fastest(monkeypatch, lambda results: "triton" if results[0].shape[1] > 8 else "torch_sparse")
    by_width = sum_classes("cpu")
    assert offered == [{"torch_sparse", "triton"}] * 3
    assert by_width == SizeClasses(floors=((1.0, 4.0, 16.0),), names=("torch_sparse", "torch_sparse", "triton"))
    assert next(iter(ops.sum_backends())) == "torch_sparse"


@pytest.mark.usefixtures("small")
def test_selection_on_this_machine() -> None:
    """Without planted timings, the kernel selected for each size class is available on this machine."""
    selection = select_fastest_kernels(DEFAULT)
    assert {*selection.kinds["map"].names} <= {*kernel_choice.available_implementations("map")}
    assert {*selection.kinds["map_weights"].names} <= {*kernel_choice.available_implementations("map_weights")}


class GpuRows:
    """Stand-in for a tensor on a GPU, with the attributes that select its backend."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = (5, width), dtype


def test_a_gpu_sums_with_the_selected_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only float32 sums follow the selection; without Triton, PyTorch's kernel sums them."""
    triton: Any = object()
    monkeypatch.setattr(ops, "triton_backend", lambda: triton)
    by_width = SizeClasses(floors=((1.0, 16.0),), names=("torch_sparse", "triton"))
    kernel_selection.select_kernels(KernelSelection(origin="x", kinds={**DEFAULT.kinds, "sum": by_width}))
    narrow, wide = GpuRows(15), GpuRows(16)
    assert ops.sum_backend_of(narrow) is torch_sparse  # type: ignore[arg-type]
    assert ops.sum_backend_of(wide) is triton  # type: ignore[arg-type]
    assert ops.backend_of(narrow) is triton  # type: ignore[arg-type]
    assert ops.sum_backend_of(GpuRows(15, torch.bfloat16)) is triton, "only Triton sums low-precision rows"  # type: ignore[arg-type]
    kernel_selection.select_kernels(DEFAULT)
    assert ops.sum_backend_of(narrow) is triton  # type: ignore[arg-type]
    monkeypatch.setattr(ops, "triton_backend", lambda: None)
    assert ops.sum_backend_of(narrow) is torch_sparse  # type: ignore[arg-type]
    assert ops.sum_backend_of(torch.zeros(1, 1)) is ops.cpu
    for backend, rows in ((ops.backend_of, narrow), (ops.sum_backend_of, GpuRows(15, torch.bfloat16))):
        with pytest.raises(InputError, match="on a GPU need Triton, which is not installed: pip install"):
            backend(rows)  # type: ignore[arg-type]


def test_prices_are_measured_with_the_selected_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank selects the kernels; ranks that are measured together use the profile's selection."""
    selection = KernelSelection(
        origin="x", kinds={**DEFAULT.kinds, "map": SizeClasses(floors=((0.0,),) * 4, names=("mkl",))}
    )
    while_priced: list[str] = []

    def priced(group: Group, *, quick: bool) -> Prices:
        assert not quick
        while_priced.append(selected_kernel("map", 1, 1, 1, 1))
        return Prices(ranks=group.size, threads=1, tables={})

    monkeypatch.setattr(probe_command, "measure_kernels", priced)
    monkeypatch.setattr(probe_command, "select_fastest_kernels", lambda *_, **__: selection)
    alone = probe_command.with_measurements(Profile(host={"cores": 1}, prices=[]), Group(), kernels=True)
    assert alone.choices == selection
    kernel_selection.select_kernels(DEFAULT)
    monkeypatch.setattr(probe_command, "select_fastest_kernels", None)
    monkeypatch.setattr(probe_command, "measure_network", lambda *_, **__: "network")
    several: Any = SimpleNamespace(size=2)
    assert probe_command.with_measurements(alone, several, kernels=True).networks == ["network"]
    assert while_priced == ["mkl", "mkl"]
    kernel_selection.select_kernels(DEFAULT)


def test_seconds_of_a_single_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_SECONDS", "ROUNDS"):
        monkeypatch.setattr(f"weft.autotune.probe.{name}", SMALL_SAMPLES[name])
    assert Stopwatch(Group()).seconds_once(lambda: None) > 0
