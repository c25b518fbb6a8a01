"""Message passing as a value: an `Aggregate` says what is computed over in-edges, without the rows.

Its tensors have a name and one of three roles: `source` rows [s, .], one for each source vertex; `target` rows [n, .],
one for each target vertex; and `shared` tensors, which all rows use. Strategies that fetch rows chunk by chunk, or from
other ranks, go by these roles: they know no aggregate, and layers know no strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from weft.data import Adjacency
from weft.nn.aggregate.partial import Partial
from weft.nn.aggregate.topology import EdgeSubset, Topology

Rows = dict[str, Tensor]
"""Tensors that an aggregate reads, by name."""


class Request(NamedTuple):
    """Aggregate that a layer requests, with the tensors that it reads."""

    op: Aggregate
    rows: Rows

    @property
    def source(self) -> Rows:
        """Source rows [s, .], by name."""
        return {name: self.rows[name] for name in self.op.source}

    @property
    def target(self) -> Rows:
        """Target rows [n, .], by name."""
        return {name: self.rows[name] for name in self.op.target}

    @property
    def shared(self) -> Rows:
        """Tensors that all rows use, by name."""
        return {name: self.rows[name] for name in self.op.shared}


SLOT_BYTES = 48
"""Bytes of metadata for each source row, 8 for each id: its vertex, its position in the transpose, and where it is
copied from and to."""
TARGET_BYTES = 16
"""Bytes of metadata for each target: its vertex, and the position of its first edge."""


class WorkingSet(NamedTuple):
    """Peak device bytes of an aggregate over a chunk (maximum of forward and backward), linear in the chunk's size."""

    per_target: int
    """Bytes for each target vertex of the chunk."""
    per_source: int
    """Bytes for each source vertex of the chunk."""
    per_edge: int
    """Bytes for each edge of the chunk."""

    def bytes(self, targets: int, sources: int, edges: int) -> int:
        """Return the bytes of one chunk.

        Args:
            targets: Number of target vertices.
            sources: Number of source vertices.
            edges: Number of edges.
        """
        return self.per_target * targets + self.per_source * sources + self.per_edge * edges


