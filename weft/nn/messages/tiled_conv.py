"""Runs the message functions of a PyG convolution as programs in tiles of edges."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.data import version_of
from weft.nn.messages.edges import SortedEdges
from weft.nn.messages.function import MessageFunction, Read, Role
from weft.nn.messages.structure import describe, structure_of

if TYPE_CHECKING:
    from weft.nn.messages.messages import MessageProgram

LOCAL = frozenset({"index", "edge_index_i", "ptr", "size_i", "dim_size"})
"""Arguments of a message function that a tile has too."""
MAX_PROGRAMS = 64
"""Largest number of programs of convolutions of equal structure."""
MISSING = object()
"""In place of the value of an attribute that was not set."""
GLOBAL = frozenset({"edge_index", "adj_t", "edge_index_j", "size", "size_j"})
"""Arguments of a message function that only the whole graph has."""


class Programs(dict[Any, "MessageProgram | str"]):
    """Programs of convolutions of equal structure, by the types and widths of a call; or why PyG runs a call.

    Copies of a convolution share them, since they contain no parameters. Another process makes its own.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        return self

    def __reduce__(self) -> tuple[type[Programs], tuple[()]]:
        return Programs, ()


class TiledConv:
    """Runs the message functions of a convolution in tiles, and keeps the edges that it has sorted.

    Args:
        conv: The convolution.
    """

    def __init__(self, conv: nn.Module) -> None:
        self.conv = conv
        self.messages = Programs()
        self.reason = ""
        """Why the convolution runs as in PyG; empty: it runs in tiles."""
        self._set: dict[tuple[str, str], Any] = {}
        """Value before this call, or MISSING, of each attribute that is `NotComputed`, by part and name."""
        self._has_set = False
        """True once an attribute was `NotComputed`."""
        self._sorted: list[SortedEdges] = []
        self._sums: list[CachedSums] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledConv:
        """Return a holder for a copy of the convolution, without the sorted edges."""
        other = TiledConv(copy.deepcopy(self.conv, memo))
        other.messages = self.messages
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs."""
        return {**TiledConv(self.conv).__dict__, "messages": self.messages}

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """Return the result of a call of the convolution, whose message functions run in tiles.

        Args:
            call: Calls the convolution.
        """
        try:
            with self.replacing():
                y = call()
            if self._has_set and any(
                isinstance(value, NotComputed) for part in self.conv.modules() for value in vars(part).values()
            ):
                raise NotComputedError("it keeps an attribute that its message function sets")
            return y
        except NotComputedError as error:
            self.reason = str(error)
            return call()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Let the convolution run its message functions in tiles inside the `with` block.

        Its linear transforms by type then run without writes into slices, whose gradients PyTorch copies as a whole.
        """
        replaced: list[tuple[nn.Module, str, Any]] = [
            (self.conv, name, partial(self._call, getattr(self.conv, name), name == "edge_updater"))
            for name in ("propagate", "edge_updater")
            if hasattr(self.conv, name)
        ]
        replaced += [
            (part, "forward_naive", partial(transform_by_type, part))
            for part in self.conv.modules()
            if is_hetero_linear(part)
        ]
        for part, name, function in replaced:
            part.__dict__[name] = function
        try:
            yield
        finally:
            for part, name, _ in replaced:
                del part.__dict__[name]
            for (path, name), value in self._set.items():
                attributes = vars(self.conv.get_submodule(path))
                attributes[name] = value
                if value is MISSING:
                    del attributes[name]
            self._set.clear()

    def _call(self, original: Any, by_edge: bool, /, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        if self.reason or not is_pygs(original, self.conv):
            as_written: Tensor = original(edge_index, size=size, **kwargs)
            return as_written
        call = self._prepare(edge_index, size, kwargs, by_edge=by_edge)
        messages = self._messages_of(call) if call else "it reads more than the endpoints of an edge"
        if call is None or isinstance(messages, str):
            whole: Tensor = original(edge_index, size=size, **kwargs)
            return whole
        shared = [*self.conv.parameters(), *self.conv.buffers()]
        edges = self._sort(edge_index, call.num_targets)
        for path, name in messages.trace.attributes:
            attributes, self._has_set = vars(self.conv.get_submodule(path)), True
            self._set.setdefault((path, name), attributes.get(name, MISSING))
            attributes[name] = torch.empty(0).as_subclass(NotComputed)
        return messages.run(edges, call.num_sources, call.tensors, shared)

    def _prepare(self, edge_index: Any, size: Any, kwargs: dict[str, Any], *, by_edge: bool) -> MessageCall | None:
        """Return a call of `propagate` or `edge_updater`; None if its function cannot run in tiles."""
        conv: Any = self.conv
        if (
            type(edge_index) is not Tensor
            or is_observed(conv)
            or torch.is_autocast_enabled("cpu")
            or conv.flow != "source_to_target"
        ):
            return None
        functions = ["edge_update"] if by_edge else ["message", "aggregate", "update"]
        names = frozenset(conv.inspector.get_flat_param_names(functions))
        by_message = frozenset(conv.inspector.get_flat_param_names(functions[:1]))
        num_rows = rows_of_endpoints(names, kwargs, size)
        if GLOBAL & names or not edge_index.shape[1] or num_rows is None:
            return None
        reads, tensors, others = list[Read](), list[Tensor](), list[tuple[str, Any]]()
        for name in sorted(names - LOCAL):
            lifted = name.endswith(("_i", "_j"))
            value = kwargs.get(name[:-2] if lifted else name, Parameter.empty)
            if lifted and isinstance(value, tuple | list):
                value = value[name.endswith("_i")]
            if not isinstance(value, Tensor):
                if isinstance(value, tuple | list | dict):
                    return None
                others.append((name, value))
                continue
            of_edges = name in by_message
            role = role_of(
                name, value, edge_index.shape[1] if of_edges else num_rows[1], "edge" if of_edges else "target"
            )
            if lifted and conv.node_dim % value.dim() != 0:
                return None
            reads.append(Read(name, role))
            tensors.append(value)
        return MessageCall(MessageFunction(conv, by_edge, tuple(reads), tuple(others)), tensors, *num_rows)

    def _messages_of(self, call: MessageCall) -> MessageProgram | str:
        """Return the program of a call, which calls with tensors of the same types and widths share."""
        from weft.nn.messages.messages import make_program  # imports torch.fx, which most runs do not need

        function = call.function
        dtypes = {tensor.dtype for tensor in call.tensors}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            return "its rows are neither float32 nor float64"
        shapes = tuple(
            (tensor.dtype, tensor.shape[role != "shared" :])
            for (_, role), tensor in zip(function.reads, call.tensors, strict=True)
        )
        state = structure_of(self.conv), describe(function.others), torch.is_grad_enabled()
        key = function.by_edge, function.reads, shapes, state
        if key not in self.messages and len(self.messages) >= MAX_PROGRAMS:
            return "its attributes change from call to call"
        if key not in self.messages:
            self.messages[key] = make_program(function, call.tensors)
        return self.messages[key]

    def _sort(self, edge_index: Tensor, num_targets: int) -> SortedEdges:
        """Return edges in the order of their targets; the last results are cached."""
        for edges in reversed(self._sorted):  # the last ones are usually the same tensor
            if version_of(edges.edge_index) != edges.version:
                continue
            same = edges.edge_index is edge_index or torch.equal(edges.edge_index, edge_index)
            if same and edges.num_targets == num_targets:
                return edges
        self._sorted = [*self._sorted[-1:], SortedEdges.of(edge_index, num_targets)]
        return self._sorted[-1]

    def constant_sums(self, of_edges: Sequence[Tensor], dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        """Return sums over edges that depend on no rows and no trained parameters; the last results are cached.

        Args:
            of_edges: The edges [2, E], their weights and features.
            dtype: Type of the rows for which the sums are computed.
            compute: Computes the sums.
        """
        shared = (each for each in (*self.conv.parameters(), *self.conv.buffers()) if not each.requires_grad)
        constants = [*of_edges, *shared]
        key = dtype, structure_of(self.conv), [(each.device, each.dtype) for each in constants]
        for cached in self._sums:  # of training steps, and of evaluations
            if cached.key == key and cached.are_of(constants):
                return cached.sums
        self._sums = [*self._sums[-1:], CachedSums(key, constants, [*map(version_of, constants)], compute())]
        return self._sums[-1].sums


class CachedSums(NamedTuple):
    """Sums over edges, and what they were computed from."""

    key: Any
    """Type of the rows, structure of the convolution, and types of the tensors."""
    constants: list[Tensor]
    """The tensors."""
    versions: list[int]
    """Versions of these tensors."""
    sums: Tensor
    """The sums."""

    def are_of(self, constants: Sequence[Tensor]) -> bool:
        """Return whether these are the sums of some tensors, of the same types as those in `constants`."""
        if self.versions != [*map(version_of, self.constants)]:  # they were changed in place
            return False
        return all(a is b or torch.equal(a, b) for a, b in zip(self.constants, constants, strict=True))


class NotComputed(Tensor):
    """Value of an attribute that a message function sets, and a program does not compute. Any use raises an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotComputedError("it reads an attribute that its message function sets")


class NotComputedError(Exception):
    """Error of a convolution that reads a `NotComputed`."""


class MessageCall(NamedTuple):
    """A call of a message function."""

    function: MessageFunction
    """The function."""
    tensors: list[Tensor]
    """The tensors that it reads."""
    num_sources: int
    """Number of sources."""
    num_targets: int
    """Number of targets."""


def is_hetero_linear(module: nn.Module) -> bool:
    """Return whether a module is PyG's HeteroLinear, whose method `forward_naive` writes into slices."""
    kind = type(module)
    return kind.__name__ == "HeteroLinear" and kind.__module__.startswith("torch_geometric.nn.dense.linear")


def transform_by_type(linear: Any, x: Tensor, bounds: Tensor) -> Tensor:
    """Return the linear transform of each type's rows, as `forward_naive` of PyG's HeteroLinear.

    Args:
        linear: The HeteroLinear, with a weight [i, o] for each type.
        x: Rows sorted by type, [n, i].
        bounds: First row of each type, and n.
    """
    parts = x.split(bounds.diff().tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, linear.weight.unbind(), strict=True)])


