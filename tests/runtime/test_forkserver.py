"""The fork server removes the temporary folder of a launcher that was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.runtime.processes import forkserver


def test_a_folder_is_removed_while_a_rank_writes_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written, remove = tmp_path / "weft-launcher", list[Path](), os.rmdir
    folder.mkdir()
    (folder / "status").touch()

    def write_and_remove(path: str | Path, **options: int | None) -> None:
        if not written:
            written.append(folder / "late")
            written[0].touch()
        remove(path, **options)

    monkeypatch.setattr(forkserver, "_launchers_folder", str(folder))
    monkeypatch.setattr(os, "rmdir", write_and_remove)
    forkserver.remove_launchers_folder()
    assert written
    assert not folder.exists()
