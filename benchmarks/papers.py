"""Compare published results of five papers with weft's estimates for their clusters and graphs, cell by cell.

    python benchmarks/papers.py --tables ../shared/papers/tables --papers neutronstar,hongtu --out NAME

A cell is one published comparison of systems. Each system is simulated by the strategy that its paper describes,
without the optimisations that it lacked. Graphs are R-MAT graphs of the published sizes, and GPUs are described by
their datasheets (weft/cost/datasheets.py); nothing is fitted to these tables. Cells that weft cannot simulate (sampled
mini-batches, CPU clusters, systems with the same strategy) are counted separately.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernels import save

from weft.autotune import Cluster
from weft.config.config import Config
from weft.cost import MemoryUse
from weft.cost.datasheets import BYTES, GATHER_EFFICIENCY, NUMBER_BYTES, PASSES_PER_HEAD, STREAM_EFFICIENCY
from weft.data import DescribedGraph
from weft.nn import GraphOperation
from weft.parallel.blocks.blocks import BlockStats
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.blocks.vertex_layout import VertexLayout
from weft.runtime.kernel_call import KernelCall
from weft.strategies import VertexOptions, register
from weft.strategies.vertex.plan import CommunicatedPlan, make_vertex_blocks
from weft.training.planning.machine_list import Machines, clusters_on
from weft.training.planning.plan_subject import DescribedSubject
from weft.training.planning.search import (
    StrategyEstimate,
    candidate_configs,
    estimate_config,
    first_fitting,
    misfit_reason,
)
from weft.training.run import prepared_workload

RESULTS = Path(__file__).parent / "results"
AIMS = {"order": 0.85, "ratio": 0.7, "memory": 0.9}
"""Fraction of the cells that should be right, by kind of comparison."""
RATIO = 1.5
"""Factor up to which a simulated ratio may differ from the published one."""
LACKED = "reach,reuse,sparse,swap"
"""Optimisations that no full-graph system of these papers has: they compute all rows in every step, from dense
features."""
RAW = f"{LACKED},cover,ring,overlap"
"""Optimisations to disable for systems without optimised communication."""
BY_EDGE = ("Sum", "Max", "Attend", "AttendEdges")
"""Price tables of kernels whose time depends on the edges."""
EDGE_SOFTMAX_PASSES = 14
"""Passes over arrays with a number for each edge and head, in the forward pass of attention in these systems: sum of
the logits (3), LeakyReLU (2), maximum by target (1), its subtraction (2), exponentials (2), their sum (1), the division
by it (2), and reading the weights in the sum of rows (1)."""
PRINTED_ONCE = ("ogbn-products",)
"""Undirected graphs whose edges papers count once, while systems store both directions (OGB: 61,859,140 edges). For
other graphs the printed number of edges counts, even if the printed degree disagrees: the degree of Twitter is twice as
large, since it counts both directions."""
MODELS = {"GCN": "gcn", "GAT": "gat", "GIN": "gin", "GraphSAGE": "sage"}


class System(NamedTuple):
    """A system of a paper, as weft simulates it."""

    options: Mapping[str, Any]
    """Fields of the configuration."""
    chunked: bool = False
    """Whether edges and rows are loaded chunk by chunk from the host even if all of them fit on the device."""
    messages: bool = False
    """Whether an edge function writes a row for each edge before the rows are summed (NeutronStar, section 4.1)."""
    on_host: bool = False
    """Whether these rows are kept on the host until the backward pass (section 5.8), so that a run always fits."""
    feature_gradients: bool = False
    """Whether gradients are kept for the features as well as for every layer (HongTu, section 1, Table 1)."""
    unlike: str = ""
    """Known difference between the system and the simulated strategy."""


def vertex(strategy: str, disable: str = f"{LACKED},cover", **options: Any) -> Mapping[str, Any]:
    return {"strategy": strategy, "disable": disable, **options}


def neutronstar(strategy: str, disable: str) -> System:
    """Return a system of the NeutronStar paper, which loads chunks of edges and rows one by one (section 4.3)."""
    unlike = "the partition is that of an R-MAT graph, whose cut differs from the real graph's"
    return System(vertex(strategy, disable), messages=True, on_host=True, unlike=unlike)


class SancusBlocks(VertexBlocks):
    """Blocks of a rank that receives all rows of all others."""

    def sizes(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        owned = [len(part.owned) for part in self.all_dependencies]
        others = sum(owned) - owned[rank]
        return replace(super().sizes(rank, op, number), num_sent=owned[rank] * (len(owned) - 1), num_received=others)


@register
class SancusPlan(CommunicatedPlan):
    """Plan of Sancus: every rank sends all its rows to all others in every epoch (NeutronTP, section 5.2)."""

    name = "sancus"
    options: VertexOptions

    def make_layout(self) -> VertexLayout:
        caching, partition = make_vertex_blocks(self, ratio=0.0).caching, self.options.partition
        return VertexLayout(SancusBlocks(self.work, self.size, partition, caching, self.traits, covers=True))


SANCUS = System(
    vertex(SancusPlan.name, RAW, partition="metis"), unlike="the paper does not say how often Sancus skips a broadcast"
)
SYSTEMS: Mapping[tuple[str, str], System] = {
    ("neutrontp", "NeutronTP"): System(
        {"strategy": "tensor", "decoupled": True, "disable": LACKED},
        chunked=True,
        unlike="NeutronTP transforms rows on the CPU",
    ),
    ("neutrontp", "NeutronStar"): System(
        vertex("hybrid"),
        messages=True,
        unlike="NeutronStar partitions the real graph by ranges, which cut more edges than in an R-MAT graph",
    ),
    ("neutrontp", "Sancus"): SANCUS,
    ("neutronstar", "DepCache"): neutronstar("cached", RAW),
    ("neutronstar", "DepComm"): neutronstar("communicated", RAW),
    ("neutronstar", "Hybrid"): neutronstar("hybrid", f"{LACKED},cover"),
    ("g3", "G3"): System({"strategy": "pipeline", "disable": LACKED}),
    ("g3", "BNS-GCN p=1"): System(vertex("communicated", RAW, partition="metis")),
    ("g3", "NeutronStar"): System(vertex("hybrid"), messages=True),
    ("hongtu", "HongTu"): System(
        {"strategy": "offload", "disable": LACKED, "partition": "metis"},
        chunked=True,
        unlike="weft pins rows in blocks whose size is a power of two; the formula of Table 1 also exceeds 512 GB",
    ),
    ("hongtu", "without deduplication"): System(
        {"strategy": "offload", "disable": f"{LACKED},share,keep,reorder", "partition": "metis"},
        chunked=True,
        unlike="an R-MAT graph has less locality than the real graph",
    ),
    ("hongtu", "HongTu-IM"): System(vertex("communicated", RAW, partition="metis"), feature_gradients=True),
    ("hongtu", "DGL"): System({"strategy": "single", "disable": LACKED}),
    ("hongtu", "Sancus"): SANCUS,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A published comparison of systems on one graph."""

    name: str
    paper: str
    testbed: str
    dataset: str
    model: str
    layers: int
    seconds: Mapping[str, float]
    """Published seconds of an epoch by system, or relative times."""
    too_large: Sequence[str]
    """Systems that ran out of memory."""
    hidden: int = 0
    """Width of the hidden layers. 0: the value of the dataset."""
    links: bool = False
    """Whether the task is link prediction."""


