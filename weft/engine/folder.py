"""A run's folder: config.toml, metrics.jsonl, probe.json, checkpoints/, model.safetensors. Only rank 0 touches it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from weft.core import record
from weft.core.config import Config
from weft.core.errors import InputError
from weft.engine import checkpoint


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.probe = path / "probe.json"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model.safetensors"

    def require_empty(self) -> None:
        """InputError if there is anything in the folder, which is to be that of a new run."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InputError(f"--out {self.path} holds another run: give another folder, or --resume to continue it")

    def resumed_epoch(self, config: Config, fingerprint: str) -> int:
        """The epoch that a stopped run goes on from: that of its newest checkpoint, or 0 if it had not got that far.

        InputError if there is no run, if it has finished, or if an option that decides its numbers has changed.
        """
        if not self.config.exists():
            raise InputError(f"--resume: {self.path} holds no run (no config.toml): leave out --resume to start one")
        changed = config.changed(Config.read(self.config))
        if changed:
            flags = ", ".join("--" + name.replace("_", "-") for name in changed)
            raise InputError(
                f"--resume: {flags} differs from the run in {self.path}: leave it out, or start a new --out"
            )
        found = checkpoint.newest(self.checkpoints)
        if found and found.fingerprint != fingerprint:
            raise InputError(
                f"--resume: the graph is not the one that {self.path} was trained on: give that, or a new --out"
            )
        if found and found.progress.is_over(config) and record.read(self.metrics)[-1]["kind"] == "summary":
            epochs = found.progress.epoch
            raise InputError(
                f"--resume: {self.path} has finished its {epochs} epochs: give more --epochs or --patience"
            )
        return found.progress.epoch if found else 0

    def open(self, config: Config, epoch: int | None, idle: Collection[str] = ()) -> None:
        """Makes the folder of a new run, or prepares that of a stopped one to go on from an epoch.

        idle: fields of the configuration that have no effect.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if epoch is not None:
                checkpoint.drop_after(self.checkpoints, epoch)
                record.keep_until(self.metrics, epoch)
            self._write_config(config.to_toml(idle))
        except OSError as error:
            raise InputError(f"--out {self.path}: {error.strerror}; give a folder that can be written") from error

    def discard(self) -> None:
        """Removes a folder that a run was refused in before it had recorded anything."""
        if not self.metrics.exists():
            self.config.unlink(missing_ok=True)
            with suppress(OSError):  # somebody has put something there
                self.path.rmdir()

    def _write_config(self, text: str) -> None:
        draft = self.config.with_suffix(".tmp")
        draft.write_text(text)
        draft.replace(self.config)


def new_folder(stem: str) -> Path:
    """A folder in runs/ that was not there, made so that no other run takes it too."""
    number = 1
    while True:
        folder = Path("runs") / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
