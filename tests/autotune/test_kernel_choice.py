"""What is chosen by planted timings: the fastest of those that give the same numbers, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.autotune.test_probe import FEW
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


def gives(*found: Tensor) -> Kernel:
    """A kernel that gives these, one after the other, the last again and again."""
    left = [*found]
    return lambda: [left.pop(0) if len(left) > 1 else left[0]]


def timer(kernels: Mapping[str, Kernel], seconds: Mapping[str, Sequence[float]]) -> Callable[[Kernel], float]:
    """A timer that says what was planted, by turn."""
    names = {id(kernel): name for name, kernel in kernels.items()}
    left = {name: [*each] for name, each in seconds.items()}
    return lambda kernel: left[names[id(kernel)]].pop(0)


def choice(kernels: Mapping[str, Kernel], **seconds: float | Sequence[float]) -> str:
    planted = {name: [one] * kernel_choice.TURNS if isinstance(one, float) else one for name, one in seconds.items()}
    return fastest(kernels, timer(kernels, planted))


def test_the_fastest_by_its_best_turn() -> None:
    kernels = {name: gives(X) for name in ("a", "b", "c")}
    assert choice(kernels, a=3.0, b=1.0, c=2.0) == "b"
    assert choice(kernels, a=3.0, b=[9.0, 1.0, 9.0], c=[2.0, 2.0, 2.0]) == "b", "others on the machine held it up"
    assert choice(kernels, a=1.0, b=1 - kernel_choice.MARGIN / 2, c=1.0) == "a", "no faster as far as can be told"
    assert choice(kernels, a=1.0, b=1 - kernel_choice.MARGIN * 2, c=1.0) == "b"


def test_maps_are_measured_on_as_many_rows_as_their_class_has() -> None:
    """In the last one on more than a cache holds, in none on so many that it takes seconds."""
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


def test_they_take_turns_in_alternating_order() -> None:
    kernels, order = {name: gives(X) for name in ("a", "b")}, []
    names = {id(kernel): name for name, kernel in kernels.items()}

    def timed(kernel: Kernel) -> float:
        order.append(names[id(kernel)])
        return 1.0

    fastest(kernels, timed)
    assert "".join(order) == "abbaab"


def test_what_gives_other_numbers_or_other_bits_is_never_chosen() -> None:
    """However fast: as one that adds by atomic operations, or forgets an edge."""
    kernels = {"a": gives(X), "atomics": gives(X, X, X + 1e-6 * X), "wrong": gives(X + 1)}
    assert choice(kernels, a=9.0) == "a"  # nobody asks for the others' seconds
    kernels = {"atomics": gives(X, X, X, X + 1e-6 * X), "b": gives(X + 1e-6 * X), "nan": gives(X * torch.nan)}
    assert choice(kernels, b=9.0) == "b", "the first is no exception"
    assert choice({"atomics": gives(X, X, X + 1e-6 * X)}) == "atomics", "there is no other"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Classes of which samples take no time."""
    for name, value in {"PRODUCTS": (64.0, 1024.0), "SIDES": (1.0, 8.0), "WIDTHS": (1.0, 4.0, 16.0)}.items():
        monkeypatch.setattr(kernel_choice, name, value)
    for name, value in {"SOURCES": (64.0,), "SHARES": (1.0,), "DEGREES": (4.0,)}.items():
        monkeypatch.setattr(kernel_choice, name, value)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    kernel_selection.select_kernels(DEFAULT)


def planted(monkeypatch: pytest.MonkeyPatch, best: Callable[[Sequence[Tensor]], str]) -> list[set[str]]:
    """Has the one be fastest that is said of what kernels give; which ones were there is noted."""
    asked: list[set[str]] = []

    def say(kernels: Mapping[str, Kernel], seconds: object) -> str:
        del seconds
        asked.append({*kernels})
        one, *others = [kernel() for kernel in kernels.values()]
        assert all(torch.allclose(a, b, atol=1e-4) for other in others for a, b in zip(one, other, strict=True))
        return best(one)

    monkeypatch.setattr(kernel_choice, "fastest", say)
    return asked


