"""Topology on the meta device, over which aggregates run to estimate their memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from weft.data import Adjacency
from weft.kernels import EdgeFeatures, Scale
from weft.nn.aggregate.relations import RelationRows
from weft.nn.aggregate.topology import Norm, Topology
from weft.nn.workload.workload import Workload


class MetaTopology(Topology):
    """Topology on the meta device: sizes without data.

    The constructor creates all tensors that a run computes once and keeps (factors, ids, edge features), so that a step
    does not allocate them. Edge weights change no allocation, so there are none.

    Args:
        work: The workload.
        num_sources: Number of sources.
        num_targets: Number of targets.
        num_edges: Number of edges.
        relation_rows: Number of relation rows by relation, for each part of the targets (each rank's).
        part: Number of the local part.
        num_own: Number of targets in the local part; None: all.
    """

    def __init__(
        self,
        work: Workload,
        num_sources: int,
        num_targets: int,
        num_edges: int,
        *,
        relation_rows: Sequence[tuple[int, ...]] = ((),),
        part: int = 0,
        num_own: int | None = None,
    ) -> None:
        num_relations, num_features, dtype = work.stats.typed.num_relations, work.stats.num_edge_features, work.dtype
        totals = [*map(sum, relation_rows)]
        adjacency = Adjacency.without_data(num_sources, num_targets, num_edges)
        Topology.__init__(self, adjacency, num_relations=num_relations)  # not super(): a block has another constructor
        with torch.device("meta"):
            self.ids = torch.empty(num_sources, dtype=torch.int64)
            self.target_ids = self.ids.new_empty(num_targets)
            self.lacks_loop = torch.empty(num_targets, dtype=torch.bool)
            self._factors = torch.empty(num_sources, dtype=dtype), torch.empty(num_targets, dtype=dtype)
            self._relation_scale = Scale(target=torch.empty(sum(totals), dtype=dtype))
            self.edge_index = torch.empty(2, num_edges, dtype=torch.int64)
            coefficients = torch.empty(num_edges, dtype=dtype)
            features = [torch.empty(number, num_features, dtype=dtype) for number in (num_edges, num_targets)]
        self.features_with_loops = EdgeFeatures(*features) if num_features else None
        self._laplacian = adjacency.with_weight(coefficients)
        self.relation_rows = RelationRows(
            counts=relation_rows[part],
            sums=Adjacency.without_data(totals[part], num_targets if num_own is None else num_own, totals[part]),
            in_edges=Adjacency.without_data(num_sources, sum(totals), num_edges),
            bounds=(0, *accumulate(totals)),
        )

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        del weighted, dtype
        source, target = self._factors
        scales = {
            "gcn": Scale(source, target, target),
            "symmetric": Scale(source, target),
            "mean": Scale(target=target),
        }
        return Scale() if norm is None else scales[norm]

    def laplacian(self, weighted: bool, dtype: torch.dtype) -> Adjacency:
        del weighted, dtype
        return self._laplacian

    def relation_scale(self, dtype: torch.dtype) -> Scale:
        del dtype
        return self._relation_scale