class Judged(NamedTuple):
    """The result of a simulated cell. Each pair of numbers counts the right comparisons and all comparisons."""

    lines: list[str]
    """Text of each comparison."""
    order: tuple[int, int]
    """Pairs of systems: the faster one is also faster in the simulation."""
    ratio: tuple[int, int]
    """Pairs of systems: the ratio of their times is right within the factor `RATIO`."""
    memory: tuple[int, int]
    """Systems: they fit into memory in the simulation if and only if they did in the paper."""
    causes: list[str]
    """Known reasons for comparisons that are wrong."""


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    tables = options.tables
    rows = list(csv.DictReader((tables / "cells.csv").read_text().splitlines()))
    selected = [row for row in rows if row["paper"] in options.papers.split(",")]
    read = {row["cell"]: read_cell(row) for row in selected}
    skipped = Counter(why for why in read.values() if isinstance(why, str))
    for name, why in read.items():
        if isinstance(why, str):
            print(f"{name}: not simulated: {why}", flush=True)
    judged_cells = read_record(options.out)
    for name, cell in read.items():
        if isinstance(cell, str):
            continue
        if name not in judged_cells:
            judged_cells[name] = judge(cell, tables)
        judged = judged_cells[name]
        print(f"{name} {cell.testbed} {cell.dataset} {cell.model} {cell.layers}", *judged.lines, sep="\n  ", flush=True)
        if judged.causes:
            print(f"  wrong: {'; '.join(judged.causes)}", flush=True)
        if options.out:
            save(options.out, record(judged_cells, skipped))
    counts = f"{len(judged_cells)} of {len(selected)} cells simulated; not simulated: "
    print(counts + "; ".join(f"{count} {why}" for why, count in skipped.items()))
    totals: dict[str, dict[str, int]] = record(judged_cells, skipped)["totals"]
    for what, total in totals.items():
        share = f"{total['cells_right'] / max(total['cells'], 1):.0%} of {total['cells']} cells (aim {AIMS[what]:.0%})"
        print(f"{what}: right in {share}, and in {total['right']} of {total['of']} comparisons")
    return 0


