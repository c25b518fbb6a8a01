"""Where runs' time goes, and how evenly."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from weft.reporting import figures
from weft.reporting.curves import finite, loss_data
from weft.reporting.figures import SECONDS, Data, FigureGroup
from weft.reporting.page_parts import (
    Code,
    Figure,
    PageTable,
    Runs,
    Section,
    course,
    rank_name,
    seconds_text,
    with_ranks,
)
from weft.reporting.records import RecordColumns, RecordLine, RunRecords, rank_summaries
from weft.reporting.run_table import STAGES
from weft.reporting.timeline_rows import TimelineSpan, read_slices, totals
from weft.utils.units import format_bytes

MAX_SLICES = 3000
"""How many slices of a run's timeline are drawn; the table has all."""
PHASES = {"train": "Training", "eval": "Evaluation", "setup": "Set-up"}
SHOWN_KINDS = {"compute": "compute", "communication": "network", "waiting": "waiting"}


def seconds(runs: Runs) -> Section:
    """Where an epoch's time goes."""
    shown, lacking = with_ranks(runs)
    parts: list[Figure | PageTable | Code] = []
    if shown:
        data = loss_data(shown)
        parts.append(
            Figure(
                name="epoch-seconds",
                title="Seconds of training by epoch",
                caption="Of the slowest rank. " + " ".join(course(run, "seconds", seconds_text) for run in shown),
                data=data,
                chart=figures.curves(data, "seconds", "seconds", unit=SECONDS),
                zoom="epoch",
            )
        )
    for phase, title in PHASES.items():
        groups = [
            FigureGroup(
                alike={"who": rank_name(run, rank, runs)},
                columns={"kind": list(found), "seconds": [*found.values()], "place": [*range(len(found))]},
            )
            for run in shown
            for rank, found in _phase_seconds(run, phase).items()
        ]
        if groups:
            data = Data(name=f"phase-{phase}", groups=groups)
            what = "in all" if phase == "setup" else "an epoch, as medians"
            text = "Compute: its own work. Network: what collectives take with nobody late. Waiting: for late ranks."
            parts.append(
                Figure(
                    name=f"phase-{phase}",
                    title=f"{title}: seconds {what}, by rank",
                    caption=text,
                    data=data,
                    chart=figures.stacked_bars(data, "seconds", "seconds", by="kind", unit=SECONDS),
                )
            )
    stages = [
        FigureGroup(alike={"who": rank_name(run, one["rank"], runs)}, columns=_stages(one["stages"]))
        for run in shown
        for one in rank_summaries(run.rank_lines)
        if one["stages"]
    ]
    if stages:
        data = Data(name="stages", groups=stages)
        chart = figures.stacked_bars(data, "seconds", "seconds", by="stage", unit=SECONDS)
        caption = "Medians of an epoch's training, with the network and waiting inside each stage."
        parts.append(Figure(name="stages", title="Training by stage", caption=caption, data=data, chart=chart))
    courses = [
        FigureGroup(alike={"who": rank_name(run, rank, runs)}, columns=_course_of_seconds(run, rank))
        for run in shown
        for rank in range(run.num_ranks)
    ]
    if courses:
        data = Data(name="ranks", groups=courses)
        parts.append(
            Figure(
                name="rank-seconds",
                title="Training of a rank, by epoch",
                caption="Seconds of compute, network and waiting of each epoch.",
                data=data,
                chart=figures.areas(data),
                zoom="epoch",
            )
        )
    return Section(name="seconds", title="Where the time goes", parts=parts, lacking=lacking)


def _phase_seconds(run: RunRecords, phase: str) -> dict[int, dict[str, float]]:
    """By rank, the seconds of each kind: medians over the epochs; of what is done once, sums."""
    taken = sum if phase == "setup" else statistics.median
    lines = [line for line in run.rank_lines if line["phase"] == phase]
    return {
        rank: {
            shown: taken([line[f"{kind}_seconds"] for line in lines if line["rank"] == rank])
            for kind, shown in SHOWN_KINDS.items()
        }
        for rank in dict.fromkeys(line["rank"] for line in lines)
    }


def _stages(found: dict[str, float]) -> dict[str, list[Any]]:
    known = [*(stage for stage in STAGES if stage in found), *(stage for stage in found if stage not in STAGES)]
    return {"stage": known, "seconds": [found[stage] for stage in known], "place": [*range(len(known))]}


