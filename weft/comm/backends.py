"""PyTorch's communication backends on this machine, and the GPU of each rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

GPU_BACKENDS = "cpu:gloo,cuda:nccl"
"""Backends of ranks that have a GPU each: NCCL between GPUs, gloo for host tensors, which NCCL cannot send."""


def available_backends() -> list[str]:
    """Return the available backends among those that weft uses: gloo between CPUs, nccl between GPUs."""
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available() and torch.cuda.is_available()}
    return [name for name, is_available in available.items() if is_available]


def local_gpu() -> torch.device:
    """Return the GPU of this rank: number LOCAL_RANK of its host, modulo the number of GPUs if ranks must share."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def gpu_uuid(gpu: torch.device) -> str:
    """Return the UUID of a GPU, which differs from that of each GPU on any host."""
    return str(torch.cuda.get_device_properties(gpu).uuid)


def gpus_are_distinct(store: Store, rank: int, size: int, gpu: str) -> bool:
    """Return True if no two ranks use the same GPU. NCCL requires this.

    Args:
        store: Store of the process group; all ranks must call this function with it.
        rank: Number of this rank.
        size: Number of ranks.
        gpu: UUID of this rank's GPU.
    """
    store.set(f"gpu {rank}", gpu)
    return len({store.get(f"gpu {other}") for other in range(size)}) == size
