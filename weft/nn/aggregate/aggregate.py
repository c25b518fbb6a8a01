"""An aggregate over in-edges as a value: what is done, apart from the rows that it is done to.

Its rows are named and have a role: of `source` there is one for each source [s, .], of `target` one for each target
[n, .], and what is `shared` belongs to all of them. So whoever brings rows from elsewhere, chunk by chunk or from other
ranks, needs to know no aggregate; and layers need to know nobody who does.
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
"""Tensors of an aggregate by name."""


class Request(NamedTuple):
    """What rows ask for: an aggregate of them."""

    op: Aggregate
    rows: Rows

    @property
    def source(self) -> Rows:
        """The rows of sources, by name."""
        return {name: self.rows[name] for name in self.op.source}

    @property
    def target(self) -> Rows:
        """The rows of targets, by name."""
        return {name: self.rows[name] for name in self.op.target}

    @property
    def shared(self) -> Rows:
        """What all rows share, by name."""
        return {name: self.rows[name] for name in self.op.shared}


SLOT_BYTES = 48
"""Of the row of a source beside its numbers: its vertex, its place among the edges out of it, and where it comes from
and goes to, 8 bytes each."""
TARGET_BYTES = 16
"""Of a target: its vertex, and its place among the edges."""


class WorkingSet(NamedTuple):
    """Bytes that an aggregate over a chunk has on the device at once, forward or backward, by what the chunk holds."""

    per_target: int
    per_source: int
    per_edge: int

    def bytes(self, targets: int, sources: int, edges: int) -> int:
        """Those of one chunk."""
        return self.per_target * targets + self.per_source * sources + self.per_edge * edges


@dataclass(frozen=True)
class Aggregate:
    """What is done to rows. One step of it is of a block: the result is [n, F], and the next step's `first` rows."""

    over_edges: ClassVar[bool] = True
    """Whether it goes over edges."""
    linear: ClassVar[bool] = False
    """Whether its gradient needs no rows: it is `transposed` then."""
    can_save: ClassVar[bool] = False
    """Whether its gradient can go by its result and rows by target, without the aggregate being made again."""
    first: ClassVar[str] = "x"
    """The rows that are aggregated; of several steps, the result of one is the next one's."""

    @property
    def source(self) -> tuple[str, ...]:
        """Names of what has a row for each source."""
        return ("x",)

    @property
    def target(self) -> tuple[str, ...]:
        """Names of what has a row for each target."""
        return ()

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of what all rows share."""
        return ()

    @property
    def plain(self) -> bool:
        """Whether it reads nothing but the rows that it aggregates: of constant rows, it is constant."""
        return self.over_edges and (*self.source, *self.target, *self.shared) == (self.first,)

    @property
    def loops(self) -> bool:
        """Whether a target's own row takes part among the sources'."""
        return False

    @property
    def reads_weight(self) -> bool:
        """Whether it uses the weights of the edges, if they have any."""
        return False

    @property
    def heads(self) -> int:
        """Heads whose logits weight the rows; 0 where none do."""
        return 0

    @property
    def logit_width(self) -> int:
        """Numbers of a source, and of a target, that the logits are made of, all heads together."""
        return 0

    @property
    def separate_logit_width(self) -> int:
        """Those of them that come beside a source's row, and are not the row itself."""
        return self.logit_width

    def apply(self, topology: Topology, rows: Rows, steps: int = 1) -> Tensor:
        """The result [n, F] on a block; more steps ask for n = s."""
        return self.run(topology, self.prepare(topology, rows), steps)

    def stepwise(self, rows: Rows) -> Request:
        """The same for steps that are taken one by one: what logits are made of stays, apart from rows that change."""
        return Request(self, rows)

    def prepare(self, topology: Topology, rows: Rows) -> Rows:
        """The rows, with what serves all steps over these edges in place of what it is made of."""
        del topology
        return rows

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        """As `apply`, of prepared rows."""
        raise NotImplementedError

    def transposed(self, topology: Topology, grad: Tensor, into: Tensor | None = None) -> Tensor:
        """The gradient [s, F] of what is aggregated, from that of the result; added to `into`, if there is any."""
        raise NotImplementedError

    def apply_saving(self, topology: Topology, rows: Rows) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The result of a step, without autograd, and rows [n, .] that `gradients` will want beside it."""
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
        """The gradients of the rows that a step read, by name, from that of its result and what was saved with it.

        Those of sources are added to the rows of `into`, by name, and left out then. Where it is linear, there are no
        others, and rows and result may be anything.
        """
        del rows, result, saved
        if self.first in into:
            self.transposed(topology, grad, into[self.first])
        return {}

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        """What a step has on the device, of `width` columns assigned to `size` ranks the share of the one with most.

        That is the larger of forward and backward, where whatever is not linear is computed again: the chunk's edges,
        loops among them, and backward their transpose; rows and results with their gradients, those of rows once more
        as they are found; scalings, what logits are made of and, by edge, the logits; a maximum's places.
        """
        raise NotImplementedError

    def partial(self, part: EdgeSubset, rows: Rows) -> Partial:
        """The result over some of the edges, to be combined with those over the others; differentiable."""
        raise NotImplementedError

    def combine(self, partials: Sequence[Partial]) -> Tensor:
        """The result over all edges [n, F], each of which, and each loop, was in one part."""
        raise NotImplementedError


@dataclass(frozen=True)
class WholeLayer(Aggregate):
    """A layer without phases, run as it is under a view: of rows x of sources, of which the targets' are the first.

    own: the rows of the targets.
    """

    layer: nn.Module

    @property
    def target(self) -> tuple[str, ...]:
        return ("own",)


@dataclass(frozen=True)
class Total(Aggregate):
    """The sum [F] of the rows: one result for all."""

    over_edges = False

    @property
    def source(self) -> tuple[str, ...]:
        return ()

    @property
    def target(self) -> tuple[str, ...]:
        return ("x",)
