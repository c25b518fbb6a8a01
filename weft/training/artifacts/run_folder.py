"""A run's folder: config.toml, choices.json, metrics.jsonl, probe.json, checkpoints/, and timeline.json if asked.

When the run has ended, model.safetensors and card.md as well.

Only rank 0 touches it. While the run lives, there is its lock too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config.config import Config
from weft.config.files import CHOICES
from weft.data import Graph, changed_data
from weft.runtime.kernel_selection import DEFAULT, KernelSelection
from weft.training.artifacts import checkpoint
from weft.training.artifacts.checkpoint import Checkpoint
from weft.training.artifacts.folder_lock import NAME as LOCK
from weft.training.artifacts.folder_lock import FolderLock, require_unlocked
from weft.utils import jsonl
from weft.utils.errors import InputError
from weft.utils.jsonl import FilePosition
from weft.utils.migrate import NewerFile

FRAME = ("kind", "version")
"""What every line of a record begins with."""
NO_DIGESTS = "weft: {} is of an earlier weft and has no digests of the data: only its edges are known to be unchanged"
"""Printed for a run without digests, whose data may have changed unnoticed."""
UNBEGUN = (LOCK, CHOICES, "choices.tmp", "config.tmp")
"""What a run may leave that was killed before its config.toml was there: nothing of it goes on, and the next one writes
it anew."""


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.probe = path / "probe.json"
        self.choices = path / CHOICES
        self.timeline = path / "timeline.json"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model.safetensors"
        self.card = path / "card.md"
        self._lock: FolderLock | None = None

    def require_empty(self) -> None:
        """InputError if there is anything in the folder, which is to be that of a new run."""
        with self._usable():
            if self.path.exists() and not (
                self.path.is_dir() and {one.name for one in self.path.iterdir()}.issubset(UNBEGUN)
            ):
                raise InputError(
                    f"--out {self.path} holds another run: give another folder, or --resume to continue it"
                )

    def resumed(self, config: Config, graph: Graph) -> Checkpoint | None:
        """The newest checkpoint of a stopped run, from which it goes on; None if it had not got that far.

        InputError if there is no run, if it has finished, or if an option that decides its numbers has changed.
        """
        with self._usable():
            return self._resumed(config, graph)

    def _resumed(self, config: Config, graph: Graph) -> Checkpoint | None:
        if not self.config.exists():
            raise InputError(f"--resume: {self.path} holds no run (no config.toml): leave out --resume to start one")
        self._require_same(config.changed(Config.read(self.config)))
        has_ended = self._has_summary()  # in any case, so that no record of a later weft is taken back or made again
        found = checkpoint.newest(self.checkpoints)
        if found and (changed := config.changed(found.config)):
            flags = ", ".join("--" + name.replace("_", "-") for name in changed)
            raise InputError(f"--resume: {flags} differs from the checkpoint in {self.path}, which is of another run")
        if found and found.fingerprint != graph.fingerprint:
            raise InputError(
                f"--resume: the graph is not the one that {self.path} was trained on: give that, or a new --out"
            )
        if found and found.data and (changed := changed_data(graph, found.data)):
            raise InputError(
                f"--resume: the graph has changed since {self.path} was trained ({', '.join(changed)}): restore it, or "
                "train in a new --out without --resume"
            )
        if found and found.progress.is_over(config) and has_ended:
            epochs = found.progress.epoch
            raise InputError(
                f"--resume: {self.path} has finished its {epochs} epochs: give more --epochs, --patience or --until"
            )
        return found

    def _require_same(self, changed: list[str]) -> None:
        """InputError where options that decide the numbers have changed."""
        if changed:
            flags = ", ".join("--" + name.replace("_", "-") for name in changed)
            raise InputError(
                f"--resume: {flags} differs from the run in {self.path}: leave it out, or start a new --out"
            )

    @property
    def is_begun(self) -> bool:
        """Whether a run has been here."""
        return self.config.exists() or self.choices.exists()

    def is_finished(self, config: Config) -> bool:
        """Whether there is a run of a configuration that has ended and would not go on. InputError for another run."""
        if not self.config.exists() or not self._has_summary():
            return False
        saved = Config.read(self.config)
        self._require_same(saved.changed(config) + (["graph"] if saved.graph != config.graph else []))
        found = checkpoint.newest(self.checkpoints)
        return found is None or found.progress.is_over(config)

    def summary(self) -> dict[str, Any]:
        """What the record's last line says of a run that has ended, else nothing. InputError for a damaged one."""
        last = (jsonl.read(self.metrics) or [{"kind": ""}])[-1]
        return {name: value for name, value in last.items() if name not in FRAME} if last["kind"] == "summary" else {}

    def _has_summary(self) -> bool:
        """Whether the record says that the run has ended."""
        try:
            return bool(self.summary())
        except NewerFile:
            raise
        except InputError:  # damaged: it is made again
            return False

    def require_unlocked(self) -> None:
        """InputError if another run lives in the folder."""
        with self._usable():
            require_unlocked(self.path)

    def lock(self) -> None:
        """Makes the folder, and keeps other runs out until `release`. InputError if one lives in it."""
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)

    def release(self) -> None:
        """Lets other runs in."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def begin(self, config: Config, idle: Collection[str] = (), choices: KernelSelection = DEFAULT) -> None:
        """Writes what a run is of, so that config.toml repeats it. idle: fields that have no effect."""
        repeating = replace(config, choices="").to_toml(idle)  # which are in the file beside it
        with self._usable():
            for path, text in ((self.choices, choices.text()), (self.config, repeating)):
                draft = path.with_suffix(".tmp")
                try:
                    draft.write_text(text)
                    draft.replace(path)
                except OSError:
                    draft.unlink(missing_ok=True)
                    raise

    def take_back(self, found: Checkpoint | None) -> None:
        """Removes what a stopped run wrote after the checkpoint that it goes on from; None: after its begin."""
        if found and not found.data:
            print(NO_DIGESTS.format(self.path), file=sys.stderr)
        with self._usable():
            checkpoint.drop_after(self.checkpoints, found.progress.epoch if found else 0)
            kept = jsonl.restore(self.metrics, found.record if found else FilePosition())
        if kept:
            print(
                f"weft: {self.metrics} is not as it was written: its epochs are made again from the checkpoint, and "
                f"what was there is kept in {kept.name}",
                file=sys.stderr,
            )

    def discard(self) -> None:
        """Removes a folder that a run was refused in before it had recorded an epoch."""
        if any(line["kind"] == "epoch" for line in jsonl.read(self.metrics)):
            return
        for path in (self.config, self.choices, self.metrics, self.probe, self.path / LOCK):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody has put something there
            self.path.rmdir()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """InputError where the system refuses the folder, or something in it."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"--out {error.filename or self.path}: {error.strerror}; give a folder that can be written"
            ) from error


def new_folder(graph: str, *names: str) -> Path:
    """A folder in runs/ that was not there, made so that no other run takes it too; its name has that of a graph."""
    stem, number = "-".join([Path(graph).stem, *names]).replace(":", "-").replace(",", "-"), 1
    while True:
        folder = Path("runs") / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
