"""A run's records as they are read: lines that are checked, what they come to, and as columns. Needs no PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.config import Config
from weft.utils import jsonl
from weft.utils.errors import InputError

RecordLine = dict[str, Any]
RecordColumns = dict[str, list[Any]]
"""Values by column, all of one length; None where a row has none."""

KINDS = ("compute", "communication", "waiting")
"""What a rank's seconds in a phase are divided into."""
NUMBER = (int, float)
NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "config": {"epoch": int, "config": dict, "graph": dict, "placement": list, "ranks": int, "num_parameters": int},
    "epoch": {"epoch": int, "loss": NUMBER, "seconds": NUMBER},
    "rank": {
        "epoch": int,
        "rank": int,
        "phase": str,
        "peak_memory_bytes": int,
        "edges": int,
        **{f"{kind}_seconds": NUMBER for kind in KINDS},
        **dict.fromkeys(("collectives", "bytes_sent", "bytes_received"), dict),
    },
    "event": {"event": str, "epoch": int},
    "summary": {"epochs": int, "best_epoch": int, "loss": NUMBER, "ranks": list},
}
"""By a line's kind, what every reader needs of it."""
NO_SCORES = ("kind", "version", "epoch", "loss", "lr", "seconds")
"""What a line of an epoch has besides its scores."""


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """What the folder of a run says, also of one that goes on or was stopped."""

    name: str
    """What tells the run from others in a report."""
    folder: Path
    config: Config
    """As config.toml has it: without what had no effect."""
    lines: list[RecordLine]
    """Of metrics.jsonl, checked."""

    @classmethod
    def read(cls, folder: Path, name: str = "") -> RunRecords:
        """Those in a folder. InputError where there is no run, and where a line is not as a run writes it."""
        config, metrics = folder / "config.toml", folder / "metrics.jsonl"
        try:
            if not config.exists():
                raise InputError(f"{folder} holds no run (no config.toml): give the folder of one")
            lines = read_lines(metrics)
        except OSError as error:
            raise InputError(
                f"{error.filename or folder}: {error.strerror}: check the path and who may read it"
            ) from error
        return cls(name=name or folder.resolve().name, folder=folder, config=Config.read(config), lines=lines)

    def of_kind(self, kind: str) -> list[RecordLine]:
        """The lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def begun(self) -> RecordLine:
        """What the run, or its newest start, was begun with; empty where that is not recorded yet."""
        return (self.of_kind("config") or [{}])[-1]

    @property
    def epochs(self) -> list[RecordLine]:
        """The lines of epochs."""
        return self.of_kind("epoch")

    @property
    def summary(self) -> RecordLine:
        """The last line of a run that has ended; else empty."""
        last = (self.lines or [{"kind": ""}])[-1]
        return last if last["kind"] == "summary" else {}

    @property
    def rank_lines(self) -> list[RecordLine]:
        """The lines of ranks since the run's newest start that got an epoch done."""
        return [line for line in newest_start(self.lines) if line["kind"] == "rank"]

    @property
    def num_ranks(self) -> int:
        """How many ranks have told of themselves."""
        return 1 + max((line["rank"] for line in self.rank_lines), default=-1)


def read_lines(path: Path) -> list[RecordLine]:
    """The lines of a metrics.jsonl, each with what readers need; the last may be cut short. InputError for others."""
    lines = jsonl.read(path)
    for number, line in enumerate(lines, 1):
        for name, kind in NEEDED.get(line["kind"], {}).items():
            if name not in line:
                wrong = f"has no '{name}'"
            elif not isinstance(line[name], kind):
                wrong = f"has '{name}' {str(line[name])[:40]}, of another type"
            else:
                continue
            raise InputError(f"{path}: line {number} is damaged (a line of kind {line['kind']} {wrong}): remove it")
    return lines


def newest_start(lines: Sequence[RecordLine]) -> Sequence[RecordLine]:
    """The lines since a run began or went on the last time, if it got an epoch done since; else all."""
    begun = max((number for number, line in enumerate(lines) if line["kind"] == "config"), default=0)
    return lines[begun:] if any(line["kind"] == "epoch" for line in lines[begun:]) else lines


def rank_summaries(lines: Iterable[RecordLine]) -> list[RecordLine]:
    """By rank, what its training epochs come to: medians of seconds, counts of the last one, the most memory."""
    trained = [line for line in lines if line["kind"] == "rank" and line["phase"] == "train"]
    by_rank: dict[int, list[RecordLine]] = {}
    for line in trained:
        by_rank.setdefault(line["rank"], []).append(line)
    return [_rank_summary(rank, by_rank[rank]) for rank in sorted(by_rank)]


def _rank_summary(rank: int, lines: list[RecordLine]) -> RecordLine:
    last = lines[-1]
    return {
        "rank": rank,
        **{f"{kind}_seconds": statistics.median(line[f"{kind}_seconds"] for line in lines) for kind in KINDS},
        "bytes_sent": sum(last["bytes_sent"].values()),
        "bytes_received": sum(last["bytes_received"].values()),
        "collectives": last["collectives"],
        "edges": last["edges"],
        "sampled": last["sampled"],
        "stages": {
            stage: statistics.median(line["stages"].get(stage, 0.0) for line in lines) for stage in last["stages"]
        },
        "peak_memory_bytes": max(line["peak_memory_bytes"] for line in lines),
    }


def score_names(epochs: Iterable[RecordLine]) -> list[str]:
    """The scores of some epochs, such as val_accuracy, in the order of their first appearance."""
    return list(dict.fromkeys(name for line in epochs for name in line if name not in NO_SCORES))


def epoch_columns(lines: Iterable[RecordLine]) -> RecordColumns:
    """A row for each epoch: epoch, loss, lr, seconds, and each score, None where it was not evaluated."""
    return _columns([line for line in lines if line["kind"] == "epoch"])


def rank_columns(lines: Iterable[RecordLine]) -> RecordColumns:
    """A row for each epoch, phase and rank; counts by tag are columns such as bytes_sent.halo, or None."""
    flat = []
    for line in lines:
        if line["kind"] == "rank":
            row: RecordLine = {}
            for name, value in line.items():
                row |= (
                    {f"{name}.{tag}": one for tag, one in value.items()} if isinstance(value, dict) else {name: value}
                )
            flat.append(row)
    return _columns(flat)


def _columns(lines: Sequence[RecordLine]) -> RecordColumns:
    names = dict.fromkeys(name for line in lines for name in line if name not in ("kind", "version"))
    return {name: [line.get(name) for line in lines] for name in names}
