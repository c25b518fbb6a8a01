"""How ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.comm.group import Group
from weft.core.errors import InputError, RunError
from weft.core.meter import Meter


def join(*, timeout_seconds: float, meter: Meter, device: str = "cpu", init_method: str = "env://") -> Group:
    """Joins the ranks that torchrun or the launcher started (RANK, WORLD_SIZE, LOCAL_RANK in the environment).

    Ranks that have joined and not left yet go on as they are, with another meter. InputError if the environment is not
    torchrun's; RunError if the others do not come within the timeout.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError) as error:
        raise InputError(f"RANK, WORLD_SIZE or LOCAL_RANK is not as torchrun sets it ({error}): unset them") from error
    if size == 1:
        return Group(meter=meter, device=device)
    if device == "cuda":
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    backend = "nccl" if device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if not dist.is_initialized():
            dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"rank {rank} did not meet the other {size - 1} within {timeout_seconds:.0f} s ({reason})"
        ) from error
    return Group(rank, size, meter, device, process_group=dist.group.WORLD)
