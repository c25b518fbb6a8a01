"""What a model does between its aggregates, as a value: which rows it leaves, of what width.

(HongTu, section 4.2.) Segment k of a program goes from the result at boundary k - 1 to boundary k, or to the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from weft.nn import Aggregate, Total
from weft.nn.layers.phases import Boundary


class LiveRows(NamedTuple):
    """Rows that a boundary leaves on the host."""

    width: int
    differentiable: bool
    """Whether they want a gradient."""
    features: bool = False
    """Whether they are the graph's features, as these are."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One part of a program, and the boundary that ends it."""

    boundary: Boundary | None
    """As found with a few rows; None after the last segment."""
    calls: tuple[int, ...]
    """Dropout masks that each stage's view has drawn before the segment."""
    live: tuple[LiveRows, ...] = ()
    """The different rows that the boundary leaves."""
    sources: dict[str, int]
    """The port of each of the aggregate's rows of sources, by name."""
    targets: dict[str, int]
    """The port of each of its rows of targets; a total's need none."""
    rows: dict[str, int]
    """The port of each of the rows that go on with the result."""
    shared: dict[str, bool]
    """Whether each tensor that all rows share, of the aggregate and of the boundary, wants a gradient."""
    width: int
    """Columns of the result."""
    kept_widths: tuple[int, ...] = ()
    """Columns of what is kept besides the result, where it is."""
    differentiable: bool
    """Whether the result has a gradient."""
    constant: bool
    """Whether nothing of it depends on the epoch."""
    hop: int
    """The number of its first aggregate."""
    calls_before: int = 0
    """Dropout masks that the view which aggregates has drawn before that."""
    needs_result: bool = True
    """Whether the gradient of the next segment depends on the numbers of the result."""

    @property
    def op(self) -> Aggregate:
        """What the boundary asks for."""
        assert self.boundary is not None
        return self.boundary.request.op

    @property
    def aggregates(self) -> bool:
        """Whether the boundary asks for an aggregate over edges."""
        return self.boundary is not None and self.op.over_edges

    @property
    def aggregated(self) -> LiveRows:
        """What the aggregate's first step reads of a source and aggregates."""
        return self.live[self.sources[self.op.first]]

    @property
    def source_ports(self) -> list[int]:
        """The ports that the aggregate reads at sources, each once; none where there is no aggregate."""
        return sorted(set(self.sources.values())) if self.aggregates else []

    @property
    def source_width(self) -> int:
        """Columns of all that the aggregate reads at a source."""
        return sum(self.live[port].width for port in self.source_ports)

    @property
    def only_features(self) -> bool:
        """Whether it leaves the graph's features and nothing that must be made of all rows."""
        return self.boundary is not None and not isinstance(self.op, Total) and all(one.features for one in self.live)

    @property
    def kept_width(self) -> int:
        """Columns of all that is kept of the result, if it is."""
        return self.width + sum(self.kept_widths)

    @property
    def steps(self) -> int:
        """How many aggregates follow each other."""
        return self.boundary.steps if self.boundary else 0


@dataclass(frozen=True, kw_only=True)
class ChunkProgram:
    """A model's segments in training or in an evaluation; num_hops: its aggregates."""

    segments: tuple[Segment, ...]
    num_hops: int


def places(named: dict[str, Tensor], found: Sequence[Tensor]) -> dict[str, int]:
    """Which of some tensors each named one is, by name, of those that are one of them."""
    return {name: i for name, value in named.items() for i, one in enumerate(found) if one is value}


def differentiable(segment: Segment) -> list[int]:
    """The ports that want a gradient."""
    return [number for number, port in enumerate(segment.live) if port.differentiable]


def goes_back(before: Segment) -> bool:
    """Whether a backward pass has anything to do behind what a boundary left."""
    if before.constant:
        return False
    return bool(differentiable(before)) or (any(before.shared.values()) if before.aggregates else before.differentiable)


def left_by(boundary: Boundary, segment: Segment) -> dict[int, Tensor]:
    """The rows that a boundary leaves, by port."""
    named = (
        (boundary.request.source, segment.sources),
        (boundary.request.target, segment.targets),
        (boundary.rows, segment.rows),
    )
    return {live[name]: rows for found, live in named for name, rows in found.items() if name in live}


def stepwise(boundary: Boundary) -> Boundary:
    """The same boundary, which of several steps says what stays for all of them."""
    return (
        replace(boundary, request=boundary.request.op.stepwise(boundary.request.rows))
        if boundary.steps > 1
        else boundary
    )