@pytest.mark.usefixtures("small")
def test_choices_by_class_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights first, of which a whole map is made; what is measured on two threads stands beside what was on one."""
    large = 512.0

    def best(found: Sequence[Tensor]) -> str:
        if len(found) == 1:
            return "onednn" if min(found[0].shape) >= 8 else "mkl"
        y, grad_x, _ = found
        return "torch" if y.numel() * grad_x.shape[1] < large else "mkl"

    asked = planted(monkeypatch, best)
    torch.set_num_threads(1)
    one = select_fastest_kernels(DEFAULT)
    assert one.origin.startswith("weft probe, 20")
    assert one.kinds["map"].names == ("torch",) * 4 + ("mkl",) * 4
    assert one.kinds["map_weights"].names == ("mkl", "mkl", "mkl", "onednn") * 2
    assert one.kinds["sum"] == DEFAULT.kinds["sum"]
    assert (
        asked
        == [{*kernel_choice.available_implementations("map_weights")}] * 8
        + [{*kernel_choice.available_implementations("map")}] * 8
    )
    torch.set_num_threads(2)
    large = 0.0
    two = select_fastest_kernels(one)
    assert two.kinds["map"].floors[0] == (1.0, 2.0)
    assert two.kinds["map"].names == one.kinds["map"].names + ("mkl",) * 8
    assert two.kinds["map"].at((1, 100, 4, 4)) == "torch" != two.kinds["map"].at((2, 100, 4, 4))
    assert KernelSelection.from_record(two.record()) == two
    kernel_selection.select_kernels(two)
    assert selected_kernel("map_weights", 2, 9999, 100, 100) == "onednn"
    if linear_transform.has_onednn():
        y = linear(torch.rand(9, 9), torch.rand(9, 9, requires_grad=True))
        assert y.grad_fn is not None
        assert y.grad_fn.kernels == ("mkl", "onednn")  # type: ignore[attr-defined]


@pytest.mark.usefixtures("small")
def test_sums_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's come first, so Triton's have to win."""
    if not ops.triton_backend():
        pytest.skip("no Triton")
    asked = planted(monkeypatch, lambda found: "triton" if found[0].shape[1] > 8 else "torch_sparse")
    found = sum_classes("cpu")
    assert asked == [{"torch_sparse", "triton"}] * 3
    assert found == SizeClasses(floors=((1.0, 4.0, 16.0),), names=("torch_sparse", "torch_sparse", "triton"))
    assert next(iter(ops.sum_backends())) == "torch_sparse"


@pytest.mark.usefixtures("small")
def test_what_is_there_is_chosen_by_time() -> None:
    """The whole of it, on this machine: whatever it is, every class has a choice that is there."""
    found = select_fastest_kernels(DEFAULT)
    assert {*found.kinds["map"].names} <= {*kernel_choice.available_implementations("map")}
    assert {*found.kinds["map_weights"].names} <= {*kernel_choice.available_implementations("map_weights")}


class Wide:
    """As a tensor on a GPU, as far as its backend is chosen by it."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = (5, width), dtype


def test_a_gpus_sums_are_the_chosen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone; and where there is no Triton, PyTorch's."""
    triton: Any = object()
    monkeypatch.setattr(ops, "triton_backend", lambda: triton)
    by_width = SizeClasses(floors=((1.0, 16.0),), names=("torch_sparse", "triton"))
    kernel_selection.select_kernels(KernelSelection(origin="x", kinds={**DEFAULT.kinds, "sum": by_width}))
    narrow, wide = Wide(15), Wide(16)
    assert ops.sum_backend_of(narrow) is torch_sparse  # type: ignore[arg-type]
    assert ops.sum_backend_of(wide) is triton  # type: ignore[arg-type]
    assert ops.backend_of(narrow) is triton  # type: ignore[arg-type]
    assert ops.sum_backend_of(Wide(15, torch.bfloat16)) is triton, "narrow rows are summed by our kernels alone"  # type: ignore[arg-type]
    kernel_selection.select_kernels(DEFAULT)
    assert ops.sum_backend_of(narrow) is triton  # type: ignore[arg-type]
    monkeypatch.setattr(ops, "triton_backend", lambda: None)
    assert ops.sum_backend_of(narrow) is torch_sparse  # type: ignore[arg-type]
    assert ops.sum_backend_of(torch.zeros(1, 1)) is ops.cpu
    for backend, rows in ((ops.backend_of, narrow), (ops.sum_backend_of, Wide(15, torch.bfloat16))):
        with pytest.raises(InputError, match="on a GPU need Triton, which is not installed: pip install"):
            backend(rows)  # type: ignore[arg-type]


def test_prices_are_those_of_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rank alone; ranks that are measured together have it from there."""
    made = KernelSelection(
        origin="x", kinds={**DEFAULT.kinds, "map": SizeClasses(floors=((0.0,),) * 4, names=("mkl",))}
    )
    while_priced: list[str] = []

    def priced(group: Group) -> Prices:
        while_priced.append(selected_kernel("map", 1, 1, 1, 1))
        return Prices(ranks=group.size, threads=1, tables={})

    monkeypatch.setattr(probe_command, "measure_kernels", priced)
    monkeypatch.setattr(probe_command, "select_fastest_kernels", lambda *_, **__: made)
    alone = probe_command.with_measurements(Profile(host={"cores": 1}, prices=[]), Group(), kernels=True)
    assert alone.choices == made
    kernel_selection.select_kernels(DEFAULT)
    monkeypatch.setattr(probe_command, "select_fastest_kernels", None)
    monkeypatch.setattr(probe_command, "measure_network", lambda *_: "network")
    several: Any = SimpleNamespace(size=2)
    assert probe_command.with_measurements(alone, several, kernels=True).networks == ["network"]
    assert while_priced == ["mkl", "mkl"]
    kernel_selection.select_kernels(DEFAULT)


def test_a_timed_run_is_one_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_SECONDS", "ROUNDS"):
        monkeypatch.setattr(f"weft.autotune.probe.{name}", FEW[name])
    assert Stopwatch(Group()).seconds_once(lambda: None) > 0
