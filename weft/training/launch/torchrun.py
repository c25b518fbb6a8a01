"""Environment of ranks that torchrun or a scheduler started."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

from weft.config.config import PlacementOptions
from weft.utils.errors import InputError

Placement = TypeVar("Placement", bound=PlacementOptions)

SCHEDULERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Commands that start several tasks, by the environment variable with the number of tasks."""


def under_torchrun() -> bool:
    """Return True if this process is a rank that torchrun started, or a local rank of weft's launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def on_present_ranks(options: Placement) -> Placement:
    """Return options of a run, under torchrun with the number of its ranks as workers.

    Raises:
        InputError: A scheduler has started several tasks without torchrun, each of which would be a run by itself.
    """
    for name, starter in SCHEDULERS.items():
        number = os.environ.get(name, "1")
        if not under_torchrun() and number.isdigit() and int(number) > 1:
            raise InputError(
                f"{starter} started {number} tasks, and each would train by itself: let it start torchrun, with one "
                "task "
                f"per node, or unset {name} if this is an independent run"
            )
    return replace(options, workers=int(os.environ["WORLD_SIZE"])) if under_torchrun() else options


def is_main_process() -> bool:
    """Return True if this process writes and prints: unless it is a rank other than 0."""
    return os.environ.get("RANK", "0") == "0"


def on_first_host() -> bool:
    """Return True if this process is on the host of rank 0. torchrun numbers the ranks host by host."""
    return os.environ.get("LOCAL_RANK", "0") == os.environ.get("RANK", "0")


def on_one_host() -> bool:
    """Return True if all ranks are on this host."""
    size = os.environ.get("WORLD_SIZE")
    return os.environ.get("LOCAL_WORLD_SIZE", size) == size


def restarted() -> bool:
    """Return True if torchrun has restarted the ranks of this host after one of them was lost."""
    return under_torchrun() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
