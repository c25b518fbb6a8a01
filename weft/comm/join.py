"""Start of the process group of all ranks."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from datetime import timedelta
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from weft.comm.backends import GPU_BACKENDS, gpu_uuid, gpus_are_distinct, local_gpu
from weft.comm.gloo import starting_gloo
from weft.comm.group import Group
from weft.runtime.meter import Meter
from weft.runtime.processes.cores import pin_to_rank_cores
from weft.utils.errors import InputError, RunError

FILE = "file://"
"""Start of the address of a rendezvous through a file."""

POLL_SECONDS = 0.01
"""Interval in which a rank looks whether the others have agreed on a meeting."""


class GroupProperties(NamedTuple):
    """Properties of a process group that weft started."""

    device: str
    """Type of the ranks' devices: cpu or cuda."""
    shares_gpu: bool
    """True if several ranks use the same GPU."""


def join(*, timeout_seconds: float, meter: Meter, device: str = "cpu", init_method: str = "env://") -> Group:
    """Connect this process with the other ranks, and return the group of all ranks.

    torchrun or weft's launcher started the ranks and set RANK, WORLD_SIZE and LOCAL_RANK in the environment. The steps:

    1. Leave weft's process group if it was started for CPUs and the ranks now use GPUs.
    2. If there is no process group, start one: gloo for CPUs, NCCL and gloo for GPUs, gloo alone if ranks share a GPU.
       Wait until all ranks are connected. An existing process group, of weft or of the caller, is used as it is.
    3. Return a new `Group` with this process group and the given meter.

    Args:
        timeout_seconds: Time to wait for the other ranks, here and in later collectives.
        meter: Counter of bytes and seconds for the group.
        device: Type of the ranks' devices: cpu or cuda.
        init_method: Address of the rendezvous: `env://` as in PyTorch, or `file://` and a path. Unlike in PyTorch, `#`,
            `?` and line breaks are part of the path.

    Raises:
        InputError: The environment is not that of torchrun, or the existing process group has no backend for the CPU.
        RunError: The other ranks do not connect within the timeout.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError) as error:
        raise InputError(
            f"RANK, WORLD_SIZE or LOCAL_RANK has no valid number ({error}): unset all three, or start with torchrun"
        ) from error
    if size == 1:
        return Group(meter=meter, device=device)
    rank_device = torch.device(device)
    if rank_device.type == "cuda":
        rank_device = local_gpu()
        torch.cuda.set_device(rank_device)
    timeout, started = timedelta(seconds=timeout_seconds), time.perf_counter()
    try:
        properties = _known_groups().get(dist.group.WORLD) if dist.group.WORLD else None
        if properties is not None and properties.device == "cpu" != rank_device.type:
            dist.destroy_process_group()
        if not dist.is_initialized():
            store = _new_store_part(_store(init_method, rank, size, timeout), rank, size, timeout)
            store.set_timeout(timeout)
            shares = rank_device.type == "cuda" and not gpus_are_distinct(store, rank, size, gpu_uuid(rank_device))
            backend = "gloo" if rank_device.type == "cpu" or shares else GPU_BACKENDS
            if rank_device.type == "cpu":
                pin_to_rank_cores(int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            with starting_gloo():
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            # gloo may return on one rank while another still connects, which would fail if the first closed the group.
            store.set(f"connected {rank}", "")
            store.wait([f"connected {other}" for other in range(size)])
            assert dist.group.WORLD is not None
            properties = _known_groups()[dist.group.WORLD] = GroupProperties(rank_device.type, shares)
    except (RuntimeError, ValueError, dist.DistError) as error:
        reason, seconds = str(error).splitlines()[0], time.perf_counter() - started
        address = "" if init_method == "env://" else f" through {init_method}"
        raise RunError(
            f"rank {rank}: could not connect to the other {size - 1}{address} within {seconds:.0f} s ({reason}): "
            "check that every rank has started"
        ) from error
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    if "cpu" not in backends:
        raise InputError(
            f"the existing process group ({dist.get_backend_config()}) has no backend for the CPU: call "
            f"init_process_group({GPU_BACKENDS!r}), or let weft start the process group"
        )
    staged = rank_device.type == "cuda" and backends.get("cuda") != "nccl"
    shares = properties is not None and properties.shares_gpu
    world = dist.group.WORLD
    return Group(rank, size, meter, rank_device, process_group=world, timeout=timeout, staged=staged, shares_gpu=shares)


@cache
def _known_groups() -> WeakKeyDictionary[dist.ProcessGroup, GroupProperties]:
    """Return the properties of the process groups that weft started."""
    return WeakKeyDictionary()


@cache
def _store(init_method: str, rank: int, size: int, timeout: timedelta) -> distributed_c10d.Store:
    """Return the store through which ranks find each other.

    The process reuses it for later process groups, since the store of rank 0 may be the server of the others.
    """
    if init_method.startswith(FILE):
        return FileStore(init_method.removeprefix(FILE), size)
    store: distributed_c10d.Store = next(rendezvous(init_method, rank, size, timeout=timeout))[0]
    return store


def _new_store_part(store: distributed_c10d.Store, rank: int, size: int, timeout: timedelta) -> distributed_c10d.Store:
    """Return a part of the store for one process group, since addresses of former groups are still in the store.

    torchrun's agents count restarts each for itself, so the ranks agree on a key without a common number:

    1. Each rank writes a random name, which replaces that of its former process or former group.
    2. Rank 0 publishes the names of all ranks, again whenever one has changed.
    3. Each rank whose name is published confirms the list.
    4. When all have confirmed the same list, rank 0 marks it as final. Its digest is the key.
    """
    name, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    published = ""
    store.set(f"name {rank}", name)
    while time.monotonic() < deadline:
        if rank == 0:
            names = b" ".join(store.multi_get([f"name {other}" for other in range(size)])).decode()
            if names != published:
                store.set("names", names)
                published = names
        names = store.get("names").decode()
        if name in names.split():
            part = distributed_c10d.PrefixStore(hashlib.sha256(names.encode()).hexdigest(), store)
            part.set(f"confirmed {rank}", "")
            if rank == 0 and part.check([f"confirmed {other}" for other in range(size)]):
                part.set("final", "")
            if part.check(["final"]):
                return part
        time.sleep(POLL_SECONDS)
    raise RuntimeError("not all ranks have agreed on a meeting")
