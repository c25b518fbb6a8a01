"""The clusters, graphs and results of five papers, as published and as simulated, cell by cell.

    python benchmarks/papers.py --tables ../shared/papers/tables --papers neutronstar,hongtu --out NAME

Each system is the strategy that its paper describes, without the optimisations that it lacked. A graph is R-MAT's of
the paper's numbers, a GPU its datasheet (weft/cost/datasheets.py): nothing is fitted to these tables. Cells with systems
that weft cannot tell of (sampled mini-batches, CPU clusters, several that are one strategy) are counted apart.
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
from weft.cost.datasheets import BYTES, GATHER_EFFICIENCY, NUMBER_BYTES, PASSES_PER_HEAD, STREAM_EFFICIENCY
from weft.data import DescribedGraph
from weft.nn import GraphOperation
from weft.runtime.kernel_call import KernelCall
from weft.strategies import MemoryUse, register
from weft.strategies.vertex.blocks import BlockStats
from weft.strategies.vertex.plan import CommunicatedPlan
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
"""The share of cells that are to be right."""
RATIO = 1.5
"""Within which a ratio is right."""
LACKED = "reach,reuse,sparse,swap"
"""What no full-graph system of these papers does: all rows are computed, in every step, from dense features."""
RAW = f"{LACKED},cover,ring,overlap"
BY_EDGE = ("Sum", "Max", "Attend", "AttendEdges")
"""Tables of kernels that work edge by edge."""
EDGE_SOFTMAX_PASSES = 14
"""Over numbers by edge and head, forward, as the layers of these systems' time make attention: logits added up (3),
LeakyReLU (2), the maximum by target (1), what is subtracted (2), exponentials (2), their sum (1), what divides (2), and
the weights of the sum of rows (1)."""
PRINTED_ONCE = ("ogbn-products",)
"""Undirected graphs whose edges papers count once and systems store both ways (OGB: 61,859,140). Others have the edges
that are printed, whatever degree stands beside them: Twitter's, twice as large, is of both directions."""
MODELS = {"GCN": "gcn", "GAT": "gat", "GIN": "gin", "GraphSAGE": "sage"}


class System(NamedTuple):
    """What a paper's system is here."""

    options: Mapping[str, Any]
    """Fields of a configuration."""
    chunked: bool = False
    """Whether edges and rows come from the host chunk by chunk, also where the device has room for all."""
    messages: bool = False
    """Whether it makes a row of each edge, by a function of edges, before it sums them (NeutronStar, section 4.1)."""
    on_host: bool = False
    """Whether it keeps these rows on the host until the backward pass (section 5.8), so that it always fits."""
    feature_gradients: bool = False
    """Whether the gradients that it keeps, of every layer, are of the features as well (HongTu, section 1, Table 1)."""
    unlike: str = ""
    """What it does otherwise than the strategy."""


def vertex(strategy: str, disable: str = f"{LACKED},cover", **options: Any) -> Mapping[str, Any]:
    return {"strategy": strategy, "disable": disable, **options}


def neutronstar(strategy: str, disable: str) -> System:
    """As its own paper has it: chunks of edges and rows come to the GPU one by one (section 4.3)."""
    unlike = "parts are cut from R-MAT, whose cut is not the real graph's"
    return System(vertex(strategy, disable), messages=True, on_host=True, unlike=unlike)


