"""Compare the epochs of strategies side by side on an emulated cluster (see cluster.py).

    python benchmarks/dependencies.py --graphs "topo_dblp-2010;tolokers" --rates 200mbit,5gbit --out NAME
    python benchmarks/dependencies.py --graphs tolokers --contenders hybrid,hybrid@0,hybrid@0.5,hybrid@1
    python benchmarks/dependencies.py --graphs cora --contenders communicated,communicated-overlap,communicated-ring
    python benchmarks/dependencies.py --contenders communicated,communicated:range,pipeline#8:balanced
    python benchmarks/dependencies.py --contenders split,sampled --batch-size 4096 --fanout 15,10,5

A contender is a strategy, followed by any of these marks, in this order:

    @0.5         fraction of remote sources to cache (hybrid)
    #8           number of chunks (tensor, pipeline)
    :range       partition method, if other than --partition
    +decoupled   train the decoupled model
    -ring        disable an optimisation

Every rank holds all contenders. The script compares their logits, then the contenders take turns with training epochs.
The time of an epoch is that of the slowest rank. `exposed` is the time in the network: for each collective the shortest
time that any rank spends in it, since the rank that arrives last waits for nobody. `waiting` is the further time that
ranks spend in collectives, averaged over the ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from cluster import Cluster
from kernels import save
from namespaces import Unavailable
from safetensors.torch import load_file, save_file
from steps import make_plan, train_step

import weft
from weft.autotune import measured_machine
from weft.comm import Group, join
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.cost import Profile
from weft.data import Graph
from weft.nn import Workload, make_model
from weft.partition import make_book
from weft.runtime.kernel_selection import KernelSelection, select_kernels
from weft.runtime.memory.heap import keep_freed_memory
from weft.runtime.meter import Meter
from weft.runtime.processes.cores import num_cores
from weft.strategies import Step
from weft.training.artifacts.run_writer import communication_seconds
from weft.training.tasks.task import make_task

TOLERANCE = 1e-3  # of float32 logits, relative to the largest: contenders sum in different orders
CLASSES = 16
FAST = "5gbit"


def main() -> int:
    options = parse()
    if options.rank:
        race(json.loads(options.rank))
        return 0
    rows: list[dict[str, Any]] = []
    try:
        for name in options.graphs.split(";"):
            rows += compare(name, options)
    except Unavailable as error:
        print(f"skipped: {error}")
        return 0
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def compare(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all contenders on one graph at all rates and return a row for each rate and contender."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, Cluster(ranks=options.ranks, rate="1gbit") as cluster:
        graph = with_labels(load(name, options.features), options.labelled)
        graph.save(Path(folder) / "graph")
        methods = {partition_of(contender, options.partition) for contender in options.contenders.split(",")}
        books = {method: make_book(graph, options.ranks, method=method) for method in sorted(methods)}
        save_file({method: book.part for method, book in books.items()}, Path(folder) / "part.safetensors")
        cuts = ", ".join(f"{method} {book.quality.cut:,}" for method, book in books.items())
        print(f"{name}: {graph.num_vertices:,} vertices, {graph.num_edges:,} edges, cut: {cuts}", flush=True)
        question = {**vars(options), "folder": folder}
        for rate in options.rates.split(","):
            if rate.endswith("x"):
                rate = as_slow(float(rate[:-1]), cluster, question)
            measured = ask(cluster, rate, question)
            rows += [{"graph": name, "rate": rate, **row} for row in measured]
            report(rate, measured)
    return rows


def ask(cluster: Cluster, rate: str, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `race` on all ranks at a rate and return a row for each contender.

    Args:
        cluster: The emulated cluster.
        rate: Rate of its links.
        question: The options of `race`.
    """
    cluster.set_rate(rate)
    return list(json.loads(cluster.run([__file__, "--rank", json.dumps(question)], timeout=3000).splitlines()[-1]))


def as_slow(times: float, cluster: Cluster, question: dict[str, Any]) -> str:
    """Return the rate at which transfers take `times` times as long as the computation of the first contender."""
    (row,) = ask(cluster, FAST, question | {"contenders": question["contenders"].split(",")[0]})
    return f"{round(max(row['rank_bytes']) * 8 / 1e3 / (times * max(row['compute_seconds'])))}kbit"


def partition_of(contender: str, default: str) -> str:
    """Return the partition method of a contender: the part of its name after `:`, or `default`."""
    return contender.partition("+")[0].partition("-")[0].partition(":")[2] or default


def load(name: str, features: int) -> Graph:
    """Load a graph; add random features and classes if it is only a topology."""
    bare = name.startswith(("topo_", "rmat")) and "features=" not in name
    return weft.load(name, random_features=features if bare else 0, random_classes=CLASSES if bare else 0)


