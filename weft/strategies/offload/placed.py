"""A plan of `offload` on a rank: its rows on the host, and the passes over them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm import Group, sum_gradients
from weft.nn import ReceptiveField, Workload, shared_parameters
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.parallel.chunks.run.activations import StoredRows
from weft.parallel.chunks.run.chunk_runtime import Fetcher, PlacedChunks
from weft.parallel.chunks.run.passes import ChunkPass
from weft.strategies.base import Placed, Step, whole_topology
from weft.strategies.offload.estimate import OffloadEstimate
from weft.strategies.step_pruning import describe_receptive_fields


class PlacedOffload(Placed):
    """A plan of `offload` on a rank: its rows on the host, and the passes over them.

    Args:
        work: The workload.
        chunks: Chunks of the rank.
        group: The ranks.
        seed: Seed of dropout.
        folder: Folder of the rows on the host; None: the folder for temporary files.
        embedded_halo: Exchange of embedding rows; None if each rank stores all that it needs.
        estimate: Estimated bytes of this rank, for the record.
        receptive_field: Receptive field of all steps, or the reason why they read all rows.
        only_first: True to compute only the first chunk of each aggregate, to measure its memory.
    """

    def __init__(
        self,
        work: Workload,
        chunks: RankChunks,
        group: Group,
        *,
        seed: int = 0,
        folder: Path | None,
        embedded_halo: Fetcher | None = None,
        estimate: OffloadEstimate | None = None,
        receptive_field: ReceptiveField | str = "",
        only_first: bool = False,
    ) -> None:
        super().__init__(work, group, chunks.dependencies.owned, seed=seed)
        self.programs, self.estimate, self.receptive_field = chunks.programs, estimate, receptive_field
        self.topology = whole_topology(work, "cpu")
        self.chunks = PlacedChunks(
            chunks,
            work,
            self.model,
            group,
            seed=seed,
            topology=self.topology,
            embedded_halo=embedded_halo,
            folder=folder,
            only_first=only_first,
        )
        self._volumes = [
            {"given": schedule.unordered_volumes.as_record(), "chosen": schedule.volumes.as_record()}
            for schedule in chunks.schedules
        ]
        self._pass: ChunkPass | None = None
        self._lent: list[StoredRows] = []
        self._logits: StoredRows | None = None
        self.chunks.release()

    def describe(self) -> dict[str, Any]:
        facts = {"forecast": asdict(self.estimate), "summary": str(self.estimate)} if self.estimate else {}
        return describe_receptive_fields({"every step": self.receptive_field}) | facts | {"volumes": self._volumes}

    def forward(self, step: Step) -> Tensor:
        self.model.train(step.training)
        self._end()
        chunk_pass = ChunkPass(self.chunks, self.programs[step.training], step_key=step.key, training=step.training)
        logits = chunk_pass.forward()
        if step.training:
            self._pass = chunk_pass
        else:  # no backward pass follows
            chunk_pass.end(but=logits)
            self._logits = logits
        return logits.tensor()

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        del logits
        assert self._pass is not None
        self._pass.backward(grad)
        self._end()
        sum_gradients(shared_parameters(self.model), self.group)

    def release_constant(self) -> None:
        """Free the cached aggregates of constant features; the next pass computes them again."""
        if (table := self.chunks.constant) is not None:
            stay = (table.arrays[port] for port in {*table.segment.rows.values()})
            self.chunks.pool.free(table.result, *(rows for rows in stay if rows is not self.chunks.features))
            self.chunks.constant = None

    def _end(self) -> None:
        """Release the host memory of the last pass."""
        if self._pass is not None:
            self._pass.end()
        self.chunks.pool.free(*self._lent, self._logits)
        self._lent, self._logits, self._pass = [], None, None

    @property
    def rows_device(self) -> torch.device:
        return torch.device("cpu")

    def empty_rows(self, rows: Tensor) -> Tensor:
        stored = self.chunks.pool.alloc(*rows.shape, in_sum_dtype=True)
        self._lent.append(stored)
        return stored.tensor()
