"""All sections of a report, in order. Each shows what the records contain, and names what is missing."""

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
"""Functions that return the sections of a report, in order."""


def sections(runs: Runs) -> list[Section]:
    """Return all sections, also those that no run has data for. InputError for records that cannot be read."""
    return [make_section(runs) for make_section in SECTIONS]