def read_record(name: str | None) -> dict[str, Judged]:
    """Return the cells that an earlier run has written to a record; none if there is no such record."""
    path = RESULTS / f"{name}.json"
    if not name or not path.exists():
        return {}
    return {cell: Judged(**fields) for cell, fields in json.loads(path.read_text())["cells"].items()}


def record(judged: Mapping[str, Judged], skipped: Mapping[str, int]) -> dict[str, Any]:
    """Return the cells so far and their totals, for JSON; a cell is right if all of its comparisons are."""
    totals = {}
    for what in AIMS:
        right = [getattr(cell, what) for cell in judged.values()]
        cells = [good == count for good, count in right if count]
        totals[what] = {
            "cells_right": sum(cells),
            "cells": len(cells),
            "right": sum(good for good, _ in right),
            "of": sum(count for _, count in right),
        }
    return {
        "totals": totals,
        "cells": {name: cell._asdict() for name, cell in judged.items()},
        "not_simulated": dict(skipped),
    }


def parse() -> argparse.Namespace:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("WEFT_PAPERS", "../shared/papers/tables"))
    command.add_argument(
        "--tables", type=Path, default=default, help="folder with the numbers of the papers (default: $WEFT_PAPERS)"
    )
    command.add_argument(
        "--papers", default="neutrontp,neutronstar,g3,gsplit,hongtu", help="papers, separated by commas"
    )
    command.add_argument(
        "--out",
        help="write the results to benchmarks/results/NAME.json; cells that it contains are not simulated again",
    )
    return command.parse_args()


TIMED = re.compile(r"(?P<system>[^<=\[\]]+?) \[(?P<strategy>[^\]]+)\] (?P<value>[\d.]+)")
FASTER = re.compile(r"(?P<first>[^\[]+?) \[[^\]]+\] faster than (?P<second>[^\[]+?) ?\[[^\]]+\]")
BARE = re.compile(r"([^\[\],]+?) \[")


def read_cell(row: Mapping[str, str]) -> Cell | str:
    """Return the cell of a row of cells.csv, or the reason why it cannot be simulated."""
    testbed = row["testbed"].split(" ")[0]
    if row["kind"] not in ("order", "ratio"):
        return f"of kind {row['kind']}"
    if not row["layers"].isdigit() or row["model"] not in MODELS or "," in row["dataset"] or " " in row["dataset"]:
        return "with several graphs, models or numbers of layers"
    timed = {match["system"].strip(): float(match["value"]) for match in TIMED.finditer(row["order"].split(";")[0])}
    if not timed and (match := FASTER.fullmatch(row["order"])) and re.fullmatch(r"[\d.]+", row["ratios"]):
        timed = {match["first"]: 1.0, match["second"]: float(row["ratios"])}
    seconds = {name: value for name, value in timed.items() if (row["paper"], name) in SYSTEMS}
    too_large = [name.strip() for name in BARE.findall(row["oom"])] if row["oom"] not in ("", "none") else []
    too_large = [name for name in too_large if (row["paper"], name) in SYSTEMS]
    strategies = {SYSTEMS[row["paper"], name].options["strategy"] for name in seconds}
    if len(strategies) < 2 and not too_large and len(seconds) < 2:
        return "with systems that sample, run on CPUs, or have the same strategy"
    hidden = re.search(r"hidden (\d+)", row["setting"])
    return Cell(
        name=row["cell"],
        paper=row["paper"],
        testbed=testbed + (" (one GPU)" if "one GPU" in row["testbed"] else ""),
        dataset=row["dataset"],
        model=row["model"],
        layers=int(row["layers"]),
        seconds=seconds,
        too_large=too_large,
        hidden=int(hidden[1]) if hidden else 0,
        links="link prediction" in row["setting"],
    )


