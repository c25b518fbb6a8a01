"""Parts of a report before it is HTML: sections with figures, tables and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.reporting.figures import Data
from weft.reporting.records import RunRecords

Runs = Sequence[RunRecords]


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """Table of texts, whose first column names the row."""

    caption: str
    """Text above the table."""
    head: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[str]]
    """Cells of each row."""
    code: bool = False
    """True: the cells are code, and shown in a monospaced font."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Chart, with a caption that says in words what it shows, and a table of its numbers."""

    name: str
    """Name that is unique in a report, of letters, digits and dashes."""
    title: str
    """Text above the figure."""
    caption: str
    """Text that says what the figure shows."""
    data: Data
    """Data of the chart."""
    chart: Any
    """Chart of Vega-Altair."""
    table: PageTable | None = None
    """Table to show with the figure. None: the page makes one from the data when the reader opens it."""
    zoom: str = ""
    """Field of the horizontal axis, if it can be zoomed; else empty."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """Block of code in a report, which the reader can copy."""

    title: str
    """Text above the code."""
    text: str
    """Text of the code."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Section of a report."""

    name: str
    """Name that is unique in a report, of letters."""
    title: str
    """Heading."""
    parts: Sequence[Figure | PageTable | Code] = ()
    """Content. Empty: no run has data for the section."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reason why a run is not shown, by the name of the run."""


def facts_table(runs: Runs, caption: str, facts: Sequence[dict[str, str]]) -> PageTable:
    """Return a table with a column for each run and a row for each fact.

    Args:
        runs: Records of the runs.
        caption: Text above the table.
        facts: Facts of each run, by name.
    """
    names = dict.fromkeys(name for run_facts in facts for name in run_facts)
    rows = [[name, *(run_facts.get(name, "-") for run_facts in facts)] for name in names]
    return PageTable(caption=caption, head=["", *(run.name for run in runs)], rows=rows)


def runs_with_ranks(runs: Runs) -> tuple[list[RunRecords], dict[str, str]]:
    """Return the runs that have lines of ranks, and the reason for each run that has none."""
    return [run for run in runs if run.rank_lines], {run.name: NO_EPOCH for run in runs if not run.rank_lines}


def rank_name(run: RunRecords, rank: int, runs: Runs) -> str:
    """Return the name of a rank, with the run if the report has several.

    Args:
        run: Records of the run.
        rank: Number of the rank.
        runs: All runs of the report.
    """
    return f"{run.name}, rank {rank}" if len(runs) > 1 else f"rank {rank}"


NO_EPOCH = "no epoch is recorded yet"


def seconds_text(value: float) -> str:
    """Return seconds as a text in s or ms."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.2f} ms"
