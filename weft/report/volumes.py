"""What runs moved and held in memory, as counted and as planned."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from weft.report import figures
from weft.report.figures import BYTES, Data, Group
from weft.report.parts import Figure, Runs, Section, Table, rank_name, with_ranks
from weft.report.records import Line, Records, rank_summaries

WAYS = {"bytes_sent": "sent", "to_device": "to the device", "to_host": "to the host"}
FORECAST = {"bytes_sent": "network", "to_device": "to_device", "to_host": "to_host"}
"""What a forecast calls each way."""
ALL = "all tags"
T = TypeVar("T")
Bytes = dict[tuple[str, str], T]
"""By way and tag."""


def traffic(runs: Runs) -> Section:
    """Bytes by tag, counted, and as they were planned."""
    groups, rows, lacking = [], [], {}
    for run in runs:
        counted, planned = _counted(run), _planned(run)
        if not counted:
            lacking[run.name] = "nothing of it crosses the network or moves between host and device"
        for (way, tag), values in counted.items():
            amount, plan = statistics.median(values), planned.get((way, tag))
            label = f"{way}: {tag}" if len(runs) == 1 else f"{run.name}, {way}: {tag}"
            kinds = {"counted": amount} | ({"planned": plan} if plan is not None else {})
            groups.append(Group(alike={"who": label}, columns={"kind": list(kinds), "bytes": [*kinds.values()]}))
            spread = "" if min(values) == max(values) else f" ({min(values):,} to {max(values):,})"
            rows.append([run.name, way, tag, f"{amount:,.0f}{spread}", "not recorded" if plan is None else f"{plan:,}"])
    parts: list[Figure] = []
    if groups:
        data = Data(name="traffic", groups=groups)
        parts.append(
            Figure(
                name="traffic",
                title="Bytes of a training epoch by tag, all ranks together",
                caption="The median over the epochs as counted; beside it what the plan said, where that is recorded.",
                data=data,
                chart=figures.grouped_bars(data, "bytes", "bytes", by="kind", unit=BYTES),
                table=Table(
                    caption="Bytes of a training epoch, all ranks together",
                    head=["run", "way", "tag", "counted", "planned"],
                    rows=rows,
                ),
            )
        )
    return Section(name="traffic", title="Bytes moved", parts=parts, lacking=lacking)


def _counted(run: Records) -> Bytes[list[int]]:
    """The bytes of all ranks in each epoch's training."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    lines = [line for line in run.rank_lines if line["phase"] == "train"]
    epochs = dict.fromkeys((line["epoch"] for line in lines), 0)
    for line in lines:
        for way, tag, amount in _amounts(line):
            by_epoch = found.setdefault((way, tag), dict(epochs))
            by_epoch[line["epoch"]] += amount
    return {key: [*by_epoch.values()] for key, by_epoch in sorted(found.items()) if any(by_epoch.values())}


def _planned(run: Records) -> Bytes[int]:
    """The same of an epoch by the plan, where each rank has recorded its own."""
    placed = run.begun.get("placement", [])
    found = Counter[tuple[str, str]]()
    for one in placed:
        forecast = one.get("forecast", {})
        totals = {way: {ALL: forecast[name]} for way, name in FORECAST.items() if name in forecast}
        for way, tag, amount in _amounts(one.get("planned", totals)):
            found[way, tag] += amount
    return found if all("forecast" in one or "planned" in one for one in placed) else {}


def _amounts(counts: Line) -> Iterator[tuple[str, str, int]]:
    """Way, tag and bytes; of all tags as well."""
    for way, shown in WAYS.items():
        by_tag = counts.get(way, {})
        yield from ((shown, tag, amount) for tag, amount in by_tag.items())
        if by_tag and ALL not in by_tag:
            yield shown, ALL, sum(by_tag.values())


def memory(runs: Runs) -> Section:
    """Memory seen, beside the forecast."""
    shown, lacking = with_ranks(runs)
    groups = []
    for run in shown:
        placed = run.begun.get("placement", [])
        for one in rank_summaries(run.rank_lines):
            rank = one["rank"]
            lines = [line for line in run.rank_lines if line["rank"] == rank]
            found = {"process, seen": one["peak_memory_bytes"]}
            if working := max(line.get("working_bytes", 0) for line in lines):
                found["working set, seen"] = working
            forecast = placed[rank].get("forecast", {}) if rank < len(placed) else {}
            found |= {f"{what}, forecast": forecast[what] for what in ("device", "host", "disk") if forecast.get(what)}
            columns = {"what": [*found], "bytes": [*found.values()]}
            groups.append(Group(alike={"who": rank_name(run, rank, runs)}, columns=columns))
    parts: list[Figure] = []
    if groups:
        data = Data(name="memory", groups=groups)
        chart = figures.grouped_bars(data, "bytes", "bytes", by="what", unit=BYTES)
        caption = (
            "The most that a rank's process had in memory, with Python and PyTorch themselves, which forecasts leave "
            "out. Under a limit, the largest working set of an aggregate. What was forecast before the run."
        )
        parts.append(Figure(name="memory", title="Memory by rank", caption=caption, data=data, chart=chart))
        lacking |= {run.name: "its strategy records no forecast" for run in shown if not _is_forecast(run)}
    return Section(name="memory", title="Memory", parts=parts, lacking=lacking)


def _is_forecast(run: Records) -> bool:
    return any("forecast" in one for one in run.begun.get("placement", []))
