"""`weft doctor`: what this machine has, what will not work on it, and why. Each check stands alone."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from weft.runtime.cores import num_cores
from weft.utils.errors import Stopped, cause, printable
from weft.utils.optional_packages import install_command
from weft.utils.units import format_bytes

FAILS, WITHOUT, WORKS = "FAILS", "without", "ok"
LOOPBACK_SECONDS = 60.0
LEAST_TEMPORARY_BYTES = 1 << 30
REQUIREMENT = re.compile(r"""([\w.-]+)(?:>=([\d.]+))?(?: *; *extra == ['"](\w+)['"])?""")
"""A line of what weft requires: a package, its least version, the extra that it is of."""


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
    versions, wrong = required()
    if wrong:
        return FAILS, f"{'; '.join(wrong.values())}: run pip install {' '.join(map(repr, wrong))}"
    return WORKS, ", ".join([f"weft {metadata.version('weft')}", *versions])


def required(extra: str = "") -> tuple[list[str], dict[str, str]]:
    """What weft, or an extra of it, requires: packages with their versions, and by requirement what is wrong."""
    versions, wrong = [], {}
    for line in metadata.requires("weft") or []:
        needed = REQUIREMENT.fullmatch(line)
        if needed is None or (needed[3] or "") != extra:
            continue
        requirement, name, least = line.partition(";")[0].strip(), needed[1], needed[2]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong[requirement] = f"{name} is not installed"
            continue
        versions.append(f"{name} {version}")
        if least and _numbers(version) < _numbers(least):
            wrong[requirement] = f"{name} is {version}, and weft needs {least}"
    return versions, wrong


def _numbers(version: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", version.split("+")[0])[:3]]


def extra(name: str, what: str) -> Callable[[], Check]:
    """The check of an extra of weft. what: it is for."""

    def check() -> Check:
        versions, wrong = required(name)
        if wrong:
            return WITHOUT, f"{'; '.join(wrong.values())}: no {what}: {install_command(name)}"
        return WORKS, f"{', '.join(versions)}: {what}"

    return check


def kernels() -> Check:
    from weft.runtime.native import _native

    return WORKS, f"instruction set {_native.current_isa()} of {', '.join(_native.supported_isas())} (WEFT_ISA)"


def threads() -> Check:
    import torch

    cores, given = num_cores(), os.environ.get("OMP_NUM_THREADS", "")
    said = f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS is not set: local ranks share the cores"
    return WORKS, f"{torch.get_num_threads()} on {cores} cores ({said})"


def memory() -> Check:
    from weft.runtime.memory import memory_limit_bytes

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
        return WITHOUT, f"none found ({_why_no_gpu()}): no --device cuda"
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    found = ", ".join(f"{one.name} ({format_bytes(one.total_memory)})" for one in names)
    versions, wrong = required("gpu")
    if wrong:
        return WITHOUT, f"{found}; {'; '.join(wrong.values())}: only plain sums run on it: {install_command('gpu')}"
    return WORKS, f"{found}, kernels in {', '.join(versions)}"


def _why_no_gpu() -> str:
    import torch

    if not torch.version.cuda:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # torch's own words: no driver, one that is too old, no device
        return cause(error)
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"


def network() -> Check:
    from weft.comm.backends import available_backends

    found = available_backends()
    if "gloo" not in found:
        return FAILS, "torch is built without gloo, by which ranks talk: install another build of torch"
    return WORKS, " and ".join(found) + ("" if "nccl" in found else "; no nccl, which ranks on GPUs need")


def hosts() -> Check:
    """The address at which ranks on other hosts would look for those of this one, as gloo chooses it."""
    chosen, here = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    if unknown := [name for name in chosen.split(",") if chosen and name not in here]:
        return (
            FAILS,
            f"GLOO_SOCKET_IFNAME={chosen}: there is no {unknown[0]}: name one of {', '.join(here)}, or unset it",
        )
    if chosen:
        return WORKS, f"by GLOO_SOCKET_IFNAME={chosen}"
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address"
    if address == "no address" or address.startswith("127."):
        others = ", ".join(name for name in here if name != "lo") or "none here"
        return WITHOUT, f"{host} is {address}: no torchrun over several hosts, unless GLOO_SOCKET_IFNAME names {others}"
    return WORKS, f"{host} is {address} to ranks on other hosts"


def loopback() -> Check:
    """Two ranks that meet on this host and add up, as those of --workers 2 do."""
    from weft.training.launch.processes import launch

    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        if stopped_by := launch(add_up, (), workers=2, folder=Path(folder)):
            raise Stopped(f"stopped by {signal.Signals(stopped_by).name}", stopped_by)
    return WORKS, "two local ranks met and exchanged rows"


def add_up(meeting: object) -> None:
    """What the ranks of `loopback` do."""
    import torch

    from weft.comm import join
    from weft.runtime.meter import Meter
    from weft.training.launch.processes import Meeting

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
    "weft[pyg]": extra("pyg", "models and layers of PyG, datasets that it fetches"),
    "weft[tables]": extra("tables", "tables of vertices and edges, .parquet files, to_pandas"),
    "weft[report]": extra("report", "weft report, run.plot()"),
    "kernels": kernels,
    "threads": threads,
    "memory": memory,
    "temporary": temporary,
    "GPUs": gpus,
    "network": network,
    "hosts": hosts,
    "loopback": loopback,
    "datasets": datasets,
    "runs": runs,
}
