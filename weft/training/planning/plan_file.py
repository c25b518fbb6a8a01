"""Plans in a file: what `weft plan --json` writes and `weft train --plan` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config.config import Config
from weft.nn import Workload
from weft.training.planning.calibration import Epoch, Estimate
from weft.training.planning.search import StrategyEstimate
from weft.utils import migrate
from weft.utils.errors import InputError, readable

DECIDED = {spec.name for spec in dataclasses.fields(Config)} - {"graph", "model"}
"""Fields of a configuration that a plan may say."""


def record(found: Sequence[StrategyEstimate], fingerprint: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """All as JSON knows it, the graph that it is of ('': one that is only described), and what was not measured."""
    plans = [dataclasses.asdict(one) for one in found]
    return migrate.versioned("plan", {"fingerprint": fingerprint, "plans": plans, "notes": [*notes]})


def as_planned(config: Config, work: Workload, path: Path) -> tuple[Config, Estimate, str]:
    """A configuration with what the best plan of a file says. InputError where it says something else by itself."""
    options, epoch = planned_options(path, work.graph.fingerprint)
    for name, value in options.items():
        default = getattr(Config(), name)
        if getattr(config, name) not in (default, value):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {getattr(config, name)}: {path} says {value}: leave {flag} or --plan out")
    return replace(config, **options), Estimate(epoch=epoch), ""


def planned_options(path: Path, fingerprint: str) -> tuple[dict[str, Any], Epoch]:
    """What the best plan of a file says: strategy, workers and options, and what they take.

    InputError where it is of another graph.
    """
    with readable(path, "write it by: weft plan GRAPH --json > FILE"):
        known = migrate.plan(json.loads(path.read_text()), path)
        of, fitting = known["fingerprint"], [one for one in known["plans"] if one["fits"]]
        found = [
            ({"strategy": one["strategy"], "workers": one["workers"], **one["options"]}, Epoch.of(one))
            for one in fitting[:1]
        ]
        if unknown := [name for options, _ in found for name in options if name not in DECIDED]:
            raise ValueError(f"no option {unknown[0]!r} is decided by a plan")
    if of != fingerprint:
        raise InputError(f"{path} is a plan of another graph: make one of this by weft plan")
    if not found:
        raise InputError(f"{path}: no strategy in it fits")
    return found[0]