def judge(cell: Cell, tables: Path) -> Judged:
    """Simulate the systems of a cell and compare them with the published numbers.

    Args:
        cell: The published comparison.
        tables: Folder with the numbers of the papers.
    """
    simulated = {name: simulate(cell, name, tables) for name in (*cell.seconds, *cell.too_large)}
    lines, causes = [], set[str]()
    order, ratio, memory = [0, 0], [0, 0], [0, 0]
    for name, estimate in simulated.items():
        published = f"{cell.seconds[name]:.4g}" if name in cell.seconds else "OOM"
        result = f"{estimate.epoch_seconds:.4g} s" + ("" if estimate.fits else f", {estimate.reason}")
        lines.append(f"{name} [{estimate.strategy}]: published {published}, simulated {result}")
        right = estimate.fits == (name in cell.seconds)
        memory = [memory[0] + right, memory[1] + 1]
        if not right:
            causes.add(
                f"memory of {name}: "
                + (SYSTEMS[cell.paper, name].unlike or "weft and the system use different amounts of memory")
            )
    ranked = sorted(cell.seconds, key=lambda name: cell.seconds[name])
    for index, first in enumerate(ranked):
        for second in ranked[index + 1 :]:
            if not (simulated[first].epoch_seconds and simulated[second].epoch_seconds):
                continue
            expected = cell.seconds[second] / cell.seconds[first]
            actual = simulated[second].epoch_seconds / simulated[first].epoch_seconds
            order_right, ratio_right = actual >= 1 or expected == 1, 1 / RATIO <= actual / expected <= RATIO
            order, ratio = [order[0] + order_right, order[1] + 1], [ratio[0] + ratio_right, ratio[1] + 1]
            lines.append(f"{second}/{first}: published {expected:.2f}, simulated {actual:.2f}")
            if not (order_right and ratio_right):
                reasons = dict.fromkeys(SYSTEMS[cell.paper, name].unlike for name in (first, second))
                causes |= {f"{second}/{first}: {' and '.join(filter(None, reasons)) or 'unknown cause'}"}
    return Judged(lines, (order[0], order[1]), (ratio[0], ratio[1]), (memory[0], memory[1]), sorted(causes))


def simulate(cell: Cell, name: str, tables: Path) -> StrategyEstimate:
    """Estimate the time and the memory of a system in a cell.

    Args:
        cell: The published comparison.
        name: Name of the system.
        tables: Folder with the numbers of the papers.
    """
    system, graph = SYSTEMS[cell.paper, name], dataset(tables, cell.paper, cell.dataset)
    config = Config(
        graph=cell.dataset,
        model=MODELS[cell.model],
        layers=cell.layers,
        hidden=cell.hidden or int(graph["hidden"]),
        dropout=0.0,
        **system.options,
    )
    machines = testbed(tables, cell.paper, cell.testbed)
    ranks = machines.hosts * machines.gpus
    if config.strategy == "communicated" and ranks == 1:
        config = replace(config, strategy="single", partition="", disable=LACKED)
    (cluster,) = map(with_edge_softmax, clusters_on([machines], Config(), None))
    if system.messages:
        cluster = with_messages(cluster, on_host=system.on_host)
    requested = replace(config, workers=cluster.ranks)
    subject = described(tables, cell.paper, cell.dataset, replace(config, strategy="single", partition=""))
    whole, *in_chunks = candidate_configs(requested, subject, cluster)
    if system.on_host:
        estimate = estimate_config(whole, requested, subject, cluster)
        estimate = replace(estimate, fits=True) if estimate.epoch_seconds else estimate
    else:
        estimate = first_fitting(in_chunks if system.chunked else [whole, *in_chunks], requested, subject, cluster)
    if system.feature_gradients and estimate.fits:
        more_bytes = NUMBER_BYTES * int(graph["vertices"]) * int(graph["features"]) // cluster.ranks
        memory = MemoryUse(estimate.device_bytes + more_bytes, estimate.host_bytes, estimate.disk_bytes)
        reason = misfit_reason(memory, whole, cluster)
        estimate = replace(estimate, device_bytes=memory.device, fits=not reason, reason=reason)
    scoring = scoring_seconds(graph, cluster) if cell.links and estimate.epoch_seconds else 0.0
    return replace(estimate, epoch_seconds=estimate.epoch_seconds + scoring)


