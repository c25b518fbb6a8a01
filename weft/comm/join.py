"""How ranks meet."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from weft.comm.gloo import beginning_gloo
from weft.comm.gpus import BOTH, each_has_its_own, name_of, own_gpu
from weft.comm.group import Group
from weft.runtime.cores import keep_to_share
from weft.runtime.meter import Meter
from weft.utils.errors import InputError, RunError


class Met(NamedTuple):
    """How ranks met that weft brought together."""

    device: str
    """The type of device for which."""
    shares: bool
    """Whether some of them share a GPU."""


def join(*, timeout_seconds: float, meter: Meter, device: str = "cpu", init_method: str = "env://") -> Group:
    """Joins the ranks that torchrun or the launcher started (RANK, WORLD_SIZE, LOCAL_RANK in the environment).

    Ranks that have joined and not left yet go on as they are, with another meter; those that have left meet anew, and
    those that met for the CPU and are to work on GPUs. A process group that is not weft's is used as it is.
    Ranks on GPUs talk by NCCL, or, where some share one, by gloo and the host.
    InputError if the environment is not torchrun's, or the process group that is there takes nothing on the host;
    RunError if the others do not come within the timeout.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError) as error:
        raise InputError(f"RANK, WORLD_SIZE or LOCAL_RANK is not as torchrun sets it ({error}): unset them") from error
    if size == 1:
        return Group(meter=meter, device=device)
    at = torch.device(device)
    if at.type == "cuda":
        at = own_gpu()
        torch.cuda.set_device(at)
    timeout, started = timedelta(seconds=timeout_seconds), time.perf_counter()
    try:
        met = _met().get(dist.group.WORLD) if dist.group.WORLD else None
        if met is not None and met.device == "cpu" != at.type:
            dist.destroy_process_group()
        if not dist.is_initialized():
            store = _meeting(_store(init_method, rank, size, timeout), rank)
            store.set_timeout(timeout)
            shares = at.type == "cuda" and not each_has_its_own(store, rank, size, name_of(at))
            backend = "gloo" if at.type == "cpu" or shares else BOTH
            if at.type == "cpu":
                keep_to_share(int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            with beginning_gloo():
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            assert dist.group.WORLD is not None
            met = _met()[dist.group.WORLD] = Met(at.type, shares)
    except (RuntimeError, ValueError, dist.DistError) as error:
        reason, seconds = str(error).splitlines()[0], time.perf_counter() - started
        where = "" if init_method == "env://" else f" by {init_method}"
        raise RunError(
            f"rank {rank} did not meet the other {size - 1}{where}: given up after {seconds:.0f} s ({reason})"
        ) from error
    backends = dict(one.split(":") for one in dist.get_backend_config().split(","))
    if "cpu" not in backends:
        raise InputError(
            f"the process group that is there ({dist.get_backend_config()}) takes nothing on the host, as reports are: "
            f"init_process_group({BOTH!r}), or leave it to weft"
        )
    staged = at.type == "cuda" and backends.get("cuda") != "nccl"
    shares = met is not None and met.shares
    world = dist.group.WORLD
    return Group(rank, size, meter, at, process_group=world, timeout=timeout, staged=staged, shares=shares)


@cache
def _met() -> WeakKeyDictionary[dist.ProcessGroup, Met]:
    """Of the process groups that weft has begun, how."""
    return WeakKeyDictionary()


@cache
def _store(init_method: str, rank: int, size: int, timeout: timedelta) -> distributed_c10d.Store:
    """Where ranks leave their addresses. A process keeps it for its next meeting: rank 0's may be what serves it."""
    store: distributed_c10d.Store = next(rendezvous(init_method, rank, size, timeout=timeout))[0]
    return store


def _meeting(store: distributed_c10d.Store, rank: int) -> distributed_c10d.Store:
    """A place in the store for a rank's next meeting, since the addresses of those before are in it still."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = store.add(f"restart {restart} rank {rank}", 1)
    return distributed_c10d.PrefixStore(f"restart {restart} meeting {number}", store)
