"""Trace of a message function: what a PyG convolution computes on edges, as a graph of ATen operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from weft.nn.messages.function import MessageFunction, Read, Role
from weft.nn.messages.structure import structure_of

aten = torch.ops.aten

NUM_EDGES, NUM_TARGETS = 1_000_003, 999_983
"""Sizes of the trace: prime numbers that are no width of a row, so that a size in the graph shows what it counts."""
FAILURES = (
    *(RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, LookupError),
    *(ArithmeticError, AssertionError),
)
"""Errors of functions that cannot be traced: they read numbers of a tensor, or do what fake tensors cannot."""


@cache
def decompositions() -> dict[Any, Any]:
    """Return decompositions of operations into the ones that `operations` translates."""
    extra = [aten.leaky_relu, aten.elu, aten.hardtanh, aten._softmax, aten._log_softmax]
    extra += [aten.native_layer_norm, aten.linalg_vector_norm, aten.index_copy, aten.gelu]
    table = dict(core_aten_decompositions().items()) | get_decompositions(extra)
    table |= {aten.addmm.default: _addmm, aten.softplus.default: _softplus, aten.elu.default: _elu}
    table[aten.celu.default] = lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha)
    table[aten.mish.default] = lambda x: x * torch.tanh(_softplus(x))
    table[aten.linalg_vector_norm.default] = partial(_vector_norm, table[aten.linalg_vector_norm.default])
    return {op: function for op, function in table.items() if op is not aten.detach.default}


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return the sum of a bias and a product; PyTorch's decomposition multiplies by 1."""
    product = torch.mm(left, right)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """Return softplus. PyTorch's decomposition computes `exp` where its result is not used: a gradient of 0 inf."""
    z = x * beta
    return torch.where(z > threshold, x, torch.log1p(torch.exp(z.clamp(max=threshold))) / beta)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    """Return ELU, or SELU by its scales; see `_softplus`."""
    negative = torch.expm1(x.clamp(max=0) * input_scale) * (alpha * scale)
    return torch.where(x > 0, x * scale, negative)