def _course_of_seconds(run: RunRecords, rank: int) -> dict[str, list[Any]]:
    lines = [line for line in run.rank_lines if line["rank"] == rank and line["phase"] == "train"]
    kinds = {shown: [finite(line[f"{kind}_seconds"]) for line in lines] for kind, shown in SHOWN_KINDS.items()}
    return {"epoch": [line["epoch"] for line in lines], **kinds}


def timelines(runs: Runs) -> Section:
    """What ranks did when."""
    parts: list[Figure] = []
    lacking = {}
    for number, run in enumerate(runs):
        path = run.folder / "timeline.json"
        slices = read_slices(path) if path.exists() else []
        if not slices:
            lacking[run.name] = "no timeline is recorded (train with --timeline N)"
            continue
        drawn = (
            sorted(sorted(slices, key=lambda one: one.start)[:MAX_SLICES], key=slices.index)
            if len(slices) > MAX_SLICES
            else slices
        )
        data = Data(name=f"timeline-{number}", groups=_lanes(drawn))
        some = f" The first {MAX_SLICES:,} of {len(slices):,} slices are drawn." if len(slices) > MAX_SLICES else ""
        parts.append(
            Figure(
                name=f"timeline-{number}",
                title=f"Timeline of {run.name}",
                caption=f"A row for each rank and stream; what lies inside another is drawn below it.{some}",
                data=data,
                chart=figures.timeline(data),
                table=_totals(slices),
                zoom="start",
            )
        )
    return Section(name="timeline", title="What ranks do when", parts=parts, lacking=lacking)


STREAM_ORDER = {"compute": 0, "send": 1, "receive": 2, "load": 3, "store": 4}


def _lanes(slices: Iterable[TimelineSpan]) -> list[FigureGroup]:
    lanes: dict[tuple[str, str], list[TimelineSpan]] = {}
    for one in sorted(slices, key=lambda one: (one.rank, STREAM_ORDER.get(one.stream, 9), one.depth, one.start)):
        lanes.setdefault((one.lane, one.kind), []).append(one)
    return [
        FigureGroup(
            alike={"lane": lane, "kind": kind},
            columns={name: [getattr(one, name) for one in found] for name in ("name", "start", "stop")},
        )
        for (lane, kind), found in lanes.items()
    ]


def _totals(slices: list[TimelineSpan]) -> PageTable:
    rows = [
        [f"rank {rank}", stream, name, f"{number:,}", f"{length:,.3f}"]
        for (rank, stream, name), (number, length) in totals(slices).items()
    ]
    head = ["rank", "stream", "what", "times", "milliseconds together"]
    return PageTable(caption="What each rank did, by stream", head=head, rows=rows)


LOADS: dict[str, tuple[Callable[[RecordLine], float], Callable[[float], str]]] = {
    "edges x width": (lambda one: one["edges"], lambda value: f"{value:,.0f}"),
    "bytes sent": (lambda one: one["bytes_sent"], format_bytes),
    "compute seconds": (lambda one: one["compute_seconds"], lambda value: seconds_text(value)),
}


def balance(runs: Runs) -> Section:
    """How even the ranks' loads are."""
    shown, lacking = with_ranks(runs)
    for run in [run for run in shown if run.num_ranks == 1]:
        lacking[run.name] = "there is one rank"
    groups, rows = [], []
    for run in (run for run in shown if run.num_ranks > 1):
        ranks = rank_summaries(run.rank_lines)
        for load, (of, text) in LOADS.items():
            values = [of(one) for one in ranks]
            mean = statistics.fmean(values)
            if not mean:
                continue
            who = [rank_name(run, one["rank"], runs) for one in ranks]
            columns: RecordColumns = {"who": who, "value": values, "share": [value / mean for value in values]}
            groups.append(FigureGroup(alike={"load": load}, columns=columns))
            most, least = text(max(values)), text(min(values))
            ratio = f"{max(values) / min(values):.3f}" if min(values) else "-"
            rows.append([run.name, load, most, least, text(mean), f"{max(values) / mean:.3f}", ratio])
    parts: list[Figure | PageTable] = []
    if groups:
        data = Data(name="balance", groups=groups)
        head = ["run", "load of a training epoch", "most", "least", "mean", "most / mean", "most / least"]
        table = PageTable(caption="Loads over the ranks", head=head, rows=rows)
        chart = figures.grouped_bars(data, "share", "share of the ranks' mean; 1 is even", by="load", mark=1.0)
        caption = "Each load of a rank, as a share of the mean over the run's ranks."
        parts = [Figure(name="balance", title="Load balance", caption=caption, data=data, chart=chart), table]
    return Section(name="balance", title="Load balance over the ranks", parts=parts, lacking=lacking)
