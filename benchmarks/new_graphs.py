"""Compare estimated with measured epochs of `weft train` on this machine, on generated graphs that no profile has seen.

    weft probe --out full.json && weft probe --quick --out quick.json
    python benchmarks/new_graphs.py --profiles full.json,quick.json --seed 11 --out NAME

Each cell is a graph, a model and a strategy. All cells train twice, in two rounds, so that the errors of the estimates
can be compared with the difference between two measurements.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from kernels import save

import weft
from weft.cost import Profile

GRAPHS = (
    "rmat:vertices=120k,edges=2.5m,features=100,classes=12,seed={}",  # hubs, as in web crawls and social networks
    "sbm:vertices=80k,degree=18,classes=24,features=64,seed={}",  # communities of equal degrees, as in co-purchases
    "cites:vertices=150k,edges=2m,features=256,classes=16,labelled=50%,seed={}",  # wide features, sources by age
)
STRATEGIES = {"single": 1, "tensor": 2, "communicated": 2, "cached": 2}
"""Number of ranks, by strategy."""
SKIPPED = 3
"""Number of the first epochs of a run that do not count."""
CLOSE = 1.05
"""A choice counts as right if it takes at most this many times the seconds of the fastest one."""


def main() -> None:
    options = parse()
    profiles = {Path(name).stem: name for name in options.profiles.split(",")}
    # Runs calibrate the machine's profile, which must not change meanwhile; it also selects kernels.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rows = [
            cell
            for name in options.graphs.split(";")
            for cell in cells(name.format(options.seed), profiles, options, folder)
        ]
        for row in [row for _ in range(2) for row in rows]:
            row["seconds"].append(measured(row, options, folder))
            print(line(row), flush=True)
    for profile in profiles:
        print(summary(rows, profile))
    differences = [abs(a / b - 1) for a, b in (row["seconds"] for row in rows)]
    print(f"difference between two measurements: median {statistics.median(differences):.1%}")
    if options.out:
        hosts = {name: Profile.read(Path(path)).record()["host"] for name, path in profiles.items()}
        save(options.out, {"options": vars(options), "profiles": hosts, "rows": rows})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", required=True, help="files of profiles of this machine")
    parser.add_argument("--graphs", default=";".join(GRAPHS), help="recipes; {} stands for the seed")
    parser.add_argument("--models", default="gcn,gat")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated graphs")
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


def cells(graph: str, profiles: dict[str, str], options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Save a graph, and return a row with the estimates for each model and strategy."""
    path = Path(folder) / graph.partition(":")[0]
    weft.load(graph).save(path)
    rows = []
    for model, (strategy, workers) in product(options.models.split(","), STRATEGIES.items()):
        estimated = {
            name: next(
                row.epoch_seconds
                for row in weft.plan(path, model, machine=profile, hidden=options.hidden, workers=workers)
                if row.strategy == strategy
            )
            for name, profile in profiles.items()
        }
        place = {"path": str(path), "strategy": strategy, "workers": workers}
        rows.append({"graph": graph, "model": model, **place, "estimated": estimated, "seconds": []})
    return rows


def measured(row: dict[str, Any], options: argparse.Namespace, folder: str) -> float:
    """Train, and return the median of the seconds of an epoch."""
    place = {name: row[name] for name in ("strategy", "workers")}
    epochs = {"epochs": options.epochs, "eval_every": options.epochs, "hidden": options.hidden}
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    run = weft.train(row["path"], row["model"], **place, **epochs, out=out, quiet=True)
    return float(statistics.median(epoch["seconds"] for epoch in run.history[SKIPPED:]))


def line(row: dict[str, Any]) -> str:
    ratios = ", ".join(f"{name} {seconds / row['seconds'][-1]:.2f}" for name, seconds in row["estimated"].items())
    return (
        f"{row['graph'].partition(':')[0]:6} {row['model']:5} {row['strategy']:13} {row['seconds'][-1]:8.4f} s, "
        f"estimated / measured: {ratios}"
    )


def summary(rows: list[dict[str, Any]], profile: str) -> str:
    """Return the errors of a profile's estimates, and how often its choice of a strategy is right."""
    ratios = [row["estimated"][profile] / statistics.mean(row["seconds"]) for row in rows]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["graph"], row["model"]), []).append(row)
    right = sum(
        statistics.mean(min(group, key=lambda row: row["estimated"][profile])["seconds"])
        <= CLOSE * min(statistics.mean(row["seconds"]) for row in group)
        for group in groups.values()
    )
    errors = [abs(ratio - 1) for ratio in ratios]
    return (
        f"{profile}: median error {statistics.median(errors):.1%}, largest {max(errors):.0%}, estimated / measured "
        f"{statistics.median(ratios):.2f}; the choice is within 5 % of the fastest in {right} of {len(groups)}"
    )


if __name__ == "__main__":
    main()
