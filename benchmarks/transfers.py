"""Count the rows that `offload` loads from the host per layer, and what sharing, reuse and chunk order save.

    python benchmarks/transfers.py --graphs "topo_cnr-2000;topo_dblp-2010" --ranks 4 --chunks 32,128 --out NAME

Counts are relative to the number of vertices. --chunks are those of all ranks together, as in table 8 of HongTu;
partitions are made by METIS. For table 9, the script also trains a GCN on one rank in as many chunks, and prints the
time of reordering as a fraction of 100 epochs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kernels import save

import weft
from weft.cost import NOMINAL_RATES
from weft.data import Graph
from weft.nn import Workload, make_model
from weft.partition import make_book
from weft.strategies.offload.options import OffloadOptions
from weft.strategies.offload.plan import OffloadPlan

NO_LIMIT = 1 << 50
"""Bytes of device memory: large enough for everything; rows come from the host nevertheless."""


def main() -> int:
    options = parse()
    rows = []
    heads = ("none", "+ranks", "+reuse", "+order")
    print(f"{'graph':24} {'chunks':>6} " + " ".join(f"{head:>7}" for head in heads) + "  saved  order s  of 100 epochs")
    for name in options.graphs.split(";"):
        graph = weft.load(name, random_features=64, random_classes=8, order=options.order)
        for chunks in map(int, options.chunks.split(",")):
            row = volumes(graph, options.ranks, chunks // options.ranks)
            row |= {"graph": name, "chunks": chunks, "ranks": options.ranks}
            row["epoch_seconds"] = epoch(graph, chunks, options.epochs)
            rows.append(row)
            print(line(row, graph.num_vertices), flush=True)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def volumes(graph: Graph, ranks: int, chunks: int) -> dict[str, object]:
    """Count the rows to load with chunks in their first order and reordered, and time the planning of both."""
    part = make_book(graph, ranks, method="metis").part if ranks > 1 else None
    model = make_model("gcn", graph.num_features, graph.num_classes)
    counts: dict[str, object] = {}
    for name in ("given", "reordered"):
        options = OffloadOptions(partition=part, device_memory=NO_LIMIT)
        (cutter,) = OffloadPlan(Workload(model, graph), ranks, options).cutters
        start = time.perf_counter()
        bounds = cutter.bounds(chunks)
        orders = cutter.choose_orders(bounds, NOMINAL_RATES) if name == "reordered" else None
        (planned, *_) = cutter.cut(0, bounds, orders).schedules
        counts[name] = planned.volumes.as_record()
        counts[f"{name}_seconds"] = time.perf_counter() - start
    return counts


def epoch(graph: Graph, chunks: int, epochs: int) -> float:
    """Return the median seconds of an epoch of a GCN on one rank in `chunks` chunks."""
    with tempfile.TemporaryDirectory() as folder:
        run = weft.train(
            graph,
            "gcn",
            out=Path(folder) / "run",
            quiet=True,
            strategy="offload",
            chunks=chunks,
            hidden=64,
            epochs=epochs + 1,
            eval_every=epochs + 1,
        )
        return float(statistics.median(record["seconds"] for record in run.records if record["kind"] == "epoch"))


def line(row: dict[str, Any], num_vertices: int) -> str:
    first, reordered = row["given"], row["reordered"]
    none, shared, reused = (first[key] / num_vertices for key in ("neighbours", "shared", "kept"))
    last = reordered["kept"] / num_vertices
    saved = (none - last) / max(none - 1, 1e-9)
    extra = row["reordered_seconds"] - row["given_seconds"]
    share = extra / (100 * row["epoch_seconds"])
    return (
        f"{row['graph']:24} {row['chunks']:6} {none:7.2f} {shared:7.2f} {reused:7.2f} {last:7.2f} {saved:6.0%}"
        f" {extra:8.3f} {share:14.2%}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="topo_cnr-2000;topo_dblp-2010;topo_soc-Slashdot0902")
    parser.add_argument("--order", default="none", help="numbering of the vertices: none, degree, bfs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--chunks", default="32,128")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", default="", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
