"""`weft doctor`: checks what this machine has, what will not work, and why. The checks are independent."""

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

from weft.runtime.processes.cores import num_cores
from weft.runtime.processes.temporary_folder import temporary_folder
from weft.utils.errors import Stopped, cause, printable
from weft.utils.optional_packages import install_command
from weft.utils.units import format_bytes

FAILS, WITHOUT, WORKS = "FAILS", "without", "ok"
"""States of a check: weft will not work; something optional is missing; passed."""
LOOPBACK_SECONDS = 60.0
"""Timeout for two local ranks to connect."""
MIN_TEMPORARY_BYTES = 1 << 30
"""Free space that the temporary folder should have."""
REQUIREMENT = re.compile(r"""([\w.-]+)(?:>=([\d.]+))?(?: *; *extra == ['"](\w+)['"])?""")
"""Pattern of a requirement of weft: package, minimum version, and the extra that needs it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    """Name of the check."""
    state: str
    """ok; without: something is missing that most users do not need; FAILS: weft does not work without it."""
    text: str
    """Facts, or what is missing and what to do."""


def diagnose() -> list[Finding]:
    """Run all checks. A check that raises counts as failed."""
    findings = []
    for name, check in CHECKS.items():
        try:
            state, text = check()
        except Exception as error:
            state, text = FAILS, cause(error)
        findings.append(Finding(name=name, state=state, text=printable(text)))
    return findings


def report(findings: list[Finding]) -> str:
    """Return one line for each finding, failed ones last."""
    ordered = sorted(findings, key=lambda finding: finding.state == FAILS)
    return "\n".join(f"{finding.state:7}  {finding.name:13}  {finding.text}" for finding in ordered)


def record(findings: list[Finding]) -> dict[str, object]:
    """Return the findings as JSON values."""
    return {"works": works(findings), "findings": [asdict(finding) for finding in findings]}


def works(findings: list[Finding]) -> bool:
    """Return True if no check has failed."""
    return all(finding.state != FAILS for finding in findings)


Check = tuple[str, str]
"""State and text of a check."""


def python() -> Check:
    """Report version and path of Python."""
    return WORKS, f"{platform.python_version()} at {sys.executable}, {platform.platform()}"


def packages() -> Check:
    """Check the packages that weft requires, and their versions."""
    versions, problems = required()
    if problems:
        return FAILS, f"{'; '.join(problems.values())}: run pip install {' '.join(map(repr, problems))}"
    return WORKS, ", ".join([f"weft {metadata.version('weft')}", *versions])


def required(extra: str = "") -> tuple[list[str], dict[str, str]]:
    """Check the packages that weft, or an extra of it, requires.

    Args:
        extra: Name of the extra. Default: weft itself.

    Returns:
        The installed packages with their versions, and the problems by requirement.
    """
    versions, problems = [], {}
    for line in metadata.requires("weft") or []:
        requirement_match = REQUIREMENT.fullmatch(line)
        if requirement_match is None or (requirement_match[3] or "") != extra:
            continue
        requirement, name, min_version = line.partition(";")[0].strip(), requirement_match[1], requirement_match[2]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems[requirement] = f"{name} is not installed"
            continue
        versions.append(f"{name} {version}")
        if min_version and _numbers(version) < _numbers(min_version):
            problems[requirement] = f"{name} is {version}, and weft needs {min_version}"
    return versions, problems


def _numbers(version: str) -> list[int]:
    """Return the first three numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]


def extra(name: str, purpose: str) -> Callable[[], Check]:
    """Return the check of an extra of weft.

    Args:
        name: Name of the extra.
        purpose: What the extra is for.
    """

    def check() -> Check:
        versions, problems = required(name)
        if problems:
            return WITHOUT, f"{'; '.join(problems.values())}; needed for {purpose}: {install_command(name)}"
        return WORKS, f"{', '.join(versions)}: {purpose}"

    return check


def kernels() -> Check:
    """Report the instruction set of the CPU kernels."""
    from weft.runtime.native import _native

    return WORKS, f"instruction set {_native.current_isa()} of {', '.join(_native.supported_isas())} (WEFT_ISA)"


def threads() -> Check:
    """Report the number of threads."""
    import torch

    cores, variable = num_cores(), os.environ.get("OMP_NUM_THREADS", "")
    explanation = (
        f"OMP_NUM_THREADS={variable}" if variable else "OMP_NUM_THREADS is not set: local ranks share the cores"
    )
    return WORKS, f"{torch.get_num_threads()} on {cores} cores ({explanation})"


