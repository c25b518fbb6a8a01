"""`weft doctor`: what this machine has, what will not work on it, and why. Each check stands alone."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from weft.core.errors import cause, printable
from weft.core.units import format_bytes

FAILS, WITHOUT, WORKS = "FAILS", "without", "ok"
LOOPBACK_SECONDS = 60.0
LEAST_TEMPORARY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check has found."""

    name: str
    state: str
    """ok; without: what is not there, and not needed by most; FAILS: what weft does not work without."""
    text: str
    """What is there, or what is not and what to do."""


def diagnose() -> list[Finding]:
    """All checks, of which none raises."""
    found = []
    for name, check in CHECKS.items():
        try:
            state, text = check()
        except Exception as error:
            state, text = FAILS, cause(error)
        found.append(Finding(name=name, state=state, text=printable(text)))
    return found


def report(findings: list[Finding]) -> str:
    """One line each, those that fail last."""
    ordered = sorted(findings, key=lambda one: one.state == FAILS)
    return "\n".join(f"{one.state:7}  {one.name:13}  {one.text}" for one in ordered)


def record(findings: list[Finding]) -> dict[str, object]:
    """The same in values that JSON knows."""
    return {"works": works(findings), "findings": [asdict(one) for one in findings]}


def works(findings: list[Finding]) -> bool:
    """Whether nothing fails."""
    return all(one.state != FAILS for one in findings)


Check = tuple[str, str]
"""State and text."""


def python() -> Check:
    return WORKS, f"{platform.python_version()} at {sys.executable}, {platform.platform()}"


def packages() -> Check:
    """Those that weft requires, at least in the versions that it says."""
    versions, wrong = [f"weft {metadata.version('weft')}"], []
    for line in metadata.requires("weft") or []:
        needed = re.fullmatch(r"([\w.-]+)(?:>=([\d.]+))?", line)  # others are of extras
        if needed is None:
            continue
        try:
            version = metadata.version(needed[1])
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed[1]} is not installed")
            continue
        versions.append(f"{needed[1]} {version}")
        if needed[2] and _numbers(version) < _numbers(needed[2]):
            wrong.append(f"{needed[1]} is {version}, and weft needs {needed[2]}")
    if wrong:
        return FAILS, f"{'; '.join(wrong)}: run pip install -e . again"
    return WORKS, ", ".join(versions)


def _numbers(version: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", version.split("+")[0])[:3]]


def extra(name: str, what: str) -> Callable[[], Check]:
    """The check of a package that weft works without."""

    def check() -> Check:
        try:
            return WORKS, f"{metadata.version(name)}: {what}"
        except metadata.PackageNotFoundError:
            return WITHOUT, f"not installed: no {what}"

    return check


def kernels() -> Check:
    from weft.core.native import _native

    return WORKS, f"instruction set {_native.current_isa()} of {', '.join(_native.supported_isas())} (WEFT_ISA)"


def threads() -> Check:
    import torch

    cores, given = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    said = f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS is not set: local ranks share the cores"
    return WORKS, f"{torch.get_num_threads()} on {cores} cores ({said})"


def memory() -> Check:
    from weft.core.memory import memory_limit_bytes

    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit_bytes()
    limited = f", limited to {format_bytes(limit)} by a cgroup or ulimit -v" if limit < machine else ", no limit"
    return WORKS, f"{format_bytes(machine)}{limited}"


def temporary() -> Check:
    """The folder for what ranks share; too little room there ends runs on local ranks."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    with tempfile.NamedTemporaryFile(dir=folder):
        pass
    if free < LEAST_TEMPORARY_BYTES:
        return FAILS, f"{folder} has {format_bytes(free)} of room: name a folder with more in TMPDIR"
    return WORKS, f"{folder}, {format_bytes(free)} of room"


def gpus() -> Check:
    import torch

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else ", and this torch is built without CUDA"
        return WITHOUT, f"none found{built}: no --device cuda"
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return WORKS, ", ".join(f"{one.name} ({format_bytes(one.total_memory)})" for one in names)


def network() -> Check:
    from weft.comm.backends import available_backends

    found = available_backends()
    if "gloo" not in found:
        return FAILS, "torch is built without gloo, by which ranks talk: install another build of torch"
    return WORKS, " and ".join(found) + ("" if "nccl" in found else "; no nccl, which ranks on GPUs need")


def loopback() -> Check:
    """Two ranks that meet on this host and add up, as those of --workers 2 do."""
    from weft.engine.launch import launch

    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        launch(add_up, (), workers=2, folder=Path(folder))
    return WORKS, "two local ranks met and exchanged rows"


def add_up(meeting: object) -> None:
    """What the ranks of `loopback` do."""
    import torch

    from weft.comm import join
    from weft.core.meter import Meter
    from weft.engine.launch import Meeting

    assert isinstance(meeting, Meeting)
    group = join(timeout_seconds=LOOPBACK_SECONDS, meter=Meter(), init_method=meeting.init_method)
    total = group.all_reduce(torch.ones(1), tag="doctor")
    assert total.item() == group.size
    group.close()


def datasets() -> Check:
    folder = os.environ.get("WEFT_DATA")
    if not folder:
        return WITHOUT, "WEFT_DATA is not set: no datasets by name but digits and those that PyG fetches"
    if not Path(folder).is_dir():
        return FAILS, f"WEFT_DATA={folder} is no folder: name one with .npz files, or unset it"
    number = len(list(Path(folder).glob("*.npz")))
    return WORKS, f"WEFT_DATA={folder}: {number} datasets"


def runs() -> Check:
    """The folder that runs are written to, where no --out is given."""
    if not os.access(Path("runs") if Path("runs").exists() else ".", os.W_OK):
        return WITHOUT, f"{Path('runs').absolute()} cannot be written: give each run an --out"
    return WORKS, f"{Path('runs').absolute()}, {format_bytes(shutil.disk_usage('.').free)} of room"


CHECKS: dict[str, Callable[[], Check]] = {
    "Python": python,
    "packages": packages,
    "PyG": extra("torch-geometric", "models and layers of PyG, datasets that it fetches"),
    "pyarrow": extra("pyarrow", ".parquet files"),
    "kernels": kernels,
    "threads": threads,
    "memory": memory,
    "temporary": temporary,
    "GPUs": gpus,
    "network": network,
    "loopback": loopback,
    "datasets": datasets,
    "runs": runs,
}
