"""Files that rank 0 writes during a run: records, checkpoints, timeline, and at the end the summary and the weights."""

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

from weft.reporting.records import newest_start, rank_summaries
from weft.runtime.timeline import Slice, write_timeline
from weft.training.artifacts import checkpoint
from weft.training.artifacts.checkpoint import Checkpoint, Progress
from weft.training.artifacts.model_card import make_card
from weft.training.artifacts.run_folder import RunFolder
from weft.training.artifacts.saved_model import Description
from weft.training.planning.calibration import Estimate
from weft.training.progress import ProgressShow
from weft.utils.errors import RunError
from weft.utils.files import jsonl
from weft.utils.files.file_writing import new_file
from weft.utils.files.jsonl import Recorder
from weft.utils.files.tensor_file import save_tensors


class RunWriter:
    """Writes the folder of a run and shows its progress.

    Args:
        folder: The run's folder.
        description: Description of model and graph.
        show: The progress display.
        idle: Fields of the configuration that have no effect.
    """

    def __init__(
        self, folder: RunFolder, description: Description, show: ProgressShow, idle: Collection[str] = ()
    ) -> None:
        self.folder, self.description, self.show, self.idle = folder, description, show, idle
        self.recorder = Recorder(folder.metrics)
        self._slices: list[list[Slice]] = []

    def begin(self, epoch: int, *, placement: list[dict[str, Any]], **facts: Any) -> None:
        """Write the first record of a run, or of its continuation.

        Args:
            epoch: Number of the first epoch.
            placement: Facts about the plan on each rank.
            **facts: Facts about the machine, and the cost factors of the plan.
        """
        self.recorder.write("config", epoch=epoch, **self.description.record(), placement=placement, **facts)
        for rank, facts_of_rank in enumerate(placement):
            if "summary" in facts_of_rank:
                self.show.say(
                    f"rank {rank}: {facts_of_rank['summary']}" if len(placement) > 1 else facts_of_rank["summary"]
                )

    def epoch(
        self, epoch: int, loss: float, lr: float, scores: dict[str, float | None], reports: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Write the record of an epoch, and one for each rank and phase, and show the epoch.

        Args:
            epoch: Number of the epoch.
            loss: Training loss.
            lr: Learning rate of its steps.
            scores: Scores by name. Scores of None are left out.
            reports: Reports of the ranks.

        Returns:
            The record of the epoch.
        """
        self._draw([[Slice(*span) for span in report.pop("timeline")] for report in reports])
        named = {name: value for name, value in scores.items() if value is not None}
        seconds = max(report["phases"]["train"]["seconds"] for report in reports)
        line = self.recorder.write("epoch", epoch=epoch, loss=loss, lr=lr, seconds=seconds, **named)
        # Seconds of a rank in a phase = computing + communicating (the same for all ranks) + waiting for others.
        for phase in reports[0]["phases"]:
            parts = [report["phases"][phase] for report in reports]
            communication = communication_seconds([part["durations"] for part in parts])
            for rank, (report, part) in enumerate(zip(reports, parts, strict=True)):
                in_collectives = sum(part.pop("durations").values())
                total = part.pop("seconds")
                if not total:
                    continue
                self.recorder.write(
                    "rank",
                    epoch=epoch,
                    rank=rank,
                    phase=phase,
                    compute_seconds=total - in_collectives,
                    communication_seconds=communication,
                    waiting_seconds=in_collectives - communication,
                    peak_memory_bytes=report["peak_memory_bytes"],
                    **part,
                )
        self.show.epoch(epoch, loss, scores, max(report["peak_memory_bytes"] for report in reports))
        return line

    def _draw(self, new_slices: list[list[Slice]]) -> None:
        """Append the slices of an epoch, by rank, to the timeline, and write it."""
        if any(new_slices):
            self._slices = [
                previous + new
                for previous, new in zip(self._slices or [[] for _ in new_slices], new_slices, strict=True)
            ]
            with replaced(self.folder.timeline, "the timeline") as draft:
                write_timeline(draft, self._slices)

    def checkpoint(self, state: Checkpoint) -> None:
        """Write a checkpoint, and a record of it."""
        checkpoint.save(self.folder.checkpoints, replace(state, record=self.recorder.mark()))
        self.recorder.write("event", event="checkpoint", epoch=state.progress.epoch - 1)

    def stopped(self, epoch: int, signal: int) -> None:
        """Record that a signal stopped the run.

        Args:
            epoch: Number of the last epoch.
            signal: Number of the signal.
        """
        self.recorder.write("event", event="stopped", epoch=epoch, signal=signal)

    def finish(self, progress: Progress, best: dict[str, Tensor], estimate: Estimate | None = None) -> dict[str, Any]:
        """Write the best weights, the model card, and as the last records the counts of the best epoch and the summary.

        Args:
            progress: Progress at the end of the run.
            best: The best weights by name.
            estimate: Time and memory estimated before the run, which the summary compares with the measured values.

        Returns:
            The summary.
        """
        with replaced(self.folder.model, "the weights") as draft:
            save_tensors(best, draft, self.description.metadata(progress))
        summary = summarise(jsonl.read(self.folder.metrics), progress, self.description.config.goal)
        summary |= {"forecast": estimate.record(summary)} if estimate else {}
        with replaced(self.folder.card, "the card") as draft:
            card = make_card(self.description, self.idle, progress.best_scores or {}, summary)
            draft.write_text(card, encoding="utf-8")
        self.recorder.write("best", epoch=progress.best_epoch, splits=progress.best_details)
        self.recorder.write("summary", **summary)
        return summary

    def close(self) -> None:
        """Close the record."""
        self.recorder.close()


@contextmanager
def replaced(path: Path, content: str) -> Iterator[Path]:
    """Yield a draft that replaces a file when the with block ends, so that the file is always complete.

    Args:
        path: The file.
        content: What the file contains, for the message.

    Raises:
        RunError: The file cannot be written.
    """
    try:
        with new_file(path) as draft:
            yield draft
    except OSError as error:
        raise RunError(f"{path}: cannot write {content} ({error.strerror})") from error


def summarise(
    records: Sequence[dict[str, Any]], progress: Progress, goal: tuple[str, float] | None = None
) -> dict[str, Any]:
    """Return the summary of a run: scores at the best epoch, and medians over epochs, also for each rank.

    For a resumed run, seconds and ranks refer to the epochs since it was resumed, possibly under another strategy.

    Args:
        records: Lines of metrics.jsonl.
        progress: Progress at the end of the run.
        goal: Score and value of --until. If given, the summary has the training seconds until the score reached the
            value, also counting epochs before the run was resumed.
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
    """Return the training seconds, without evaluations, until a score was reached; None if it was not reached.

    Args:
        records: Lines of metrics.jsonl.
        score: Name of the score.
        value: The value to reach.
        progress: Says whether lower is better.
    """
    epochs = [line for line in records if line["kind"] == "epoch"]
    reached = next((number for number, line in enumerate(epochs) if progress.reaches(line.get(score), value)), None)
    return None if reached is None else math.fsum(line["seconds"] for line in epochs[: reached + 1])


def communication_seconds(durations: Sequence[dict[str, float]]) -> float:
    """Return the seconds of all collectives of a phase, without the time that ranks wait for each other.

    The last rank to arrive at a collective does not wait, so the shortest duration of any rank is the transfer alone.
    This needs no synchronized clocks, and no rank that only observes.

    Args:
        durations: For each rank, seconds by collective.
    """
    stays = defaultdict[str, list[float]](list)
    for rank in durations:
        for name, seconds in rank.items():
            stays[name].append(seconds)
    return math.fsum(map(min, stays.values()))
