"""Folder of a run.

It contains config.toml, choices.json, metrics.jsonl, epochs.jsonl, checkpoints/, and if requested timeline.json and
tensorboard/; after the end of the run also model.safetensors and card.md; and while it lives, a lock. Only rank 0 reads
or writes it.
"""

from __future__ import annotations

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
from weft.utils.errors import InputError
from weft.utils.files import jsonl
from weft.utils.files.file_writing import is_draft, refuse_link, remove_drafts, write_text
from weft.utils.files.jsonl import FilePosition
from weft.utils.files.migrate import NewerFile
from weft.utils.log import LOGGER

FRAME = ("kind", "version")
"""Keys that begin every line of a record."""
NO_DIGESTS = (
    "{} was written by an earlier version of weft, without digests of the data: only its edges are checked for changes"
)
"""Message for a run without digests, whose data may have changed unnoticed."""
UNBEGUN = (LOCK, CHOICES)
"""Files, next to drafts, that a run leaves if it is killed before it writes config.toml. A new run replaces them."""


class RunFolder:
    """Paths of the files of a run, and what may be done with them.

    Args:
        path: The folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.epochs = path / jsonl.EPOCHS
        self.choices = path / CHOICES
        self.timeline = path / "timeline.json"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model.safetensors"
        self.card = path / "card.md"
        self._lock: FolderLock | None = None

    def require_empty(self) -> None:
        """Check that the folder contains nothing, so that a new run may use it.

        Raises:
            InputError: The folder contains something.
        """
        with self._usable():
            if self.path.exists() and not (
                self.path.is_dir()
                and all(entry.name in UNBEGUN or is_draft(entry.name) for entry in self.path.iterdir())
            ):
                raise InputError(
                    f"--out {self.path} contains another run: give another folder, or --resume to continue it"
                )

    def resumed(self, config: Config, graph: Graph) -> Checkpoint | None:
        """Return the newest checkpoint of a stopped run, from which it continues; None if it had written none.

        Args:
            config: Configuration of the run that continues it.
            graph: Graph of the run that continues it.

        Raises:
            InputError: The folder contains no run, the run has finished, the graph has changed, or an option has
                changed that decides the run's numbers.
        """
        with self._usable():
            return self._resumed(config, graph)

    def _resumed(self, config: Config, graph: Graph) -> Checkpoint | None:
        if not self.config.exists():
            raise InputError(f"--resume: {self.path} contains no run (no config.toml): leave out --resume to start one")
        self._require_same(config.changed(Config.read(self.config)))
        has_ended = self._has_summary()  # also checks that no later version of weft wrote the record
        saved = checkpoint.newest(self.checkpoints)
        if saved and (changed := config.changed(saved.config)):
            flags = ", ".join("--" + name.replace("_", "-") for name in changed)
            raise InputError(
                f"--resume: {flags} differs from the checkpoint in {self.path}, which belongs to another run: give a "
                "new --out"
            )
        if saved and saved.fingerprint != graph.fingerprint:
            raise InputError(
                f"--resume: the edges are not those that {self.path} was trained on: give that graph, or a new --out"
            )
        if saved and saved.data and (changed := changed_data(graph, saved.data)):
            raise InputError(
                f"--resume: the graph has changed since {self.path} was trained ({', '.join(changed)}): restore it, or "
                "train in a new --out without --resume"
            )
        if saved and saved.progress.is_over(config) and has_ended:
            epochs = saved.progress.epoch
            raise InputError(
                f"--resume: {self.path} has finished its {epochs} epochs: give more --epochs, --patience or --until"
            )
        return saved

    def _require_same(self, changed: list[str]) -> None:
        """Raise InputError if options have changed that decide the run's numbers."""
        if changed:
            flags = ", ".join("--" + name.replace("_", "-") for name in changed)
            raise InputError(
                f"--resume: {flags} differs from the run in {self.path}: leave it out, or start a new --out"
            )

    @property
    def is_begun(self) -> bool:
        """True if a run has used the folder."""
        return self.config.exists() or self.choices.exists()

    def is_finished(self, config: Config) -> bool:
        """Return True if a run with this configuration has ended, and would not continue if resumed.

        Raises:
            InputError: The folder contains another run.
        """
        if not self.config.exists() or not self._has_summary():
            return False
        saved = Config.read(self.config)
        self._require_same(saved.changed(config) + (["graph"] if saved.graph != config.graph else []))
        last_checkpoint = checkpoint.newest(self.checkpoints)
        return last_checkpoint is None or last_checkpoint.progress.is_over(config)

    def summary(self) -> dict[str, Any]:
        """Return the summary of a run that has ended, the last line of its record; {} if it has not ended.

        Raises:
            InputError: The record is damaged.
        """
        last = (jsonl.read(self.metrics) or [{"kind": ""}])[-1]
        return {name: value for name, value in last.items() if name not in FRAME} if last["kind"] == "summary" else {}

    def _has_summary(self) -> bool:
        """Return True if the record says that the run has ended."""
        try:
            return bool(self.summary())
        except NewerFile:
            raise
        except InputError:  # damaged: the epochs are repeated
            return False

    def require_unlocked(self) -> None:
        """Check that no other run uses the folder.

        Raises:
            InputError: Another run uses it.
        """
        with self._usable():
            require_unlocked(self.path)

    def lock(self) -> None:
        """Create the folder, and keep other runs out until `release`.

        Raises:
            InputError: Another run uses the folder, or its lock or checkpoints are a symbolic link.
        """
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_link(self.checkpoints)
            self._lock = FolderLock(self.path)
            remove_drafts(self.path)

    def release(self) -> None:
        """Let other runs use the folder."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def begin(self, config: Config, idle: Collection[str] = (), choices: KernelSelection = DEFAULT) -> None:
        """Write config.toml and choices.json, with which the run can be repeated.

        Args:
            config: The run's configuration.
            idle: Fields without effect, which are left out.
            choices: Kernel selection of the run.
        """
        config_text = replace(config, choices="").to_toml(idle)  # choices.json contains them
        with self._usable():
            write_text(self.choices, choices.text())
            write_text(self.config, config_text)

    def take_back(self, resumed_from: Checkpoint | None) -> None:
        """Remove what a stopped run wrote after the checkpoint from which it continues.

        Args:
            resumed_from: The checkpoint; None: the run starts again from the beginning.
        """
        if resumed_from and not resumed_from.data:
            LOGGER.info(NO_DIGESTS.format(self.path))
        with self._usable():
            # Checkpoints first: a later one whose part of the record is gone could not be resumed.
            checkpoint.drop_after(self.checkpoints, resumed_from.progress.epoch if resumed_from else 0)
            damaged_copy = jsonl.restore(self.metrics, resumed_from.record if resumed_from else FilePosition())
        if damaged_copy:
            LOGGER.info(
                f"{self.metrics} is damaged: its epochs are restored from {jsonl.EPOCHS}, and the damaged file is kept "
                f"as {damaged_copy.name}"
            )

    def discard(self) -> None:
        """Remove the files of a run that failed before it recorded an epoch. Keep the folder if it has other files."""
        if any(line["kind"] == "epoch" for line in jsonl.read(self.metrics)):
            return
        for path in (self.config, self.choices, self.metrics, self.epochs, self.path / LOCK):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder has other files
            self.path.rmdir()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise InputError, for instance for missing permissions, if the with block raises OSError."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"--out {error.filename or self.path}: {error.strerror}; give a writable folder"
            ) from error


def new_folder(graph: str, *names: str) -> Path:
    """Create a new folder in runs/, in a way that no other run can take the same one.

    Args:
        graph: Name or path of the graph, with which the folder's name begins.
        *names: Further parts of the folder's name.
    """
    stem, number = "-".join([Path(graph).stem, *names]).replace(":", "-").replace(",", "-"), 1
    while True:
        folder = Path("runs") / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
