"""Messages of a PyG convolution, computed in tiles of edges, so that no tensor has a row for each edge.

A convolution's `propagate` gathers the rows of both endpoints of each edge, computes a message from them, and reduces
the messages of each target. Here it does so for one tile after the other: a range of targets with all of their
in-edges, whose rows fit the cache. The backward pass computes the messages of a tile again, and adds their gradients to
the rows of the sources in the order of the edges, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.data import Adjacency
from weft.kernels import Scale, spmm
from weft.kernels.cpu import spmm_scatter

TILE_BYTES = 1 << 20
"""Bytes of a tensor with a row for each edge of a tile."""
MIN_TILE = 64
"""Smallest number of edges of a tile, unless there are fewer."""
LOCAL = frozenset({"index", "edge_index_i", "ptr", "size_i", "dim_size"})
"""Arguments of a message function that a tile has too."""
GLOBAL = frozenset({"edge_index", "adj_t", "edge_index_j", "size", "size_j"})
"""Arguments of a message function that only the whole graph has."""

Role = Literal["source", "target", "edge", "shared"]
"""Rows of a tensor: one for each source, for each target, for each edge, or none."""


class Tile(NamedTuple):
    """A range of targets with all of their in-edges."""

    targets: slice
    """The targets."""
    edges: slice
    """Edges into these, in the order of `SortedEdges`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedEdges:
    """Edges in the order of their targets."""

    edge_index: Tensor
    """Source and target of each edge in its original order, int64 [2, E]."""
    order: Tensor | None
    """Original position of each edge, int64 [E]; None: the original order."""
    sources: Tensor
    """Source of each edge, int64 [E]."""
    indptr: Tensor
    """First edge of each target, int64 [n + 1]."""

    @classmethod
    def of(cls, edge_index: Tensor, num_targets: int) -> SortedEdges:
        """Sort edges by their targets; edges of the same target stay in their order.

        Args:
            edge_index: Source and target of each edge, int64 [2, E].
            num_targets: Number of targets.
        """
        sources, targets = edge_index
        order = None
        if not bool((targets[1:] >= targets[:-1]).all()):
            targets, order = targets.sort(stable=True)
            sources = sources[order]
        indptr = torch.searchsorted(targets, torch.arange(num_targets + 1))
        return cls(edge_index=edge_index, order=order, sources=sources, indptr=indptr)

    def tiles(self, num_edges: int) -> Iterator[Tile]:
        """Yield tiles of at most so many edges and targets, or of one target.

        Args:
            num_edges: The number of edges.
        """
        first, num_targets = 0, len(self.indptr) - 1
        while first < num_targets:
            last = int(torch.searchsorted(self.indptr, self.indptr[first] + num_edges, right=True)) - 1
            last = min(max(last, first + 1), first + num_edges, num_targets)
            yield Tile(slice(first, last), slice(int(self.indptr[first]), int(self.indptr[last])))
            first = last

    def positions(self, edges: slice) -> slice | Tensor:
        """Return the original positions of a range of the sorted edges."""
        return edges if self.order is None else self.order[edges]


class Read(NamedTuple):
    """A tensor that a message function reads."""

    name: str
    """Argument of the function."""
    role: Role
    """Rows of the tensor."""


