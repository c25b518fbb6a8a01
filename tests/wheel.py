"""Check the contents of a wheel, and that it works without other packages: `make wheel`, and cibuildwheel's test.

python tests/wheel.py FILE      print what is wrong with the contents of a wheel
python tests/wheel.py --release TAG     print what prevents a release under this tag
python tests/wheel.py           train with this Python's installed weft in an empty folder, without a compiler on PATH
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
PLACEHOLDER = "weft.example"
"""Domain in pyproject.toml and SECURITY.md until weft has an address."""
MOST_BYTES = 8 << 20
NATIVE = r"weft/_native\.(cpython-3\d+-\w+-linux-gnu|abi3)\.so"
HEAP = "weft/_heap.so"
COMMANDS = (
    "weft --version",
    "weft doctor",
    "weft train digits --epochs 5 --out runs/single",
    "weft train digits --epochs 5 --strategy tensor --workers 2 --out runs/tensor",
    "weft predict runs/tensor --out logits.npy",
)
LOSS_TOLERANCE = 1e-3
"""Largest allowed difference between the float32 losses of two strategies after five epochs."""


def version() -> str:
    """Return weft's version from pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def sources() -> set[str]:
    """Return the files of weft's package, by their names in a wheel."""
    folder = ROOT / "weft"
    return {
        path.relative_to(ROOT).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".so" and path.parent.name != "__pycache__"
    }


def faults(names: set[str], num_bytes: int, metadata: str) -> list[str]:
    """Return the faults of a wheel with these file names, size in bytes and METADATA."""
    info = f"weft-{version()}.dist-info/"
    package = {name for name in names if not name.startswith(info)}
    native = {name for name in package if re.fullmatch(NATIVE, name)}
    problems = [f"{name} is missing" for name in sorted((sources() | {HEAP}) - package)]
    problems += [f"{name} does not belong there" for name in sorted(package - sources() - native - {HEAP})]
    if len(native) != 1:
        problems.append(f"there are {len(native)} extensions: {sorted(native)}")
    if f"{info}licenses/LICENSE" not in names:
        problems.append("LICENSE is missing")
    if f"\nVersion: {version()}\n" not in metadata:
        problems.append(f"METADATA is not of version {version()}")
    if num_bytes > MOST_BYTES:
        problems.append(f"it has {num_bytes:,} bytes, more than {MOST_BYTES:,}")
    return problems


def check(path: Path) -> list[str]:
    """Return the faults of a wheel."""
    with ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        metadata = next((wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")), "")
    return faults(names, path.stat().st_size, metadata)


def obstacles(tag: str, root: Path = ROOT) -> list[str]:
    """Return what prevents a release under a tag.

    Args:
        tag: The tag, such as v0.1.0.
        root: Root of the repository.
    """
    number = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    entry = re.search(rf"^## {re.escape(number)}\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(), re.M | re.S)
    problems = [] if tag == f"v{number}" else [f"the tag {tag} is not that of version {number} in pyproject.toml"]
    if entry is None or "not been released" in entry[1]:
        problems.append(f"CHANGELOG.md does not say that {number} is released")
    files = [name for name in ("pyproject.toml", "SECURITY.md") if PLACEHOLDER in (root / name).read_text()]
    return problems + [f"{name} has the placeholder {PLACEHOLDER} in place of an address" for name in files]


def use(folder: Path) -> None:
    """Train and predict with the commands of this Python's environment; raise an error if one fails."""
    programs = Path(sys.executable).parent
    environment = {"PATH": str(programs), "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    for command in COMMANDS:
        print(f"$ {command}", flush=True)
        name, *arguments = command.split()
        subprocess.run([programs / name, *arguments], cwd=folder, env=environment, check=True)
    code = "import weft; print(weft.__file__)"
    location = subprocess.check_output([sys.executable, "-c", code], cwd=folder, env=environment, text=True)
    assert not Path(location).is_relative_to(ROOT / "weft"), f"{location} is not of the wheel"
    losses = [summary(folder / "runs" / name)["loss"] for name in ("single", "tensor")]
    assert abs(losses[0] - losses[1]) < LOSS_TOLERANCE, losses


def summary(run: Path) -> dict[str, float]:
    """Return the last line of a run's record."""
    last: dict[str, float] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return last


def main(arguments: list[str]) -> int:
    """Run the checks and return the exit code: 1 for a wheel with faults."""
    if not arguments:
        with tempfile.TemporaryDirectory(prefix="weft-wheel-") as folder:
            use(Path(os.path.realpath(folder)))
        return 0
    problems = obstacles(arguments[1]) if arguments[0] == "--release" else check(Path(arguments[0]))
    for fault in problems:
        print(f"{arguments[-1]}: {fault}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
