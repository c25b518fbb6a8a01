"""`weft doctor` finds no problem on this machine, and reports each problem in one line, with exit code 1."""

from __future__ import annotations

import json
import shutil
import socket
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from weft.cli import doctor
from weft.cli.main import main
from weft.training.launch import processes
from weft.utils.errors import RunError


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not start ranks, for tests of other checks."""
    monkeypatch.setattr(processes, "launch", lambda *_, **__: 0)


def run_doctor(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, tuple[str, str]]:
    """Run `weft doctor`, check its exit code, and return state and text of each check."""
    capsys.readouterr()
    assert main(["doctor", "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["works"] == (code == 0)
    return {check["name"]: (check["state"], check["text"]) for check in result["findings"]}


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    checks = run_doctor(capsys, 0)
    assert checks.keys() == doctor.CHECKS.keys()
    assert checks["loopback"] == ("ok", "two local ranks met and exchanged rows")
    assert torch.__version__ in checks["packages"][1]


class Usage(NamedTuple):
    free: int


@pytest.mark.usefixtures("no_ranks")
def test_missing_things_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real_version = metadata.version

    def version(name: str) -> str:
        if name in ("rich", "pyarrow"):
            raise metadata.PackageNotFoundError(name)
        return "2.5.1+cpu" if name == "torch" else real_version(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))
    monkeypatch.setenv("WEFT_DATA", "/nowhere")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = run_doctor(capsys, 1)
    wrong = "rich is not installed; torch is 2.5.1+cpu, and weft needs 2.6: run pip install 'rich>=13' 'torch>=2.6'"
    assert checks["packages"] == ("FAILS", wrong)
    assert checks["weft[tables]"][0] == "without"
    assert checks["weft[tables]"][1].startswith("pyarrow is not installed; needed for tables of vertices and edges")
    assert checks["weft[tables]"][1].endswith(": pip install 'weft[tables]'")
    assert checks["temporary"][0] == "FAILS"
    assert "has 1.0 kB free: set TMPDIR to a folder with more space" in checks["temporary"][1]
    assert checks["datasets"][1].startswith("WEFT_DATA=/nowhere is not a folder")
    assert checks["GPUs"][0] == "without"
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines].count("FAILS") == 3
    assert all(line.startswith("FAILS") for line in lines[-3:])


@pytest.mark.parametrize(
    ("interface", "address", "state", "text"),
    [
        (
            "",
            "127.0.1.1",
            "without",
            "box is 127.0.1.1: torchrun over several hosts needs GLOO_SOCKET_IFNAME, set to eth7",
        ),
        ("", "10.0.0.3", "ok", "box is 10.0.0.3 to ranks on other hosts"),
        ("eth7", "127.0.1.1", "ok", "by GLOO_SOCKET_IFNAME=eth7"),
        (
            "eth7,ib9",
            "10.0.0.3",
            "FAILS",
            "GLOO_SOCKET_IFNAME=eth7,ib9: there is no interface ib9: set it to one of lo, eth7",
        ),
    ],
)
def test_the_address_of_this_host(
    interface: str, address: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: address)
    result = doctor.hosts()
    assert result[0] == state
    assert result[1].startswith(text)


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fails)
    assert (
        doctor.gpus()[1]
        == "no GPU found (RuntimeError: Found no NVIDIA driver on your system.): --device cuda will not work"
    )


@pytest.mark.parametrize(
    ("wrong", "state", "text"),
    [
        ({}, "ok", "Card (80.00 GB), kernels in triton 3.9"),
        (
            {"triton>=3": "triton is not installed"},
            "without",
            "Card (80.00 GB); triton is not installed: only sums can run on it: pip install 'weft[gpu]'",
        ),
    ],
)
def test_what_runs_on_a_gpu(wrong: dict[str, str], state: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="Card", total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(doctor, "required", lambda _: ([] if wrong else ["triton 3.9"], wrong))
    assert doctor.gpus() == (state, text)


def test_ranks_that_do_not_meet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        raise RunError("rank 1: could not connect to the other 1")

    monkeypatch.setattr(processes, "launch", fails)
    assert run_doctor(capsys, 1)["loopback"] == ("FAILS", "RunError: rank 1: could not connect to the other 1")
