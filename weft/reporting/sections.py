"""All sections of a report, in their order. Each draws what records hold, and names what they lack."""

from __future__ import annotations

from collections.abc import Callable

from weft.reporting.curves import configuration, curves, overview
from weft.reporting.inputs import graph, partition
from weft.reporting.page_parts import Runs, Section
from weft.reporting.time_costs import balance, seconds, timelines
from weft.reporting.volumes import memory, traffic

SECTIONS: tuple[Callable[[Runs], Section], ...] = (
    overview,
    curves,
    seconds,
    timelines,
    balance,
    traffic,
    memory,
    graph,
    partition,
    configuration,
)


def sections(runs: Runs) -> list[Section]:
    """All, also those without parts, which no run has data for. InputError for records that cannot be read."""
    return [made(runs) for made in SECTIONS]
