"""What a run is told to take before it begins: by the forecast that chose it, or one made for its summary."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from weft.autotune import bytes_held, epoch_time
from weft.config.config import Config
from weft.nn import Workload
from weft.strategies import Plan
from weft.training.launch.joined_ranks import said_by_first
from weft.training.launch.torchrun import on_one_host
from weft.training.machine_context import cluster_here
from weft.training.planning.calibration import Correction, Epoch, Estimate
from weft.training.planning.plan_file import as_planned
from weft.training.planning.search import chosen, require_foreseeable

LEAST_EPOCHS = 100
"""Of a run of which a forecast is made for its summary: it takes as long as a few of its epochs at most."""


def as_foreseen(config: Config, work: Workload, path: Path | None) -> tuple[Config, Estimate | None]:
    """A configuration with the best of a file of plans, or of those that this machine's profile comes to.

    And what it was told to take, on rank 0: of torchrun's ranks, that one decides for all. InputError where nothing
    fits, or the configuration says something else by itself.
    """
    told: list[Estimate] = []

    def lead() -> dict[str, Any]:
        taken, expected, said = as_planned(config, work, path) if path else chosen(config, work)
        told.append(expected)
        if said:
            print(f"weft: {said}", file=sys.stderr, flush=True)
        names = [spec.name for spec in dataclasses.fields(config)]
        return {name: getattr(taken, name) for name in names if getattr(taken, name) != getattr(config, name)}

    taken = dataclasses.replace(config, **said_by_first(config, lead))
    return taken, told[0] if told and on_one_host() else None


def foretold(config: Config, plan: Plan) -> Estimate | None:
    """What a run by a plan will take here; None where that cannot be told, or the run is too short to be worth it."""
    cluster = cluster_here(config) if config.epochs >= LEAST_EPOCHS else None
    if cluster is None:
        return None
    try:
        require_foreseeable(config)
        held = bytes_held(plan, cluster)
        seconds = epoch_time(plan, cluster, held)
    except Exception:  # whatever it is: a run does not fail for a forecast of it
        return None
    finally:
        if plan.size > 1:  # what all ranks have is more than this one's
            plan.forget()
    epoch = Epoch(
        epoch_seconds=seconds.total,
        compute_seconds=seconds.compute,
        network_seconds=seconds.network,
        waiting_seconds=seconds.waiting,
        host_bytes=held.host,
    )
    return Estimate(epoch=epoch, lesson=Correction.of(cluster.profile, cluster.threads))
