"""Operations of a trace that several strategies have: dense layers, aggregates, and their backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.cost import Operation
from weft.data import GraphStats
from weft.nn import Aggregate, GraphOperation
from weft.runtime.kernel_call import KernelCall


def backward_operations(forward: Iterable[Operation]) -> list[Operation]:
    """Return the backward pass of operations, last first.

    What overlaps with an exchange in the forward pass overlaps with the exchange of its gradients.
    """
    backward: list[Operation] = []
    for operation in reversed([*forward]):
        # What overlapped with the exchange now overlaps with that of the gradients: it stays after it in the list.
        before = len(backward) - bool(operation.kind == "collective" and backward and backward[-1].ahead)
        backward[before:before] = [operation.adjoint()] if operation.backward is None else operation.backward
    return backward


def dense_operations(flops: int, calls: tuple[KernelCall, ...]) -> list[Operation]:
    """Return the dense layers and passes over rows between two graph operations: one operation, or none.

    Args:
        flops: Floating-point operations.
        calls: Kernel calls.
    """
    return [Operation(kind="dense", flops=flops, calls=calls)] if flops or calls else []


class AggregateSize(NamedTuple):
    """Number of rows of an aggregate, and how many of its reads come from memory."""

    targets: int
    """Number of rows that the aggregate writes."""
    sources: int
    """Number of rows that the aggregate may read."""
    fresh_share: float = 1.0
    """Share of edges whose source row comes from memory, see `Adjacency.fresh_share`."""

    @classmethod
    def whole(cls, stats: GraphStats) -> AggregateSize:
        """Return the size of an aggregate over a whole graph."""
        return cls(stats.num_vertices, stats.num_vertices, stats.fresh_share)


def aggregate(
    op: GraphOperation,
    edges: int,
    size: AggregateSize,
    *,
    steps: int = 1,
    width: int | None = None,
    recomputed: bool = False,
) -> Operation:
    """Return the trace's operation for one aggregate.

    Args:
        op: Operation of the model's outline.
        edges: Number of edges of each step.
        size: Number of rows.
        steps: Number of times that the aggregate is applied.
        width: Columns; None: `op.width`.
        recomputed: True if the backward pass runs the aggregate again.
    """
    assert isinstance(op.op, Aggregate)
    width = op.width if width is None else width
    fresh = round(size.fresh_share * edges)
    sizes = edges, size.targets, size.sources, fresh, width, op.op.heads
    call = KernelCall(type(op.op).__name__, sizes, steps)
    return Operation(kind="aggregate", edges=steps * edges * width, recomputed=recomputed, calls=(call,))
