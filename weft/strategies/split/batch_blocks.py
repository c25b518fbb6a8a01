"""A mini-batch on its rank: its blocks, the halos between them, and the rows that the model begins with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weft.comm import Group, Halo
from weft.kernels import Scale
from weft.nn import Aggregate, Inputs, Rows, Topology
from weft.nn.aggregate.topology import Norm
from weft.strategies.placed_view import PlacedView
from weft.strategies.split.sampler import SampledBatch, SampledHop
from weft.strategies.vertex.blocks import Block, Halos
from weft.strategies.vertex.plan import PlacedVertices


class SampledBlock(Block):
    """In-edges that were drawn: a sum over them estimates that over all without bias (Horvitz and Thompson 1952).

    So it is scaled by the whole graph's degrees, as in an evaluation, and by one over the chance of being drawn.
    """

    hop: SampledHop

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        scale, factor = super()._scale(norm, weighted, dtype), self.hop.sample.row_scale
        if factor is None:
            return scale
        factor = factor.to(self.device, dtype)
        return scale._replace(target=factor if scale.target is None else scale.target * factor)


class BatchHalos(Halos):
    """The halos of one stage of a batch. Constant features cross as well, since their owner alone loads them.

    row_ids: int64, the original ids of the rank's rows. num_rows: vertices of all ranks before and behind the stage's
    aggregates. embedded: int64, which of the rows that the rank keeps of an embedding are the batch's.
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

    def is_exchanged(self, view: PlacedView, x: Tensor) -> bool:
        del view, x
        return True

    def embed(self, weight: Tensor) -> Tensor:
        return weight.index_select(0, self._embedded)

    def aggregate(self, view: PlacedView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        y = super().aggregate(view, op, rows, steps)
        self.num_vertices = self.num_rows[1]
        return y

    def block(self, view: PlacedView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        found = super().block(view, x)
        self.num_vertices = self.num_rows[1]
        return found


class BatchBlocks:
    """What a rank has of a mini-batch. Nothing crosses the network here.

    drawn: its share. num_rows: vertices of all ranks, by level. stage_hops: the aggregates of each of the model's
    stages. backward_hops: those that gradients go back through. embedded: int64, which of the rows that the rank keeps
    of an embedding are the batch's. placed: has the graph, and the model on this rank. inputs: what the model begins
    with.
    """

    def __init__(
        self,
        drawn: SampledBatch,
        num_rows: Sequence[int],
        stage_hops: Sequence[Sequence[int]],
        backward_hops: Collection[int],
        embedded: Tensor,
        placed: PlacedVertices,
        inputs: Inputs,
    ) -> None:
        group, rows = placed.group, drawn.rows
        self.inputs = inputs
        blocks = []
        for number, hop in enumerate(drawn.hops):
            halo = Halo(hop.route, group, name=f"batch {number}") if hop.route else None
            blocks.append(SampledBlock(hop, rows, placed, halo))
            if number in backward_hops:
                blocks[-1].adjacency.transpose  # noqa: B018  # here, ahead of the step
        row_ids = placed.topology.ids[rows].to(group.device)
        self.exchanges: list[BatchHalos] = []
        level = 0
        for hops in stage_hops:
            behind = hops[-1] + 1 if hops else level
            counts = num_rows[level], num_rows[behind]
            stage = tuple(blocks[hop] for hop in hops)
            self.exchanges.append(BatchHalos(stage, placed.topology, row_ids, counts, group, embedded))
            level = behind

    def rewind(self) -> None:
        """Before each forward pass: no aggregate has been made."""
        for exchange in self.exchanges:
            exchange.num_vertices = exchange.num_rows[0]
