"""Files are written completely or not at all, never through a symbolic link, and always by file_writing."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lib.language import ROOT
from weft.utils.files import file_writing
from weft.utils.files.file_writing import draft_in, is_draft, new_file, open_in_place, remove_drafts, write_text

LIBRARIES = ("ParquetWriter", "copy2", "copyfile", "save_file", "save_tensors", "savefig", "savez", "tofile")
"""Functions that write a file by its path."""
WRITERS = {
    "runtime/processes/child_process.py": 2,  # in a folder that only this user may open
    "runtime/meter.py": 1,  # status of ranks, in a folder that only this user may open
    "runtime/processes/usage.py": 1,  # standard error of a measured run, in such a folder
    "runtime/timeline.py": 1,  # a draft
    "comm/gloo.py": 2,  # /dev/null and a descriptor
    "data/store/external_sort.py": 3,  # exclusive, in the draft of a graph folder, and unnamed after its opening
    "data/store/npy_writer.py": 1,  # exclusive, in the draft of a graph folder
    "data/store/store.py": 1,  # exclusive, in the draft of a graph folder
    "prediction/prediction.py": 1,  # Parquet, a draft
    "storage/table_file.py": 1,  # exclusive
    "training/artifacts/checkpoint.py": 1,  # in the draft of a checkpoint
    "training/launch/launcher.py": 3,  # in a folder that only this user may open
    "training/launch/processes.py": 1,  # in such a folder
    "utils/error_line.py": 1,  # torchrun's file for an error
    "utils/files/jsonl.py": 1,  # a descriptor of open_in_place
    "utils/log.py": 1,  # such a descriptor
    "utils/files/tensor_file.py": 1,  # save_file in save_tensors, whose calls count
}
"""Largest number of calls in each file of weft that open or write a file that is not the draft of a new file."""


def test_a_file_is_replaced_or_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(IsADirectoryError), new_file(path, flush=True) as draft:
        draft.write_text(f"half of {tmp_path.read_text()}")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    with new_file(path, flush=True) as draft:
        assert is_draft(draft.name)
        assert draft.stat().st_size == 0
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_signal_while_a_draft_is_created_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.open

    def stopped(*arguments: Any, **options: Any) -> int:
        os.close(create(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "open", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == []


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        open_in_place(link, os.O_RDWR)
    with pytest.raises(OSError, match="not a regular file"):
        open_in_place(Path("/dev/null"), os.O_RDWR)
    write_text(link, "new")
    assert not link.is_symlink()
    assert target.read_text() == "mine"
    # A draft of a name that somebody has guessed is not written.
    draft = draft_in(tmp_path)
    draft.symlink_to(target)
    monkeypatch.setattr(file_writing, "draft_in", lambda folder: folder / draft.name)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "file", "new")
    assert target.read_text() == "mine"


def test_old_drafts_of_this_user_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, other = draft_in(tmp_path), draft_in(tmp_path), tmp_path / ".weft-notes.tmp"
    for path in (old, new, other):
        path.write_text("half of")
    week_ago = time.time() - file_writing.LEFTOVER_SECONDS - 60
    for path in (old, other):
        os.utime(path, (week_ago, week_ago))
    with monkeypatch.context() as as_other_user:
        as_other_user.setattr(os, "getuid", lambda: 12345)
        remove_drafts(tmp_path)
    assert old.exists()
    write_text(tmp_path / "file", "text")
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)
    remove_drafts(tmp_path)
    assert (new.exists(), other.exists()) == (False, True)


def test_every_writer_is_known() -> None:
    """A new place that writes a file uses file_writing, or is listed with the reason why it need not."""
    counts: dict[str, int] = {}
    for path in sorted((ROOT / "weft").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        if number := sum(isinstance(node, ast.Call) and writes(node) for node in nodes):
            counts[path.relative_to(ROOT / "weft").as_posix()] = number
    assert not {name: number for name, number in counts.items() if number > WRITERS.get(name, 0)}


def writes(call: ast.Call) -> bool:
    """Return True if a call opens a file for writing, or writes a file by a path that does not contain `draft`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("write_text", "write_bytes"):
        return not (isinstance(call.func.value, ast.Name) and call.func.value.id in ("draft", "native", "_native"))
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in LIBRARIES:
        return not any(getattr(node, "id", "") == "draft" for value in call.args for node in ast.walk(value))
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return name in ("open", "fdopen") and any(mode[:1] in ("w", "a", "x") or "+" in mode for mode in modes)
