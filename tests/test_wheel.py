"""`make wheel` finds nothing wrong with a complete wheel, and detects each planted fault."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

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


def test_what_prevents_a_release(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "SECURITY.md").write_text("Write to security@weft.org.\n")
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## 1.2.3\n\nThe date.\n\n## 1.2.2\n\nIt has not been released.\n")
    assert wheel.obstacles("v1.2.3", tmp_path) == []
    assert wheel.obstacles("v1.2.4", tmp_path) == ["the tag v1.2.4 is not that of version 1.2.3 in pyproject.toml"]
    changes.write_text("# Changelog\n\n## 1.2.3\n\nIt has not been released yet.\n")
    (tmp_path / "SECURITY.md").write_text("Write to security@weft.example.\n")
    assert wheel.obstacles("v1.2.3", tmp_path) == [
        "CHANGELOG.md does not say that 1.2.3 is released",
        "SECURITY.md has the placeholder weft.example in place of an address",
    ]


def test_this_version_is_not_released_by_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """Remove this test with the placeholders."""
    assert wheel.main(["--release", f"v{wheel.version()}"]) == 1
    assert "placeholder weft.example" in capsys.readouterr().err


def test_the_workflow_and_the_image() -> None:
    """Neither GitHub nor Docker runs here: the files name scripts that exist, and an image is no root's."""
    jobs = yaml.safe_load((wheel.ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == ["check", "wheels", "sources"]
    assert jobs["check"]["if"] == "github.event_name == 'push'"  # so `publish` is skipped on a pull request, too
    scripts = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    image = (wheel.ROOT / "Dockerfile").read_text().splitlines()
    assert image.index("USER weft") < image.index('ENTRYPOINT ["weft"]')
    assert any(line.startswith("HEALTHCHECK") and line.endswith('CMD ["weft", "doctor"]') for line in image)
