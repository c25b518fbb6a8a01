"""Sections of a report about time: seconds by kind and stage, timelines, balance over the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from weft.reporting import figures
from weft.reporting.figures import SECONDS, Data, FigureGroup
from weft.reporting.page_parts import (
    Code,
    Figure,
    PageTable,
    Runs,
    Section,
    rank_name,
    runs_with_ranks,
    seconds_text,
)
from weft.reporting.records import RecordColumns, RecordLine, RunRecords, rank_summaries
from weft.reporting.run_table import STAGES
from weft.reporting.sections.curve_data import describe, epoch_data, finite
from weft.reporting.sections.timeline_rows import TimelineSpan, read_spans, span_totals
from weft.utils.units import format_bytes

MAX_SPANS = 3000
"""Most spans of a timeline that are drawn; the table has all."""
PHASES = {"train": "Training", "eval": "Evaluation", "setup": "Set-up"}
"""Titles of the phases of a run, by their names in the records."""
SHOWN_KINDS = {"compute": "compute", "communication": "network", "waiting": "waiting"}
"""Names of the kinds of seconds in a report, by their names in the records."""


def seconds(runs: Runs) -> Section:
    """Return the section with the seconds of an epoch by rank, kind and stage."""
    shown, missing = runs_with_ranks(runs)
    parts: list[Figure | PageTable | Code] = []
    if shown:
        data = epoch_data(shown, "seconds")
        parts.append(
            Figure(
                name="epoch-seconds",
                title="Training seconds per epoch",
                caption=f"On the slowest rank. {describe(data, 'seconds', seconds_text)}",
                data=data,
                chart=figures.curves(data, "seconds", "seconds", unit=SECONDS),
                zoom="epoch",
            )
        )
    for phase, title in PHASES.items():
        groups = [
            FigureGroup(
                shared={"label": rank_name(run, rank, runs)},
                columns={"kind": list(kinds), "seconds": [*kinds.values()], "place": [*range(len(kinds))]},
            )
            for run in shown
            for rank, kinds in _phase_seconds(run, phase).items()
        ]
        if groups:
            data = Data(name=f"phase-{phase}", groups=groups)
            unit = "in total" if phase == "setup" else "per epoch, medians"
            text = "Compute: work of the rank. Network: collectives, without waiting. Waiting: for slower ranks."
            parts.append(
                Figure(
                    name=f"phase-{phase}",
                    title=f"{title}: seconds {unit}, by rank",
                    caption=text,
                    data=data,
                    chart=figures.stacked_bars(data, "seconds", "seconds", by="kind", unit=SECONDS),
                )
            )
    stages = [
        FigureGroup(shared={"label": rank_name(run, rank["rank"], runs)}, columns=_stages(rank["stages"]))
        for run in shown
        for rank in rank_summaries(run.rank_lines)
        if rank["stages"]
    ]
    if stages:
        data = Data(name="stages", groups=stages)
        chart = figures.stacked_bars(data, "seconds", "seconds", by="stage", unit=SECONDS)
        caption = "Seconds per training epoch (medians). Each stage includes its network and waiting time."
        parts.append(Figure(name="stages", title="Training by stage", caption=caption, data=data, chart=chart))
    curves = [
        FigureGroup(shared={"label": rank_name(run, rank, runs)}, columns=_seconds_by_epoch(run, rank))
        for run in shown
        for rank in run.ranks
    ]
    if curves:
        data = Data(name="ranks", groups=curves)
        parts.append(
            Figure(
                name="rank-seconds",
                title="Training seconds of a rank, by epoch",
                caption="Compute, network and waiting in each epoch.",
                data=data,
                chart=figures.areas(data),
                zoom="epoch",
            )
        )
    return Section(name="seconds", title="Where the time goes", parts=parts, missing=missing)


def _phase_seconds(run: RunRecords, phase: str) -> dict[int, dict[str, float]]:
    """Return the seconds of each kind, by rank: medians over the epochs, or sums for the set-up."""
    statistic = sum if phase == "setup" else statistics.median
    lines = [line for line in run.rank_lines if line["phase"] == phase]
    return {
        rank: {
            shown: statistic([line[f"{kind}_seconds"] for line in lines if line["rank"] == rank])
            for kind, shown in SHOWN_KINDS.items()
        }
        for rank in dict.fromkeys(line["rank"] for line in lines)
    }


def _stages(seconds: dict[str, float]) -> dict[str, list[Any]]:
    names = [*(stage for stage in STAGES if stage in seconds), *(stage for stage in seconds if stage not in STAGES)]
    return {"stage": names, "seconds": [seconds[stage] for stage in names], "place": [*range(len(names))]}


def _seconds_by_epoch(run: RunRecords, rank: int) -> dict[str, list[Any]]:
    lines = [line for line in run.rank_lines if line["rank"] == rank and line["phase"] == "train"]
    kinds = {shown: [finite(line[f"{kind}_seconds"]) for line in lines] for kind, shown in SHOWN_KINDS.items()}
    return {"epoch": [line["epoch"] + 1 for line in lines], **kinds}


def timelines(runs: Runs) -> Section:
    """Return the section with the timelines of the ranks."""
    parts: list[Figure] = []
    missing = {}
    for number, run in enumerate(runs):
        path = run.folder / "timeline.json"
        spans = read_spans(path) if path.exists() else []
        if not spans:
            missing[run.name] = "no timeline is recorded (train with --timeline N)"
            continue
        drawn = (
            sorted(sorted(spans, key=lambda span: span.start)[:MAX_SPANS], key=spans.index)
            if len(spans) > MAX_SPANS
            else spans
        )
        data = Data(name=f"timeline-{number}", groups=_lanes(drawn))
        note = f" Only the first {MAX_SPANS:,} of {len(spans):,} spans are drawn." if len(spans) > MAX_SPANS else ""
        parts.append(
            Figure(
                name=f"timeline-{number}",
                title=f"Timeline of {run.name}",
                caption=f"A row for each rank and stream. A span inside of another is drawn in a row below it.{note}",
                data=data,
                chart=figures.timeline(data),
                table=_totals(spans),
                zoom="start",
            )
        )
    return Section(name="timeline", title="Timelines of the ranks", parts=parts, missing=missing)


STREAM_ORDER = {"compute": 0, "send": 1, "receive": 2, "load": 3, "store": 4}
"""Order of a rank's streams in the chart."""


