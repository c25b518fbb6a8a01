"""Compare estimated with measured seconds of epochs, on an emulated cluster (see cluster.py).

    weft probe --out machine.json
    python benchmarks/forecast.py --machine machine.json --graphs "amazon_photo;tolokers" --models gcn,gat --out NAME

--machine is a profile of this machine, measured before and on none of these graphs. At each rate, as many ranks as will
train measure the network first. Contenders are named as in dependencies.py, but they run one after the other: in turns,
each would find the caches as another one has left them, which no training run does. Estimates need no ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import dependencies
from cluster import Cluster as Network
from kernels import save
from namespaces import Unavailable
from safetensors.torch import save_file
from steps import make_plan

from weft.autotune import Cluster, epoch_time, measure_network
from weft.comm import join
from weft.config.optimisations import Optimisations
from weft.cost import Profile
from weft.data import Graph
from weft.nn import Workload, make_model
from weft.partition import make_book
from weft.runtime.kernel_selection import select_kernels
from weft.runtime.memory.heap import heap_environment, keep_freed_memory
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.meter import Meter
from weft.runtime.processes.cores import cores_per_rank
from weft.strategies import Plan

NETWORK = "network.json"
LARGE_ERROR = 0.2
ROW_SECONDS = 0.2
"""Smallest duration of a round of consecutive epochs."""


def main() -> int:
    options = parse()
    if options.measure:
        measure(Path(options.measure), Profile.read(Path(options.machine)))
        return 0
    os.environ |= heap_environment()  # as weft train does
    machine = Profile.read(Path(options.machine))
    rows: list[dict[str, Any]] = []
    try:
        for ranks in map(int, options.ranks.split(",")):
            rates = options.rates.split(",") if ranks > 1 else ["1gbit"]
            with Network(ranks=ranks, rate=rates[0]) as network:
                for rate in rates:
                    rows += at_rate(network, rate, machine, options)
    except Unavailable as error:
        print(f"skipped: {error}")
        return 0
    summarise(rows)
    if options.again:
        compare_again(rows, options.again)
    if options.out:
        save(options.out, {"options": vars(options), "profile": machine.record()["host"], "rows": rows})
    return 0


def measure(path: Path, machine: Profile) -> None:
    """Measure the network between all ranks; rank 0 writes a profile with it.

    Args:
        path: File to write.
        machine: Profile of the machine, to which the network is added.
    """
    keep_freed_memory()
    select_kernels(machine.choices)
    group = join(timeout_seconds=600, meter=Meter())
    network = measure_network(group, machine, hosts=group.size, emulated=True)
    group.close()
    if group.rank == 0:
        replace(machine, networks=[network]).save(path)


def at_rate(network: Network, rate: str, machine: Profile, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and estimate all graphs, models and contenders at one rate, and return a row for each."""
    network.set_rate(rate)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if network.ranks > 1:
            network.run(
                [__file__, "--measure", Path(folder) / NETWORK, "--machine", Path(options.machine).absolute()],
                timeout=600,
            )
            machine = replace(machine, networks=Profile.read(Path(folder) / NETWORK).networks)
        for name in options.graphs.split(";"):
            graph = dependencies.load(name, options.features)
            graph.save(Path(folder) / "graph", overwrite=True)
            book = make_book(graph, network.ranks, method=options.partition)
            save_file({options.partition: book.part}, Path(folder) / "part.safetensors")
            for model in options.models.split(","):
                question = {
                    **vars(options),
                    "folder": folder,
                    "model": model,
                    "contenders": contenders(network.ranks, options),
                    "nominal": True,
                    "row_seconds": ROW_SECONDS,
                    "choices": machine.choices.record(),
                }
                measured = dependencies.ask(network, rate, question)
                for row in measured:
                    plan = plan_of(row["contender"], model, graph, book.part, network.ranks, options)
                    start = time.perf_counter()
                    estimate = epoch_time(
                        plan,
                        Cluster(
                            profile=machine,
                            ranks=network.ranks,
                            hosts=network.ranks,
                            threads=cores_per_rank(network.ranks),
                            memory_bytes=memory_limit_bytes(),
                            emulated=True,
                        ),
                    )
                    estimate_seconds = time.perf_counter() - start
                    rows.append(
                        {
                            "graph": name,
                            "model": model,
                            "ranks": network.ranks,
                            "rate": rate,
                            "contender": row["contender"],
                            "seconds": statistics.median(row["seconds"]),
                            "least": min(row["seconds"]),
                            "most": max(row["seconds"]),
                            "exposed": statistics.median(row["exposed_seconds"]),
                            "told": estimate.total,
                            "told_network": estimate.network,
                            "told_waiting": estimate.waiting,
                            "forecast_seconds": estimate_seconds,
                        }
                    )
                    report(rows[-1])
    return rows


