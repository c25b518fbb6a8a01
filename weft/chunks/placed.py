"""A rank's chunks in place: what a pass of a model needs beside its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.chunks.home import Home
from weft.chunks.program import Segment
from weft.chunks.rank import RankChunks
from weft.chunks.slots import PlacedRound
from weft.chunks.tables import BoundaryRows
from weft.comm import Group
from weft.nn import Inputs, Topology, Workload, is_embedded, typed_rows
from weft.store.files import release


class Fetcher(Protocol):
    """What brings the embedded rows that a rank computes again."""

    def fetch(self, weight: Tensor) -> Tensor:
        """The rows of all embedded vertices of the rank, from those that it keeps."""
        ...


class PlacedChunks(Home):
    """What a pass needs on its rank.

    model: the rank's own. embedded_halo: None where every rank has its vertices' embedded rows. folder: of the files;
    None: that for temporary ones. in_memory: rows and rounds are in memory, not in files.
    only_first: work on the first chunk of everything, to see what it takes.
    """

    def __init__(
        self,
        chunks: RankChunks,
        work: Workload,
        model: nn.Module,
        group: Group,
        *,
        seed: int,
        topology: Topology,
        embedded_halo: Fetcher | None,
        folder: Path | None,
        in_memory: bool = False,
        only_first: bool = False,
    ) -> None:
        super().__init__(
            work,
            group,
            group.device,
            folder=folder,
            in_memory=in_memory,
            prefetch=chunks.prefetch,
            transfers=group.meter,
        )
        self.model, self.seed, self.topology, self.work = model, seed, topology, work
        self.embedded_halo = embedded_halo
        needed = chunks.dependencies
        self.vertices, self.num_own = needed.rows, needed.num_own
        self.row_ids = topology.ids[needed.rows].to(group.device)
        self.kept, self._schedule_of = chunks.kept, chunks.schedule_of
        self._rows_at = [chunks.num_rows(hop) for hop in range(len(needed.hops) + 1)]
        self._spans = {num_rows: chunks.spans(num_rows) for num_rows in self._rows_at}
        self._held_at = [hop.num_inputs for hop in needed.hops]
        self.halo = chunks.halo
        self.constant: BoundaryRows | None = None
        self._number = 1 if only_first else None
        self._rounds: list[list[PlacedRound]] = []
        for planned in chunks.schedules:
            hop, vertices = planned.hop, torch.cat([needed.rows[: planned.hop.num_inputs], planned.hop.fetched])
            placed = (
                PlacedRound(round_, hop, vertices, topology, planned.layouts, self.array_file)
                for round_ in planned.schedule.rounds
            )
            self._rounds.append(list(placed))

    @property
    def stages(self) -> range:
        """The model's stages."""
        return range(int(self.model.num_stages))  # type: ignore[arg-type]

    def rounds(self, hop: int) -> Sequence[PlacedRound]:
        """The rounds of an aggregate."""
        return self._rounds[self._schedule_of[hop]][: self._number]

    def spans(self, num_rows: int) -> Sequence[slice]:
        """Ranges of rows that are worked on one after the other."""
        return self._spans[num_rows][: self._number]

    def num_rows(self, hop: int) -> int:
        """How many rows this rank has before an aggregate, or, behind the last one, in the end."""
        return self._rows_at[min(hop, len(self._rows_at) - 1)]

    def num_held(self, hop: int) -> int:
        """How many rows an aggregate reads from: those, and where other ranks send theirs, these as well."""
        return self._held_at[hop]

    def keeps(self, segment: Segment) -> bool:
        """Whether the results of an aggregate are kept for the backward pass."""
        return self.model.training and segment.hop in self.kept

    def inputs_of(self, span: slice) -> Inputs:
        """The features of a range of rows."""
        vertices = self.vertices[span]
        typed = typed_rows(self.graph, vertices, self.group.device, self.dtype)
        rows = self.work.features(vertices, self.group.device)
        self.release()
        return Inputs(rows=rows, optimisations=self.optimisations, typed=typed)

    def release(self) -> None:
        """Gives back the pages of a graph that is mapped: what is resident is to be what the device may have."""
        graph, edges = self.graph, self.graph.in_edges
        known = (graph.x, graph.edge_features, graph.edge_type, *graph.features.values())
        for one in (*known, edges.indptr, edges.indices, edges.weight):
            if one is not None:
                release(one)

    def embedded_in(self, span: slice) -> slice:
        """Which of this rank's embedded rows belong to a range of its rows."""
        before = self._embedded_before
        return slice(int(before[span.start]), int(before[span.stop]))

    @cached_property
    def _embedded_before(self) -> Tensor:
        found = is_embedded(self.graph)[self.vertices].cumsum(0)
        return torch.cat([found.new_zeros(1), found])
