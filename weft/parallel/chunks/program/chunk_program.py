"""A model cut into segments at its layer boundaries: which rows each segment leaves on the host, and their widths.

Source: HongTu, section 4.2. Segment k of a program runs from the result of boundary k - 1 to boundary k, or to the
logits. At a boundary, a segment leaves one or more matrices of rows on the host, numbered from 0. The number of such a
matrix is called its port.
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
    """Number of columns."""
    differentiable: bool
    """True if the rows need a gradient."""
    features: bool = False
    """True if the rows are the graph's features, unchanged."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment of a model, with the boundary that ends it."""

    boundary: Boundary | None
    """Boundary as traced with a few rows; None for the last segment, which ends with the logits."""
    calls: tuple[int, ...]
    """Number of dropout masks that each stage's view has drawn before the segment."""
    live: tuple[LiveRows, ...] = ()
    """Distinct rows that the boundary leaves, by port."""
    sources: dict[str, int]
    """Port of each tensor that the aggregate reads at sources, by name."""
    targets: dict[str, int]
    """Port of each tensor that the aggregate reads at targets, by name; a sum over all rows needs no port."""
    rows: dict[str, int]
    """Port of each tensor that the boundary passes on to the next segment, by name."""
    shared: dict[str, bool]
    """True for each shared tensor, of the aggregate or the boundary, that needs a gradient; by name."""
    width: int
    """Number of columns of the result."""
    saved_widths: tuple[int, ...] = ()
    """Columns of each tensor that is saved with the result for the backward pass."""
    differentiable: bool
    """True if the result has a gradient."""
    constant: bool
    """True if the result is the same in every epoch."""
    hop: int
    """Number of the first aggregate of the boundary."""
    calls_before: int = 0
    """Number of dropout masks that the view which aggregates has drawn before the aggregate."""
    needs_result: bool = True
    """True if the backward of the next segment depends on the values of the result."""

    @property
    def op(self) -> Aggregate:
        """Aggregate that the boundary requests."""
        assert self.boundary is not None
        return self.boundary.request.op

    @property
    def aggregates(self) -> bool:
        """True if the boundary requests an aggregate over edges."""
        return self.boundary is not None and self.op.over_edges

    @property
    def aggregated(self) -> LiveRows:
        """Rows of the sources that the first step of the aggregate sums."""
        return self.live[self.sources[self.op.first]]

    @property
    def source_ports(self) -> list[int]:
        """Ports that the aggregate reads at sources, each once; empty without an aggregate over edges."""
        return sorted(set(self.sources.values())) if self.aggregates else []

    @property
    def source_width(self) -> int:
        """Total number of columns that the aggregate reads at a source."""
        return sum(self.live[port].width for port in self.source_ports)

    @property
    def only_features(self) -> bool:
        """True if the segment leaves only the graph's features, so that it need not run on all rows."""
        return self.boundary is not None and not isinstance(self.op, Total) and all(rows.features for rows in self.live)

    @property
    def total_saved_width(self) -> int:
        """Total number of columns of the result and of what is saved with it."""
        return self.width + sum(self.saved_widths)

    @property
    def steps(self) -> int:
        """Number of aggregate steps, each of which reads the result of the one before."""
        return self.boundary.steps if self.boundary else 0


@dataclass(frozen=True, kw_only=True)
class ChunkProgram:
    """The segments of a model, either for training or for evaluation."""

    segments: tuple[Segment, ...]
    """Segments in order."""
    num_hops: int
    """Number of aggregate steps over edges of all segments."""


def ports_by_name(named: dict[str, Tensor], tensors: Sequence[Tensor]) -> dict[str, int]:
    """Return the port of each named tensor that is one of the given tensors.

    Args:
        named: Tensors by name.
        tensors: Tensors by port.
    """
    return {name: port for name, value in named.items() for port, tensor in enumerate(tensors) if tensor is value}


def differentiable_ports(segment: Segment) -> list[int]:
    """Return the ports whose rows need a gradient."""
    return [number for number, port in enumerate(segment.live) if port.differentiable]


def needs_backward(before: Segment) -> bool:
    """Return True if the backward pass has to go on through a boundary, given the segment before it."""
    if before.constant:
        return False
    return bool(differentiable_ports(before)) or (
        any(before.shared.values()) if before.aggregates else before.differentiable
    )


def rows_by_port(boundary: Boundary, segment: Segment) -> dict[int, Tensor]:
    """Return the rows that a boundary leaves, by port.

    Args:
        boundary: The boundary that the segment reached.
        segment: The segment.
    """
    named = (
        (boundary.request.source, segment.sources),
        (boundary.request.target, segment.targets),
        (boundary.rows, segment.rows),
    )
    return {ports[name]: rows for tensors, ports in named for name, rows in tensors.items() if name in ports}


def stepwise(boundary: Boundary) -> Boundary:
    """Return the boundary with an aggregate that can run step by step, if it has several steps."""
    return (
        replace(boundary, request=boundary.request.op.stepwise(boundary.request.rows))
        if boundary.steps > 1
        else boundary
    )
