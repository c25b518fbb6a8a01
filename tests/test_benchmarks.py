"""The benchmarks run as they stand, on graphs so small that their figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RUNS = {
    "kernels": "--graph rmat:vertices=300,edges=2k --widths 8 --rounds 1",
    "epoch": "--graph rmat:vertices=300,edges=2k,features=8,classes=3 --hidden 16 --contenders weft,pyg-csr"
    " --warmups 1 --rounds 1 --operations",
    "growth": "--edges 2k,4k --features 8 --classes 3 --hidden 16 --model gat --warmups 1 --rounds 1",
    "import_graph": "--edges 20k --vertices 2k --rounds 1",
    "offload": "time --graphs rmat:vertices=300,edges=2k --features 8 --models gcn --hidden 16 --layers 2 --rounds 1",
    "transfers": "--graphs rmat:vertices=300,edges=2k --ranks 2 --chunks 4 --epochs 1",
    "partition": "--graphs rmat:vertices=300,edges=2k --parts 2,3",
}


@pytest.mark.parametrize("name", RUNS)
def test_benchmark(name: str, tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / f"{name}.py", *RUNS[name].split(), "--out", tmp_path / "figures"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "NO R" not in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["machine"]["logical_processors"] >= 1
    if name == "epoch":
        shares = [row["share"] for row in figures["contenders"]["weft"]["profile"]["operations"]]
        assert sum(shares) == pytest.approx(1)
    if name == "growth":
        assert [row["ratio"] > 0 for row in figures["rows"]] == [True, True]
    if name == "import_graph":
        assert figures["rounds"][0]["stored_bytes"] > 2 * 4 * 20_000
