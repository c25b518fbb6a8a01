"""A message function as a program on edges, between what runs on sources and targets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from weft.nn.messages.edges import SortedEdges
from weft.nn.messages.function import MessageFunction, Role
from weft.nn.messages.parts import Evaluation, divide, rows_of
from weft.nn.messages.program import EdgeProgram
from weft.nn.messages.trace import FAILURES, FunctionModule, MessageTrace, trace, trace_gradients
from weft.runtime.kernel_call import work_counters

TRIED = 7, 6, 23
"""Sources, targets and edges on which a program is compared with the message function."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}
"""Largest difference between them in units of the largest number, by the type of rows."""
LARGE = 1 << 20
"""Numbers of a parameter above which the comparison makes no copy of it."""


def make_program(function: MessageFunction, tensors: Sequence[Tensor]) -> MessageProgram | str:
    """Return a message function as a program, or why it cannot be one.

    Args:
        function: The function.
        tensors: Tensors that it reads.
    """
    try:
        with _disable_current_modes():  # of those who count operations: a trace is none
            function = function._replace(conv=_copied(function.conv))
            program = MessageProgram(trace(function, tensors))
            for positive in (False, True):
                compare(program, function, tensors, positive=positive)
            return program
    except FAILURES as error:
        return str(error).partition("\n")[0]


def _copied(conv: nn.Module) -> nn.Module:
    """Return a copy of a convolution, whose attributes may change, with the same tensors."""
    others = (value for part in conv.modules() for value in vars(part).values() if isinstance(value, Tensor))
    return copy.deepcopy(conv, {id(each): each for each in (*conv.parameters(), *conv.buffers(), *others)})


def compare(program: MessageProgram, function: MessageFunction, tensors: Sequence[Tensor], *, positive: bool) -> None:
    """Compare a program with the message function on a few random rows and edges.

    A trace does not show, for instance, that a number in the code is the number of edges, or was drawn at random.

    Args:
        program: The program.
        function: The message function.
        tensors: Tensors that it reads.
        positive: The numbers of rows are positive, so that they have roots.

    Raises:
        NotImplementedError: Results or gradients differ.
    """
    random, (num_sources, num_targets, num_edges) = torch.Generator().manual_seed(0), TRIED
    edge_index = torch.stack(
        [torch.randint(end, (num_edges,), generator=random) for end in (num_sources, num_targets - 1)]
    )
    messages, edges = FunctionModule(function, num_targets), SortedEdges.of(edge_index, num_targets)
    numbers = {"source": num_sources, "target": num_targets, "edge": num_edges}
    rows = [
        torch.randn(*tensor.shape if role == "shared" else (numbers[role], *tensor.shape[1:]), generator=random)
        for (_, role), tensor in zip(function.reads, tensors, strict=True)
    ]
    rows = [each.abs() if positive else each for each in rows]
    rows += [
        each + 0.1 * torch.randn(each.shape, generator=random)
        if each.is_floating_point() and not _is_large(each)
        else each
        for each in messages.shared
    ]

    def of_function(*inputs: Tensor) -> Tensor:
        read, shared = inputs[: len(tensors)], inputs[len(tensors) :]
        ends = {"source": edge_index[0], "target": edge_index[1]}
        of_edges = [
            each[ends[read.role]] if read.by_edge and read.role in ends else each
            for read, each in zip(function.reads, read, strict=True)
        ]
        return messages.run(*of_edges, *shared, edge_index[1])

    def of_program(*inputs: Tensor) -> Tensor:
        return program.run(edges, num_sources, inputs[: len(tensors)], inputs[len(tensors) :])

    results, grad = list[list[Tensor | None]](), torch.empty(0)
    is_large = [False] * len(tensors) + [*map(_is_large, messages.shared)]
    counters, work_counters[:] = [*work_counters], []
    try:
        for run in (of_function, of_program):
            leaves = [
                each.detach().to(like.dtype) for each, like in zip(rows, [*tensors, *messages.shared], strict=True)
            ]
            needed = [
                leaf.requires_grad_()
                for leaf, large in zip(leaves, is_large, strict=True)
                if torch.is_grad_enabled() and leaf.is_floating_point() and not large
            ]
            y = run(*(leaf if large else leaf.clone() for leaf, large in zip(leaves, is_large, strict=True)))
            grad = grad if results else torch.randn(y.shape, generator=random).to(y.dtype)
            grads = torch.autograd.grad(y, needed, grad, allow_unused=True) if y.requires_grad else [None] * len(needed)
            results.append([y.detach(), *grads])
    finally:
        work_counters[:] = counters
    expected, actual = results
    largest = max(map(_largest, expected))
    if not all(_is_close(*pair, largest) for pair in zip(expected, actual, strict=True)):
        raise NotImplementedError("its results are others on a few random rows and edges")


