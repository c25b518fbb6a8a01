"""What a report is made of: sections of figures, tables and text, before there is any HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.reporting.figures import Data
from weft.reporting.records import RunRecords

Runs = Sequence[RunRecords]


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """Cells as text; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    code: bool = False
    """Whether the cells are what a person types."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart, what it shows in words, and its numbers as a table."""

    name: str
    """In letters, digits and dashes: one figure of the report has it."""
    title: str
    caption: str
    data: Data
    chart: Any
    table: PageTable | None = None
    """Where that of the data's own rows would be too long; None: the page makes that when it is opened."""
    zoom: str = ""
    """The field of the horizontal axis, where it can be zoomed."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """Text to be copied."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report."""

    name: str
    title: str
    parts: Sequence[Figure | PageTable | Code] = ()
    lacking: dict[str, str] = field(default_factory=dict)
    """By the name of a run that it does not show: why."""


def by_run(runs: Runs, caption: str, facts: Sequence[dict[str, str]]) -> PageTable:
    """A column for each run."""
    names = dict.fromkeys(name for one in facts for name in one)
    rows = [[name, *(one.get(name, "-") for one in facts)] for name in names]
    return PageTable(caption=caption, head=["", *(run.name for run in runs)], rows=rows)


def with_ranks(runs: Runs) -> tuple[list[RunRecords], dict[str, str]]:
    return [run for run in runs if run.rank_lines], {run.name: NO_EPOCH for run in runs if not run.rank_lines}


def rank_name(run: RunRecords, rank: int, runs: Runs) -> str:
    """What a rank is called among those of all runs of the report."""
    return f"{run.name}, rank {rank}" if len(runs) > 1 else f"rank {rank}"


NO_EPOCH = "no epoch is recorded yet"


def seconds_text(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.2f} ms"


def course(run: RunRecords, name: str, text: Callable[[float], str] = lambda value: f"{value:.4g}") -> str:
    """Where a curve begins and ends, as a sentence."""
    known = [(line["epoch"], line[name]) for line in run.epochs if isinstance(line.get(name), int | float)]
    if not known:
        return f"{run.name}: not evaluated."
    (first, begin), (last, end) = known[0], known[-1]
    return f"{run.name}: {text(begin)} in epoch {first}, {text(end)} in epoch {last}."
