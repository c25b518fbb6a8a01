"""Files that somebody else wrote: only regular ones are read, and only as large as their kind can be."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

from weft.utils.errors import InputError
from weft.utils.files.file_reading import open_regular, read_bytes, read_text

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    *("ZipFile", "dataset", "from_file", "fromfile", "genfromtxt", "load_file", "loadtxt", "memmap", "read_csv"),
    *("read_parquet", "read_table", "safe_open"),
)
"""Functions of libraries that open a file; those that get a path need a check of `file_reading` before."""
READERS = {
    "data/io/npz_arrays.py": 1,  # open_regular, then ZipFile of the file
    "data/io/ogb.py": 1,  # the same
    "data/store/external_sort.py": 1,  # an unnamed file of this process
    "data/store/write_parts.py": 2,  # a draft of this process
    "data/tables/table.py": 2,  # dataset of pyarrow after check_regular
    "data/tables/text_table.py": 1,  # gzip.open after check_regular
    "prediction/prediction.py": 1,  # open of TableFile, a draft of this process
    "reporting/page.py": 1,  # a file of the package
    "runtime/processes/child_process.py": 1,  # a file in the private folder of this process
    "runtime/processes/cores.py": 1,  # /sys
    "runtime/memory/heap.py": 1,  # /proc
    "runtime/memory/limit.py": 3,  # /proc and /sys
    "runtime/meter.py": 1,  # a file of the launcher, in its private folder
    "runtime/processes/usage.py": 1,  # standard error of a measured run, in a private folder
    "storage/table_file.py": 1,  # a draft of this process
    "storage/unnamed_files.py": 1,  # an unnamed file of this process
    "training/launch/launcher.py": 1,  # a file in the launcher's private folder
    "training/launch/processes.py": 1,  # open of Received, not of a file
    "training/planning/probe_command.py": 1,  # /proc
    "utils/files/tensor_file.py": 1,  # safe_open after check_regular
}
"""Number of calls in each file of weft that read a file without `weft.utils.files.file_reading`, and why they may."""


def test_every_reader_is_known() -> None:
    """A new place that reads a file uses file_reading, or is listed with the reason why it need not."""
    counts: dict[str, int] = {}
    for path in sorted((ROOT / "weft").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        if number := sum(isinstance(node, ast.Call) and reads(node) for node in nodes):
            counts[path.relative_to(ROOT / "weft").as_posix()] = number
    assert counts.items() <= READERS.items(), counts.items() - READERS.items()


def reads(call: ast.Call) -> bool:
    """Return True if a call reads a file by its path, or opens one for reading."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "read_bytes"):
        return isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") not in ("native", "_native")
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    without_mode = len(values) < (1 if isinstance(call.func, ast.Attribute) else 2)  # Path.open(), open(path)
    return name in LIBRARIES or (name == "open" and (without_mode or any(mode in ("r", "rb") for mode in modes)))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("open(path)", True),
        ("open(path, encoding='utf-8')", True),
        ("path.open()", True),
        ("path.open(mode='rb')", True),
        ("path.read_text()", True),
        ("dataset.dataset(path)", True),
        ("open(path, 'w')", False),
        ("path.open(mode='x')", False),
        ("open_regular(path)", False),
    ],
)
def test_a_call_that_reads_is_detected(call: str, expected: bool) -> None:
    (node,) = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)]
    assert reads(node) == expected


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("\u00e9", encoding="utf-8")
    assert read_text(path, 2) == "\u00e9"
    assert read_bytes(path, 2) == "\u00e9".encode()
    with pytest.raises(InputError, match=r"file: has 2 B, but such a file has at most 1 B"):
        read_bytes(path, 1)


@pytest.mark.timeout(10)
def test_other_kinds_of_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, kind in (("fifo", "a FIFO"), ("socket", "a socket"), ("link", "a device")):
        with pytest.raises(InputError, match=f"{name}: is {kind}, which weft does not read: give a regular file"):
            open_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


@pytest.mark.timeout(10)
def test_a_file_that_becomes_a_fifo_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr("weft.utils.files.file_reading.check_regular", lambda _: None)
    with pytest.raises(InputError, match="is a FIFO"):
        open_regular(tmp_path / "fifo")


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="has at most"):
        read_bytes(tmp_path / "big", 1 << 24)
