"""Estimate time and memory before a run starts; the run's summary compares them with the measured values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.autotune import Cluster, epoch_time, plan_memory
from weft.strategies import Plan
from weft.training.launch.launcher import Launcher
from weft.training.launch.torchrun import on_one_host
from weft.training.planning.calibration import Correction, Epoch, Estimate
from weft.utils.log import LOGGER


def options_of_rank_zero(
    choose: Callable[[], tuple[dict[str, Any], Estimate, str]], launcher: Launcher
) -> tuple[dict[str, Any], Estimate | None]:
    """Return the options that rank 0 chooses for all processes: the strategy, its number of ranks, and its own options.

    Args:
        choose: Chooses the options; see `choose_options` and `as_planned`.
        launcher: The launcher of the call.

    Returns:
        The options by name, and their estimate: only on rank 0, and only if all ranks are on one host; else None.

    Raises:
        InputError: No strategy fits, or the requested options contradict a plan. All ranks raise it.
    """
    estimates: list[Estimate] = []

    def lead() -> dict[str, Any]:
        options, estimate, message = choose()
        estimates.append(estimate)
        if message:
            LOGGER.info(message)
        return options

    options = launcher.on_first_process(lead)
    return options, estimates[0] if estimates and on_one_host() else None


def estimate_run(plan: Plan, cluster: Cluster) -> Estimate | None:
    """Estimate a run.

    Args:
        plan: The plan of its strategy.
        cluster: The machine of the run.

    Returns:
        The estimate. None if it fails.
    """
    try:
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
