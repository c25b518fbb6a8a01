"""Memory and disk of runs beside those that `weft plan` says: told before, and seen from outside while they run.

    weft probe --out machine.json
    python benchmarks/forecast_memory.py --machine machine.json --graphs "tolokers;topo_dblp-2010" --out NAME

Memory is that of all processes of a run, pages that they share counted once; disk is their temporary files. Of a few
short epochs, an observer may miss the most. Goes on where the results of NAME end. --limits: also runs each under a
limit of 1.1 times what was told, in which it is to fit, and of 0.9 times, in which it is not; a run that takes more is
killed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels import save

from weft.autotune import Cluster, plan_memory
from weft.config.config import Config
from weft.cost import Profile
from weft.nn import Workload
from weft.runtime.process_memory import ProcessUsage, watch
from weft.strategies import MemoryUse, get_strategy
from weft.training.planning.plan_subject import Parts
from weft.training.planning.search import command
from weft.training.run import prepared_workload

RESULTS = Path(__file__).parent / "results"
NEAR = 0.1
LITTLE = 4 << 20
"""Bytes on disk that are not judged: weights and what processes meet by."""
LIMITS = (1 + NEAR, 1 - NEAR)
CELL = ("graph", "model", "strategy", "ranks")


def main() -> int:
    options = parse()
    machine = Profile.read(Path(options.machine))
    path = RESULTS / f"{options.out}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if options.out and path.exists() else []
    known = {tuple(row[name] for name in CELL) for row in rows}
    for graph in options.graphs.split(";"):
        for model in options.models.split(","):
            work = None
            for config in cells(graph, model, options):
                if (graph, model, config.strategy, config.workers) in known:
                    continue
                work = work or prepared_workload(config, None, None)
                rows.append(measured(config, work, machine, limits=options.limits))
                report(rows[-1])
                if options.out:
                    asked = {"options": vars(options), "processes": machine.processes._asdict()}
                    save(options.out, asked | {"rows": rows})
    summarise(rows)
    return 0


def cells(graph: str, model: str, options: argparse.Namespace) -> Iterator[Config]:
    """What is to be run of a graph and a model."""
    bare = graph.startswith(("topo_", "rmat")) and "features=" not in graph
    made = {"random_features": options.features, "random_classes": options.classes} if bare else {}
    for workers in map(int, options.ranks.split(",")):
        for strategy in (options.alone if workers == 1 else options.strategies).split(","):
            yield Config(graph=graph, model=model, strategy=strategy, workers=workers, epochs=options.epochs, **made)


def measured(config: Config, work: Workload, machine: Profile, *, limits: bool) -> dict[str, Any]:
    """A run, what was told of it, and what was seen."""
    told = foretold(config, work, machine)
    seen = run(config)
    row: dict[str, Any] = {
        "graph": config.graph,
        "model": config.model,
        "strategy": config.strategy,
        "ranks": config.workers,
        "told": told.host,
        "seen": seen.memory,
        "told_disk": told.disk,
        "seen_disk": seen.disk,
        "failed": seen.last_line if seen.exit_code else "",
    }
    if limits:
        row["within"] = {str(share): run(config, int(share * told.host)).exit_code == 0 for share in LIMITS}
    return row


def foretold(config: Config, work: Workload, machine: Profile) -> MemoryUse:
    """What the plan of a run says."""
    made = Parts(work.graph).options(config)
    plan = get_strategy(config.strategy)(work, config.workers, made)
    cluster = Cluster(profile=machine, ranks=config.workers, hosts=1, threads=1, memory_bytes=0)
    return plan_memory(plan, cluster)


def run(config: Config, limit: int | None = None) -> ProcessUsage:
    """A run as a person would start it."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        words = command(replace(config, epochs=Config().epochs)).split()[1:]
        asked = [*words, "--epochs", str(config.epochs), "--quiet", "--out", f"{folder}/run"]
        return watch([sys.executable, "-m", "weft", *asked], scratch, limit=limit)


def report(row: dict[str, Any]) -> None:
    disk = f"disk {row['told_disk']:13,} {row['seen_disk']:13,}"
    print(
        f"{row['graph'][:24]:24} {row['model']:6} {row['strategy']:13} P={row['ranks']} told {row['told']:14,} seen "
        f"{row['seen']:14,} {row['told'] / row['seen']:6.3f}  {disk} {row.get('within', '')} {row['failed']}",
        flush=True,
    )


def summarise(rows: list[dict[str, Any]]) -> None:
    """How far what was told is off."""
    sound = [row for row in rows if not row["failed"]]
    ratios = {
        "memory": [row["told"] / row["seen"] for row in sound],
        "disk": [row["told_disk"] / row["seen_disk"] for row in sound if row["seen_disk"] > LITTLE],
    }
    for what, found in ratios.items():
        if found:
            within = statistics.mean(abs(ratio - 1) <= NEAR for ratio in found)
            print(f"{what}: {len(found)} cells, within 10 %: {within:.0%}, {min(found):.3f} to {max(found):.3f} times")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="a profile, as weft probe writes it")
    parser.add_argument("--graphs", default="tolokers;coauthor_physics;topo_dblp-2010", help="separated by semicolons")
    parser.add_argument("--models", default="gcn,gat")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--alone", default="single,offload", help="strategies on one rank")
    parser.add_argument("--strategies", default="communicated,cached,hybrid,tensor,pipeline,offload")
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