def contenders(ranks: int, options: argparse.Namespace) -> str:
    return str(options.alone if ranks == 1 else options.contenders)


def plan_of(contender: str, model: str, graph: Graph, part: Any, ranks: int, options: argparse.Namespace) -> Plan:
    """Return a new plan of a contender."""
    kind, _, chunks = contender.partition("#")
    net = make_model(model, graph.num_features, graph.num_classes, hidden=options.hidden, layers=options.layers)
    work = Workload(net, graph, Optimisations.without(options.disable))
    return make_plan(kind, work, ranks, partition=part, chunks=int(chunks or 0))


def report(row: dict[str, Any]) -> None:
    print(
        f"{row['graph'][:24]:24} {row['model']:6} P={row['ranks']} {row['rate']:>8} {row['contender']:14} "
        f"{row['seconds'] * 1e3:9.1f} ms ({row['least'] * 1e3:.1f} to {row['most'] * 1e3:.1f}) estimated "
        f"{row['told'] * 1e3:9.1f} ms {row['told'] / row['seconds']:5.2f}x  network {row['exposed'] * 1e3:.1f} "
        f"estimated {row['told_network'] * 1e3:.1f}  in {row['forecast_seconds']:.2f} s",
        flush=True,
    )


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print the errors of the estimates, and how much slower the contender with the lowest estimate is than the best.

    Args:
        rows: A row for each graph, model, number of ranks, rate and contender.
    """
    errors = sorted(abs(row["told"] / row["seconds"] - 1) for row in rows)
    within = sum(error <= LARGE_ERROR for error in errors) / len(errors)
    print(
        f"{len(errors)} cells: median error {statistics.median(errors):.1%}, within 20 %: {within:.0%}, "
        f"worst {errors[-1]:.0%}"
    )
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["graph"], row["model"], row["ranks"], row["rate"]), []).append(row)
    slowdowns = sorted(
        min(cell, key=lambda row: row["told"])["seconds"] / min(row["seconds"] for row in cell)
        for cell in cells.values()
        if len(cell) > 1
    )
    if slowdowns:
        print(
            f"seconds of the contender with the lowest estimate, relative to the fastest: median "
            f"{statistics.median(slowdowns):.3f}, worst {slowdowns[-1]:.3f} of {len(slowdowns)}"
        )


def compare_again(rows: list[dict[str, Any]], name: str) -> None:
    """Print how much the measured seconds differ from an earlier run: no estimate can be more exact than that.

    Args:
        rows: Rows of this run.
        name: Name of the earlier results, in benchmarks/results.
    """
    cell = ("graph", "model", "ranks", "rate", "contender")
    before = json.loads((Path(__file__).parent / "results" / f"{name}.json").read_text())["rows"]
    earlier = {tuple(row[part] for part in cell): row["seconds"] for row in before}
    both = [(row["seconds"], earlier[key]) for row in rows if (key := tuple(row[part] for part in cell)) in earlier]
    if both:
        errors = sorted(abs(old / new - 1) for new, old in both)
        within = sum(error <= LARGE_ERROR for error in errors) / len(errors)
        print(
            f"{len(errors)} cells of {name}, measured at another time: median difference "
            f"{statistics.median(errors):.1%}, within 20 %: {within:.0%}, worst {errors[-1]:.0%}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="profile from weft probe")
    parser.add_argument(
        "--graphs", default="amazon_photo;tolokers;topo_dblp-2010", help="graphs to train on, separated by semicolons"
    )
    parser.add_argument("--models", default="gcn,sage,gin,gat")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rates", default="200mbit,1gbit,5gbit")
    parser.add_argument("--alone", default="single,offload#4", help="contenders to run on one rank")
    parser.add_argument("--contenders", default="communicated,cached,hybrid,tensor,pipeline#4")
    parser.add_argument("--partition", default="metis")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disable", default="")
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    parser.add_argument("--again", help="name of earlier results: also print how much its seconds differ from these")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.set_defaults(batch_size="", fanout="10", batches=None, input_dropout=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