def scoring_seconds(graph: Mapping[str, str], cluster: Cluster) -> float:
    """Return the seconds that link prediction adds to an epoch.

    Each rank scores its share of the edges, and as many random pairs. A score is the product of two rows whose width is
    the number of classes. Endpoints belong to any rank, so all ranks get all rows and send the gradients back. The
    sampling of pairs is not counted: hosts do it, and no datasheet has its time.
    """
    (prices,), network = cluster.profile.prices, cluster.profile.network_of(cluster.ranks, cluster.hosts)
    row = NUMBER_BYTES * int(graph["classes"])
    ends = 2 * 2 * int(graph["edges"]) // cluster.ranks
    calls = [
        KernelCall("gather", (ends, row), 2),  # rows gathered, gradients accumulated
        KernelCall("pass", (ends * row,), 3),  # multiplication; gradients read and written
        KernelCall("loss", (ends // 2, 1)),
    ]
    fetched = int(graph["vertices"]) * (cluster.ranks - 1) // cluster.ranks * row
    return sum(map(prices.seconds, calls)) + 2 * network.seconds("halo", fetched)


def with_edge_softmax(cluster: Cluster) -> Cluster:
    """Return the cluster with prices of attention by separate kernels over edges and heads (`EDGE_SOFTMAX_PASSES`)."""
    (prices,) = cluster.profile.prices
    gathered = prices.tables["pass"].at((BYTES[-1],)) * STREAM_EFFICIENCY / GATHER_EFFICIENCY
    tables = dict(prices.tables)
    for name, table in prices.tables.items():
        if name.startswith("Attend"):
            # A pass reads or writes `heads` numbers per edge: `heads / width` of the bytes of an edge's row.
            passes = (EDGE_SOFTMAX_PASSES - PASSES_PER_HEAD) * (1 + name.endswith("_backward"))
            added = (passes * heads / width * NUMBER_BYTES * gathered for *_, width, heads in product(*table.axes))
            tables[name] = replace(table, seconds=tuple(map(sum, zip(table.seconds, added, strict=True))))
    return replace(cluster, profile=replace(cluster.profile, prices=[replace(prices, tables=tables)]))


def with_messages(cluster: Cluster, *, on_host: bool) -> Cluster:
    """Return the cluster with prices for an edge function, which moves the row of each edge four times.

    The row is written for the function, read by it, written as its result, and read for the sum.

    Args:
        cluster: The cluster.
        on_host: Whether the row also goes to the host, until the backward pass.
    """
    (prices,) = cluster.profile.prices
    moved = 4 * prices.tables["pass"].at((BYTES[-1],)) + on_host * prices.link_seconds
    added = NUMBER_BYTES * moved
    tables = {
        name: replace(table, seconds=tuple(seconds + added for seconds in table.seconds))
        if name.removesuffix("_backward") in BY_EDGE
        else table
        for name, table in prices.tables.items()
    }
    return replace(cluster, profile=replace(cluster.profile, prices=[replace(prices, tables=tables)]))


@cache
def described(tables: Path, paper: str, name: str, config: Config) -> DescribedSubject:
    """Describe a paper's graph as an R-MAT graph of the same size.

    Args:
        tables: Folder with the numbers of the papers.
        paper: Name of the paper.
        name: Name of the dataset.
        config: Configuration whose model runs on the graph.
    """
    row = dataset(tables, paper, name)
    graph = DescribedGraph(
        num_vertices=int(row["vertices"]),
        num_edges=int(row["edges"]) * (2 if name.lower() in PRINTED_ONCE else 1),
        num_features=int(row["features"]),
        num_classes=int(row["classes"]),
    )
    return DescribedSubject(graph, partial(_workload, config))


def _workload(config: Config, graph: Any) -> Any:
    return prepared_workload(config, graph, None)


@cache
def dataset(tables: Path, paper: str, name: str) -> Mapping[str, str]:
    """Return the row of a graph in the datasets.csv of a paper."""
    rows = csv.DictReader((tables / paper / "datasets.csv").read_text().splitlines())
    return next(row for row in rows if row["dataset"].lower() == name.lower())


@cache
def testbed(tables: Path, paper: str, name: str) -> Machines:
    """Return the machines of a paper's testbed."""
    beds = tomllib.loads((tables / paper / "hardware.toml").read_text())["testbed"]
    bed = next(entry for entry in beds if entry["id"] == name.removesuffix(" (one GPU)"))
    model = bed.get("datasheet", {}).get("gpu", bed["gpu"])
    gpu = re.sub(r"NVIDIA|GeForce|Tesla|80GB|\s", "", model)
    is_single = name.endswith("(one GPU)")
    hosts = int(bed["nodes"])
    network = f"{bed['network_Gbps']}gbit" if hosts > 1 else ""
    memory = f"{bed['ram_GB']}GB" if "ram_GB" in bed else ""
    return Machines(
        hosts=hosts, gpu=gpu, gpus=1 if is_single else int(bed["gpus_per_node"]), memory=memory, network=network
    )


if __name__ == "__main__":
    sys.exit(main())