def _is_large(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter of which the comparison makes no copy."""
    return isinstance(tensor, nn.Parameter) and tensor.numel() > LARGE


def _largest(tensor: Tensor | None) -> float:
    """Return the largest absolute number of a tensor that is finite."""
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().nan_to_num(0, 0, 0).max())


def _is_close(expected: Tensor | None, actual: Tensor | None, largest: float) -> bool:
    """Return whether two results are equal but for rounding.

    Args:
        expected: The one result; None: zeros.
        actual: The other one.
        largest: Largest number of all results of the same run, to whose rounding the results may be due.
    """
    if expected is None or actual is None:
        return all(each is None or not each.any() for each in (expected, actual))
    tolerance, rounding = TOLERANCE[expected.dtype], 100 * torch.finfo(expected.dtype).eps
    absolute = max(tolerance * _largest(expected), rounding * largest)
    return actual.dtype == expected.dtype and torch.allclose(actual, expected, tolerance, absolute, equal_nan=True)


class MessageProgram:
    """A message function as a program, with what runs on sources and targets before and after.

    Args:
        trace: Trace of the function.

    Raises:
        NotImplementedError: It cannot run edge by edge, or there is no operation for a part of it.
    """

    def __init__(self, trace: MessageTrace) -> None:
        self.trace, self.parts = trace, divide(trace)
        self.roles: list[Role] = [each.role for each in self.parts.inputs]
        dtypes = {each.value.meta["val"].dtype for each in self.parts.inputs}
        if not dtypes or not self.parts.results:
            raise NotImplementedError("it computes nothing on edges")
        if len(dtypes) > 1:
            raise NotImplementedError("it reads tensors of several types")
        self.results: list[Role] = ["edge" if rows_of(node) == "edge" else "target" for node in self.parts.results]
        self.forward = EdgeProgram(self.parts.program, self.roles, self.results)
        self._inputs = [node for node in self.parts.before if node.op == "placeholder"]
        self._read_after = self.parts.read_after
        self._needed = {*self._read_after, *(each.value for each in self.parts.inputs)}
        self._gradients: dict[tuple[bool, ...], EdgeProgram] = {}
        if torch.is_grad_enabled():  # so that a function without gradients is refused now
            self.gradients(tuple(True for _ in self.roles))

    def gradients(self, needed: tuple[bool, ...]) -> EdgeProgram:
        """Return the program of the gradients of some inputs."""
        if needed not in self._gradients:
            with _disable_current_modes():
                graph = trace_gradients(self.parts.program, list(needed), self.trace.mode)
            roles = [role for role, wanted in zip(self.roles, needed, strict=True) if wanted]
            self._gradients[needed] = EdgeProgram(graph, [*self.results, *self.roles], roles)
        return self._gradients[needed]

    def run(self, edges: SortedEdges, num_sources: int, tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        """Return the result of the function.

        Args:
            edges: The edges.
            num_sources: Number of sources.
            tensors: The tensors that it reads, with rows of sources, targets or edges.
            shared: The convolution's parameters and buffers.
        """
        parts = self.parts
        evaluation = Evaluation(parts, num_sources, edges.num_targets)
        evaluation.values |= dict(zip(self._inputs, [*tensors, *shared], strict=True))
        evaluation.run(parts.before, self._needed)
        inputs = [evaluation.values[each.value] for each in parts.inputs]
        evaluation.values = {node: value for node, value in evaluation.values.items() if node in self._read_after}
        results = RunProgram.apply(self, edges, num_sources, *inputs)  # type: ignore[no-untyped-call]
        evaluation.values |= dict(zip(parts.results, results, strict=True))
        del inputs, results  # they live as long as autograd needs them
        evaluation.run(parts.after, {parts.result})
        result: Tensor = evaluation.values[parts.result]
        return result


class RunProgram(torch.autograd.Function):
    """The program of a message function on all edges."""

    @staticmethod
    def forward(ctx: Any, messages: MessageProgram, edges: SortedEdges, num_sources: int, *inputs: Tensor) -> Any:
        ctx.messages, ctx.edges, ctx.num_sources = messages, edges, num_sources
        ctx.save_for_backward(*inputs)
        if any(ctx.needs_input_grad):
            messages.gradients(ctx.needs_input_grad[3:])  # translated now, not in the backward pass
        return tuple(messages.forward.run(edges, num_sources, inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        program = ctx.messages.gradients(needed)
        inputs = [*(grad.contiguous() for grad in grads), *ctx.saved_tensors]
        computed = iter(program.run(ctx.edges, ctx.num_sources, inputs))
        return None, None, None, *(next(computed) if wanted else None for wanted in needed)