def _vector_norm(
    others: Callable[..., Tensor],
    x: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a norm, whose gradient is 0 where it is 0, as PyTorch's; that of a root is infinite there.

    Args:
        others: Decomposition of norms other than the Euclidean one.
        x: The numbers.
        ord: Order of the norm.
        dim: Dimensions that are reduced; None: all.
        keepdim: Keep them with size 1.
        dtype: Type in which the norm is computed; None: that of x.
    """
    if ord != 2 or dtype is not None:
        return others(x, ord, dim, keepdim, dtype=dtype)
    squares = (x * x).sum(dim, keepdim=keepdim)
    is_zero = squares == 0
    return torch.where(is_zero, squares, torch.where(is_zero, torch.ones_like(squares), squares).sqrt())


class MessageTrace(NamedTuple):
    """A graph of ATen operations on fake tensors."""

    module: GraphModule
    """The graph. Its inputs are the tensors in `reads`, then the parameters and buffers, then the target of each edge.

    A tensor that is read by edge has NUM_EDGES rows.
    """
    roles: list[Role]
    """Role of each tensor input."""
    mode: FakeTensorMode
    """Mode in which the graph was traced."""
    attributes: tuple[tuple[str, str], ...] = ()
    """Path of a part of the convolution, and the name of an attribute that the function sets to a tensor."""


class FunctionModule(nn.Module):
    """The message function as a module, whose parameters can be replaced.

    Args:
        function: The message function.
        num_targets: Number of targets.
    """

    def __init__(self, function: MessageFunction, num_targets: int) -> None:
        super().__init__()
        self.conv, self.function, self.num_targets = function.conv, function, num_targets
        self.shared = [*function.conv.parameters(), *function.conv.buffers()]
        """Parameters and buffers of the convolution."""
        position = {id(tensor): number for number, tensor in enumerate(self.shared)}
        # Each part once, though it may have several names, and a tensor in each part that has it: PyTorch's search for
        # tied weights would leave fake ones in a part with two names.
        self._names = {
            f"conv.{path}.{name}".replace("..", "."): position[id(tensor)]
            for path, part in function.conv.named_modules()
            for name, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None
        }

    def run(self, *inputs: Tensor) -> Tensor:
        """Return the result for other parameters.

        Args:
            *inputs: The tensors in `reads`, then the parameters and buffers, then the target of each edge.
        """
        *values, index = inputs
        num_reads = len(self.function.reads)
        replaced = {name: values[num_reads + number] for name, number in self._names.items()}
        arguments = list(values[:num_reads]), index
        result: Tensor = torch.func.functional_call(self, replaced, arguments, tie_weights=False)
        return result

    def forward(self, values: list[Tensor], index: Tensor) -> Tensor:
        before = self._tensors()
        result = self._call(values, index)
        if not all(map(is_, self._tensors(), before)):
            raise NotImplementedError("it replaces parameters or buffers")
        return result

    def _tensors(self) -> list[Tensor | None]:
        return [each for part in self.conv.modules() for each in (*part._parameters.values(), *part._buffers.values())]

    def _call(self, values: list[Tensor], index: Tensor) -> Tensor:
        function, conv = self.function, self.conv
        arguments = dict(function.others) | {"index": index, "edge_index_i": index, "ptr": None}
        arguments |= {"size_i": self.num_targets, "dim_size": self.num_targets}
        arguments |= {read.name: value for read, value in zip(function.reads, values, strict=True)}
        collect = conv.inspector.collect_param_data
        if function.by_edge:
            result: Tensor = conv.edge_update(**collect("edge_update", arguments))
            return result
        messages = conv.message(**collect("message", arguments))
        rows = conv.aggregate(messages, **collect("aggregate", arguments))
        updated: Tensor = conv.update(rows, **collect("update", arguments))
        return updated


def trace(function: MessageFunction, tensors: Sequence[Tensor]) -> MessageTrace:
    """Trace a message function.

    Args:
        function: The function. Attributes of its convolution may change.
        tensors: The tensors in `reads`.

    Raises:
        RuntimeError: The function depends on numbers in a tensor; another of FAILURES for what cannot be traced.
    """
    messages = FunctionModule(function, NUM_TARGETS)

    def samples() -> list[Tensor]:
        rows = [_sample(read, tensor) for read, tensor in zip(function.reads, tensors, strict=True)]
        return [*rows, *(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in messages.shared)]

    roles: list[Role] = [read.role for read in function.reads]
    roles += ["shared" for _ in messages.shared]
    with _recording_attributes(function.conv) as attributes:
        traced = trace_rows(messages.run, samples, roles)
    return traced._replace(attributes=tuple(attributes))


@contextmanager
def _recording_attributes(conv: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """List the attributes that the `with` block sets to a tensor, see `MessageTrace`.

    Args:
        conv: The convolution.

    Raises:
        NotImplementedError: The block changes another attribute, or draws random numbers of Python or NumPy.
    """
    attributes, drawn = list[tuple[str, str]](), (random.getstate(), np.random.get_state())
    before = [(path, vars(part), {**vars(part)}) for path, part in conv.named_modules()]
    structure = structure_of(conv)
    try:
        yield attributes
    finally:
        is_drawn = repr((random.getstate(), np.random.get_state())) != repr(drawn)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    for path, values, former in before:
        names = [name for name, value in values.items() if isinstance(value, Tensor) and value is not former.get(name)]
        attributes += [(path, name) for name in names]
        for name in names:
            del values[name]
        values |= {name: former[name] for name in names if name in former}
    if is_drawn:
        raise NotImplementedError("random numbers")
    if structure_of(conv) != structure:
        raise NotImplementedError("it changes attributes of the convolution")


def trace_rows(run: Callable[..., Tensor], samples: Callable[[], list[Tensor]], roles: list[Role]) -> MessageTrace:
    """Trace a function of rows.

    Args:
        run: The function. Its arguments are tensors, and the target of each edge.
        samples: Function that creates the tensors, with as many rows as in a `MessageTrace`.
        roles: Role of each tensor.

    Raises:
        RuntimeError: The function depends on numbers in a tensor; another of FAILURES for what cannot be traced.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad(), _Traceable():
        inputs = [*samples(), torch.empty(NUM_EDGES, dtype=torch.int64)]
        graph = make_fx(torch.func.functionalize(run), decomposition_table=decompositions())(*inputs)
    graph.graph.eliminate_dead_code()
    _check_repeatable(graph)
    return MessageTrace(graph, roles, mode)


NUMBERS = frozenset(
    {
        *("item", "tolist", "numpy", "is_nonzero"),
        *("__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"),
    }
)
"""Names of functions by which Python reads the numbers of a tensor."""


class _Traceable(TorchFunctionMode):
    """Mode in which functions must not do what a graph of operations does not contain.

    They must not switch gradients off or on, and Python must not read numbers of a tensor, which may change.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            raise NotImplementedError("torch.no_grad or a similar mode")
        if getattr(func, "__name__", "") in NUMBERS:
            raise NotImplementedError("numbers of a tensor in Python")
        return func(*args, **(kwargs or {}))


def _check_repeatable(graph: GraphModule) -> None:
    """Raise NotImplementedError if a graph draws random numbers, or reads tensors that another call may replace."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotImplementedError("random numbers")
        if node.op == "get_attr":
            raise NotImplementedError("a tensor that is neither a parameter nor a buffer")


def trace_gradients(forward: GraphModule, needed: list[bool], mode: FakeTensorMode) -> GraphModule:
    """Return the graph of the gradients of a graph's inputs.

    Args:
        forward: The graph, whose last input is the target of each edge.
        needed: For each other input, whether its gradient is needed.
        mode: Mode in which the graph was traced.

    Returns:
        A graph of the gradients that are needed. Its inputs are the gradients of the outputs, then the inputs.
    """
    values = [node.meta["val"] for node in forward.graph.nodes if node.op == "placeholder"]
    results = [node.meta["val"] for node in outputs_of(forward)]

    def run(grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            outputs = torch.fx.Interpreter(forward).run(*inputs)
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
        of = [each for each, wanted in zip(inputs, [*needed, False], strict=True) if wanted]
        results, grads_of = ([pair[number] for pair in pairs] for number in (0, 1))
        return list(torch.autograd.grad(results, of, grads_of, allow_unused=True))

    with mode:
        inputs = [
            torch.empty_like(value).requires_grad_(wanted)
            for value, wanted in zip(values, [*needed, False], strict=True)
        ]
        grads = [torch.empty_like(value) for value in results]
        graph = make_fx(run, decomposition_table=decompositions())(grads, inputs)
        if any(node.op == "call_function" and _changes_in_place(node.target) for node in graph.graph.nodes):
            inputs = [each.detach() for each in inputs]
            graph = make_fx(torch.func.functionalize(graph), decomposition_table=decompositions())(grads, inputs)
    graph.graph.eliminate_dead_code()
    return graph


def _changes_in_place(operation: Any) -> bool:
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def outputs_of(module: GraphModule) -> list[Node]:
    """Return the nodes that a graph returns."""
    (result,) = next(node for node in reversed(module.graph.nodes) if node.op == "output").args
    return [result] if isinstance(result, Node) else list(result)


def call(node: Node, args: Any, kwargs: Any) -> Any:
    """Return the result of a node's operation on tensors whose strides may be others than in the trace.

    Args:
        node: The node.
        args: Arguments by position.
        kwargs: Arguments by name.
    """
    function = aten.reshape.default if node.target is aten.view.default else node.target
    return function(*args, **kwargs)  # type: ignore[operator]


def _sample(read: Read, tensor: Tensor) -> Tensor:
    """Return a tensor with the number of rows of the trace."""
    if read.role == "shared":
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.empty(NUM_EDGES if read.by_edge else NUM_TARGETS, *tensor.shape[1:], dtype=tensor.dtype)