@dataclass(frozen=True)
class Aggregate:
    """Base class of aggregates: reads named tensors on a block of edges, and returns rows [n, F] of the targets.

    With several steps, the result of a step is the `first` rows of the next one.
    """

    over_edges: ClassVar[bool] = True
    """True for an aggregate over edges, False for one over all vertices."""
    linear: ClassVar[bool] = False
    """True if the gradient does not depend on the rows: `transposed` computes it."""
    can_save: ClassVar[bool] = False
    """True if `gradients` can work from saved results, without running the aggregate again."""
    first: ClassVar[str] = "x"
    """Name of the rows that are aggregated."""

    @property
    def source(self) -> tuple[str, ...]:
        """Names of the tensors with a row for each source vertex."""
        return ("x",)

    @property
    def target(self) -> tuple[str, ...]:
        """Names of the tensors with a row for each target vertex."""
        return ()

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the tensors that all rows use."""
        return ()

    @property
    def plain(self) -> bool:
        """True if the aggregate reads only the rows that it aggregates; if they are constant, its result is too."""
        return self.over_edges and (*self.source, *self.target, *self.shared) == (self.first,)

    @property
    def loops(self) -> bool:
        """True if the row of a target is aggregated too, as if it had a self-loop."""
        return False

    @property
    def reads_weight(self) -> bool:
        """True if the aggregate multiplies rows by edge weights, in a graph that has edge weights."""
        return False

    @property
    def heads(self) -> int:
        """Number of attention heads; 0 for an aggregate without attention."""
        return 0

    @property
    def logit_width(self) -> int:
        """Number of columns, of a source and of a target, from which attention logits are computed, over all heads."""
        return 0

    @property
    def separate_logit_width(self) -> int:
        """Number of columns that logits read of a source in addition to the row that is aggregated."""
        return self.logit_width

    def apply(self, topology: Topology, rows: Rows, steps: int = 1) -> Tensor:
        """Return the result [n, F] on a block.

        Args:
            topology: The edges.
            rows: The tensors that it reads, by name.
            steps: Number of times that it is applied; more than one needs n = s.
        """
        return self.run(topology, self.prepare(topology, rows), steps)

    def stepwise(self, rows: Rows) -> Request:
        """Return the request to use if the caller runs the steps one by one.

        Each step replaces the rows named `first` by its result, but all steps use the attention logits of the first
        step. An aggregate that computes logits from `first` therefore gets the original rows under a second name.
        """
        return Request(self, rows)

    def prepare(self, topology: Topology, rows: Rows) -> Rows:
        """Return the tensors that `run` reads: everything that is the same in all steps is computed here, once.

        Args:
            topology: The edges.
            rows: The tensors that the aggregate reads, by name.
        """
        del topology
        return rows

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        """Return the result [n, F] on a block.

        Args:
            topology: The edges.
            prepared: The tensors that `prepare` returned.
            steps: Number of times that it is applied; more than one needs n = s.
        """
        raise NotImplementedError

    def transposed(self, topology: Topology, grad: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the gradient [s, F] of the `first` rows of a linear aggregate.

        Args:
            topology: The edges.
            grad: Gradient [n, F] of the result.
            into: Rows [s, F] to which the gradient is added in place.
        """
        raise NotImplementedError

    def apply_saving(self, topology: Topology, rows: Rows) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one step without autograd.

        Args:
            topology: The edges.
            rows: The tensors that the aggregate reads, by name.

        Returns:
            The result [n, F], and further rows [n, .] that `gradients` needs.
        """
        return self.apply(topology, rows), ()

    def gradients(
        self,
        topology: Topology,
        rows: Rows,
        result: Tensor,
        saved: Sequence[Tensor],
        grad: Tensor,
        into: Rows,
    ) -> Rows:
        """Return the gradients of the tensors that a step read, by name, except those added to `into`.

        Args:
            topology: The edges.
            rows: The tensors that the step read. A linear aggregate ignores them.
            result: The step's result [n, F]. A linear aggregate ignores it.
            saved: The rows that `apply_saving` returned with the result.
            grad: Gradient [n, F] of the result.
            into: Source rows [s, .], by name, to which gradients are added in place.
        """
        del rows, result, saved
        if self.first in into:
            self.transposed(topology, grad, into[self.first])
        return {}

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        """Return the peak device bytes of a step on the rank with the most columns (maximum of forward and backward).

        A backward pass runs aggregates that are not linear again. Counted are the edges with self-loops and their
        transpose; rows, results and their gradients, those of rows a second time before they are accumulated; scalings;
        inputs of logits; logits of edges; and positions of maxima.

        Args:
            adjacency: The graph, for the types of ids and weights.
            width: Number of columns of the rows.
            itemsize: Bytes of a number.
            size: Number of ranks over which the columns are split.
            num_edge_features: Number of features of an edge.
        """
        raise NotImplementedError

    def partial(self, part: EdgeSubset, rows: Rows) -> Partial:
        """Return the result over a subset of the edges, for `combine`; differentiable.

        Args:
            part: The subset.
            rows: The tensors that the aggregate reads, by name.
        """
        raise NotImplementedError

    def combine(self, partials: Sequence[Partial]) -> Tensor:
        """Return the result [n, F] over all edges from the results over disjoint subsets."""
        raise NotImplementedError


@dataclass(frozen=True)
class WholeLayer(Aggregate):
    """A layer without phases, called as a whole under a view.

    The layer reads the tensors `x`, rows of the sources (the targets come first among them), and `own`, rows of the
    targets.
    """

    layer: nn.Module
    """The layer, called as `layer(view, x)`."""

    @property
    def target(self) -> tuple[str, ...]:
        return ("own",)


@dataclass(frozen=True)
class Total(Aggregate):
    """Sum [F] of the rows of all vertices."""

    over_edges = False

    @property
    def source(self) -> tuple[str, ...]:
        return ()

    @property
    def target(self) -> tuple[str, ...]:
        return ("x",)
