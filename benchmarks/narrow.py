"""Compare test scores and losses of bfloat16 rows with those of float32, from the same seeds.

    WEFT_DATA=shared/data python benchmarks/narrow.py --graphs cora --out NAME
    WEFT_DATA=shared/data python benchmarks/narrow.py --graphs tolokers --metric roc_auc --out NAME

Differences of losses are relative and per epoch. For comparison, the last column has the largest difference between two
seeds in float32.
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
        scores = {
            dtype: [run.summary[f"test_{options.metric}"] for run in dtype_runs] for dtype, dtype_runs in runs.items()
        }
        wide, narrow = ([losses(run) for run in dtype_runs] for dtype_runs in runs.values())
        pairs = [*zip(wide, narrow, strict=True)]
        rows.append(
            {
                "graph": graph,
                "model": model,
                **scores,
                "median_difference": statistics.median(torch.cat([difference(*pair) for pair in pairs]).tolist()),
                "largest_difference": max(float(difference(*pair).max()) for pair in pairs),
                "largest_absolute_difference": max(float((a - b).abs().max()) for a, b in pairs),
                "last_difference": max(float(difference(*pair)[-1]) for pair in pairs),
                "between_seeds": min(float(difference(*pair).max()) for pair in pairwise(wide)),
            }
        )
        report(rows[-1])
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def trained(graph: str, model: str, dtype: str, seed: int, options: argparse.Namespace) -> weft.Run:
    """Train with the defaults of weft and return the run; its folder is deleted.

    Args:
        graph: Name of the graph.
        model: Name of the model.
        dtype: Type of the rows.
        seed: Random seed.
        options: The command line options.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"epochs": options.epochs, "metrics": options.metric, "eval_every": 2, "dtype": dtype}
        run = weft.train(graph, model, out=Path(folder) / "run", seed=seed, quiet=True, **settings)
        run.summary["losses"] = [line["loss"] for line in run.records if line["kind"] == "epoch"]
    return run


def losses(run: weft.Run) -> Tensor:
    return torch.tensor(run.summary["losses"], dtype=torch.float64)


def difference(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the difference of two runs' losses in each epoch, relative to the first run."""
    return (expected - actual).abs() / expected


def report(row: dict[str, Any]) -> None:
    """Print the line of a graph and a model."""
    spread = {dtype: (statistics.fmean(row[dtype]), statistics.stdev(row[dtype])) for dtype in TYPES}
    scores = (f"{dtype} {mean:.4f} +- {deviation:.4f}" for dtype, (mean, deviation) in spread.items())
    changes = [b - a for a, b in zip(*(row[dtype] for dtype in TYPES), strict=True)]
    print(
        f"{row['graph']:10} {row['model']:5} {', '.join(scores)}, same seed "
        f"{min(changes):+.4f} to {max(changes):+.4f}; "
        f"losses differ by {row['median_difference']:.2%}, up to {row['largest_difference']:.2%} "
        f"({row['largest_absolute_difference']:.4f}), in the last epoch {row['last_difference']:.2%}; "
        f"another seed {row['between_seeds']:.2%}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="cora", help="graphs to train on, separated by semicolons")
    parser.add_argument("--models", default="gcn,sage,gat")
    parser.add_argument("--metric", default="accuracy", choices=("accuracy", "roc_auc"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, at least 2")
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
