"""What lies in a run's folder, which only rank 0 reads, told to all ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from weft.comm import Group
from weft.training.artifacts import checkpoint
from weft.training.artifacts.checkpoint import Progress
from weft.training.artifacts.run_folder import RunFolder


def broadcast_checkpoint(folder: RunFolder, group: Group) -> tuple[Progress, dict[str, Tensor], dict[str, Any]] | None:
    """The progress, tensors and updates of the newest checkpoint, read where the folder is and sent to all ranks."""
    found = checkpoint.newest(folder.checkpoints) if group.rank == 0 else None
    report: dict[str, Any] = {}
    if found:
        shapes = {name: (list(value.shape), str(value.dtype)) for name, value in found.tensors.items()}
        report = {"progress": asdict(found.progress), "updates": found.updates, "shapes": shapes}
    report = group.all_gather_object(report)[0]
    if not report:
        return None
    tensors = {}
    for name, (shape, dtype) in report["shapes"].items():
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        value = (found.tensors[name] if found else value).to(group.device)
        group.broadcast(value, tag="checkpoint")
        tensors[name] = value
    return Progress(**report["progress"]), tensors, report["updates"]