class MessageFunction(NamedTuple):
    """A step of a convolution over edges, and what it reads."""

    conv: Any
    """The convolution."""
    edges: SortedEdges
    """The edges."""
    by_edge: bool
    """True if the result has a row for each edge (`edge_update`), False for one of each target (`propagate`)."""
    reads: tuple[Read, ...]
    """The tensors that it reads."""
    others: dict[str, Any]
    """Other arguments by name."""

    def on_tile(self, tile: Tile, values: Sequence[Tensor]) -> Tensor:
        """Return the result on a tile.

        Args:
            tile: The tile.
            values: Rows of the tensors in `reads`: of the sources of edges, of the targets, or of the edges.
        """
        conv, num_targets = self.conv, tile.targets.stop - tile.targets.start
        indptr = self.edges.indptr[tile.targets.start : tile.targets.stop + 1] - tile.edges.start
        index = torch.arange(num_targets).repeat_interleave(
            indptr.diff(), output_size=tile.edges.stop - tile.edges.start
        )
        arguments = self.others | {"index": index, "edge_index_i": index, "ptr": None}
        arguments |= {"size_i": num_targets, "dim_size": num_targets}
        for read, value in zip(self.reads, values, strict=True):
            in_edges = read.role == "target" and read.name.endswith("_i")
            arguments[read.name] = value.index_select(0, index) if in_edges else value
        collect = conv.inspector.collect_param_data
        if self.by_edge:
            result: Tensor = conv.edge_update(**collect("edge_update", arguments))
            return result
        messages = conv.message(**collect("message", arguments))
        rows = summed(conv, messages, index, indptr)
        if rows is None:
            rows = conv.aggregate(messages, **collect("aggregate", arguments))
        updated: Tensor = conv.update(rows, **collect("update", arguments))
        return updated

    def rows_of(self, tile: Tile, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of the tensors in `reads` that a tile reads.

        Args:
            tile: The tile.
            tensors: The tensors.
        """
        sources, positions = self.edges.sources[tile.edges], self.edges.positions(tile.edges)
        rows: dict[Role, Callable[[Tensor], Tensor]] = {
            "source": lambda tensor: tensor.index_select(0, sources),
            "target": lambda tensor: tensor[tile.targets],
            "edge": lambda tensor: tensor[positions],
            "shared": lambda tensor: tensor,
        }
        return [rows[read.role](tensor) for read, tensor in zip(self.reads, tensors, strict=True)]

    def edges_per_tile(self, tensors: Sequence[Tensor]) -> int:
        """Return the number of edges for which the widest of some tensors takes about TILE_BYTES.

        Args:
            tensors: The tensors in `reads`.
        """
        by_edge = (tensor[:1].nbytes for read, tensor in zip(self.reads, tensors, strict=True) if read.role != "shared")
        return max(MIN_TILE, TILE_BYTES // max(max(by_edge, default=1), 1))

    @property
    def num_results(self) -> int:
        """Number of rows of the result."""
        return self.edges.edge_index.shape[1] if self.by_edge else len(self.edges.indptr) - 1


class TiledFunction(torch.autograd.Function):
    """A `MessageFunction` on all edges; its backward pass also adds the gradients of the convolution's parameters."""

    @staticmethod
    def forward(
        ctx: Any, function: MessageFunction, skipped: torch.Size | None, anchor: Tensor, *tensors: Tensor
    ) -> Tensor:
        del anchor
        ctx.function, ctx.tiles = function, []
        ctx.save_for_backward(*tensors)
        if skipped is not None:
            return tensors[0].new_empty(function.num_results, *skipped)
        results: Tensor | None = None
        ctx.tiles = list(function.edges.tiles(function.edges_per_tile(tensors)))
        for tile in ctx.tiles:
            result = function.on_tile(tile, function.rows_of(tile, tensors))
            if results is None:
                results = result.new_empty(function.num_results, *result.shape[1:])
            results[function.edges.positions(tile.edges) if function.by_edge else tile.targets] = result
        assert results is not None
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        function, tensors, needed = ctx.function, ctx.saved_tensors, ctx.needs_input_grad[3:]
        grads = [torch.zeros_like(tensor) if wanted else None for tensor, wanted in zip(tensors, needed, strict=True)]
        for tile in ctx.tiles:
            rows = function.rows_of(tile, tensors)
            leaves = [each.detach().requires_grad_(wanted) for each, wanted in zip(rows, needed, strict=True)]
            with torch.enable_grad():
                result = function.on_tile(tile, leaves)
            if not result.requires_grad:
                continue
            positions = function.edges.positions(tile.edges)
            torch.autograd.backward(result, grad[positions if function.by_edge else tile.targets])
            for read, leaf, whole in zip(function.reads, leaves, grads, strict=True):
                if whole is None or leaf.grad is None:
                    continue
                if read.role == "source":
                    add_to_sources(whole, function.edges.sources[tile.edges], leaf.grad)
                elif read.role == "target":
                    whole[tile.targets] = leaf.grad
                elif read.role == "edge":
                    whole[positions] = leaf.grad
                else:
                    whole += leaf.grad
        return None, None, None, *grads


def add_to_sources(whole: Tensor, sources: Tensor, grad: Tensor) -> None:
    """Add the gradients of the sources of some edges, in the order of the edges.

    Args:
        whole: Gradients of all sources [s, ...], which are added to.
        sources: Source of each edge, int64 [e].
        grad: Gradient of each edge's source [e, ...].
    """
    num_edges = len(sources)
    edges = Adjacency(indptr=torch.arange(num_edges + 1), indices=sources, num_sources=len(whole))
    spmm_scatter(edges, as_matrix(grad), Scale(), False, as_matrix(whole))


def as_matrix(rows: Tensor) -> Tensor:
    """Return rows [n, ...] as a contiguous matrix [n, F]; a view if they are contiguous."""
    return rows.reshape(len(rows), prod(rows.shape[1:])).contiguous()


class SegmentSum(torch.autograd.Function):
    """Sum [n, F] of the rows [e, F] of each target, which are one after the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, indptr: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        edges = Adjacency(indptr=indptr, indices=torch.arange(len(rows), dtype=torch.int32), num_sources=len(rows))
        return spmm(edges, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


def summed(conv: Any, messages: Tensor, index: Tensor, indptr: Tensor) -> Tensor | None:
    """Return the sum or mean of the messages of each target; None if the convolution reduces them in another way.

    Args:
        conv: The convolution.
        messages: The messages [e, ...].
        index: Target of each message, int64 [e], ascending.
        indptr: First message of each target, int64 [n + 1].
    """
    kind = type(getattr(conv, "aggr_module", None)).__name__
    overridden = type(conv).aggregate.__module__ != "torch_geometric.nn.conv.message_passing"
    if overridden or kind not in ("SumAggregation", "MeanAggregation") or not messages.is_floating_point():
        return None
    rows: Tensor = SegmentSum.apply(as_matrix(messages), index, indptr)  # type: ignore[no-untyped-call]
    if kind == "MeanAggregation":
        rows = rows / indptr.diff().clamp(min=1)[:, None]
    return rows.view(len(rows), *messages.shape[1:])


class TiledConv:
    """Runs the message functions of a convolution in tiles, and keeps the edges that it has sorted.

    Args:
        conv: The convolution.
    """

    def __init__(self, conv: nn.Module) -> None:
        self.conv = conv
        self.edges_per_tile = 0
        """Largest number of edges of a tile in the last calls; 0 if they did not run in tiles."""
        self.skips = False
        """True to skip the tiles, which leaves the results undefined: a measurement of the memory outside of them."""
        self._sorted: list[SortedEdges] = []
        self._shapes: list[torch.Size] = []
        """Shape of the result of each call inside `replacing`."""

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Let `propagate` and `edge_updater` of the convolution run in tiles inside the `with` block."""
        shapes, self._shapes = self._shapes if self.skips else [], []
        self._expected = iter(shapes)
        if not self.skips:
            self.edges_per_tile = 0
        replaced = {
            name: partial(self._call, getattr(self.conv, name), by_edge=name == "edge_updater")
            for name in ("propagate", "edge_updater")
            if hasattr(self.conv, name)
        }
        self.conv.__dict__.update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                del self.conv.__dict__[name]

    def _call(self, original: Any, edge_index: Any, size: Any = None, *, by_edge: bool, **kwargs: Any) -> Tensor:
        function, tensors = self._function(edge_index, size, kwargs, by_edge=by_edge) or (None, [])
        if function is None:
            whole: Tensor = original(edge_index, size=size, **kwargs)
            return whole
        needs_grad = any(parameter.requires_grad for parameter in self.conv.parameters())
        anchor = torch.empty(0, requires_grad=needs_grad)
        self.edges_per_tile = max(self.edges_per_tile, function.edges_per_tile(tensors))
        skipped = next(self._expected) if self.skips else None
        result: Tensor = TiledFunction.apply(function, skipped, anchor, *tensors)  # type: ignore[no-untyped-call]
        self._shapes.append(result.shape[1:])
        return result

    def _function(
        self, edge_index: Any, size: Any, kwargs: dict[str, Any], *, by_edge: bool
    ) -> tuple[MessageFunction, list[Tensor]] | None:
        """Return the message function of a call and the tensors that it reads; None if it cannot run in tiles."""
        conv: Any = self.conv
        if type(edge_index) is not Tensor or is_observed(conv) or conv.flow != "source_to_target":
            return None
        functions = ["edge_update"] if by_edge else ["message", "aggregate", "update"]
        names = frozenset(conv.inspector.get_flat_param_names(functions))
        by_message = frozenset(conv.inspector.get_flat_param_names(functions[:1]))
        if GLOBAL & names or not edge_index.shape[1]:
            return None
        num_edges, num_rows = edge_index.shape[1], rows_of_endpoints(kwargs, size)
        if num_rows is None:
            return None
        reads, tensors, others = list[Read](), list[Tensor](), dict[str, Any]()
        for name in sorted(names - LOCAL):
            lifted = name.endswith(("_i", "_j"))
            value = kwargs.get(name[:-2] if lifted else name, Parameter.empty)
            if lifted and isinstance(value, tuple | list):
                value = value[name.endswith("_i")]
            if not isinstance(value, Tensor):
                if isinstance(value, tuple | list | dict):
                    return None
                others[name] = value
                continue
            per_edge = name in by_message
            role = role_of(name, value, num_edges if per_edge else num_rows[1], "edge" if per_edge else "target")
            if lifted and conv.node_dim % value.dim() != 0:
                return None
            reads.append(Read(name, role))
            tensors.append(value)
        edges = self._sort(edge_index, num_rows[1])
        return MessageFunction(conv, edges, by_edge, tuple(reads), others), tensors

    def _sort(self, edge_index: Tensor, num_targets: int) -> SortedEdges:
        """Return edges in the order of their targets; the last results are cached."""
        for edges in self._sorted:
            same = edges.edge_index is edge_index or torch.equal(edges.edge_index, edge_index)
            if same and len(edges.indptr) == num_targets + 1:
                return edges
        self._sorted = [*self._sorted[-1:], SortedEdges.of(edge_index, num_targets)]
        return self._sorted[-1]


def is_observed(conv: Any) -> bool:
    """Return whether hooks, or an explainer, look at the messages of a convolution, or it divides its columns."""
    hooks = [value for name, value in vars(conv).items() if name.endswith("_hooks") and value]
    return bool(hooks) or bool(conv.explain) or conv.decomposed_layers > 1


def rows_of_endpoints(kwargs: dict[str, Any], size: Any) -> tuple[int, int] | None:
    """Return the number of sources and of targets of a call of `propagate`; None if the call does not say.

    Args:
        kwargs: Arguments of the call.
        size: The numbers, if the call states them.
    """
    if size is not None and None not in tuple(size):
        return size[0], size[1]
    for value in kwargs.values():
        if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(each, Tensor) for each in value):
            return len(value[0]), len(value[1])
    x = kwargs.get("x", next((value for value in kwargs.values() if isinstance(value, Tensor)), None))
    return (len(x), len(x)) if isinstance(x, Tensor) else None


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