def _lanes(spans: Iterable[TimelineSpan]) -> list[FigureGroup]:
    lanes: dict[tuple[str, str], list[TimelineSpan]] = {}
    for span in sorted(spans, key=lambda span: (span.rank, STREAM_ORDER.get(span.stream, 9), span.depth, span.start)):
        lanes.setdefault((span.lane, span.kind), []).append(span)
    return [
        FigureGroup(
            shared={"lane": lane, "kind": kind},
            columns={name: [getattr(span, name) for span in lane_spans] for name in ("name", "start", "stop")},
        )
        for (lane, kind), lane_spans in lanes.items()
    ]


def _totals(spans: list[TimelineSpan]) -> PageTable:
    rows = [
        [f"rank {rank}", stream, name, f"{number:,}", f"{length:,.3f}"]
        for (rank, stream, name), (number, length) in span_totals(spans).items()
    ]
    head = ["rank", "stream", "work", "number", "milliseconds in total"]
    return PageTable(caption="Work of each rank, by stream", head=head, rows=rows)


LOADS: dict[str, tuple[Callable[[RecordLine], float], Callable[[float], str]]] = {
    "edges x width": (lambda rank: rank["edges"], lambda value: f"{value:,.0f}"),
    "bytes sent": (lambda rank: rank["bytes_sent"], format_bytes),
    "compute seconds": (lambda rank: rank["compute_seconds"], lambda value: seconds_text(value)),
}
"""Loads of a rank by name: a function that reads it from the rank's summary, and one that formats it."""


def balance(runs: Runs) -> Section:
    """Return the section with the balance of the ranks' loads."""
    shown, missing = runs_with_ranks(runs)
    for run in [run for run in shown if len(run.ranks) == 1]:
        missing[run.name] = "the run has only one rank"
    groups, rows = [], []
    for run in (run for run in shown if len(run.ranks) > 1):
        ranks = rank_summaries(run.rank_lines)
        for load, (read, text) in LOADS.items():
            values = [read(rank) for rank in ranks]
            mean = statistics.fmean(values)
            if not mean:
                continue
            labels = [rank_name(run, rank["rank"], runs) for rank in ranks]
            columns: RecordColumns = {"label": labels, "value": values, "share": [value / mean for value in values]}
            groups.append(FigureGroup(shared={"load": load}, columns=columns))
            maximum, minimum = text(max(values)), text(min(values))
            ratio = f"{max(values) / min(values):.3f}" if min(values) else "-"
            rows.append([run.name, load, maximum, minimum, text(mean), f"{max(values) / mean:.3f}", ratio])
    parts: list[Figure | PageTable] = []
    if groups:
        data = Data(name="balance", groups=groups)
        head = ["run", "load of a training epoch", "max", "min", "mean", "max / mean", "max / min"]
        table = PageTable(caption="Loads of the ranks", head=head, rows=rows)
        chart = figures.grouped_bars(data, "share", "ratio to the mean of the ranks (1: balanced)", by="load", mark=1.0)
        caption = "Each load of a rank, divided by its mean over the ranks of the run."
        parts = [Figure(name="balance", title="Load balance", caption=caption, data=data, chart=chart), table]
    return Section(name="balance", title="Load balance over the ranks", parts=parts, missing=missing)
