"""What `weft doctor` finds: all is well here, and each thing that is not is one line, exit code 1."""

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
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks are started for the checks of other things."""
    monkeypatch.setattr(processes, "launch", lambda *_, **__: 0)


def said(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, tuple[str, str]]:
    """State and text of each check, of a command that ends with a code."""
    capsys.readouterr()
    assert main(["doctor", "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["works"] == (code == 0)
    return {one["name"]: (one["state"], one["text"]) for one in found["findings"]}


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, 0)
    assert found.keys() == doctor.CHECKS.keys()
    assert found["loopback"] == ("ok", "two local ranks met and exchanged rows")
    assert torch.__version__ in found["packages"][1]


class Usage(NamedTuple):
    free: int


@pytest.mark.usefixtures("alone")
def test_what_is_missing_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version

    def version(name: str) -> str:
        if name in ("rich", "pyarrow"):
            raise metadata.PackageNotFoundError(name)
        return "2.5.1+cpu" if name == "torch" else known(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))
    monkeypatch.setenv("WEFT_DATA", "/nowhere")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = said(capsys, 1)
    wrong = "rich is not installed; torch is 2.5.1+cpu, and weft needs 2.6: run pip install 'rich>=13' 'torch>=2.6'"
    assert found["packages"] == ("FAILS", wrong)
    assert found["weft[tables]"][0] == "without"
    assert found["weft[tables]"][1].startswith("pyarrow is not installed; needed for tables of vertices and edges")
    assert found["weft[tables]"][1].endswith(": pip install 'weft[tables]'")
    assert found["temporary"][0] == "FAILS"
    assert "has 1.0 kB free: set TMPDIR to a folder with more space" in found["temporary"][1]
    assert found["datasets"][1].startswith("WEFT_DATA=/nowhere is not a folder")
    assert found["GPUs"][0] == "without"
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
    found = doctor.hosts()
    assert found[0] == state
    assert found[1].startswith(text)


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
    assert said(capsys, 1)["loopback"] == ("FAILS", "RunError: rank 1: could not connect to the other 1")
