"""The benchmarks run as they stand, on graphs so small that their figures mean nothing."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.lib.cases import Case
from tests.lib.pairwise import param
from tests.lib.ranks import forked
from tests.lib.session import Given, part_by, workload

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RUNS = {
    "kernels": "--graph rmat:vertices=300,edges=2k --widths 8 --rounds 1",
    "kernels alone": "--alone --graph rmat:vertices=300,edges=2k --widths 8,12 --rounds 1",
    "epoch": "--graph rmat:vertices=300,edges=2k,features=8,classes=3 --hidden 16 --contenders weft,pyg-csr"
    " --warmups 1 --rounds 1 --operations",
    "growth": "--edges 2k,4k --features 8 --classes 3 --hidden 16 --model gat --warmups 1 --rounds 1",
    "import_graph": "--edges 20k --vertices 2k --rounds 1",
    "offload": "time --graphs rmat:vertices=300,edges=2k --features 8 --models gcn --hidden 16 --layers 2 --rounds 1",
    "offload forecast": "forecast --graphs rmat:vertices=300,edges=2k --features 8 --models gcn --hidden 16 --layers 2"
    " --limits #2",
    "transfers": "--graphs rmat:vertices=300,edges=2k --ranks 2 --chunks 4 --epochs 1",
    "partition": "--graphs rmat:vertices=300,edges=2k --parts 2,3",
    "minibatches": "--graphs rmat:vertices=300,edges=2k --batch-sizes 32 --batches 2",
    "converted": "--graph sbm:vertices=300,degree=4,features=8,classes=3 --models pyg-gcn,pyg-pna --rounds 1",
    "halo": "--graphs rmat:vertices=300,edges=2k --parts 2,3",
    "reach": "--graphs rmat:vertices=300,edges=2k,features=8,classes=3 --labelled 0.01 --hidden 16 --rounds 1",
    "seeds": "--graphs sbm:vertices=300,degree=4,features=8,classes=3 --models gcn,pyg-gcn --seeds 2 --epochs 2",
    "gpu": "--device cpu --graphs 300/2000 --widths 8 --rows 2000"
    " --epoch-graph rmat:vertices=300,edges=2k,features=8,classes=3 --parts rates,products,attention,epochs,offload",
    "sampling": "--graphs rmat:vertices=300,edges=2k --batch-sizes 32 --contenders weft,weft-labor --rounds 1",
}


@pytest.fixture
def _quick_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork contenders from a process that has imported PyTorch; restore this process's number of threads."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    context = forked()
    monkeypatch.setattr(importlib.import_module("processes").multiprocessing, "get_context", lambda _: context)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_it_can_be_imported(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script can be imported, including those that need a cluster, a GPU or minutes and are not run here."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    importlib.import_module(script)


SLOW_RUNS = ("gpu", "transfers", "offload", "reach", "seeds", "converted", "minibatches")
"""Benchmarks that start processes or train for seconds."""


@pytest.mark.usefixtures("_quick_processes")
@pytest.mark.parametrize("name", [param(name, name=name, quick=name not in SLOW_RUNS) for name in RUNS])
def test_benchmark(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = name.partition(" ")[0]
    monkeypatch.setattr("sys.argv", [f"{script}.py", *RUNS[name].split(), "--out", str(tmp_path / "figures")])
    assert not importlib.import_module(script).main()
    assert "NO R" not in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["machine"]["logical_processors"] >= 1
    if name == "epoch":
        shares = [row["share"] for row in figures["contenders"]["weft"]["profile"]["operations"]]
        assert sum(shares) == pytest.approx(1)
    if name == "gpu":
        rows = [row for part in figures["parts"].values() for row in part["rows"]]
        assert len(rows) == 34
        assert all(("seconds" in row or "rate" in row) and "differs" not in row for row in rows)
        assert len(figures["aims"]) == 10
    if name == "growth":
        assert [row["ratio"] > 0 for row in figures["rows"]] == [True, True]
    if name == "offload forecast":
        row = figures["rows"][0]
        assert [row["to_device"], row["to_host"]] == row["moved"]
    if name == "import_graph":
        assert figures["rounds"][0]["stored_bytes"] > 2 * 4 * 20_000


CELLS = """cell,paper,kind,testbed,dataset,model,layers,setting,order,ratios,oom
A,neutronstar,order,bed,Graph,GCN,2,,Hybrid [hybrid] 1.0 < DepComm [communicated] 1.1 < DGL [sampled] 3 s/epoch,,none
B,neutronstar,ratio,bed,Graph,GCN,2,hidden 8,DepCache [cached] faster than DepComm [communicated],500,
C,neutronstar,order,bed,Graph,GCN,2,,DGL [sampled data parallel] 3 < PyG-CPU [single] 4 s/epoch,,none
D,neutronstar,order,bed,Graph,GCN,2,,Hybrid [hybrid] 1.0 s/epoch,,"DepCache [cached], DGL [sampled data parallel]"
E,neutronstar,gain,bed,,GCN,2,,ring 1.1,1.1,
"""
DATASETS = """dataset,vertices,edges,features,classes,hidden,avg_degree
Graph,1000,5000,32,4,16,10
"""
HARDWARE = """[[testbed]]
id = "bed"
nodes = 2
gpus_per_node = 1
gpu = "NVIDIA Tesla T4"
ram_GB = 62
network_Gbps = 6
"""


def test_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that can be simulated are compared with the paper; the others are counted separately."""
    (tmp_path / "neutronstar").mkdir()
    for name, text in (("cells.csv", CELLS), ("neutronstar/datasets.csv", DATASETS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "neutronstar" / "hardware.toml").write_text(HARDWARE)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("sys.argv", ["papers.py", "--tables", str(tmp_path), "--out", str(tmp_path / "figures")])
    before = torch.get_num_threads()
    assert not importlib.import_module("papers").main()
    torch.set_num_threads(before)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["cells"]) == {"A", "B", "D"}
    assert sum(figures["not_simulated"].values()) == 2
    assert figures["totals"]["order"]["of"] == 2
    assert figures["totals"]["ratio"] == {"cells_right": 1, "cells": 2, "right": 1, "of": 2}  # no ratio is 500
    assert figures["totals"]["memory"] == {"cells_right": 2, "cells": 3, "right": 5, "of": 6}  # all of it fits
    assert "Graph GCN 2" in capsys.readouterr().out


