"""What ranks can talk by on this machine."""

from __future__ import annotations

import torch
import torch.distributed as dist


def available_backends() -> list[str]:
    """Those of PyTorch that weft uses: gloo between CPUs, nccl between GPUs."""
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available() and torch.cuda.is_available()}
    return [name for name, there in found.items() if there]