def with_labels(graph: Graph, share: float) -> Graph:
    """Return the graph with a random split.

    Args:
        graph: Any graph.
        share: Fraction of the vertices to train on; the same number is for validation. 0: keep the graph's split.
    """
    if not share:
        return graph
    chosen = torch.randperm(graph.num_vertices, generator=torch.Generator().manual_seed(0))
    number, masks = round(share * graph.num_vertices), torch.zeros(2, graph.num_vertices, dtype=torch.bool)
    for side, mask in enumerate(masks):
        mask[chosen[side * number : (side + 1) * number]] = True
    return replace(graph, train_mask=masks[0], val_mask=masks[1], test_mask=None)


def race(options: dict[str, Any]) -> None:
    """Measure all contenders on this rank; rank 0 prints their rows as JSON."""
    keep_freed_memory()
    if "choices" in options:
        select_kernels(KernelSelection.from_record(options["choices"]))
    # The first optimizer imports PyTorch's compiler, which takes 1 s or more: import it before anything is timed.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).zero_grad()
    group = join(timeout_seconds=600, meter=Meter())
    folder = Path(options["folder"])
    graph = Graph.open(folder / "graph", verify=False)
    parts = load_file(folder / "part.safetensors")
    runners = {
        name: Runner(name, options, graph, parts[partition_of(name, options["partition"])], group)
        for name in options["contenders"].split(",")
    }
    compare_logits(runners, group)
    if row_seconds := options.get("row_seconds"):
        for runner in runners.values():
            runner.run(options["rounds"], row_seconds)
    else:
        for runner in chain.from_iterable([[*runners.values()]] * (options["rounds"] + 1)):
            runner.round()
    rows = [runner.row() for runner in runners.values()]
    if group.rank == 0:
        print(json.dumps(rows), flush=True)
    group.close()


class Runner:
    """One contender on one rank: its plan, its placed model, and the rounds that it has measured."""

    def __init__(self, name: str, options: dict[str, Any], graph: Graph, part: torch.Tensor, group: Group) -> None:
        self.name, self.group = name, group
        rest, *without = name.split("-")
        rest, _, self.model_name = rest.partition("+")
        rest, _, _ = rest.partition(":")
        rest, _, chunks = rest.partition("#")
        kind, _, ratio = rest.partition("@")
        torch.manual_seed(0)
        model = make_model(
            options["model"],
            graph.num_features,
            graph.num_classes,
            hidden=options["hidden"],
            layers=options["layers"],
            decoupled=self.model_name == "decoupled",
            input_dropout=options["input_dropout"],
        )
        work = Workload(model, graph, Optimisations.without(",".join([*without, options["disable"]])))
        self.batches = options["batches"]
        plan_options = {
            "partition": part,
            "batch_size": options["batch_size"],
            "fanout": options["fanout"],
            "cache_ratio": float(ratio) if ratio else None,
            "chunks": int(chunks or 0),
        }
        group.all_gather_object({})
        start = time.perf_counter()
        self.plan = make_plan(kind, work, group.size, **plan_options)
        measure_start = time.perf_counter()
        if kind == "hybrid" and not ratio and not options.get("nominal"):  # as with --measure
            unknown = Profile(host={"cores": num_cores()}, prices=[])
            machine, _ = measured_machine(work, group, unknown, hosts=group.size)
            self.plan = type(self.plan)(work, group.size, self.plan.options, machine)
        self.measure_seconds = time.perf_counter() - measure_start
        self.placed = self.plan.place(group)
        self.setup_seconds = time.perf_counter() - start
        self.task = make_task(Config(), self.placed)
        self.optimizer = torch.optim.Adam(self.placed.model.parameters(), lr=0.01)
        self.trained = -1
        """Number of the latest epoch that was trained."""
        self.rounds: list[dict[str, Any]] = []

    def round(self, epochs: int = 1) -> None:
        """Train and time some epochs, which all ranks begin together.

        An epoch has one step, or the first `batches` mini-batches.
        """
        self.group.all_gather_object({})
        self.group.meter.take("train")
        start = time.perf_counter()
        with self.group.meter.during("train"):
            for _ in range(epochs):
                self.trained += 1
                for step in islice(self.placed.steps(self.trained), self.batches):
                    self.optimizer.zero_grad()
                    train_step(self.placed, self.task, step)
                    self.optimizer.step()
        seconds = time.perf_counter() - start
        counts = self.group.meter.take("train")
        self.rounds.append(
            {
                "seconds": seconds / epochs,
                "stays": {name: stay / epochs for name, stay in counts.durations.items()},
                "bytes": sum(counts.bytes_sent.values()) // epochs,
                "edges": counts.edges // epochs,
            }
        )

    def run(self, rounds: int, least_seconds: float) -> None:
        """Measure rounds of several epochs, after two rounds of one epoch, the first for warm-up.

        In a real run epochs follow each other directly. A round of one epoch begins with a collective that the ranks
        leave at different times, so longer rounds are closer to a real run.

        Args:
            rounds: Number of rounds.
            least_seconds: Smallest duration of a round, which sets its number of epochs.
        """
        for _ in range(2):
            self.round()
        first_rounds = self.group.all_gather_object({"seconds": self.rounds.pop()["seconds"]})
        epochs = math.ceil(least_seconds / max(rank["seconds"] for rank in first_rounds))
        for _ in range(rounds):
            self.round(epochs)

    def row(self) -> dict[str, Any]:
        """Collect the measurements of all ranks and return the row of this contender, without the first round."""
        facts = self.placed.describe() | {"measure_seconds": self.measure_seconds}
        ranks = self.group.all_gather_object({"rounds": self.rounds[1:], "setup": self.setup_seconds, "facts": facts})
        rounds = list(zip(*(rank["rounds"] for rank in ranks), strict=True))
        exposed = [communication_seconds([rank["stays"] for rank in ranks_of_round]) for ranks_of_round in rounds]
        inside = [statistics.fmean(sum(rank["stays"].values()) for rank in ranks_of_round) for ranks_of_round in rounds]
        return {
            "contender": self.name,
            "seconds": [max(rank["seconds"] for rank in ranks_of_round) for ranks_of_round in rounds],
            "exposed_seconds": exposed,
            "waiting_seconds": [a - b for a, b in zip(inside, exposed, strict=True)],
            "bytes": statistics.fmean(sum(rank["bytes"] for rank in ranks_of_round) for ranks_of_round in rounds),
            "rank_bytes": [rank["bytes"] for rank in rounds[-1]],
            "compute_seconds": [
                statistics.median(epoch["seconds"] - sum(epoch["stays"].values()) for epoch in rounds_of_rank)
                for rounds_of_rank in zip(*rounds, strict=True)
            ],
            "edges": [rank["edges"] for rank in rounds[-1]],
            "setup_seconds": max(rank["setup"] for rank in ranks),
            "facts": [rank["facts"] for rank in ranks],
            "factors": asdict(self.plan.machine) if self.plan.machine else None,
        }


