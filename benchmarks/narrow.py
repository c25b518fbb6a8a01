"""What rows of bfloat16 change: test scores and losses beside those of float32 from the same seeds.

    WEFT_DATA=shared/data python benchmarks/narrow.py --graphs cora --out NAME
    WEFT_DATA=shared/data python benchmarks/narrow.py --graphs tolokers --metric roc_auc --out NAME

Differences of losses are relative, of an epoch. Beside the largest stands what another seed of float32 changes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from kernels import save
from torch import Tensor

import weft

TYPES = ("float32", "bfloat16")


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for graph, model in product(options.graphs.split(";"), options.models.split(",")):
        runs = {
            dtype: [trained(graph, model, dtype, seed, options) for seed in range(options.seeds)] for dtype in TYPES
        }
        scores = {dtype: [run.summary[f"test_{options.metric}"] for run in found] for dtype, found in runs.items()}
        wide, narrow = ([losses(run) for run in found] for found in runs.values())
        pairs = [*zip(wide, narrow, strict=True)]
        rows.append(
            {
                "graph": graph,
                "model": model,
                **scores,
                "median_difference": statistics.median(torch.cat([apart(*pair) for pair in pairs]).tolist()),
                "largest_difference": max(float(apart(*pair).max()) for pair in pairs),
                "largest_absolute_difference": max(float((a - b).abs().max()) for a, b in pairs),
                "last_difference": max(float(apart(*pair)[-1]) for pair in pairs),
                "between_seeds": min(float(apart(*pair).max()) for pair in pairwise(wide)),
            }
        )
        report(rows[-1])
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def trained(graph: str, model: str, dtype: str, seed: int, options: argparse.Namespace) -> weft.Run:
    """A run with the defaults of weft, whose folder does not stay."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"epochs": options.epochs, "metrics": options.metric, "eval_every": 2, "out": Path(folder) / "run"}
        run = weft.train(graph, model, dtype=dtype, seed=seed, quiet=True, **given)
        run.summary["losses"] = [line["loss"] for line in run.records if line["kind"] == "epoch"]
    return run


def losses(run: weft.Run) -> Tensor:
    return torch.tensor(run.summary["losses"], dtype=torch.float64)


def apart(one: Tensor, other: Tensor) -> Tensor:
    """How far losses are apart by epoch, as a share of the first."""
    return (one - other).abs() / one


def report(row: dict[str, Any]) -> None:
    """One line."""
    scores = (f"{one} {statistics.fmean(row[one]):.4f} +- {statistics.stdev(row[one]):.4f}" for one in TYPES)
    moved = [b - a for a, b in zip(*(row[one] for one in TYPES), strict=True)]
    print(
        f"{row['graph']:10} {row['model']:5} {', '.join(scores)}, same seed {min(moved):+.4f} to {max(moved):+.4f}; "
        f"losses differ by {row['median_difference']:.2%}, up to {row['largest_difference']:.2%} "
        f"({row['largest_absolute_difference']:.4f}), at last {row['last_difference']:.2%}; "
        f"another seed {row['between_seeds']:.2%}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="cora", help="separated by semicolons")
    parser.add_argument("--models", default="gcn,sage,gat")
    parser.add_argument("--metric", default="accuracy", choices=("accuracy", "roc_auc"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
