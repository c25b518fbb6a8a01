"""What runs moved and held in memory, as counted and as planned."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from weft.reporting import figures
from weft.reporting.figures import BYTES, Data, FigureGroup
from weft.reporting.page_parts import Figure, PageTable, Runs, Section, rank_name, with_ranks
from weft.reporting.records import RecordColumns, RecordLine, RunRecords, rank_summaries

WAYS = {"bytes_sent": "sent", "to_device": "to the device", "to_host": "to the host"}
FORECAST = {"bytes_sent": "network", "to_device": "to_device", "to_host": "to_host"}
"""What a forecast calls each way."""
ALL = "all tags"
T = TypeVar("T")
Bytes = dict[tuple[str, str], T]
"""By way and tag."""


def traffic(runs: Runs) -> Section:
    """Bytes by tag, counted, and as they were planned."""
    parts, lacking = [], {}
    for number, run in enumerate(runs):
        counted, planned = _counted(run), _planned(run)
        if not counted:
            lacking[run.name] = "nothing crosses the network, or moves between host and device"
            continue
        if not planned:
            lacking[run.name] = "the strategy does not record what it plans"
        groups, rows = [], []
        for (way, tag), values in counted.items():
            amount, plan = statistics.median(values), planned.get((way, tag))
            kinds = {"counted": amount} | ({} if plan is None else {"planned": plan})
            columns: RecordColumns = {"kind": [*kinds], "bytes": [*kinds.values()]}
            groups.append(FigureGroup(alike={"who": f"{way}: {tag}"}, columns=columns))
            spread = "" if min(values) == max(values) else f" ({min(values):,} to {max(values):,})"
            rows.append([f"{way}: {tag}", f"{amount:,.0f}{spread}", "not recorded" if plan is None else f"{plan:,}"])
        data, title = Data(name=f"traffic-{number}", groups=groups), f"Bytes of an epoch's training: {run.name}"
        parts.append(
            Figure(
                name=data.name,
                title=title,
                caption="Of all ranks together: the median over the epochs as counted, and what the plan said.",
                data=data,
                chart=figures.grouped_bars(data, "bytes", "bytes", by="kind", unit=BYTES),
                table=PageTable(caption=title, head=["way and tag", "counted", "planned"], rows=rows),
            )
        )
    return Section(name="traffic", title="Bytes moved", parts=parts, lacking=lacking)


def _counted(run: RunRecords) -> Bytes[list[int]]:
    """The bytes of all ranks in each epoch's training."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    lines = [line for line in run.rank_lines if line["phase"] == "train"]
    epochs = dict.fromkeys((line["epoch"] for line in lines), 0)
    for line in lines:
        for way, tag, amount in _amounts(line):
            by_epoch = found.setdefault((way, tag), dict(epochs))
            by_epoch[line["epoch"]] += amount
    return {key: [*by_epoch.values()] for key, by_epoch in sorted(found.items()) if any(by_epoch.values())}


def _planned(run: RunRecords) -> Bytes[int]:
    """The same of an epoch by the plan, where each rank has recorded its own."""
    placed = run.begun.get("placement", [])
    found = Counter[tuple[str, str]]()
    for one in placed:
        forecast = one.get("forecast", {})
        totals = {way: {ALL: forecast[name]} for way, name in FORECAST.items() if name in forecast}
        for way, tag, amount in _amounts(one.get("planned", totals)):
            found[way, tag] += amount
    return found if all("forecast" in one or "planned" in one for one in placed) else {}


def _amounts(counts: RecordLine) -> Iterator[tuple[str, str, int]]:
    """Way, tag and bytes; of all tags as well."""
    for way, shown in WAYS.items():
        by_tag = counts.get(way, {})
        yield from ((shown, tag, amount) for tag, amount in by_tag.items())
        if by_tag and ALL not in by_tag:
            yield shown, ALL, sum(by_tag.values())


def memory(runs: Runs) -> Section:
    """Memory seen, and the forecast."""
    shown, lacking = with_ranks(runs)
    lacking |= {run.name: "the strategy records no forecast" for run in shown if not _is_forecast(run)}
    process, held = [], []
    for run in shown:
        placed = run.begun.get("placement", [])
        for one in rank_summaries(run.rank_lines):
            rank, alike = one["rank"], {"who": rank_name(run, one["rank"], runs)}
            process.append(FigureGroup(alike=alike, columns={"what": ["process"], "bytes": [one["peak_memory_bytes"]]}))
            forecast = placed[rank].get("forecast", {}) if rank < len(placed) else {}
            working = max(line["working_bytes"] for line in run.rank_lines if line["rank"] == rank)
            found = {"working set, seen": working} | {f"{what}, forecast": forecast.get(what, 0) for what in PLACES}
            known = {what: amount for what, amount in found.items() if amount}
            if known:
                held.append(FigureGroup(alike=alike, columns={"what": [*known], "bytes": [*known.values()]}))
    figures_of = {
        ("memory", "Most memory of each rank's process"): (process, "As seen, with Python and PyTorch themselves."),
        ("held", "Memory as forecast, and working sets"): (
            held,
            "Forecasts leave out Python and PyTorch. The largest working set of an aggregate is seen under a limit.",
        ),
    }
    parts = []
    for (name, title), (groups, caption) in figures_of.items():
        if groups:
            data = Data(name=name, groups=groups)
            chart = figures.grouped_bars(data, "bytes", "bytes", by="what", unit=BYTES)
            parts.append(Figure(name=name, title=title, caption=caption, data=data, chart=chart))
    return Section(name="memory", title="Memory", parts=parts, lacking=lacking)


PLACES = ("device", "host", "disk")
"""Where a forecast says that bytes are."""


def _is_forecast(run: RunRecords) -> bool:
    return any("forecast" in one for one in run.begun.get("placement", []))
