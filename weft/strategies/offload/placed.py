"""Offload on a rank: its rows on the host, and the passes over them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm import Group, sum_gradients
from weft.nn import Workload, shared_parameters
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.parallel.chunks.run.activations import StoredRows
from weft.parallel.chunks.run.chunk_runtime import Fetcher, PlacedChunks
from weft.parallel.chunks.run.passes import ChunkPass
from weft.partition import ReceptiveField
from weft.strategies.base import Placed, Step, whole_topology
from weft.strategies.offload.estimate import OffloadEstimate
from weft.strategies.step_pruning import describe_receptive_fields


class PlacedOffload(Placed):
    """A rank's rows on the host, and the passes over them.

    folder, embedded_halo, only_first: see PlacedChunks. forecast: of this rank, where there is one. reach: what of the
    graph is read, or why all.
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
            {"given": one.unordered_volumes.as_record(), "chosen": one.volumes.as_record()} for one in chunks.schedules
        ]
        self._pass: ChunkPass | None = None
        self._lent: list[StoredRows] = []
        self._logits: StoredRows | None = None
        self.chunks.release()

    def describe(self) -> dict[str, Any]:
        known = {"forecast": asdict(self.estimate), "summary": str(self.estimate)} if self.estimate else {}
        return describe_receptive_fields({"every step": self.receptive_field}) | known | {"volumes": self._volumes}

    def forward(self, step: Step) -> Tensor:
        self.model.train(step.training)
        self._end()
        made = ChunkPass(self.chunks, self.programs[step.training], step_key=step.key, training=step.training)
        logits = made.forward()
        if step.training:
            self._pass = made
        else:  # nothing follows but the next pass
            made.end(but=logits)
            self._logits = logits
        return logits.tensor()

    def backward(self, logits: Tensor, grad: Tensor) -> None:
        del logits
        assert self._pass is not None
        self._pass.backward(grad)
        self._end()
        sum_gradients(shared_parameters(self.model), self.group)

    def release_constant(self) -> None:
        """Has the next pass make again what is made once, in the same memory."""
        if (table := self.chunks.constant) is not None:
            stay = (table.arrays[port] for port in {*table.segment.rows.values()})
            self.chunks.pool.free(table.result, *(rows for rows in stay if rows is not self.chunks.features))
            self.chunks.constant = None

    def _end(self) -> None:
        """Takes back what the last pass has on the host."""
        if self._pass is not None:
            self._pass.end()
        self.chunks.pool.free(*self._lent, self._logits)
        self._lent, self._logits, self._pass = [], None, None

    @property
    def rows_device(self) -> torch.device:
        return torch.device("cpu")

    def empty_rows(self, rows: Tensor) -> Tensor:
        made = self.chunks.pool.alloc(*rows.shape)
        self._lent.append(made)
        return made.tensor()
