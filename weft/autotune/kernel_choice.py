"""Select the fastest available implementation of each kernel, by class of sizes: the implementations run in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from weft.autotune.probe import DEGREES, SHARES, SOURCES, Stopwatch, random_edges, random_numbers
from weft.comm import Group
from weft.kernels import Scale, sum_backends
from weft.kernels.backend import SumBackend
from weft.nn.layers.linear_transform import has_onednn, linear_by
from weft.runtime.kernel_selection import IMPLEMENTATIONS, KernelSelection, SizeClasses

Kernel = Callable[[], Sequence[Tensor]]
"""Function that runs a kernel on fixed arguments and returns its results."""
Timer = Callable[[Kernel], float]
"""Function that returns the seconds of a kernel."""
TURNS = 2
"""Number of times that each implementation is timed."""
REPEATS = 3
"""Number of runs that must give the same bits."""
MARGIN = 0.05
"""Share by which another implementation must be faster than the first to be selected."""
TOLERANCE = 1e-4
"""Largest difference of two implementations in float32, as a share of the largest element."""
CLASS_ROWS, MAX_ROWS, MAX_PRODUCTS = 1 << 13, 1 << 17, float(1 << 28)
"""Size of a measured dense layer.

CLASS_ROWS: rows in the last class, too many for a cache. MAX_ROWS: most rows. MAX_PRODUCTS: most multiplications; more
would take seconds.
"""
PRODUCTS, SIDES, WIDTHS = (
    tuple(float(1 << power) for power in (12, 15, 18, 21, 24, 26)),
    (1.0, 16.0, 64.0, 192.0, 513.0),
    (1.0, 12.0, 24.0, 48.0, 96.0, 192.0),
)
"""Lower bounds of the classes: by multiplications, by columns in and columns out, and by columns of a sum."""


def fastest(kernels: Mapping[str, Kernel], seconds: Timer) -> str:
    """Return the name of the fastest implementation that gives correct and reproducible results.

    1. Leave out implementations whose results differ from the first one's, or between runs.
    2. Time each one several times, in alternating order. The shortest time counts, since other programs on the machine
       only make it longer.
    3. Select the first implementation unless another one is faster by MARGIN.

    Args:
        kernels: The implementations by name, on the same arguments. The first is the reference.
        seconds: Timer.
    """
    first, expected = next(iter(kernels)), next(iter(kernels.values()))()
    correct = [name for name, kernel in kernels.items() if is_correct(kernel, expected)]
    times: dict[str, list[float]] = {name: [] for name in correct}
    for turn in range(TURNS):
        for name in correct[:: -1 if turn % 2 else 1]:
            times[name].append(seconds(kernels[name]))
    shortest = {name: min(kernel_times) for name, kernel_times in times.items()}
    best = min(shortest, key=shortest.__getitem__, default=first)
    return best if first not in shortest or shortest[best] < shortest[first] * (1 - MARGIN) else first


def is_correct(kernel: Kernel, expected: Sequence[Tensor]) -> bool:
    """Return True if a kernel gives the expected results up to rounding, and the same bits in each run.

    Args:
        kernel: The kernel.
        expected: Results of the reference.
    """
    results, *repeats = ([tensor.detach().clone() for tensor in kernel()] for _ in range(REPEATS))
    same = all(torch.equal(a, b) for repeat in repeats for a, b in zip(results, repeat, strict=True))
    return same and all(
        bool(((a - b).abs() <= TOLERANCE * b.abs().max()).all()) for a, b in zip(results, expected, strict=True)
    )


def select_fastest_kernels(selection: KernelSelection, *, device: str = "") -> KernelSelection:
    """Return a kernel selection updated by measurements on this machine.

    Args:
        selection: The selection so far. Its classes for other numbers of threads are kept.
        device: Device on which sums are measured as well. Empty: only dense layers, with the threads of this process.
    """
    watch = Stopwatch(Group())
    weights = dense_classes(lambda x, weight: fastest(weight_gradient_kernels(x, weight), watch.seconds_once))

    def fastest_layer(x: Tensor, weight: Tensor) -> str:
        weights_by = weights.at((torch.get_num_threads(), x.numel() * weight.shape[1], *weight.shape))
        return fastest(dense_kernels(x, weight, weights_by), watch.seconds_once)

    kinds = dict(selection.kinds)
    for kind, classes in (("map_weights", weights), ("map", dense_classes(fastest_layer))):
        same_classes = kinds[kind].floors[1:] == classes.floors[1:]
        kinds[kind] = kinds[kind].with_slice(classes.floors[0][0], classes.names) if same_classes else classes
    if device:
        kinds["sum"] = sum_classes(device)
    return KernelSelection(origin=f"weft probe, {time.strftime('%Y-%m-%d')}", kinds=kinds)


def dense_classes(choose: Callable[[Tensor, Tensor], str]) -> SizeClasses:
    """Return the selected implementation for each size class of a dense layer, with the threads of this process.

    Args:
        choose: Function that returns the implementation for rows [n, in] and a weight [in, out] in the middle of a
            class.
    """
    names = []
    for products, columns, width in product(*map(class_centers, (PRODUCTS, SIDES, SIDES))):
        weight = torch.rand(round(columns), round(width))
        names.append(choose(random_numbers(sample_rows(products, weight.numel()), len(weight)), weight))
    return SizeClasses(floors=((float(torch.get_num_threads()),), PRODUCTS, SIDES, SIDES), names=tuple(names))


def sample_rows(products: float, weights: int) -> int:
    """Return the number of rows on which a dense layer is measured.

    Args:
        products: Number of multiplications in the middle of the class.
        weights: Number of elements of the weight.
    """
    rows = products / weights
    if products > PRODUCTS[-1]:
        rows = max(rows, min(CLASS_ROWS, MAX_PRODUCTS / weights))
    return min(max(1, round(rows)), MAX_ROWS)


def class_centers(floors: Sequence[float]) -> list[float]:
    """Return the geometric mean of the bounds of each class; the last class ends at 4 times its lower bound."""
    return [math.sqrt(low * high) for low, high in zip(floors, (*floors[1:], 4 * floors[-1]), strict=True)]


def weight_gradient_kernels(x: Tensor, weight: Tensor) -> dict[str, Kernel]:
    """Return the gradient of a weight as a kernel, for each available implementation.

    Args:
        x: Rows [n, in].
        weight: Weight [in, out].
    """
    weight = weight.requires_grad_()

    def kernel(by: str) -> Kernel:
        y = linear_by("mkl", by, x, weight)
        grad_y = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, weight, grad_y, retain_graph=True)

    return {by: kernel(by) for by in available_implementations("map_weights")}


def dense_kernels(x: Tensor, weight: Tensor, weights_by: str) -> dict[str, Kernel]:
    """Return a dense layer with all its gradients as a kernel, for each available implementation.

    Args:
        x: Rows [n, in].
        weight: Weight [in, out].
        weights_by: Implementation of the weight's gradient.
    """
    x, weight = x.requires_grad_(), weight.requires_grad_()
    grad_y = torch.ones(len(x), weight.shape[1])

    def kernel(by: str) -> Kernel:
        def run() -> Sequence[Tensor]:
            y = linear_by(by, weights_by, x, weight)
            return y, *torch.autograd.grad(y, (x, weight), grad_y)

        return run

    return {by: kernel(by) for by in available_implementations("map")}


def available_implementations(kind: str) -> list[str]:
    """Return the implementations of a kind of `IMPLEMENTATIONS` that this machine has."""
    return [name for name in IMPLEMENTATIONS[kind] if has_onednn() or not name.startswith("onednn")]


def sum_classes(device: str) -> SizeClasses:
    """Return the selected implementation of sums on a device, for each class of columns.

    Measures forward and backward over edges whose source rows come from memory, not from a cache.
    """
    edges = random_edges(SOURCES[-1], SHARES[-1], DEGREES[-1]).to(device)
    watch, names = Stopwatch(Group(device=device)), []
    for width in class_centers(WIDTHS):
        x = torch.rand(edges.num_sources, round(width), device=device)

        def kernel(backend: SumBackend, x: Tensor = x) -> Kernel:
            def run() -> Sequence[Tensor]:
                y = backend.spmm(edges, x, Scale(), False)
                return y, backend.spmm_transposed(edges, y, Scale(), False)

            return run

        names.append(fastest({name: kernel(backend) for name, backend in sum_backends().items()}, watch.seconds_once))
    return SizeClasses(floors=(WIDTHS,), names=tuple(names))
