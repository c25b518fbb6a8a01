"""Checkpoints of a run.

A checkpoint is complete or absent: it is written under another name and then renamed. The newest undamaged one is used.
It does not depend on the strategy or the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.config.config import Config, TrainingOptions
from weft.runtime.memory.limit import check_fits_memory
from weft.utils.errors import InputError, RunError, readable
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_RECORD_BYTES, open_regular, read_text
from weft.utils.files.file_writing import sync
from weft.utils.files.json_types import check_types, from_json
from weft.utils.files.jsonl import FilePosition
from weft.utils.files.tensor_file import load_tensors, save_tensors

MAX_CHECKPOINTS = 2
"""Number of checkpoints that a run keeps."""
UPDATES = {"groups": list[dict[str, Any]], "values": dict[str, dict[str, Any]], "scheduler": dict[str, Any]}
"""Types of the state of optimizer and scheduler that is not in tensors."""


@dataclass(kw_only=True)
class Progress:
    """Progress of a run between two epochs, without its tensors."""

    epoch: int = 0
    """Number of the next epoch."""
    best_score: float | None = None
    """Best validation score so far."""
    lower_is_better: bool = False
    """True if a lower validation score is better."""
    best_epoch: int = -1
    """Epoch of the best validation score; -1: none yet."""
    best_scores: dict[str, float | None] | None = None
    """All scores of that epoch, by name."""
    best_details: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Counts of that epoch for the report, by split and name; see `Task.details`."""
    waited: int = 0
    """Number of epochs from the best to the last evaluation."""

    def is_over(self, config: TrainingOptions) -> bool:
        """Return True if all epochs are done, the patience is used up, or the score of --until is reached."""
        reached = config.goal is not None and self.reaches(self.best_score, config.goal[1])
        return self.epoch >= config.epochs or 0 < config.patience <= self.waited or reached

    def reaches(self, score: float | None, value: float) -> bool:
        """Return True if a validation score is at least as good as a value.

        Args:
            score: The validation score; None, if there is none, reaches nothing.
            value: The score to reach.
        """
        return score is not None and (score <= value if self.lower_is_better else score >= value)

    def improves(self, score: float | None) -> bool:
        """Return True if a validation score is better than the best so far, or there is none so far."""
        return self.best_score is None or (score is not None and not self.reaches(self.best_score, score))


@dataclass(kw_only=True)
class Checkpoint:
    """State of a run between two epochs."""

    config: Config
    fingerprint: str
    """Fingerprint of the graph's edges."""
    progress: Progress
    tensors: dict[str, Tensor]
    """Tensors `model.*`, `best.*` and `optimizer.*` with all rows and columns, independent of ranks."""
    updates: dict[str, Any] = field(default_factory=dict)
    """State of optimizer and scheduler that is not in tensors, as JSON values; see `plain_state`."""
    record: FilePosition = field(default_factory=FilePosition)
    """Position in metrics.jsonl after the last record before this checkpoint."""
    data: dict[str, str] = field(default_factory=dict)
    """Digests of the graph's arrays, see weft.data.data_digests. Empty: an earlier version of weft wrote none."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a new checkpoint next to the older ones, then remove all but the newest MAX_CHECKPOINTS.

    A crash at any time leaves the older checkpoints intact.

    Args:
        folder: Folder of the checkpoints.
        checkpoint: The state to write.

    Raises:
        RunError: The checkpoint cannot be written. Nothing of it remains then.
    """
    name = f"epoch-{checkpoint.progress.epoch:08d}"
    draft = folder / f".{name}"
    try:
        for leftover in folder.glob(".epoch-*"):
            _remove(leftover)
        draft.mkdir(parents=True)
        _write(draft, checkpoint)
        _remove(folder / name)
        os.rename(draft, folder / name)
        sync(folder)
        for obsolete in _newest_first(folder)[MAX_CHECKPOINTS:]:
            _remove(obsolete)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunError(
            f"{folder}: cannot write the checkpoint {name}, or remove an older one ({error.strerror})"
        ) from error


