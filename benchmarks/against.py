"""Compares the speed of the working tree with that of another commit: training, start-up, opening a graph.

    python benchmarks/against.py main~3
    python benchmarks/against.py ../other-checkout --cases gcn,sage --out against-NAME

Both trees are installed in the same way, each in a folder of its own below build/against, which serves again while the
sources stay as they are (a new one compiles for some minutes). Other packages are this environment's. A case is a
command of `weft train`, or a short script on the public API, in a new process. Runs come in pairs, in which the working
tree goes first every other time, so that a machine that slows down slows both. The losses of every pair are compared.
Pairs are added until the interval of the median ratio is narrow, or until there are --most of them.

Exit code 0: no case is slower by more than 5 %, by the upper end of its interval. 1: some are, or are not settled, or
differ in their outputs. 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kernels import save
from trees import ROOT, BadInputError, RunFailedError, Tree, install

WARMUPS = 3  # epochs that touch memory, and fill caches, for the first time
LEVEL, WIDTH, SLOWER, TOLERANCE = 0.95, 0.06, 1.05, 1e-3
FEWEST = 6  # pairs: with fewer, even the range of all ratios holds the median with less than LEVEL
STORE = "import sys, weft; weft.load(sys.argv[1]).save(sys.argv[2])"
OPEN = """
import statistics, sys, time, weft
seconds = []
for _ in range(20):
    begin = time.perf_counter()
    graph = weft.load(sys.argv[1])
    seconds.append(time.perf_counter() - begin)
print(statistics.median(seconds), graph.num_vertices, graph.num_edges)
"""


class Outcome(NamedTuple):
    """The result of one run."""

    seconds: float
    """The time that the case is about."""
    outputs: list[float]
    """The numbers that both trees must agree on: losses, or a graph's size."""


@dataclass(frozen=True)
class Case:
    """A run that is timed."""

    measure: Callable[[Tree, Case, Path], Outcome]
    """The function that runs a tree in an empty folder and times it."""
    graph: str
    """The name or recipe of the graph."""
    options: str = ""
    """Options of `weft train`."""
    ranks: int = 1
    """The number of ranks."""


def train(tree: Tree, case: Case, folder: Path) -> list[dict[str, Any]]:
    """Train by the command line and return the epochs' records."""
    options = f"--workers {case.ranks} --checkpoint-every 0 --eval-every 1000 --quiet {case.options}"
    out = folder / "run"
    tree.run(["-m", "weft", "train", case.graph, *options.split(), "--out", str(out)], case.ranks, folder)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "epoch"]


def time_epochs(tree: Tree, case: Case, folder: Path) -> Outcome:
    """Time the median epoch behind the first few."""
    epochs = train(tree, case, folder)
    return Outcome(statistics.median(epoch["seconds"] for epoch in epochs[WARMUPS:]), [e["loss"] for e in epochs])


def time_command(tree: Tree, case: Case, folder: Path) -> Outcome:
    """Time a whole command, from its start to its end."""
    begin = time.perf_counter()
    epochs = train(tree, case, folder)
    return Outcome(time.perf_counter() - begin, [epoch["loss"] for epoch in epochs])


def time_opening(tree: Tree, case: Case, folder: Path) -> Outcome:
    """Time the opening of a graph's folder that this tree's weft has written, as formats may differ."""
    store = folder.parent / f"{tree.folder.name}.store"
    if not store.exists():
        tree.run(["-c", STORE, case.graph, str(store)], 1, folder)
    seconds, *sizes = (float(word) for word in tree.run(["-c", OPEN, str(store)], 1, folder).split())
    return Outcome(seconds, sizes)


GRAPH = "rmat:vertices=60k,edges=1200k,features=64,classes=16"
WIDE = "--hidden 128 --layers 3"
CASES = {
    "gcn": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --epochs 30"),
    "sage": Case(time_epochs, GRAPH, f"--model sage {WIDE} --epochs 25"),
    "gat": Case(time_epochs, GRAPH, "--model gat --hidden 64 --epochs 15"),
    "tensor": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy tensor --epochs 15", ranks=4),
    "hybrid": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy hybrid --epochs 20", ranks=2),
    "offload": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy offload --chunks 4 --epochs 15", ranks=2),
    "pipeline": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy pipeline --chunks 4 --epochs 15", ranks=2),
    "start-up": Case(time_command, "digits", "--model gcn --epochs 1"),
    "open": Case(time_opening, "rmat:vertices=1m,edges=10m"),
}