def memory() -> Check:
    """Report the memory and its limit."""
    from weft.runtime.memory.limit import memory_limit_bytes

    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit_bytes()
    limited = f", limited to {format_bytes(limit)} by a cgroup or ulimit -v" if limit < machine else ", no limit"
    return WORKS, f"{format_bytes(machine)}{limited}"


def temporary() -> Check:
    """Check the free space of the folder in which ranks share files."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    with tempfile.NamedTemporaryFile(dir=folder):
        pass
    if free < MIN_TEMPORARY_BYTES:
        return FAILS, f"{folder} has {format_bytes(free)} free: set TMPDIR to a folder with more space"
    return WORKS, f"{folder}, {format_bytes(free)} free"


def gpus() -> Check:
    """Report the GPUs, and whether Triton kernels can run on them."""
    import torch

    if not torch.cuda.is_available():
        return WITHOUT, f"no GPU found ({_why_no_gpu()}): --device cuda will not work"
    gpus_here = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    described = ", ".join(f"{gpu.name} ({format_bytes(gpu.total_memory)})" for gpu in gpus_here)
    versions, problems = required("gpu")
    if problems:
        return (
            WITHOUT,
            f"{described}; {'; '.join(problems.values())}: only sums can run on it: {install_command('gpu')}",
        )
    return WORKS, f"{described}, kernels in {', '.join(versions)}"


def _why_no_gpu() -> str:
    """Return the reason why PyTorch finds no GPU."""
    import torch

    if not torch.version.cuda:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # its message names the reason: no driver, an old driver, or no device
        return cause(error)
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"


def network() -> Check:
    """Check that PyTorch has the backends with which ranks communicate."""
    from weft.comm.backends import available_backends

    backends = available_backends()
    if "gloo" not in backends:
        return FAILS, "torch was built without gloo, with which ranks communicate: install another build of torch"
    return WORKS, " and ".join(backends) + ("" if "nccl" in backends else "; no nccl, which ranks on GPUs need")


def hosts() -> Check:
    """Report the address that gloo uses for connections from other hosts."""
    chosen, interfaces = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    if unknown := [name for name in chosen.split(",") if chosen and name not in interfaces]:
        return (
            FAILS,
            f"GLOO_SOCKET_IFNAME={chosen}: there is no interface {unknown[0]}: set it to one of "
            f"{', '.join(interfaces)}, or unset it",
        )
    if chosen:
        return WORKS, f"by GLOO_SOCKET_IFNAME={chosen}"
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address"
    if address == "no address" or address.startswith("127."):
        others = ", ".join(name for name in interfaces if name != "lo") or "the name of a network interface"
        return WITHOUT, f"{host} is {address}: torchrun over several hosts needs GLOO_SOCKET_IFNAME, set to {others}"
    return WORKS, f"{host} is {address} to ranks on other hosts"


def loopback() -> Check:
    """Check that two local ranks can connect and add numbers, as with --workers 2."""
    from weft.training.launch.processes import launch

    with temporary_folder() as folder:
        if stopped_by := launch(add_up, (), workers=2, folder=folder):
            raise Stopped(f"stopped by {signal.Signals(stopped_by).name}", stopped_by)
    return WORKS, "two local ranks met and exchanged rows"


def add_up(meeting: object) -> None:
    """Add one number on each rank of `loopback`."""
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
    """Report the datasets in WEFT_DATA."""
    folder = os.environ.get("WEFT_DATA")
    if not folder:
        return WITHOUT, "WEFT_DATA is not set: the only datasets by name are digits and those that PyG downloads"
    if not Path(folder).is_dir():
        return FAILS, f"WEFT_DATA={folder} is not a folder: set it to a folder with .npz files, or unset it"
    number = len(list(Path(folder).glob("*.npz")))
    return WORKS, f"WEFT_DATA={folder}: {number} datasets"


def runs() -> Check:
    """Check that the default folder of runs can be written."""
    if not os.access(Path("runs") if Path("runs").exists() else ".", os.W_OK):
        return WITHOUT, f"{Path('runs').absolute()} cannot be written: give each run an --out"
    return WORKS, f"{Path('runs').absolute()}, {format_bytes(shutil.disk_usage('.').free)} free"


CHECKS: dict[str, Callable[[], Check]] = {
    "Python": python,
    "packages": packages,
    "weft[pyg]": extra("pyg", "models and layers of PyG, datasets that it downloads"),
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
"""Checks by name."""
