"""Mini-batch on a rank: its blocks, the halos between them, and the rows that the model begins with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weft.comm import Group, Halo
from weft.kernels import Scale
from weft.nn import Aggregate, GraphView, Inputs, Rows, Topology
from weft.nn.aggregate.topology import Norm
from weft.parallel.blocks.blocks import Block, Halos
from weft.strategies.split.sampler import SampledBatch, SampledHop
from weft.strategies.vertex.plan import PlacedVertices


class SampledBlock(Block):
    """Sampled in-edges; a sum over them is an unbiased estimate of the sum over all (Horvitz and Thompson 1952).

    It is scaled by the degrees in the whole graph, as in an evaluation, and by the inverse sampling probability.
    """

    keeps_whole_scale = True
    hop: SampledHop

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        scale, factor = super()._scale(norm, weighted, dtype), self.hop.sample.row_scale
        if factor is None:
            return scale
        factor = factor.to(self.device, dtype)
        return scale._replace(target=factor if scale.target is None else scale.target * factor)


class BatchHalos(Halos):
    """Halos of one stage of a batch. Constant features are exchanged as well, because only their owner loads them.

    Args:
        blocks: Block of each step; the targets of the last one are the results.
        whole: Topology of the whole graph, for a stage without aggregates.
        row_ids: Original ids of the rank's rows, int64.
        num_rows: Number of vertices of all ranks before and after the stage's aggregates.
        group: The ranks.
        embedded: Positions of the batch's rows among the embedding rows that the rank stores, int64.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        whole: Topology,
        row_ids: Tensor,
        num_rows: tuple[int, int],
        group: Group,
        embedded: Tensor,
    ) -> None:
        super().__init__(blocks, whole, row_ids, len(row_ids), group, None)
        self.num_rows, self.num_vertices, self._embedded = num_rows, num_rows[0], embedded

    def is_exchanged(self, view: GraphView, x: Tensor) -> bool:
        del view, x
        return True

    def embed(self, weight: Tensor) -> Tensor:
        return weight.index_select(0, self._embedded)

    def aggregate(self, view: GraphView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        y = super().aggregate(view, op, rows, steps)
        self.num_vertices = self.num_rows[1]
        return y

    def block(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        requested = super().block(view, x)
        self.num_vertices = self.num_rows[1]
        return requested


class BatchBlocks:
    """Blocks, exchanges and inputs of a rank for a mini-batch. Creating them needs no communication.

    Args:
        batch: The rank's part of the batch.
        num_rows: Number of vertices of all ranks at each layer boundary.
        stage_hops: Numbers of the aggregates of each stage of the model.
        backward_hops: Aggregates through which gradients flow.
        embedded: Positions of the batch's rows among the embedding rows that the rank stores, int64.
        placed: The plan on this rank, with graph and model.
        inputs: Rows that the model begins with.
    """

    def __init__(
        self,
        batch: SampledBatch,
        num_rows: Sequence[int],
        stage_hops: Sequence[Sequence[int]],
        backward_hops: Collection[int],
        embedded: Tensor,
        placed: PlacedVertices,
        inputs: Inputs,
    ) -> None:
        group, rows = placed.group, batch.rows
        self.inputs = inputs
        blocks = []
        for number, hop in enumerate(batch.hops):
            halo = Halo(hop.route, group, name=f"batch {number}") if hop.route else None
            blocks.append(SampledBlock(hop, rows, placed, halo))
            if number in backward_hops:
                blocks[-1].adjacency.transpose  # noqa: B018  # computed now, before the step
        row_ids = placed.topology.ids[rows].to(group.device)
        self.exchanges: list[BatchHalos] = []
        boundary = 0
        for hops in stage_hops:
            next_boundary = hops[-1] + 1 if hops else boundary
            counts = num_rows[boundary], num_rows[next_boundary]
            stage = tuple(blocks[hop] for hop in hops)
            self.exchanges.append(BatchHalos(stage, placed.topology, row_ids, counts, group, embedded))
            boundary = next_boundary

    def rewind(self) -> None:
        """Reset the number of rows before a forward pass."""
        for exchange in self.exchanges:
            exchange.num_vertices = exchange.num_rows[0]