def main() -> int:
    """Compare the cases, print a line for each and return the exit code."""
    try:
        options = parse()
        baseline = install(options.baseline)  # first: what is wrong with it is said before anything compiles
        sides = {"current": install(str(ROOT)), "baseline": baseline}
    except BadInputError as error:
        print(f"against: {error}", file=sys.stderr)
        return 2
    names = " against ".join(side.name for side in sides.values())
    print(f"{names}: seconds of each, median ratio with its {LEVEL:.0%} interval", flush=True)
    rows = {}
    for name in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = compare(CASES[name], sides, options, Path(folder))
        print(describe(name, rows[name]), flush=True)
    if options.out:
        save(options.out, {"baseline": sides["baseline"].name, "options": vars(options), "cases": rows})
    failed = [name for name, row in rows.items() if row["verdict"] != "not slower"]
    print(f"NOT SHOWN TO BE AS FAST: {', '.join(failed)}" if failed else "no case is slower")
    return int(bool(failed))


def parse() -> argparse.Namespace:
    """Read the command line; raise BadInputError for what cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", metavar="COMMIT", help="a commit of this repository, or the path of a checkout")
    parser.add_argument("--cases", default=",".join(CASES), help="some of the cases, separated by commas")
    parser.add_argument("--least", type=int, default=8, help=f"pairs of runs at least, {FEWEST} or more")
    parser.add_argument("--most", type=int, default=30, help="pairs of runs at most")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    options = parser.parse_args()
    options.cases = options.cases.split(",")
    if unknown := [name for name in options.cases if name not in CASES]:
        raise BadInputError(f"no case {', '.join(unknown)}: choose of {', '.join(CASES)}")
    if not FEWEST <= options.least <= options.most or options.most % 2:
        limits = f"--least {options.least} --most {options.most}"
        raise BadInputError(f"{limits}: give at least {FEWEST}, and for --most an even number that is no smaller")
    return options


def compare(case: Case, sides: dict[str, Tree], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run pairs of a case until its interval is narrow, and return what was measured, with a verdict."""
    pairs: list[dict[str, float]] = []
    row: dict[str, Any] = {"pairs": pairs}
    while len(pairs) < options.most:
        outcomes: dict[str, Outcome] = {}
        try:
            for role in list(sides)[:: -1 if len(pairs) % 2 else 1]:
                scratch = Path(tempfile.mkdtemp(dir=folder))
                outcomes[role] = case.measure(sides[role], case, scratch)
                shutil.rmtree(scratch)
        except RunFailedError as error:
            return row | {"verdict": str(error)}
        if not agree(*(outcome.outputs for outcome in outcomes.values())):
            return row | {"verdict": "differs", "outputs": {role: outcomes[role].outputs for role in sides}}
        pairs.append({role: outcomes[role].seconds for role in sides})
        measured = " ".join(f"{role} {outcomes[role].seconds:.4f}" for role in sides)
        print(f"  pair {len(pairs)}: {measured}", file=sys.stderr, flush=True)
        ratios = [pair["current"] / pair["baseline"] for pair in pairs]
        # An even number, so that each side has come first as often: what comes second may find another machine.
        if len(pairs) >= options.least and len(pairs) % 2 == 0:
            low, high = interval(ratios)
            row |= {"ratio": statistics.median(ratios), "low": low, "high": high, "verdict": judge(low, high)}
            if high - low < WIDTH:
                break
    return row


def agree(outputs: Sequence[float], others: Sequence[float]) -> bool:
    """Tell whether two lists have the same length and numbers within TOLERANCE, which float32's sums need."""
    pairs = zip(outputs, others, strict=False)
    return len(outputs) == len(others) and all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the confidence interval of the ratios' median between two of the ratios.

    A ratio falls below the median with chance 1/2, whatever its distribution, so the number of ratios below it is
    binomial: the k-th smallest and the k-th largest enclose the median, but for twice the chance of fewer than k. No
    bootstrap, which takes the ratios for their whole distribution, and whose intervals of ten ratios are too narrow.
    Since pairs are added until the interval is narrow, it misses the median slightly more often than 1 - LEVEL.
    """
    ordered, count, rank, tail = sorted(ratios), len(ratios), 0, 1.0
    while 2 * tail <= (1 - LEVEL) * 2**count:
        rank += 1
        tail += math.comb(count, rank)
    if not rank:
        raise ValueError(f"{count} ratios have no interval: give {FEWEST} or more")
    return ordered[rank - 1], ordered[-rank]


def judge(low: float, high: float) -> str:
    """Name what an interval of the ratio shows."""
    if high <= SLOWER:
        return "not slower"
    return "slower" if low > 1 else "unsettled"


def describe(name: str, row: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "ratio" not in row:
        return f"{name:>8}: {row['verdict']}"
    medians = [statistics.median(pair[role] for pair in row["pairs"]) for role in ("current", "baseline")]
    text = f"{name:>8}: {medians[0]:8.4f} {medians[1]:8.4f}  {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    wide = f", wider than {WIDTH:g} at --most" if row["high"] - row["low"] >= WIDTH else ""
    return f"{text}  {len(row['pairs'])} pairs{wide}: {row['verdict']}"


if __name__ == "__main__":
    sys.exit(main())
