"""A custom strategy: each rank stores a range of vertices with their in-edges, and gets the rows of all other ranks.

`BroadcastPlan` lists the operations of a rank, for estimates of time and memory. `BroadcastExchange` executes them.
"""

import torch
from torch import Tensor

import weft
from weft.comm import Group, Halo, Route, even_bounds
from weft.cost import Operation
from weft.data import Adjacency
from weft.nn import Aggregate, GraphOperation, GraphView, Rows, SubTopology, Topology
from weft.strategies import AggregateSize, Exchange, ResidentPlaced, ResidentPlan, aggregate, register


class PlacedRange(ResidentPlaced):
    """The plan on one rank, with its range of vertices."""

    def exchange(self, _stage: int) -> Exchange:
        assert isinstance(self.rows, slice)
        return BroadcastExchange(self.topology, self.rows, self.group)


@register
class BroadcastPlan(ResidentPlan):
    """Plan of the strategy: the operations of each rank and the exchange that they need."""

    name = "broadcast"
    placed_type = PlacedRange

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        first, end = even_bounds(self.work.stats.num_vertices, self.size)[rank : rank + 2]
        num_own, indptr, operations = end - first, self.work.graph.in_edges.indptr, list[Operation]()
        for step in range(op.steps if op.reads_edges else 0):
            row = (op.width + (0 if step else op.separate_logit_width)) * self.work.itemsize
            sent, received = num_own * (self.size - 1) * row, (len(indptr) - 1 - num_own) * row
            if self.size > 1:
                operations += [Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received)]
            if op.is_aggregate:
                operations += [aggregate(op, int(indptr[end] - indptr[first]), AggregateSize(num_own, len(indptr) - 1))]
        return operations


class BroadcastExchange(Exchange):
    """Exchange that gathers the rows of all ranks, this rank's first, and sends gradients back to the owners."""

    def __init__(self, whole: Topology, local: slice, group: Group) -> None:
        # Sources are numbered with this rank's rows first, as `complete` returns them.
        edges, ids = whole.adjacency, torch.arange(whole.adjacency.num_targets, device=group.device)
        sources = torch.cat([ids[local], ids[: local.start], ids[local.stop :]])
        span = slice(int(edges.indptr[local.start]), int(edges.indptr[local.stop]))
        indptr = edges.indptr[local.start : local.stop + 1] - span.start
        indices = sources.argsort().to(edges.indices.dtype)[edges.indices[span].long()]
        weight = None if edges.weight is None else edges.weight[span]
        block = Adjacency(indptr=indptr, indices=indices, num_sources=len(ids), weight=weight)
        super().__init__(SubTopology(block, sources, local, whole, span), whole.ids[local], len(ids), group)
        received = torch.tensor(even_bounds(len(ids), group.size)).diff().tolist()
        self.num_own, received[group.rank] = received[group.rank], 0
        sent = tuple(0 if rank == group.rank else self.num_own for rank in range(group.size))
        rows = torch.arange(self.num_own, device=group.device).repeat(group.size - 1)
        route = Route(rows=rows, sent=sent, received=tuple(received), num_rows=self.num_own)
        self.complete = Halo(route, group, name="broadcast").complete if group.size > 1 else lambda *rows: rows

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        gathered = self.complete(*(rows[name] for name in op.source))
        op, rows = op.stepwise({**rows, **dict(zip(op.source, gathered, strict=True))})
        prepared, x = op.prepare(self.topology, rows), rows[op.first]
        for step in range(steps):
            x = view.run(op, {**prepared, op.first: self.complete(x)[0] if step else x}, 1, self.topology)
        return x

    def block(self, _view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return self.complete(x)[0], self.topology.edge_index, self.num_own


if __name__ == "__main__":
    run = weft.train("digits", strategy="broadcast", workers=2)
    print(f"test accuracy {run.summary['test_accuracy']:.3f}")