def compare_logits(runners: dict[str, Runner], group: Group) -> None:
    """Raise SystemExit if the logits of exact contenders differ on any vertex by more than `TOLERANCE`."""
    first: dict[str, torch.Tensor] = {}
    for runner in runners.values():
        logits = runner.placed.forward(Step(epoch=0, training=False))
        whole = torch.zeros(runner.placed.graph.num_vertices, logits.shape[1])
        whole[runner.placed.rows] = logits
        whole = group.all_reduce(whole, tag="check")
        expected = first.setdefault(runner.model_name, whole)
        apart = float((whole - expected).abs().max() / expected.abs().max())
        if runner.plan.exact and not apart <= TOLERANCE:
            raise SystemExit(f"{runner.name}: logits differ by {apart:.1e} of the largest")


def report(rate: str, rows: list[dict[str, Any]]) -> None:
    """Print a line for each contender: median, least and most seconds of an epoch, and the ratio to the first one."""
    base = statistics.median(rows[0]["seconds"])
    for row in rows:
        seconds = row["seconds"]
        exposed, waiting = (statistics.median(row[f"{kind}_seconds"]) for kind in ("exposed", "waiting"))
        median = statistics.median(seconds)
        cached, fetched = (sum(sum(facts.get(kind, [])) for facts in row["facts"]) for kind in ("cached", "fetched"))
        decision = max(facts.get("measure_seconds", 0) + facts.get("choice_seconds", 0) for facts in row["facts"])
        print(
            f"{rate:>8} {row['contender']:>22}: {median:7.3f} s ({min(seconds):.3f} to {max(seconds):.3f}) "
            f"{median / base:5.2f}x  exposed {exposed:6.3f} s waiting {waiting:6.3f} s  {row['bytes'] / 1e6:8.1f} MB  "
            f"{sum(row['edges']) / 1e6:8.0f} M edges x width  cached {cached:,} fetched {fetched:,}  "
            f"decision {decision:.2f} s ({decision / median:.1f} % of 100 epochs)",
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="topo_dblp-2010", help="graphs to train on, separated by semicolons")
    parser.add_argument(
        "--rates",
        default="200mbit,5gbit",
        help="rates of a rank's link, separated by commas; 2x: the rate at which transfers take twice as long as the "
        "computation of the first contender",
    )
    parser.add_argument("--contenders", default="communicated,cached,hybrid,tensor,stale")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--partition", default="metis")
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--batch-size", default="", help="split, sampled: number of training vertices per step")
    parser.add_argument(
        "--fanout", default="10", help="split, sampled: in-edges to sample per vertex, from the batch outward"
    )
    parser.add_argument("--batches", type=int, help="split, sampled: largest number of steps per epoch")
    parser.add_argument(
        "--labelled", type=float, default=0.0, help="fraction of the vertices to train on (0: the graph's split)"
    )
    parser.add_argument("--input-dropout", type=float, default=0.0)
    parser.add_argument("--disable", default="", help="optimisations to disable in all contenders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
