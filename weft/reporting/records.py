"""Read and check the records of a run, and return them as lines, summaries or columns. Needs no PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.config import Config
from weft.utils.errors import InputError
from weft.utils.files import jsonl

RecordLine = dict[str, Any]
"""Line of metrics.jsonl."""
RecordColumns = dict[str, list[Any]]
"""Columns of equal length, by name; None: the row has no value."""

KINDS = ("compute", "communication", "waiting")
"""Kinds of a rank's seconds in a phase."""
NUMBER = (int, float)
REQUIRED_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
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
    "best": {"epoch": int, "splits": dict},
    "summary": {"epochs": int, "best_epoch": int, "loss": NUMBER, "ranks": list},
}
"""Fields that a line must have, and their types, by the kind of the line."""
NOT_SCORES = ("kind", "version", "epoch", "loss", "val_loss", "lr", "seconds")
"""Fields of an epoch's line that are not scores."""


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Records in the folder of a run, which may still be running or may have been stopped."""

    name: str
    """Name of the run in a report."""
    folder: Path
    """Folder of the run."""
    config: Config
    """Configuration from config.toml, without options that had no effect."""
    lines: list[RecordLine]
    """Checked lines of metrics.jsonl."""

    @classmethod
    def read(cls, folder: Path, name: str = "") -> RunRecords:
        """Read the records of a run.

        Args:
            folder: Folder of the run.
            name: Name of the run in a report. Empty: the name of its folder.

        Raises:
            InputError: The folder has no run, or a line is damaged.
        """
        config, metrics = folder / "config.toml", folder / "metrics.jsonl"
        try:
            if not config.exists():
                raise InputError(f"{folder} contains no run (no config.toml): give the folder of a run")
            lines = read_lines(metrics)
        except OSError as error:
            raise InputError(
                f"{error.filename or folder}: {error.strerror}: check the path and its permissions"
            ) from error
        return cls(name=name or folder.resolve().name, folder=folder, config=Config.read(config), lines=lines)

    def of_kind(self, kind: str) -> list[RecordLine]:
        """Return the lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def config_line(self) -> RecordLine:
        """Line of kind `config` of the newest start. Empty: not recorded yet."""
        return (self.of_kind("config") or [{}])[-1]

    @property
    def epochs(self) -> list[RecordLine]:
        """Lines of kind `epoch`, one for each epoch."""
        return self.of_kind("epoch")

    @property
    def summary(self) -> RecordLine:
        """Last line of a finished run; empty for others."""
        last = (self.lines or [{"kind": ""}])[-1]
        return last if last["kind"] == "summary" else {}

    @property
    def best_splits(self) -> dict[str, RecordLine]:
        """Counts of the best epoch of a finished run, by split and kind; empty if none were recorded."""
        splits: dict[str, RecordLine] = (self.of_kind("best") or [{"splits": {}}])[-1]["splits"]
        return splits

    @property
    def rank_lines(self) -> list[RecordLine]:
        """Lines of ranks since the newest start that finished an epoch."""
        return [line for line in newest_start(self.lines) if line["kind"] == "rank"]

    @property
    def ranks(self) -> list[int]:
        """Ranks for which `rank_lines` has lines, ascending."""
        return sorted({line["rank"] for line in self.rank_lines})


def read_lines(path: Path) -> list[RecordLine]:
    """Read and check the lines of a metrics.jsonl. A last line that is incomplete is left out.

    Raises:
        InputError: A line is damaged.
    """
    lines = jsonl.read(path)
    for number, line in enumerate(lines, 1):
        for name, kind in REQUIRED_FIELDS.get(line["kind"], {}).items():
            if name not in line:
                problem = f"has no '{name}'"
            elif not isinstance(line[name], kind):
                problem = f"has '{name}' {str(line[name])[:40]}, of the wrong type"
            else:
                continue
            raise InputError(f"{path}: line {number} is damaged (a line of kind {line['kind']} {problem}): remove it")
    return lines


def newest_start(lines: Sequence[RecordLine]) -> Sequence[RecordLine]:
    """Return the lines since a run last started or resumed, if it has finished an epoch since then; else all lines."""
    start = max((number for number, line in enumerate(lines) if line["kind"] == "config"), default=0)
    return lines[start:] if any(line["kind"] == "epoch" for line in lines[start:]) else lines


def rank_summaries(lines: Iterable[RecordLine]) -> list[RecordLine]:
    """Return a summary of each rank's training epochs: medians of seconds, counts of the last epoch, peak memory."""
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
    """Return the names of the scores, such as val_accuracy, in the order of their first appearance."""
    return list(dict.fromkeys(name for line in epochs for name in line if name not in NOT_SCORES))


def epoch_columns(lines: Iterable[RecordLine]) -> RecordColumns:
    """Return a row for each epoch: epoch, loss, lr, seconds, and each score (None: not evaluated)."""
    return _columns([line for line in lines if line["kind"] == "epoch"])


def rank_columns(lines: Iterable[RecordLine]) -> RecordColumns:
    """Return a row for each epoch, phase and rank; counts by tag are columns such as bytes_sent.halo."""
    flat = []
    for line in lines:
        if line["kind"] == "rank":
            row: RecordLine = {}
            for name, value in line.items():
                row |= (
                    {f"{name}.{tag}": count for tag, count in value.items()}
                    if isinstance(value, dict)
                    else {name: value}
                )
            flat.append(row)
    return _columns(flat)


def _columns(lines: Sequence[RecordLine]) -> RecordColumns:
    names = dict.fromkeys(name for line in lines for name in line if name not in ("kind", "version"))
    return {name: [line.get(name) for line in lines] for name in names}
