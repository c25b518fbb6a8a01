"""What rank 0 writes while a run goes on: records, checkpoints, progress, and at the end the summary and the model."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.cost import Machine
from weft.reporting.records import newest_start, rank_summaries
from weft.runtime.timeline import Slice, write_timeline
from weft.training.artifacts import checkpoint
from weft.training.artifacts.checkpoint import Checkpoint, Progress
from weft.training.artifacts.model_card import make_card
from weft.training.artifacts.run_folder import RunFolder
from weft.training.artifacts.saved_model import Description
from weft.training.planning.calibration import Estimate
from weft.training.progress import ProgressShow
from weft.utils import jsonl
from weft.utils.errors import RunError
from weft.utils.jsonl import Recorder
from weft.utils.tensor_file import save_tensors


class RunWriter:
    """Writes one run's folder and shows its progress. idle: fields of the configuration that have no effect."""

    def __init__(
        self, folder: RunFolder, described: Description, show: ProgressShow, idle: Collection[str] = ()
    ) -> None:
        self.folder, self.description, self.show, self.idle = folder, described, show, idle
        self.recorder = Recorder(folder.metrics)
        self._slices: list[list[Slice]] = []

    def begin(self, epoch: int, *, placement: list[dict[str, Any]], machine: Machine | None, **facts: Any) -> None:
        """The run starts, or goes on, at `epoch`; placement: of each rank; `facts`: of the machine."""
        self.recorder.write("config", epoch=epoch, **self.description.record(), placement=placement, **facts)
        if machine:
            machine.save(self.folder.probe)
        for rank, one in enumerate(placement):
            if "summary" in one:
                self.show.say(f"rank {rank}: {one['summary']}" if len(placement) > 1 else one["summary"])

    def epoch(
        self, epoch: int, loss: float, lr: float, scores: dict[str, float | None], reports: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """One line for the epoch, which it returns, and one for each rank and phase. lr: the rate of its steps."""
        self._draw([[Slice(*one) for one in report.pop("timeline")] for report in reports])
        named = {name: value for name, value in scores.items() if value is not None}
        seconds = max(report["phases"]["train"]["seconds"] for report in reports)
        line = self.recorder.write("epoch", epoch=epoch, loss=loss, lr=lr, seconds=seconds, **named)
        for phase in reports[0]["phases"]:
            parts = [report["phases"][phase] for report in reports]
            communication = communication_seconds([part["durations"] for part in parts])
            for rank, (report, part) in enumerate(zip(reports, parts, strict=True)):
                inside = sum(part.pop("durations").values())
                whole = part.pop("seconds")
                if not whole:
                    continue
                self.recorder.write(
                    "rank",
                    epoch=epoch,
                    rank=rank,
                    phase=phase,
                    compute_seconds=whole - inside,
                    communication_seconds=communication,
                    waiting_seconds=inside - communication,
                    peak_memory_bytes=report["peak_memory_bytes"],
                    **part,
                )
        self.show.epoch(epoch, loss, scores, max(report["peak_memory_bytes"] for report in reports))
        return line

    def _draw(self, found: list[list[Slice]]) -> None:
        """Writes the timeline as far as it goes; found: what an epoch has added to it, by rank."""
        if any(found):
            self._slices = [
                before + new for before, new in zip(self._slices or [[] for _ in found], found, strict=True)
            ]
            with replaced(self.folder.timeline, "the timeline") as draft:
                write_timeline(draft, self._slices)

    def checkpoint(self, state: Checkpoint) -> None:
        """Writes a checkpoint, and the record that says so."""
        checkpoint.save(self.folder.checkpoints, replace(state, record=self.recorder.mark))
        self.recorder.write("event", event="checkpoint", epoch=state.progress.epoch - 1)

    def stopped(self, epoch: int, signal: int) -> None:
        """The run was told to stop after `epoch`."""
        self.recorder.write("event", event="stopped", epoch=epoch, signal=signal)

    def finish(self, progress: Progress, best: dict[str, Tensor], told: Estimate | None = None) -> dict[str, Any]:
        """The run has reached its end: writes the best weights, the card, and as the last line the summary: that.

        told: what was told of it, which the summary has beside what it took.
        """
        with replaced(self.folder.model, "the weights") as draft:
            save_tensors(best, draft, self.description.metadata(progress))
        summary = summarise(jsonl.read(self.folder.metrics), progress, self.description.config.goal)
        summary |= {"forecast": told.record(summary)} if told else {}
        with replaced(self.folder.card, "the card") as draft:
            draft.write_text(make_card(self.description, self.idle, progress.best_scores or {}, summary))
        self.recorder.write("summary", **summary)
        return summary

    def close(self) -> None:
        """Closes the records, also those of a run that failed."""
        self.recorder.close()


@contextmanager
def replaced(path: Path, what: str) -> Iterator[Path]:
    """A draft that takes the place of a file once it is written whole. RunError where it cannot be."""
    draft = path.with_suffix(".tmp")
    try:
        yield draft
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot write {what} ({error.strerror})") from error


def summarise(
    records: Sequence[dict[str, Any]], progress: Progress, goal: tuple[str, float] | None = None
) -> dict[str, Any]:
    """A run in one object: scores at the best validation epoch, and medians over the epochs, also by rank.

    Of a resumed run, seconds and ranks are of the epochs since it went on, which may be under another strategy. goal:
    a score that the run trained until it was reached; the seconds of training up to then are of all its epochs.
    """
    losses = [line["loss"] for line in records if line["kind"] == "epoch"]
    goal_seconds = {"goal_seconds": seconds_until(records, *goal, progress)} if goal else {}
    records = newest_start(records)
    epochs = [line for line in records if line["kind"] == "epoch"]
    return {
        **(progress.best_scores or {}),
        "best_epoch": progress.best_epoch,
        "epochs": progress.epoch,
        "loss": losses[-1],
        "epoch_seconds": statistics.median(line["seconds"] for line in epochs),
        **goal_seconds,
        "ranks": rank_summaries(records),
    }


def seconds_until(records: Sequence[dict[str, Any]], score: str, value: float, progress: Progress) -> float | None:
    """Seconds of training, without evaluations, until a score was reached; None: it was not."""
    epochs = [line for line in records if line["kind"] == "epoch"]
    reached = next((number for number, line in enumerate(epochs) if progress.reaches(line.get(score), value)), None)
    return None if reached is None else math.fsum(line["seconds"] for line in epochs[: reached + 1])


def communication_seconds(durations: Sequence[dict[str, float]]) -> float:
    """Seconds of one phase's collectives, by rank and name, without the waiting for late ranks.

    The last rank to arrive at a collective waits for nobody, so the shortest stay of any rank is the transfer alone.
    This needs no common clock, and no rank that takes no part.
    """
    stays = defaultdict[str, list[float]](list)
    for rank in durations:
        for name, seconds in rank.items():
            stays[name].append(seconds)
    return math.fsum(map(min, stays.values()))
