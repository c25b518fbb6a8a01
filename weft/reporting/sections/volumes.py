"""Sections of a report about bytes moved and memory: counted, planned and estimated."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from weft.reporting import figures
from weft.reporting.figures import BYTES, Data, FigureGroup
from weft.reporting.page_parts import Figure, PageTable, Runs, Section, rank_name, runs_with_ranks
from weft.reporting.records import RecordColumns, RecordLine, RunRecords, rank_summaries

WAYS = {"bytes_sent": "sent", "to_device": "to the device", "to_host": "to the host"}
"""Names of the directions of bytes in a report, by their names in the records."""
FORECAST = {"bytes_sent": "network", "to_device": "to_device", "to_host": "to_host"}
"""Field of a recorded estimate for each direction."""
ALL_TAGS = "all tags"
"""Tag of the sums over all tags."""
T = TypeVar("T")
Bytes = dict[tuple[str, str], T]
"""Numbers of bytes by direction (sent, to the device, to the host) and by tag of the transfer."""


def traffic(runs: Runs) -> Section:
    """Return the section with the bytes by tag, counted and planned."""
    parts, missing = [], {}
    for number, run in enumerate(runs):
        counted, planned = _counted(run), _planned(run)
        if not counted:
            missing[run.name] = "no bytes are sent over the network or between host and device"
            continue
        if not planned:
            missing[run.name] = "the strategy does not record planned bytes"
        groups, rows = [], []
        for (way, tag), values in counted.items():
            amount, plan = statistics.median(values), planned.get((way, tag))
            kinds = {"counted": amount} | ({} if plan is None else {"planned": plan})
            columns: RecordColumns = {"kind": [*kinds], "bytes": [*kinds.values()]}
            groups.append(FigureGroup(shared={"label": f"{way}: {tag}"}, columns=columns))
            spread = "" if min(values) == max(values) else f" ({min(values):,} to {max(values):,})"
            rows.append([f"{way}: {tag}", f"{amount:,.0f}{spread}", "not recorded" if plan is None else f"{plan:,}"])
        data, title = Data(name=f"traffic-{number}", groups=groups), f"Bytes per training epoch: {run.name}"
        parts.append(
            Figure(
                name=data.name,
                title=title,
                caption="Sums over all ranks: counted (median over the epochs) and planned.",
                data=data,
                chart=figures.grouped_bars(data, "bytes", "bytes", by="kind", unit=BYTES),
                table=PageTable(caption=title, head=["direction and tag", "counted", "planned"], rows=rows),
            )
        )
    return Section(name="traffic", title="Bytes moved", parts=parts, missing=missing)


def _counted(run: RunRecords) -> Bytes[list[int]]:
    """Return the bytes of all ranks in each training epoch, by direction and tag."""
    totals: dict[tuple[str, str], dict[int, int]] = {}
    lines = [line for line in run.rank_lines if line["phase"] == "train"]
    epochs = dict.fromkeys((line["epoch"] for line in lines), 0)
    for line in lines:
        for way, tag, amount in _amounts(line):
            by_epoch = totals.setdefault((way, tag), dict(epochs))
            by_epoch[line["epoch"]] += amount
    return {key: [*by_epoch.values()] for key, by_epoch in sorted(totals.items()) if any(by_epoch.values())}


def _planned(run: RunRecords) -> Bytes[int]:
    """Return the planned bytes of all ranks in an epoch, by direction and tag. Empty if a rank recorded none."""
    placement = run.config_line.get("placement", [])
    planned = Counter[tuple[str, str]]()
    for rank in placement:
        forecast = rank.get("forecast", {})
        totals = {way: {ALL_TAGS: forecast[name]} for way, name in FORECAST.items() if name in forecast}
        for way, tag, amount in _amounts(rank.get("planned", totals)):
            planned[way, tag] += amount
    return planned if all("forecast" in rank or "planned" in rank for rank in placement) else {}


def _amounts(counts: RecordLine) -> Iterator[tuple[str, str, int]]:
    """Yield direction, tag and bytes, and the sum over the tags."""
    for way, shown in WAYS.items():
        by_tag = counts.get(way, {})
        yield from ((shown, tag, amount) for tag, amount in by_tag.items())
        if by_tag and ALL_TAGS not in by_tag:
            yield shown, ALL_TAGS, sum(by_tag.values())


def memory(runs: Runs) -> Section:
    """Return the section with measured and estimated memory."""
    shown, missing = runs_with_ranks(runs)
    missing |= {run.name: "the strategy records no estimate" for run in shown if not _has_estimate(run)}
    measured, estimated = [], []
    for run in shown:
        placement = run.config_line.get("placement", [])
        for summary in rank_summaries(run.rank_lines):
            rank, shared = summary["rank"], {"label": rank_name(run, summary["rank"], runs)}
            process = {"kind": ["process"], "bytes": [summary["peak_memory_bytes"]]}
            measured.append(FigureGroup(shared=shared, columns=process))
            forecast = placement[rank].get("forecast", {}) if rank < len(placement) else {}
            working = max(line["working_bytes"] for line in run.rank_lines if line["rank"] == rank)
            amounts = {"working set, measured": working}
            amounts |= {f"{location}, estimated": forecast.get(location, 0) for location in LOCATIONS}
            amounts = {kind: amount for kind, amount in amounts.items() if amount}
            if amounts:
                columns: RecordColumns = {"kind": [*amounts], "bytes": [*amounts.values()]}
                estimated.append(FigureGroup(shared=shared, columns=columns))
    figures_of = {
        ("memory", "Peak memory of each rank's process"): (measured, "Measured, including Python and PyTorch."),
        ("memory-estimates", "Estimated memory, and working sets"): (
            estimated,
            "Estimates do not include Python and PyTorch. The largest working set of an aggregate is measured if "
            "there is a memory limit.",
        ),
    }
    parts = []
    for (name, title), (groups, caption) in figures_of.items():
        if groups:
            data = Data(name=name, groups=groups)
            chart = figures.grouped_bars(data, "bytes", "bytes", by="kind", unit=BYTES)
            parts.append(Figure(name=name, title=title, caption=caption, data=data, chart=chart))
    return Section(name="memory", title="Memory", parts=parts, missing=missing)


LOCATIONS = ("device", "host", "disk")
"""Fields of a recorded estimate: where bytes are."""


def _has_estimate(run: RunRecords) -> bool:
    return any("forecast" in rank for rank in run.config_line.get("placement", []))