@register
class SancusPlan(CommunicatedPlan):
    """All rows of a rank go to all others, whoever needs them (NeutronTP, section 5.2), in every epoch."""

    name = "sancus"

    def block(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        own = [len(one.owned) for one in self.all_dependencies]
        others = sum(own) - own[rank]
        return replace(super().block(rank, op, number), num_sent=own[rank] * (len(own) - 1), num_received=others)


SANCUS = System(
    vertex(SancusPlan.name, RAW, partition="metis"), unlike="how often Sancus skips a broadcast is not in the tables"
)
SYSTEMS: Mapping[tuple[str, str], System] = {
    ("neutrontp", "NeutronTP"): System(
        {"strategy": "tensor", "decoupled": True, "disable": LACKED},
        chunked=True,
        unlike="NeutronTP maps rows on the CPU",
    ),
    ("neutrontp", "NeutronStar"): System(
        vertex("hybrid"),
        messages=True,
        unlike="NeutronStar's parts, of range chunks of the real graph, cut more than R-MAT's",
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
        unlike="weft's rows are pinned in blocks of a power of two; Table 1's formula is beyond 512 GB as well",
    ),
    ("hongtu", "without deduplication"): System(
        {"strategy": "offload", "disable": f"{LACKED},share,keep,reorder", "partition": "metis"},
        chunked=True,
        unlike="R-MAT has less locality than the real graph",
    ),
    ("hongtu", "HongTu-IM"): System(vertex("communicated", RAW, partition="metis"), feature_gradients=True),
    ("hongtu", "DGL"): System({"strategy": "single", "disable": LACKED}),
    ("hongtu", "Sancus"): SANCUS,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A comparison as it was published."""

    name: str
    paper: str
    testbed: str
    dataset: str
    model: str
    layers: int
    seconds: Mapping[str, float]
    """Of an epoch, or relative, by system."""
    too_large: Sequence[str]
    """Systems that ran out of memory."""
    hidden: int = 0
    """0: the dataset's."""
    links: bool = False
    """Whether it is of link prediction."""


class Judged(NamedTuple):
    """A cell as simulated: pairs of systems in the right order, ratios and memory that are right, and how many."""

    lines: list[str]
    order: tuple[int, int]
    ratio: tuple[int, int]
    memory: tuple[int, int]
    causes: list[str]


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    tables = options.tables
    rows = list(csv.DictReader((tables / "cells.csv").read_text().splitlines()))
    asked = [row for row in rows if row["paper"] in options.papers.split(",")]
    read = {row["cell"]: read_cell(row) for row in asked}
    skipped = Counter(why for why in read.values() if isinstance(why, str))
    for name, why in read.items():
        if isinstance(why, str):
            print(f"{name}: not simulated: {why}", flush=True)
    found = known_cells(options.out)
    for name, cell in read.items():
        if isinstance(cell, str):
            continue
        judged = found[name] = found[name] if name in found else judge(cell, tables)
        print(f"{name} {cell.testbed} {cell.dataset} {cell.model} {cell.layers}", *judged.lines, sep="\n  ", flush=True)
        if judged.causes:
            print(f"  misses: {'; '.join(judged.causes)}", flush=True)
        if options.out:
            save(options.out, record(found, skipped))
    told = f"{len(found)} of {len(asked)} cells simulated; not: "
    print(told + "; ".join(f"{count} {why}" for why, count in skipped.items()))
    totals: dict[str, dict[str, int]] = record(found, skipped)["totals"]
    for what, one in totals.items():
        share = f"{one['cells_right'] / max(one['cells'], 1):.0%} of {one['cells']} cells (aim {AIMS[what]:.0%})"
        print(f"{what}: right in {share}, and in {one['right']} of {one['of']} comparisons")
    return 0


def known_cells(name: str | None) -> dict[str, Judged]:
    """Those that are in a record already, from where a run goes on."""
    path = RESULTS / f"{name}.json"
    if not name or not path.exists():
        return {}
    return {cell: Judged(**told) for cell, told in json.loads(path.read_text())["cells"].items()}


def record(found: Mapping[str, Judged], skipped: Mapping[str, int]) -> dict[str, Any]:
    """The cells so far and their totals: a cell is right where all of its comparisons are."""
    totals = {}
    for what in AIMS:
        right = [getattr(one, what) for one in found.values()]
        cells = [good == count for good, count in right if count]
        totals[what] = {
            "cells_right": sum(cells),
            "cells": len(cells),
            "right": sum(good for good, _ in right),
            "of": sum(count for _, count in right),
        }
    return {
        "totals": totals,
        "cells": {name: one._asdict() for name, one in found.items()},
        "not_simulated": dict(skipped),
    }


def parse() -> argparse.Namespace:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("WEFT_PAPERS", "../shared/papers/tables"))
    command.add_argument("--tables", type=Path, default=default, help="folder of the papers' numbers ($WEFT_PAPERS)")
    command.add_argument("--papers", default="neutrontp,neutronstar,g3,gsplit,hongtu")
    command.add_argument("--out", help="name of the record in benchmarks/results, which goes on where it ended")
    return command.parse_args()


TIMED = re.compile(r"(?P<system>[^<=\[\]]+?) \[(?P<strategy>[^\]]+)\] (?P<value>[\d.]+)")
FASTER = re.compile(r"(?P<first>[^\[]+?) \[[^\]]+\] faster than (?P<second>[^\[]+?) ?\[[^\]]+\]")
BARE = re.compile(r"([^\[\],]+?) \[")


def read_cell(row: Mapping[str, str]) -> Cell | str:
    """A cell, or why it cannot be simulated."""
    testbed = row["testbed"].split(" ")[0]
    if row["kind"] not in ("order", "ratio"):
        return f"a cell of kind {row['kind']}"
    if not row["layers"].isdigit() or row["model"] not in MODELS or "," in row["dataset"] or " " in row["dataset"]:
        return "of several graphs, models or layers"
    timed = {match["system"].strip(): float(match["value"]) for match in TIMED.finditer(row["order"].split(";")[0])}
    if not timed and (match := FASTER.fullmatch(row["order"])) and re.fullmatch(r"[\d.]+", row["ratios"]):
        timed = {match["first"]: 1.0, match["second"]: float(row["ratios"])}
    known = {name: value for name, value in timed.items() if (row["paper"], name) in SYSTEMS}
    too_large = [name.strip() for name in BARE.findall(row["oom"])] if row["oom"] not in ("", "none") else []
    too_large = [name for name in too_large if (row["paper"], name) in SYSTEMS]
    strategies = {SYSTEMS[row["paper"], name].options["strategy"] for name in known}
    if len(strategies) < 2 and not too_large and len(known) < 2:
        return "whose systems are sampled, on CPUs, or one strategy"
    hidden = re.search(r"hidden (\d+)", row["setting"])
    return Cell(
        name=row["cell"],
        paper=row["paper"],
        testbed=testbed + (" (one GPU)" if "one GPU" in row["testbed"] else ""),
        dataset=row["dataset"],
        model=row["model"],
        layers=int(row["layers"]),
        seconds=known,
        too_large=too_large,
        hidden=int(hidden[1]) if hidden else 0,
        links="link prediction" in row["setting"],
    )


def judge(cell: Cell, tables: Path) -> Judged:
    """A cell as simulated."""
    simulated = {name: simulate(cell, name, tables) for name in (*cell.seconds, *cell.too_large)}
    lines, causes = [], set[str]()
    order, ratio, memory = [0, 0], [0, 0], [0, 0]
    for name, one in simulated.items():
        published = f"{cell.seconds[name]:.4g}" if name in cell.seconds else "OOM"
        told = f"{one.epoch_seconds:.4g} s" + ("" if one.fits else f", {one.reason}")
        lines.append(f"{name} [{one.strategy}]: published {published}, simulated {told}")
        right = one.fits == (name in cell.seconds)
        memory = [memory[0] + right, memory[1] + 1]
        if not right:
            causes.add(f"memory of {name}: " + (SYSTEMS[cell.paper, name].unlike or "weft's footprint is not its own"))
    ranked = sorted(cell.seconds, key=lambda name: cell.seconds[name])
    for place, first in enumerate(ranked):
        for second in ranked[place + 1 :]:
            if not (simulated[first].epoch_seconds and simulated[second].epoch_seconds):
                continue
            published = cell.seconds[second] / cell.seconds[first]
            told = simulated[second].epoch_seconds / simulated[first].epoch_seconds
            order_right, ratio_right = told >= 1 or published == 1, 1 / RATIO <= told / published <= RATIO
            order, ratio = [order[0] + order_right, order[1] + 1], [ratio[0] + ratio_right, ratio[1] + 1]
            lines.append(f"{second}/{first}: published {published:.2f}, simulated {told:.2f}")
            if not (order_right and ratio_right):
                said = dict.fromkeys(SYSTEMS[cell.paper, name].unlike for name in (first, second))
                causes |= {f"{second}/{first}: {' and '.join(filter(None, said)) or 'not known'}"}
    return Judged(lines, (order[0], order[1]), (ratio[0], ratio[1]), (memory[0], memory[1]), sorted(causes))


def simulate(cell: Cell, name: str, tables: Path) -> StrategyEstimate:
    """What a system takes in a cell."""
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
    asked = replace(config, workers=cluster.ranks)
    subject = described(tables, cell.paper, cell.dataset, replace(config, strategy="single", partition=""))
    whole, *in_chunks = candidate_configs(asked, subject, cluster)
    if system.on_host:
        found = estimate_config(whole, asked, subject, cluster)
        found = replace(found, fits=True) if found.epoch_seconds else found
    else:
        found = first_fitting(in_chunks if system.chunked else [whole, *in_chunks], asked, subject, cluster)
    if system.feature_gradients and found.fits:
        more_bytes = NUMBER_BYTES * int(graph["vertices"]) * int(graph["features"]) // cluster.ranks
        held = MemoryUse(found.device_bytes + more_bytes, found.host_bytes, found.disk_bytes)
        reason = misfit_reason(held, whole, cluster)
        found = replace(found, device_bytes=held.device, fits=not reason, reason=reason)
    more = scoring_seconds(graph, cluster) if cell.links and found.epoch_seconds else 0.0
    return replace(found, epoch_seconds=found.epoch_seconds + more)


def scoring_seconds(graph: Mapping[str, str], cluster: Cluster) -> float:
    """What link prediction takes beside the model: a rank scores its share of the edges, and as many pairs by chance.

    A score is the product of two rows as wide as there are classes. Ends are anybody's, so all rows go to all ranks,
    and their gradients back. Drawing pairs is left out, since hosts do it, of which no datasheet tells.
    """
    (prices,), network = cluster.profile.prices, cluster.profile.network_of(cluster.ranks, cluster.hosts)
    row = NUMBER_BYTES * int(graph["classes"])
    ends = 2 * 2 * int(graph["edges"]) // cluster.ranks
    calls = [
        KernelCall("gather", (ends, row), 2),  # brought, and gradients added up
        KernelCall("pass", (ends * row,), 3),  # multiplied; gradients read and written
        KernelCall("loss", (ends // 2, 1)),
    ]
    fetched = int(graph["vertices"]) * (cluster.ranks - 1) // cluster.ranks * row
    return sum(map(prices.seconds, calls)) + 2 * network.seconds("halo", fetched)


def with_edge_softmax(cluster: Cluster) -> Cluster:
    """A cluster where attention is made by several kernels over numbers by edge and head, see EDGE_SOFTMAX_PASSES."""
    (prices,) = cluster.profile.prices
    gathered = prices.tables["pass"].at((BYTES[-1],)) * STREAM_EFFICIENCY / GATHER_EFFICIENCY
    tables = dict(prices.tables)
    for name, table in prices.tables.items():
        if name.startswith("Attend"):
            passes = (EDGE_SOFTMAX_PASSES - PASSES_PER_HEAD) * (1 + name.endswith("_backward"))
            added = (passes * heads / width * NUMBER_BYTES * gathered for *_, width, heads in product(*table.axes))
            tables[name] = replace(table, seconds=tuple(map(sum, zip(table.seconds, added, strict=True))))
    return replace(cluster, profile=replace(cluster.profile, prices=[replace(prices, tables=tables)]))


def with_messages(cluster: Cluster, *, on_host: bool) -> Cluster:
    """A cluster where each edge's row is written for a function of edges, read by it, written again, and read.

    on_host: and goes to the host, from where it comes back for the backward pass.
    """
    (prices,) = cluster.profile.prices
    moved = 4 * prices.tables["pass"].at((BYTES[-1],)) + on_host * prices.link_seconds
    added = NUMBER_BYTES * moved
    tables = {
        name: replace(table, seconds=tuple(one + added for one in table.seconds))
        if name.removesuffix("_backward") in BY_EDGE
        else table
        for name, table in prices.tables.items()
    }
    return replace(cluster, profile=replace(cluster.profile, prices=[replace(prices, tables=tables)]))


@cache
def described(tables: Path, paper: str, name: str, config: Config) -> DescribedSubject:
    """A paper's graph, of which R-MAT's usual skew is assumed."""
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
    """The row of a paper's graph."""
    rows = csv.DictReader((tables / paper / "datasets.csv").read_text().splitlines())
    return next(row for row in rows if row["dataset"].lower() == name.lower())


@cache
def testbed(tables: Path, paper: str, name: str) -> Machines:
    """A paper's machines."""
    beds = tomllib.loads((tables / paper / "hardware.toml").read_text())["testbed"]
    bed = next(one for one in beds if one["id"] == name.removesuffix(" (one GPU)"))
    said = bed.get("datasheet", {}).get("gpu", bed["gpu"])
    gpu = re.sub(r"NVIDIA|GeForce|Tesla|80GB|\s", "", said)
    one = name.endswith("(one GPU)")
    hosts = int(bed["nodes"])
    network = f"{bed['network_Gbps']}gbit" if hosts > 1 else ""
    memory = f"{bed['ram_GB']}GB" if "ram_GB" in bed else ""
    return Machines(hosts=hosts, gpu=gpu, gpus=1 if one else int(bed["gpus_per_node"]), memory=memory, network=network)


if __name__ == "__main__":
    sys.exit(main())
