"""What the environment says of ranks that torchrun, or a scheduler, started."""

from __future__ import annotations

import os
from dataclasses import replace

from weft.config.config import Config
from weft.utils.errors import InputError

TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""The environment's names of how many tasks a scheduler has started, and what starts them."""


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def on_present_ranks(config: Config) -> Config:
    """A configuration whose workers are the ranks that torchrun started, if it did.

    InputError for a task among several of a scheduler, each of which would be a run by itself.
    """
    for name, starter in TASKS.items():
        number = os.environ.get(name, "1")
        if not under_torchrun() and number.isdigit() and int(number) > 1:
            raise InputError(
                f"{starter} started {number} tasks, and each would train by itself: let it start torchrun, one task a "
                f"node, or unset {name} if this is to be a run of its own"
            )
    return replace(config, workers=int(os.environ["WORLD_SIZE"])) if under_torchrun() else config


def is_main_process() -> bool:
    """Whether this process is the one that writes and prints: any but a rank of torchrun other than 0."""
    return os.environ.get("RANK", "0") == "0"


def on_first_host() -> bool:
    """Whether this process is on rank 0's host, since torchrun numbers the ranks host by host."""
    return os.environ.get("LOCAL_RANK", "0") == os.environ.get("RANK", "0")


def on_one_host() -> bool:
    """Whether all ranks are on this host."""
    size = os.environ.get("WORLD_SIZE")
    return os.environ.get("LOCAL_WORLD_SIZE", size) == size


def restarted() -> bool:
    """Whether torchrun has started the ranks again after one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
