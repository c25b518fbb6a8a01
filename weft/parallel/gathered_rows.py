"""Exchange without data that gathers all rows: the memory of a strategy that states only its operations."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from weft.comm import Group, Halo, Route, even_bounds
from weft.nn import Aggregate, GraphView, MetaTopology, Rows, Workload
from weft.parallel.exchange import Exchange


class GatheredRows(Exchange):
    """Even ranges of rows, with their in-edges; before each aggregate, a rank gets the rows of all other ranks.

    Args:
        work: The workload.
        group: Process group of the ranks as this rank sees it, on the meta device: it sends nothing.
    """

    def __init__(self, work: Workload, group: Group) -> None:
        num_vertices, (rank, size) = work.stats.num_vertices, (group.rank, group.size)
        counts = [stop - start for start, stop in pairwise(even_bounds(num_vertices, size))]
        received = tuple(0 if other == rank else count for other, count in enumerate(counts))
        sent = tuple(0 if other == rank else counts[rank] for other in range(size))
        share = counts[rank] / max(num_vertices, 1)
        relation_rows = (tuple(round(count * share) for count in work.stats.relation_rows),)
        num_edges = round(work.stats.num_edges * share)
        block = MetaTopology(work, num_vertices, counts[rank], num_edges, relation_rows=relation_rows)
        super().__init__(block, block.target_ids, num_vertices, group)
        self.halo = Halo(Route.without_data(counts[rank], sent, received), group, name="rows")

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        gathered = dict(zip(op.source, self.halo.complete(*(rows[name] for name in op.source)), strict=True))
        op, rows = op.stepwise({**rows, **gathered})
        prepared, x = op.prepare(self.topology, rows), rows[op.first]
        for step in range(steps):
            x = view.run(op, {**prepared, op.first: self.halo.complete(x)[0] if step else x}, 1, self.topology)
        return x

    def block(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        del view
        return self.halo.complete(x)[0], self.topology.edge_index, len(self.row_ids)