def is_pygs(method: Any, conv: nn.Module) -> bool:
    """Return whether a convolution's `propagate` or `edge_updater` is PyG's, or what PyG has generated for its class.

    Args:
        method: The method.
        conv: The convolution.
    """
    generated = tuple(f"{kind.__module__}_{kind.__name__}_" for kind in type(conv).__mro__)
    return str(method.__module__).startswith(("torch_geometric.", *generated))


def is_observed(conv: Any) -> bool:
    """Return whether hooks, or an explainer, look at the messages of a convolution, or it divides its columns."""
    hooks = (value for module in conv.modules() for name, value in vars(module).items() if name.endswith("_hooks"))
    return any(hooks) or bool(conv.explain) or conv.decomposed_layers > 1


def rows_of_endpoints(names: frozenset[str], kwargs: dict[str, Any], size: Any) -> tuple[int, int] | None:
    """Return the number of sources and of targets of a call of `propagate`; None if the call does not say.

    Args:
        names: Arguments of the message function.
        kwargs: Arguments of the call.
        size: The numbers, if the call states them.
    """
    numbers = list(size) if size is not None else [None, None]
    for name in sorted(names):
        if name.endswith(("_i", "_j")):
            value, end = kwargs.get(name[:-2]), int(name.endswith("_i"))
            pair = value if isinstance(value, tuple | list) else [(None, value), (value, None)][1 - end]
            numbers = [
                len(each) if number is None and isinstance(each, Tensor) else number
                for number, each in zip(numbers, pair, strict=True)
            ]
    sources, targets = (each if each is not None else other for each, other in zip(numbers, numbers[::-1], strict=True))
    return None if sources is None or targets is None else (sources, targets)


def role_of(name: str, value: Tensor, num_rows: int, of_rows: Role) -> Role:
    """Return the role of a tensor that a message function reads.

    Args:
        name: Argument of the function.
        value: The tensor.
        num_rows: Number of its rows if it is not shared.
        of_rows: Its role then, unless the name says that it is read at an endpoint of edges.
    """
    if name.endswith("_j"):
        return "source"
    if name.endswith("_i"):
        return "target"
    return of_rows if value.dim() and len(value) == num_rows else "shared"
