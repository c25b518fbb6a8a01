"""The emulated cluster of the benchmarks: ranks connect to each other in it, and it leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TRAIN = ["-m", "weft", "train", "digits", "--decoupled", "--strategy", "tensor", "--epochs", "2", "--out"]
OWNER = """
import signal, subprocess
from cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with Cluster(ranks=1, rate="1mbit") as cluster:
    with subprocess.Popen(["ip", "netns", "exec", cluster.members[0], "sh", "-c", "echo $$; sleep 600"]):
        pass
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module `cluster`, if this machine can emulate one. A test that leaves network namespaces behind fails."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("cluster")
    try:
        module.clean()
        with module.Cluster(ranks=1, rate="1gbit"):
            pass
    except module.Unavailable as missing:
        pytest.skip(f"no emulated cluster: {missing}")
    yield module
    assert not belonging_to(os.getpid())


def belonging_to(pid: int) -> set[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return {name for name in names if name.startswith(f"weft-{pid}-")}


@pytest.mark.slow
def test_trains(cluster: ModuleType, tmp_path: Path) -> None:
    with cluster.Cluster(ranks=2, rate="1gbit") as two:
        out = two.run([*TRAIN, tmp_path / "run"], timeout=60)
    assert "accuracy" in out
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_names_the_rank_that_fails(cluster: ModuleType) -> None:
    with cluster.Cluster(ranks=2, rate="1gbit") as two:
        two.set_rate("200mbit")
        fail = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '0' else sys.exit('no such thing')"
        with pytest.raises(cluster.RankFailed, match=r"rank 1 failed .*\nno such thing"):
            two.run(["-c", fail], timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_an_ended_owner_leaves_is_removed(cluster: ModuleType, number: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, cwd=BENCHMARKS, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout
        pid = int(owner.stdout.readline())
        assert len(belonging_to(owner.pid)) == 2
        owner.send_signal(number)
    left = belonging_to(owner.pid)
    assert len(left) == (2 if number == signal.SIGKILL else 0)
    assert left <= set(cluster.clean())
    assert not belonging_to(owner.pid)
    assert not importlib.import_module("namespaces").living(pid)


def test_two_at_once_do_not_meet(cluster: ModuleType) -> None:
    with cluster.Cluster(ranks=1, rate="1mbit") as first, cluster.Cluster(ranks=1, rate="1mbit") as second:
        assert first.members != second.members
        assert first.switch != second.switch


@pytest.mark.parametrize("arguments", ["--rate fast --measure", "--ranks 0 --rate 1gbit x", ""])
def test_a_mistake_is_one_line(arguments: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "cluster.py"), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("cluster")