class TestAgainst:
    """Statistics and error messages of against.py, whose measurements need an idle machine."""

    @pytest.fixture
    def against(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("against")

    @pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (30, 10)])
    def test_interval_as_tables_have_it(self, count: int, rank: int, against: ModuleType) -> None:
        """The ranks of the 95 % interval of a median, as tables of the sign test list them."""
        ratios = [float(number) for number in range(1, count + 1)]
        assert against.interval(ratios[::-1]) == (rank, count + 1 - rank)

    def test_interval_covers_the_median(self, against: ModuleType) -> None:
        """At least 95 % of the intervals of skewed samples contain the median, and at most 97.5 %."""
        draws = torch.empty(2000, 12).exponential_(generator=torch.Generator().manual_seed(0)).tolist()
        covered = [low <= math.log(2) <= high for low, high in map(against.interval, draws)]
        assert 0.95 <= sum(covered) / len(covered) <= 0.975

    def test_too_few_ratios(self, against: ModuleType) -> None:
        with pytest.raises(ValueError, match="5 ratios have no interval: give 6 or more"):
            against.interval([1.0] * 5)

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [(0.99, 1.05, "not slower"), (1.02, 1.04, "not slower"), (1.01, 1.06, "slower"), (0.99, 1.06, "unsettled")],
    )
    def test_verdict(self, low: float, high: float, verdict: str, against: ModuleType) -> None:
        assert against.judge(low, high) == verdict

    def test_losses_that_differ(self, against: ModuleType) -> None:
        assert against.agree([1.0, 2.0], [1.0009, 2.0])
        assert not against.agree([1.0, 2.0], [1.002, 2.0])
        assert not against.agree([1.0, 2.0], [1.0])
        assert not against.agree([math.nan], [math.nan])

    @pytest.mark.parametrize("shift", [0.0, 0.1])
    def test_planted_slowdown(self, shift: float, against: ModuleType, tmp_path: Path) -> None:
        """A slowdown of 10 % is detected in random times with noise of 2 %; without a slowdown, none is reported."""
        noise = random.Random(0)
        slow = {"current": 1 + shift, "baseline": 1.0}

        def measure(roles: list[str], _case: object, _folder: Path) -> object:
            seconds = [slow[role] * noise.lognormvariate(0, 0.02) for role in roles]
            return against.Pair(seconds, seconds[0] / seconds[1], [[1.0], [1.0]])

        case = SimpleNamespace(measure=measure)
        row = against.compare(case, {role: role for role in slow}, SimpleNamespace(least=8, most=60), tmp_path)
        assert row["high"] - row["low"] < against.WIDTH
        assert row["low"] <= 1 + shift <= row["high"]
        assert row["verdict"] == ("slower" if shift else "not slower")

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ("no-such-commit", "no commit no-such-commit: give a commit of this repository, or the path of a checkout"),
            ("HEAD --cases gcn,gnc", "no case gnc: choose of gcn, sage"),
            ("HEAD --least 4", "--least 4 --most 30: give at least 6"),
            ("HEAD --most 9", "--least 8 --most 9: give at least 6"),
        ],
    )
    def test_mistakes(
        self,
        arguments: str,
        problem: str,
        against: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("sys.argv", ["against.py", *arguments.split()])
        assert against.main() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"against: {problem}")


def test_sancus_sends_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank sends its rows to all others, also those that no edge needs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    importlib.import_module("papers")
    case, size = Case(model="gcn"), 3
    options = Given(partition=part_by("random", case, size))
    owned = torch.as_tensor(options["partition"]).bincount(minlength=size)
    sent = {}
    for name in ("sancus", "communicated"):
        trace = options.plan(name, workload(case), size).trace(0, training=False)
        sent[name] = [operation.bytes_sent for operation in trace.operations if operation.tag == "halo"]
    assert all(each % (8 * int(owned[0]) * (size - 1)) == 0 for each in sent["sancus"])
    assert sum(sent["sancus"]) > sum(sent["communicated"]) > 0
