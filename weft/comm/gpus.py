"""Which GPU a rank works on, and whether all have one of their own, without which NCCL does not work."""

from __future__ import annotations

import os

import torch
from torch.distributed.distributed_c10d import Store

BOTH = "cpu:gloo,cuda:nccl"
"""By what ranks with a GPU each talk: NCCL between GPUs; gloo for what is on the host, as NCCL knows no host."""


def own_gpu() -> torch.device:
    """The GPU of this rank's number on its host (LOCAL_RANK); where there are fewer, ranks share them in turn."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def name_of(gpu: torch.device) -> str:
    """What no other GPU of any host is called."""
    return str(torch.cuda.get_device_properties(gpu).uuid)


def each_has_its_own(store: Store, rank: int, size: int, gpu: str) -> bool:
    """Whether no two ranks work on one GPU, by the names of all; every rank asks."""
    store.set(f"gpu {rank}", gpu)
    return len({store.get(f"gpu {one}") for one in range(size)}) == size
