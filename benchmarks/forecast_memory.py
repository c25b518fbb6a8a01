"""Compare the memory and disk space that `weft plan` estimates with what runs use, measured from outside.

    weft probe --out machine.json
    python benchmarks/forecast_memory.py --machine machine.json --graphs "tolokers;topo_dblp-2010" --out NAME

Memory is that of all processes of a run, with shared pages counted once; disk is their temporary files. If epochs are
short and few, the measurement may miss the peak. If the results of NAME exist, the script continues after their last
row. --limits also repeats each run under a limit of 1.1 times the estimate, in which it should fit, and of 0.9 times,
in which it should not; a run that exceeds its limit is killed.
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
from weft.cost import MemoryUse, Profile
from weft.nn import Workload
from weft.runtime.processes.usage import ProcessUsage, watch
from weft.strategies import get_strategy
from weft.training.flag_checks import make_options
from weft.training.planning.search import command
from weft.training.run import prepared_workload

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.1
"""Largest relative error of an estimate that counts as right."""
MIN_DISK_BYTES = 4 << 20
"""Disk use below which no ratio is computed: weights and the files through which processes connect."""
LIMITS = (1 + TOLERANCE, 1 - TOLERANCE)
CELL = ("graph", "model", "strategy", "ranks")


def main() -> int:
    options = parse()
    machine = Profile.read(Path(options.machine))
    path = RESULTS / f"{options.out}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if options.out and path.exists() else []
    done = {tuple(row[name] for name in CELL) for row in rows}
    for graph in options.graphs.split(";"):
        for model in options.models.split(","):
            work = None  # prepared once, when the first of its runs is missing
            for config in cells(graph, model, options):
                if (graph, model, config.strategy, config.workers) in done:
                    continue
                work = work or prepared_workload(config, None, None)
                rows.append(measured(config, work, machine, limits=options.limits))
                report(rows[-1])
                if options.out:
                    header = {"options": vars(options), "processes": machine.processes._asdict()}
                    save(options.out, header | {"rows": rows})
    summarise(rows)
    return 0


def cells(graph: str, model: str, options: argparse.Namespace) -> Iterator[Config]:
    """Yield the configurations to run for a graph and a model."""
    bare = graph.startswith(("topo_", "rmat")) and "features=" not in graph
    random_data = {"random_features": options.features, "random_classes": options.classes} if bare else {}
    for workers in map(int, options.ranks.split(",")):
        for strategy in (options.alone if workers == 1 else options.strategies).split(","):
            yield Config(
                graph=graph, model=model, strategy=strategy, workers=workers, epochs=options.epochs, **random_data
            )


def measured(config: Config, work: Workload, machine: Profile, *, limits: bool) -> dict[str, Any]:
    """Estimate and measure a run, and return its row.

    Args:
        config: The run.
        work: The model and the graph.
        machine: Profile of this machine.
        limits: Whether to repeat the run under the `LIMITS`.
    """
    estimate = estimated(config, work, machine)
    used = run(config)
    row: dict[str, Any] = {
        "graph": config.graph,
        "model": config.model,
        "strategy": config.strategy,
        "ranks": config.workers,
        "told": estimate.host,
        "seen": used.memory,
        "told_disk": estimate.disk,
        "seen_disk": used.disk,
        "failed": used.last_line if used.exit_code else "",
    }
    if limits:
        row["within"] = {str(share): run(config, int(share * estimate.host)).exit_code == 0 for share in LIMITS}
    return row


def estimated(config: Config, work: Workload, machine: Profile) -> MemoryUse:
    """Return the memory that the plan of a run estimates."""
    plan = get_strategy(config.strategy)(work, config.workers, make_options(config, work.graph))
    cluster = Cluster(profile=machine, ranks=config.workers, hosts=1, threads=1, memory_bytes=0)
    return plan_memory(plan, cluster)


def run(config: Config, limit: int | None = None) -> ProcessUsage:
    """Run a configuration by `weft train` in a new process, and return the memory and disk space that it used.

    Args:
        config: The run.
        limit: Bytes of memory above which the run is killed. None: no limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        words = command(replace(config, epochs=Config().epochs)).split()[1:]
        arguments = [*words, "--epochs", str(config.epochs), "--quiet", "--out", f"{folder}/run"]
        return watch([sys.executable, "-m", "weft", *arguments], scratch, limit=limit)


def report(row: dict[str, Any]) -> None:
    disk = f"disk {row['told_disk']:13,} {row['seen_disk']:13,}"
    print(
        f"{row['graph'][:24]:24} {row['model']:6} {row['strategy']:13} P={row['ranks']} estimated {row['told']:14,} "
        f"used {row['seen']:14,} {row['told'] / row['seen']:6.3f}  {disk} {row.get('within', '')} {row['failed']}",
        flush=True,
    )


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print how far the estimates are from the measurements."""
    sound = [row for row in rows if not row["failed"]]
    ratios = {
        "memory": [row["told"] / row["seen"] for row in sound],
        "disk": [row["told_disk"] / row["seen_disk"] for row in sound if row["seen_disk"] > MIN_DISK_BYTES],
    }
    for resource, values in ratios.items():
        if values:
            within = statistics.mean(abs(ratio - 1) <= TOLERANCE for ratio in values)
            print(
                f"{resource}: {len(values)} cells, within 10 %: {within:.0%}, estimated / used "
                f"{min(values):.3f} to {max(values):.3f}"
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="profile from weft probe")
    parser.add_argument(
        "--graphs",
        default="tolokers;coauthor_physics;topo_dblp-2010",
        help="graphs to train on, separated by semicolons",
    )
    parser.add_argument("--models", default="gcn,gat")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--alone", default="single,offload", help="strategies to run on one rank")
    parser.add_argument("--strategies", default="communicated,cached,hybrid,tensor,pipeline,offload")
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--limits", action="store_true", help="repeat each run under limits of 1.1 and 0.9 times the estimate"
    )
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
