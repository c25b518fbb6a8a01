"""A message function as a program on edges, between what runs on sources and targets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from weft.nn.messages.comparison import compare
from weft.nn.messages.edges import SortedEdges
from weft.nn.messages.function import MessageFunction, Role
from weft.nn.messages.parts import Evaluation, divide, rows_of
from weft.nn.messages.program import EdgeProgram
from weft.nn.messages.trace import FAILURES, MessageTrace, trace, trace_gradients


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
            compare(program.run, function, tensors)
            return program
    except FAILURES as error:
        return str(error).partition("\n")[0]


def _copied(conv: nn.Module) -> nn.Module:
    """Return a copy of a convolution, whose attributes may change, with the same tensors."""
    others = (value for part in conv.modules() for value in vars(part).values() if isinstance(value, Tensor))
    return copy.deepcopy(conv, {id(each): each for each in (*conv.parameters(), *conv.buffers(), *others)})


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
