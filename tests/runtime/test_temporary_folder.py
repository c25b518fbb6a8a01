"""Temporary folders are removed, also those of killed processes, and never those of others."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from weft.runtime.processes import temporary_folder as folders
from weft.runtime.processes.temporary_folder import (
    LEFTOVER_SECONDS,
    NAME,
    lock_folder,
    remove_leftovers,
    temporary_folder,
)


def test_a_temporary_folder_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        assert NAME.fullmatch(folder.name)
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert not list(tmp_path.iterdir())


def test_a_signal_while_a_folder_is_created_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "lock_folder", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), temporary_folder():
        pass
    assert not list(tmp_path.iterdir())


def test_no_signal_arrives_while_python_tries_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python creates a file there and removes it. A signal in between would leave the file."""
    blocked = list[set[int]]()

    def find_folder() -> str:
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return str(tmp_path)

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", find_folder)
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
    assert blocked[0] >= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def test_only_old_unlocked_folders_of_this_user_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = time.time() - 2 * LEFTOVER_SECONDS
    names = ["weft-0123456789abcdef", "weft-my-own-results", "weft-1123456789abcdef", "weft-2123456789abcdef"]
    left, other_name, locked, young = (tmp_path / name for name in names)
    for folder in (left, other_name, locked, young):
        folder.mkdir()
        (folder / "file").touch()
    link = tmp_path / "weft-3123456789abcdef"
    link.symlink_to(other_name)
    for folder in (left, other_name, locked):
        os.utime(folder, (old, old))
    lock = lock_folder(locked)
    with monkeypatch.context() as as_other_user:
        as_other_user.setattr(folders.os, "getuid", lambda: 12345)
        remove_leftovers(tmp_path, NAME)
    assert left.exists()
    remove_leftovers(tmp_path, NAME)
    assert {path.name for path in tmp_path.iterdir()} == {other_name.name, locked.name, young.name, link.name}
    assert (other_name / "file").exists()
    os.close(lock)
    remove_leftovers(tmp_path, NAME)
    assert not locked.exists()


def test_a_folder_that_is_missing_has_no_leftovers(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "missing", re.compile("x"))
