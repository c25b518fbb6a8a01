"""Settings of runs: groups of runs that differ in their seed only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from weft.reporting.records import RunRecords

SEED = re.compile(r",?\bseed=[^,]*")
"""Part of the name of a sweep's run that names its seed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Configuration of one or more runs, which differ in their seed only."""

    name: str
    """Name of the run; of several, that of the first without its seed."""
    runs: list[RunRecords]
    """The runs."""


def settings_of(runs: Sequence[RunRecords]) -> list[Setting]:
    """Group runs that differ in their seed only. Runs with the same seed are not grouped."""
    groups: dict[str, list[RunRecords]] = {}
    for run in runs:
        groups.setdefault(repr(dataclasses.replace(run.config, seed=0)), []).append(run)
    settings = []
    for group in groups.values():
        if len(group) == 1 or len({run.config.seed for run in group}) < len(group):
            settings += [Setting(name=run.name, runs=[run]) for run in group]
        else:
            first = group[0].name
            stem = SEED.sub("", first).strip(",")
            name = stem if stem not in ("", first) else f"{first} and {len(group) - 1} other seeds"
            settings.append(Setting(name=name, runs=group))
    return settings
