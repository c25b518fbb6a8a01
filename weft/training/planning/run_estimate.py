"""Estimate time and memory before a run starts; the run's summary compares them with the measured values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from weft.autotune import epoch_time, plan_memory
from weft.comm import Group
from weft.config.config import Config
from weft.nn import Workload
from weft.strategies import Plan
from weft.training.launch.joined_ranks import result_of_rank_zero
from weft.training.launch.torchrun import on_one_host
from weft.training.machine_context import local_cluster
from weft.training.planning.calibration import Correction, Epoch, Estimate
from weft.training.planning.plan_file import as_planned
from weft.training.planning.search import check_can_estimate, choose_config
from weft.utils.log import LOGGER

MIN_EPOCHS = 100
"""Fewest epochs of a run that is estimated only for its summary: an estimate costs at most a few epochs."""


def resolve_strategy(config: Config, work: Workload, path: Path | None, group: Group) -> tuple[Config, Estimate | None]:
    """Return a configuration with the best strategy, and its estimate.

    Under torchrun, rank 0 decides for all ranks. Only rank 0 returns the estimate, and only if all ranks are on one
    host; else it is None.

    Args:
        config: The configuration as requested, with `--strategy auto` or without a strategy.
        work: The model and the graph.
        path: File of `weft plan --json` to take the best plan from. None: estimate with this machine's profile.
        group: The connected processes.

    Raises:
        InputError: No strategy fits, or the configuration contradicts the file.
    """
    estimates: list[Estimate] = []

    def lead() -> dict[str, Any]:
        best, estimate, message = as_planned(config, work, path) if path else choose_config(config, work)
        estimates.append(estimate)
        if message:
            LOGGER.info(message)
        names = [spec.name for spec in dataclasses.fields(config)]
        return {name: getattr(best, name) for name in names if getattr(best, name) != getattr(config, name)}

    resolved = dataclasses.replace(config, **result_of_rank_zero(group, lead))
    return resolved, estimates[0] if estimates and on_one_host() else None


def estimate_run(config: Config, plan: Plan) -> Estimate | None:
    """Estimate a run on this machine.

    Args:
        config: The configuration of the run.
        plan: The plan of its strategy.

    Returns:
        The estimate. None if the run has fewer than `MIN_EPOCHS` epochs, learns edges or cannot be estimated.
    """
    cluster = local_cluster(config) if config.epochs >= MIN_EPOCHS and config.task == "node" else None
    if cluster is None:
        return None
    try:
        check_can_estimate(config)
        memory = plan_memory(plan, cluster)
        seconds = epoch_time(plan, cluster, memory)
    except Exception:  # a run must not fail because its estimate does
        return None
    finally:
        if plan.size > 1:  # this process planned for all ranks, and needs only its own part
            plan.release()
    epoch = Epoch(
        epoch_seconds=seconds.total,
        compute_seconds=seconds.compute,
        network_seconds=seconds.network,
        waiting_seconds=seconds.waiting,
        host_bytes=memory.host,
    )
    return Estimate(epoch=epoch, correction=Correction.of(cluster.profile, cluster.threads))
