"""Plans in a file: what `weft plan --json` writes and `weft train --plan` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.config.config import OPTIONS
from weft.nn import Workload
from weft.training.planning.calibration import Epoch, Estimate
from weft.training.planning.search import StrategyEstimate
from weft.utils.errors import InputError, readable
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_JSON_BYTES, read_text

PLANNED_FIELDS = OPTIONS.keys() - {"graph", "model"}
"""Fields of a configuration that a plan may set."""


def record(estimates: Sequence[StrategyEstimate], fingerprint: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a plan file, in values that JSON can store.

    Args:
        estimates: The estimate of each strategy, the best first.
        fingerprint: Fingerprint of the graph. Empty: a graph of which only numbers are known (`stats:...`).
        notes: Lines about what was not measured.
    """
    plans = [dataclasses.asdict(estimate) for estimate in estimates]
    return migrate.versioned("plan", {"fingerprint": fingerprint, "plans": plans, "notes": [*notes]})


def as_planned(requested: Mapping[str, Any], work: Workload, path: Path) -> tuple[dict[str, Any], Estimate, str]:
    """Return the options of the best plan in a file, its estimate, and an empty message.

    Args:
        requested: Options of the configuration as requested.
        work: The model and the graph to train.
        path: A file that `weft plan --json` wrote.

    Raises:
        InputError: A requested option contradicts the plan, or the file cannot be used.
    """
    options, epoch = planned_options(path, work.graph.fingerprint)
    for name, value in options.items():
        if requested[name] not in (OPTIONS[name].default, value):
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} {requested[name]} contradicts {path}, which has {value}: leave out {flag} or --plan"
            )
    return options, Estimate(epoch=epoch), ""


def planned_options(path: Path, fingerprint: str) -> tuple[dict[str, Any], Epoch]:
    """Return the options of the best plan in a file (strategy, workers and more), and the estimate of an epoch.

    Args:
        path: A file that `weft plan --json` wrote.
        fingerprint: Fingerprint of the graph to train.

    Raises:
        InputError: The file is damaged, is about another graph, or has no plan that fits.
    """
    with readable(path, "write it again: weft plan GRAPH --json > FILE"):
        content = migrate.plan(json.loads(read_text(path, MAX_JSON_BYTES)), path)
        planned_graph, fitting = content["fingerprint"], [plan for plan in content["plans"] if plan["fits"]]
        best = [
            ({"strategy": plan["strategy"], "workers": plan["workers"], **plan["options"]}, Epoch.of(plan))
            for plan in fitting[:1]
        ]
        if unknown := [name for options, _ in best for name in options if name not in PLANNED_FIELDS]:
            raise ValueError(f"a plan cannot set the option {unknown[0]!r}")
    if planned_graph != fingerprint:
        raise InputError(f"{path} is a plan for another graph: run weft plan for this one")
    if best and not fitting[0]["epoch_seconds"]:
        raise InputError(f"{path}: estimates only memory, so it cannot choose: write it without --memory")
    if not best:
        raise InputError(f"{path}: no strategy in this plan fits: run weft plan again, for other machines or options")
    return best[0]
