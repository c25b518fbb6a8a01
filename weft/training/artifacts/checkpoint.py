"""Checkpoints: complete or absent, the newest valid one wins, independent of the strategy and the number of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from weft.config.config import Config
from weft.utils import migrate
from weft.utils.errors import InputError, RunError, readable
from weft.utils.jsonl import FilePosition
from weft.utils.tensor_file import save_tensors

MAX_CHECKPOINTS = 2


@dataclass(kw_only=True)
class Progress:
    """Where a run stands between two epochs, its tensors aside."""

    epoch: int = 0
    """The next epoch."""
    best_score: float | None = None
    lower_is_better: bool = False
    """Of the validation score."""
    best_epoch: int = -1
    best_scores: dict[str, float | None] | None = None
    waited: int = 0
    """Epochs from the best to the last evaluation."""

    def is_over(self, config: Config) -> bool:
        """Whether the epochs, or the patience for a better validation score, are at an end, or the goal is reached."""
        reached = config.goal is not None and self.reaches(self.best_score, config.goal[1])
        return self.epoch >= config.epochs or 0 < config.patience <= self.waited or reached

    def reaches(self, score: float | None, value: float) -> bool:
        """Whether a validation score is at least as good as a value."""
        return score is not None and (score <= value if self.lower_is_better else score >= value)

    def improves(self, score: float | None) -> bool:
        """Whether a validation score is better than the best; any is, as long as there is none."""
        return self.best_score is None or (score is not None and not self.reaches(self.best_score, score))


@dataclass(kw_only=True)
class Checkpoint:
    """A run between two epochs. `tensors` holds model.*, best.* and optimizer.*; none of it knows ranks or columns."""

    config: Config
    fingerprint: str
    progress: Progress
    tensors: dict[str, Tensor]
    updates: dict[str, Any] = field(default_factory=dict)
    """What is known of the optimiser and the schedule that is no tensor; plain JSON values."""
    record: FilePosition = field(default_factory=FilePosition)
    """How far metrics.jsonl had come."""
    data: dict[str, str] = field(default_factory=dict)
    """Digests of the graph's arrays, see weft.data.data_digests; empty where an earlier weft wrote none."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a new checkpoint beside the old ones and drops all but the newest; a crash leaves the old ones whole.

    RunError if it cannot be written; nothing of it is left then.
    """
    name = f"epoch-{checkpoint.progress.epoch:08d}"
    draft = folder / f".{name}"
    try:
        for left in folder.glob(".epoch-*"):
            shutil.rmtree(left)
        draft.mkdir(parents=True)
        _write(draft, checkpoint)
        _remove(folder / name)
        os.rename(draft, folder / name)
        _sync(folder)
        for old in _newest_first(folder)[MAX_CHECKPOINTS:]:
            _remove(old)
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
        _sync(path)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, or None if there is none at all.

    InputError if all are damaged, and NewerFile for one that this program is too old for, which is not passed over.
    """
    found = _newest_first(folder)
    for path in found:
        try:
            with readable(path, "it is passed over"):
                return _read(path)
        except migrate.NewerFile:
            raise
        except InputError:
            continue
    if found:
        raise InputError(f"{folder}: no checkpoint is as it was written; give a new --out to start again")
    return None


def _read(path: Path) -> Checkpoint:
    """Read the checkpoint in a folder. Raise any error where it is damaged, NewerFile where it is of a later weft."""
    content = json.loads((path / "state.json").read_text())
    if content["sha256"] != _digest(json.dumps(content["state"])):
        raise ValueError("its state is not as it was written")
    state = migrate.checkpoint(content["state"], path / "state.json")
    if state["progress"]["epoch"] != _epoch_of(path) or state["tensors"] != _sha256(path / "state.safetensors"):
        raise ValueError("it is of another epoch, or its tensors are not as they were written")
    return Checkpoint(
        config=Config.from_dict(state["config"], str(path)),
        fingerprint=state["fingerprint"],
        progress=Progress(**state["progress"]),
        tensors=load_file(path / "state.safetensors"),
        updates=state["updates"],
        record=FilePosition(**state["record"]),
        data=state["data"],
    )


def drop_after(folder: Path, epoch: int) -> None:
    """Removes checkpoints of later epochs than the one that a run goes on from: they are damaged."""
    for path in _newest_first(folder):
        if _epoch_of(path) > epoch:
            _remove(path)


def tensors_under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under `prefix`, without it."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("epoch-*") if _epoch_of(path) >= 0), key=_epoch_of, reverse=True)


def _epoch_of(path: Path) -> int:
    """That of a checkpoint's folder, or -1 for what is none."""
    number = path.name.removeprefix("epoch-")
    return int(number) if number.isascii() and number.isdigit() else -1


def _remove(path: Path) -> None:
    """A checkpoint's folder, or whatever somebody has put there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
