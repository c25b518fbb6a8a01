"""Which implementation of a kernel is the fastest here, by class of sizes: those that are there run in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from weft.autotune.probe import DEGREES, SHARES, SOURCES, Stopwatch, random_edges
from weft.comm import Group
from weft.kernels import Scale, sum_backends
from weft.kernels.backend import SumBackend
from weft.nn.layers.linear_transform import has_onednn, linear_by
from weft.runtime.kernel_selection import IMPLEMENTATIONS, Choices, Classes

Kernel = Callable[[], Sequence[Tensor]]
Timer = Callable[[Kernel], float]
TURNS = 3
REPEATS = 3
"""Runs that have to give the same bits."""
MARGIN = 0.05
"""By which share another implementation has to be faster than the first."""
TOLERANCE = 1e-4
"""Of the largest number: as far as two may round apart in float32."""
ROWS, MOST_ROWS, MOST_PRODUCTS = 1 << 13, 1 << 17, float(1 << 30)
"""Of a map that is measured: its rows in the last class, so that no cache holds them, and at most; and multiplications
at most, beyond which it would take seconds."""
PRODUCTS, SIDES, WIDTHS = (
    tuple(float(1 << power) for power in (12, 15, 18, 21, 24, 26)),
    (1.0, 16.0, 64.0, 192.0, 513.0),
    (1.0, 12.0, 24.0, 48.0, 96.0, 192.0),
)
"""Where classes begin: of multiplications, of columns in and out, and of columns that are summed."""


def fastest(kernels: Mapping[str, Kernel], seconds: Timer) -> str:
    """The name of the fastest of those kernels that give what the first gives, and the same bits each time.

    The first, unless another one is faster by MARGIN: by the least of some turns, in alternating order, since others on
    the machine make a turn only longer. kernels: of the same arguments.
    """
    first, expected = next(iter(kernels)), next(iter(kernels.values()))()
    sound = [name for name, kernel in kernels.items() if is_sound(kernel, expected)]
    found: dict[str, list[float]] = {name: [] for name in sound}
    for turn in range(TURNS):
        for name in sound[:: -1 if turn % 2 else 1]:
            found[name].append(seconds(kernels[name]))
    least = {name: min(each) for name, each in found.items()}
    best = min(least, key=least.__getitem__, default=first)
    return best if first not in least or least[best] < least[first] * (1 - MARGIN) else first


def is_sound(kernel: Kernel, expected: Sequence[Tensor]) -> bool:
    """Whether a kernel gives numbers as expected, up to rounding, and the same bits each time."""
    one, *others = ([tensor.detach().clone() for tensor in kernel()] for _ in range(REPEATS))
    same = all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))
    return same and all(
        bool(((a - b).abs() <= TOLERANCE * b.abs().max()).all()) for a, b in zip(one, expected, strict=True)
    )


def measured_choices(known: Choices, *, device: str = "") -> Choices:
    """What is known, with the choices for maps on as many threads as this process has; device: and for sums there."""
    watch = Stopwatch(Group())
    weights = map_classes(lambda x, weight: fastest(weight_gradients(x, weight), watch.seconds_once))

    def whole_map(x: Tensor, weight: Tensor) -> str:
        weights_by = weights.at((torch.get_num_threads(), x.numel() * weight.shape[1], *weight.shape))
        return fastest(maps(x, weight, weights_by), watch.seconds_once)

    kinds = dict(known.kinds)
    for kind, found in (("map_weights", weights), ("map", map_classes(whole_map))):
        measured = kinds[kind].floors[1:] == found.floors[1:]
        kinds[kind] = kinds[kind].with_slice(found.floors[0][0], found.names) if measured else found
    if device:
        kinds["sum"] = sum_classes(device)
    return Choices(origin=f"weft probe, {time.strftime('%Y-%m-%d')}", kinds=kinds)


def map_classes(choose: Callable[[Tensor, Tensor], str]) -> Classes:
    """What is chosen for rows [n, in] and a weight [in, out] in the middle of each class, on so many threads."""
    names = []
    for products, columns, width in product(*map(middles, (PRODUCTS, SIDES, SIDES))):
        weight = torch.rand(round(columns), round(width))
        names.append(choose(torch.rand(rows_of(products, weight.numel()), len(weight)), weight))
    return Classes(floors=((float(torch.get_num_threads()),), PRODUCTS, SIDES, SIDES), names=tuple(names))


def rows_of(products: float, weights: int) -> int:
    """How many rows a map by so many weights is measured on, in the middle of a class of multiplications."""
    rows = products / weights
    if products > PRODUCTS[-1]:
        rows = max(rows, min(ROWS, MOST_PRODUCTS / weights))
    return min(max(1, round(rows)), MOST_ROWS)


def middles(floors: Sequence[float]) -> list[float]:
    """A size in the middle of each class."""
    return [math.sqrt(low * high) for low, high in zip(floors, (*floors[1:], 4 * floors[-1]), strict=True)]


def weight_gradients(x: Tensor, weight: Tensor) -> dict[str, Kernel]:
    """The gradient of a weight by each implementation that is there."""
    weight = weight.requires_grad_()

    def kernel(by: str) -> Kernel:
        y = linear_by("mkl", by, x, weight)
        grad_y = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, weight, grad_y, retain_graph=True)

    return {by: kernel(by) for by in here("map_weights")}


def maps(x: Tensor, weight: Tensor, weights_by: str) -> dict[str, Kernel]:
    """A map of rows with all its gradients by each implementation that is there."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    grad_y = torch.ones(len(x), weight.shape[1])

    def kernel(by: str) -> Kernel:
        def run() -> Sequence[Tensor]:
            y = linear_by(by, weights_by, x, weight)
            return y, *torch.autograd.grad(y, (x, weight), grad_y)

        return run

    return {by: kernel(by) for by in here("map")}


def here(kind: str) -> list[str]:
    """The implementations of a kind of map that are there."""
    return [name for name in IMPLEMENTATIONS[kind] if has_onednn() or not name.startswith("onednn")]


def sum_classes(device: str) -> Classes:
    """What is chosen for sums on a device, by columns: forward and backward, over edges whose rows come from memory."""
    edges = random_edges(SOURCES[-1], SHARES[-1], DEGREES[-1]).to(device)
    watch, names = Stopwatch(Group(device=device)), []
    for width in middles(WIDTHS):
        x = torch.rand(edges.num_sources, round(width), device=device)

        def kernel(backend: SumBackend, x: Tensor = x) -> Kernel:
            def run() -> Sequence[Tensor]:
                y = backend.spmm(edges, x, Scale(), False)
                return y, backend.spmm_transposed(edges, y, Scale(), False)

            return run

        names.append(fastest({name: kernel(one) for name, one in sum_backends().items()}, watch.seconds_once))
    return Classes(floors=(WIDTHS,), names=tuple(names))