def _write(draft: Path, checkpoint: Checkpoint) -> None:
    save_tensors(checkpoint.tensors, draft / "state.safetensors")
    state = {
        "config": asdict(checkpoint.config),
        "fingerprint": checkpoint.fingerprint,
        "progress": asdict(checkpoint.progress),
        "updates": checkpoint.updates,
        "data": checkpoint.data,
        "record": asdict(checkpoint.record),
        "tensors": _sha256(draft / "state.safetensors"),
    }
    text = json.dumps(migrate.versioned("checkpoint", state))
    (draft / "state.json").write_text(f'{{"sha256": "{_digest(text)}", "state": {text}}}')
    for path in (*draft.iterdir(), draft):
        sync(path)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, or None if there are no checkpoints at all.

    Raises:
        InputError: All checkpoints are damaged.
        PermissionError: A checkpoint may not be read. It is not skipped either.
        NewerFile: A later version of weft wrote a checkpoint. It is not skipped, so that its progress is not lost.
    """
    paths = _newest_first(folder)
    for path in paths:
        try:
            with readable(path, "it is skipped"):
                return _read(path)
        except migrate.NewerFile:
            raise
        except InputError as error:
            if isinstance(error.__cause__, PermissionError):
                raise error.__cause__ from None
            continue
    if paths:
        raise InputError(f"{folder}: all checkpoints are damaged; give a new --out to start again")
    return None


def broadcast_newest(folder: Path, group: Group) -> tuple[Progress, dict[str, Tensor], dict[str, Any]] | None:
    """Return progress, tensors and updates of the newest checkpoint on all ranks. All ranks must call it.

    Only rank 0 reads the folder, since other hosts may not have it.

    Args:
        folder: Folder of the checkpoints, on the host of rank 0.
        group: The ranks, to whose devices the tensors are sent.

    Returns:
        None if there is no checkpoint.
    """
    saved = newest(folder) if group.rank == 0 else None
    report: dict[str, Any] = {}
    if saved:
        shapes = {name: (list(value.shape), str(value.dtype)) for name, value in saved.tensors.items()}
        report = {"progress": asdict(saved.progress), "updates": saved.updates, "shapes": shapes}
    report = group.all_gather_object(report)[0]
    if not report:
        return None
    tensors = {}
    for name, (shape, dtype) in report["shapes"].items():
        value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        value = (saved.tensors[name] if saved else value).to(group.device)
        group.broadcast(value, tag="checkpoint")
        tensors[name] = value
    return Progress(**report["progress"]), tensors, report["updates"]


def _read(path: Path) -> Checkpoint:
    """Read the checkpoint in a folder.

    Raises any error if it is damaged, and NewerFile if a later version of weft wrote it.
    """
    content = json.loads(read_text(path / "state.json", MAX_RECORD_BYTES))
    if content["sha256"] != _digest(json.dumps(content["state"])):
        raise ValueError("its state does not match its checksum")
    state = migrate.checkpoint(content["state"], path / "state.json")
    check_types(state, {"fingerprint": str, "data": dict[str, str], "updates": dict[str, Any]})
    check_types(state["updates"], UPDATES)
    progress, record = from_json(Progress, state["progress"]), from_json(FilePosition, state["record"])
    if min(progress.waited, progress.best_epoch + 1, record.size, record.epochs_size) < 0:
        raise ValueError("one of its counts is negative")
    tensors = path / "state.safetensors"
    check_fits_memory(tensors.stat().st_size, f"{tensors}: its tensors", "resume on a machine with more memory")
    if progress.epoch != _epoch_of(path) or state["tensors"] != _sha256(tensors):
        raise ValueError("its epoch does not match its name, or its tensors do not match their checksum")
    return Checkpoint(
        config=Config.from_dict(state["config"], str(path)),
        fingerprint=state["fingerprint"],
        progress=progress,
        tensors=load_tensors(tensors),
        updates=state["updates"],
        record=record,
        data=state["data"],
    )


def drop_after(folder: Path, epoch: int) -> None:
    """Remove the checkpoints of later epochs than the one from which a run resumes, since they are damaged.

    Args:
        folder: Folder of the checkpoints.
        epoch: Epoch of the checkpoint from which the run resumes.
    """
    for path in _newest_first(folder):
        if _epoch_of(path) > epoch:
            _remove(path)


def tensors_under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names.

    Args:
        prefix: The prefix, such as "model.".
        tensors: Tensors of a checkpoint by name.
    """
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters and persistent buffers by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, none if there is no folder; OSError if it may not be read."""
    names = os.listdir(folder) if folder.exists() else []  # glob takes a folder that may not be read for an empty one
    return sorted((folder / name for name in names if _epoch_of(folder / name) >= 0), key=_epoch_of, reverse=True)


def _epoch_of(path: Path) -> int:
    """Return the epoch in the name of a checkpoint's folder, or -1 if the name is not that of a checkpoint."""
    prefix, _, number = path.name.partition("-")
    return int(number) if prefix == "epoch" and number.isascii() and number.isdigit() else -1


def _remove(path: Path) -> None:
    """Remove the folder of a checkpoint, or a file or link that somebody put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
