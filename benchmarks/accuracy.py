"""Validation scores by epoch, with the vertices drawn and the seconds of training until then.

    python benchmarks/accuracy.py --graphs "coauthor_physics;tolokers" --out NAME
    python benchmarks/accuracy.py --graphs tolokers --contenders split:fanout=10,split:sampling=labor:fanout=14

Contenders are those of `weft compare`, one after the other on the same graph and seed. To compare ways of drawing at
equal vertices, give LABOR the fanout that draws as many.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from kernels import save

import weft
from weft.cli.parser import parse_strategies

EPOCHS = (1, 2, 3, 5, 10, 20, 30, 50)


def main() -> int:
    options = parse()
    rows: list[dict[str, Any]] = []
    for graph in options.graphs.split(";"):
        names = ["layers", "workers", "epochs", "metrics"] + ["batch_size", "fanout"] * bool(options.fanout)
        given: dict[str, Any] = {name: getattr(options, name) for name in names}
        with tempfile.TemporaryDirectory() as folder:
            runs = weft.compare(
                graph,
                options.model,
                strategies=parse_strategies(options.contenders),
                out=Path(folder) / "runs",
                quiet=True,
                **given,
            )
            found = [{"graph": graph, "contender": name, **curve(run.records)} for name, run in runs.items()]
        report(graph, found)
        rows += found
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def curve(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By epoch: the validation score, and all vertices drawn and seconds of training so far."""
    epochs = [line for line in records if line["kind"] == "epoch"]
    drawn = [0] * len(epochs)
    for line in records:
        if line["kind"] == "rank" and line["phase"] == "train":
            drawn[line["epoch"]] += line["sampled"].get("vertices", 0)
    score = next(name for name in epochs[0] if name.startswith("val_"))
    return {
        "score": [line[score] for line in epochs],
        "vertices": list(accumulate(drawn)),
        "seconds": list(accumulate(line["seconds"] for line in epochs)),
    }


def report(graph: str, rows: list[dict[str, Any]]) -> None:
    """A line for each contender: validation score, million vertices and seconds at some epochs."""
    known = [epoch for epoch in EPOCHS if epoch <= len(rows[0]["score"])]
    print(f"{graph}: validation score (million vertices drawn, seconds) after epochs {', '.join(map(str, known))}")
    for row in rows:
        told = (
            f"{row['score'][epoch - 1]:.4f} ({row['vertices'][epoch - 1] / 1e6:.2f}, {row['seconds'][epoch - 1]:.2f})"
            for epoch in known
        )
        print(f"  {row['contender']:40} {'  '.join(told)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="coauthor_physics;tolokers", help="separated by semicolons")
    parser.add_argument("--contenders", default="communicated,split,split:sampling=labor,sampled")
    parser.add_argument("--model", default="sage")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", default="512")
    parser.add_argument("--fanout", default="10", help="none where no contender draws mini-batches")
    parser.add_argument("--metrics", default="", help="the score, such as roc_auc; none: the task's")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
