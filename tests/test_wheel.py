"""`make wheel` finds nothing wrong with a complete wheel, and detects each planted fault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests import wheel

INFO = f"weft-{wheel.version()}.dist-info"
WHOLE = {*wheel.sources(), "weft/_native.abi3.so", wheel.HEAP, f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"}


def write_wheel(folder: Path, names: Iterable[str], *, version: str = wheel.version()) -> Path:
    """Write a wheel whose files are empty, but for the version in METADATA, and return its path."""
    path = folder / "weft.whl"
    with ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, f"Name: weft\nVersion: {version}\n" if name.endswith("METADATA") else "")
    return path


def test_a_whole_wheel(tmp_path: Path) -> None:
    assert wheel.main([str(write_wheel(tmp_path, WHOLE))]) == 0
    assert wheel.check(write_wheel(tmp_path, WHOLE | {"weft/", "weft/comm/"})) == []  # as auditwheel writes it


@pytest.mark.parametrize("name", ["weft/py.typed", "weft/reporting/page.css", "weft/comm/group.py", wheel.HEAP])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    assert wheel.check(write_wheel(tmp_path, WHOLE - {name})) == [f"{name} is missing"]


@pytest.mark.parametrize("name", ["tests/conftest.py", "csrc/graph.cpp", "weft.libs/libgomp-98b21ff3.so.1"])
def test_a_foreign_file(tmp_path: Path, name: str) -> None:
    assert wheel.check(write_wheel(tmp_path, WHOLE | {name})) == [f"{name} does not belong there"]


def test_extensions(tmp_path: Path) -> None:
    assert wheel.check(write_wheel(tmp_path, WHOLE - {"weft/_native.abi3.so"})) == ["there are 0 extensions: []"]
    two = WHOLE | {"weft/_native.cpython-311-x86_64-linux-gnu.so"}
    assert wheel.check(write_wheel(tmp_path, two))[0].startswith("there are 2 extensions")


def test_licence_version_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheel, "MOST_BYTES", 100)
    path = write_wheel(tmp_path, WHOLE - {f"{INFO}/licenses/LICENSE"}, version="0.0.1")
    assert wheel.main([str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"{path}: ") for line in lines] == [
        "LICENSE is missing",
        f"METADATA is not of version {wheel.version()}",
        f"it has {path.stat().st_size:,} bytes, more than 100",
    ]
