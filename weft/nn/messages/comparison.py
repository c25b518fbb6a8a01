"""Comparison of a program with the message function that it was traced from, on a few random rows and edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from weft.nn.messages.edges import SortedEdges
from weft.nn.messages.function import MessageFunction
from weft.nn.messages.trace import FunctionModule
from weft.runtime.kernel_call import work_counters

Run = Callable[[SortedEdges, int, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Method `run` of a program; see `MessageProgram`."""
NUM_SOURCES, NUM_TARGETS, NUM_EDGES = 7, 6, 23
"""Sources, targets and edges of the comparison; the last target has no edge."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}
"""Largest difference in units of the largest number, by the type of rows."""
LARGE = 1 << 20
"""Numbers of a parameter above which the comparison makes no copy of it."""


def compare(run: Run, function: MessageFunction, tensors: Sequence[Tensor]) -> None:
    """Compare a program with the message function that it was traced from.

    A trace does not show, for instance, that a number in the code is the number of edges, or was drawn at random.

    Args:
        run: Runs the program.
        function: The message function.
        tensors: Tensors that it reads.

    Raises:
        NotImplementedError: Results or gradients differ.
    """
    random, module = torch.Generator().manual_seed(0), FunctionModule(function, NUM_TARGETS)
    sources, targets = (torch.randint(end, (NUM_EDGES,), generator=random) for end in (NUM_SOURCES, NUM_TARGETS - 1))
    edges = SortedEdges.of(torch.stack([sources, targets]), NUM_TARGETS)

    def of_function(*inputs: Tensor) -> Tensor:
        ends = {"source": sources, "target": targets}
        read = [
            each[ends[read.role]] if read.by_edge and read.role in ends else each
            for read, each in zip(function.reads, inputs, strict=False)
        ]
        return module.run(*read, *inputs[len(read) :], targets)

    def of_program(*inputs: Tensor) -> Tensor:
        return run(edges, NUM_SOURCES, inputs[: len(tensors)], inputs[len(tensors) :])

    counters, work_counters[:] = [*work_counters], []
    try:
        for positive in (False, True):  # some functions have roots or logarithms of rows
            rows = random_rows(function, tensors, random, positive=positive)
            inputs = [*rows, *(changed(each, random) for each in module.shared)]
            expected, actual = (results_of(each, inputs) for each in (of_function, of_program))
            largest = max(map(largest_of, expected))
            if not all(is_close(*pair, largest) for pair in zip(expected, actual, strict=True)):
                raise NotImplementedError("its results are others on a few random rows and edges")
    finally:
        work_counters[:] = counters


def random_rows(
    function: MessageFunction, tensors: Sequence[Tensor], random: Generator, *, positive: bool
) -> list[Tensor]:
    """Return random tensors in place of those that a function reads.

    Args:
        function: The function.
        tensors: The tensors, which may have other numbers of rows.
        random: Source of the numbers.
        positive: Whether all numbers are positive.
    """
    num_rows = {"source": NUM_SOURCES, "target": NUM_TARGETS, "edge": NUM_EDGES}
    rows = []
    for (_, role), tensor in zip(function.reads, tensors, strict=True):
        sizes = tensor.shape if role == "shared" else (num_rows[role], *tensor.shape[1:])
        x = torch.randn(*sizes, generator=random).to(tensor.dtype)
        rows.append(x.abs() if positive else x)
    return rows


def changed(tensor: Tensor, random: Generator) -> Tensor:
    """Return a parameter or buffer plus random numbers, since it may be zero; as it is if it is large or integer.

    Args:
        tensor: The parameter or buffer.
        random: Source of the numbers.
    """
    if isinstance(tensor, nn.Parameter) and tensor.numel() > LARGE:
        return tensor
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.detach() + 0.1 * torch.randn(tensor.shape, generator=random).to(tensor.dtype)


def results_of(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the result of a function, and gradients with respect to its inputs but for large parameters.

    Args:
        run: The function, which may change its arguments.
        inputs: Its arguments.
    """
    arguments, needed = [], []
    for each in inputs:
        argument = each.detach()
        if not isinstance(each, nn.Parameter):
            argument = argument.requires_grad_(each.is_floating_point() and torch.is_grad_enabled())
            needed += [argument] if argument.requires_grad else []
            argument = argument.clone()
        arguments.append(argument)
    y = run(*arguments)
    if not y.requires_grad:
        return [y, *[None] * len(needed)]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, needed, grad, allow_unused=True)]


def largest_of(tensor: Tensor | None) -> float:
    """Return the largest absolute number of a tensor that is finite."""
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().nan_to_num(0, 0, 0).max())


def is_close(expected: Tensor | None, actual: Tensor | None, largest: float) -> bool:
    """Return whether two results are equal but for rounding.

    Args:
        expected: The one result; None: zeros.
        actual: The other one.
        largest: Largest number of all results of the same run, to whose rounding the results may be due.
    """
    if expected is None or actual is None:
        return all(each is None or not each.any() for each in (expected, actual))
    tolerance, rounding = TOLERANCE[expected.dtype], 100 * torch.finfo(expected.dtype).eps
    absolute = max(tolerance * largest_of(expected), rounding * largest)
    return actual.dtype == expected.dtype and torch.allclose(actual, expected, tolerance, absolute, equal_nan=True)
