"""Compares the speed of the working tree with that of another commit: training, start-up, opening a graph.

    python benchmarks/against.py main~3
    python benchmarks/against.py ../other-checkout --cases gcn,sage --out against-NAME

Both trees are installed in the same way, each in a folder of its own below build/against, which serves again while the
sources stay as they are (a new one compiles for some minutes). Other packages are this environment's. A case is a
command of `weft train`, or a short script on the public API, in a new process. Runs come in pairs, in which the working
tree goes first every other time. The two runs of a pair that trains take turns of a few epochs: one is stopped while
the other runs, so that a machine that slows down slows both. The losses of every pair are compared. Pairs are added
until the interval of the median ratio is narrow, or until there are --most of them.

Exit code 0: no case is slower by more than 5 %, by the upper end of its interval. 1: some are, or are not settled, or
differ in their outputs. 2: bad input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
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
TURNS, TURN = 8, 3  # turns of a run, and epochs of a turn
POLL = 0.005  # seconds
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


class Pair(NamedTuple):
    """The result of one run of each tree."""

    seconds: list[float]
    """The median time of each tree, in the order of the trees."""
    ratio: float
    """The time of the first tree divided by that of the second."""
    outputs: list[list[float]]
    """The numbers of each tree that must agree: losses, or a graph's size."""


@dataclass(frozen=True)
class Case:
    """A run that is timed."""

    measure: Callable[[list[Tree], Case, Path], Pair]
    """The function that runs two trees in an empty folder and times them."""
    graph: str
    """The name or recipe of the graph."""
    options: str = ""
    """Options of `weft train`."""
    ranks: int = 1
    """The number of ranks."""


def training_command(case: Case, epochs: int, out: Path) -> list[str]:
    """Return the arguments of Python that train a case and write the run into `out`."""
    options = f"--workers {case.ranks} --epochs {epochs} --checkpoint-every 0 --eval-every 1000 --quiet"
    return ["-m", "weft", "train", case.graph, *options.split(), *case.options.split(), "--out", str(out)]


def read_epochs(out: Path) -> list[dict[str, Any]]:
    """Return the records of the epochs that have ended, but for one that is only half written."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == "epoch"]


class Training:
    """A run of `weft train` that stands still until it is given a turn."""

    def __init__(self, tree: Tree, case: Case, out: Path, epochs: int) -> None:
        """Start the run and stop it as soon as its first `WARMUPS` epochs have ended."""
        self.tree = tree
        self.out = out
        self.process = tree.start(training_command(case, epochs, out), case.ranks, out.parent)
        self._run_until(WARMUPS)

    def take_turn(self) -> list[float]:
        """Run `TURN` epochs and return the seconds of each; the one that the last turn interrupted is left out."""
        first = len(read_epochs(self.out)) + 1
        os.killpg(self.process.pid, signal.SIGCONT)
        self._run_until(first + TURN)
        return [epoch["seconds"] for epoch in read_epochs(self.out)[first : first + TURN]]

    def finish(self) -> list[float]:
        """Let the run end, and return the losses of its epochs; raise RunFailedError if it fails."""
        os.killpg(self.process.pid, signal.SIGCONT)
        self.tree.finish(self.process)
        return [epoch["loss"] for epoch in read_epochs(self.out)]

    def kill(self) -> None:
        """End the run if it is still there."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def _run_until(self, epochs: int) -> None:
        """Wait until so many epochs have ended, then stop all processes of the run."""
        while len(read_epochs(self.out)) < epochs:
            if self.process.poll() is not None:
                self.tree.finish(self.process)
                raise RunFailedError(f"{self.tree.name} ended before epoch {epochs}")
            time.sleep(POLL)
        os.killpg(self.process.pid, signal.SIGSTOP)


def time_epochs(trees: list[Tree], case: Case, folder: Path) -> Pair:
    """Time epochs of two runs that take turns, so that a machine that slows down slows both.

    The ratio is the median over the turns: two epochs that follow each other by a second are compared, not two runs.
    """
    epochs = WARMUPS + TURNS * (TURN + 1) + TURN  # the last ones in case that an epoch ends just as a turn does
    trainings: list[Training] = []
    try:
        for number, tree in enumerate(trees):
            trainings.append(Training(tree, case, folder / str(number), epochs))
        turns: list[list[list[float]]] = [[], []]
        for turn in range(TURNS):
            for number in (0, 1) if turn % 2 else (1, 0):
                turns[number].append(trainings[number].take_turn())
        losses = [training.finish() for training in trainings]
    finally:
        for training in trainings:
            training.kill()
    ratios = [statistics.median(first) / statistics.median(second) for first, second in zip(*turns, strict=True)]
    seconds = [statistics.median(itertools.chain(*times)) for times in turns]
    return Pair(seconds, statistics.median(ratios), losses)


def time_commands(trees: list[Tree], case: Case, folder: Path) -> Pair:
    """Time a whole command of each tree, from its start to its end."""
    seconds, losses = [], []
    for number, tree in enumerate(trees):
        out = folder / str(number)
        begin = time.perf_counter()
        tree.run(training_command(case, 1, out), case.ranks, folder)
        seconds.append(time.perf_counter() - begin)
        losses.append([epoch["loss"] for epoch in read_epochs(out)])
    return Pair(seconds, seconds[0] / seconds[1], losses)


def time_openings(trees: list[Tree], case: Case, folder: Path) -> Pair:
    """Time the opening of a graph's folder, which each tree's weft has written, as formats may differ."""
    seconds, sizes = [], []
    for tree in trees:
        store = folder.parent / f"{tree.folder.name}.store"
        if not store.exists():
            tree.run(["-c", STORE, case.graph, str(store)], 1, folder)
        median, *size = (float(word) for word in tree.run(["-c", OPEN, str(store)], 1, folder).split())
        seconds.append(median)
        sizes.append(size)
    return Pair(seconds, seconds[0] / seconds[1], sizes)


GRAPH = "rmat:vertices=40k,edges=2400k,features=64,classes=16"
WIDE = "--hidden 128 --layers 3"
CASES = {
    "gcn": Case(time_epochs, GRAPH, f"--model gcn {WIDE}"),
    "sage": Case(time_epochs, GRAPH, f"--model sage {WIDE}"),
    "gat": Case(time_epochs, GRAPH, "--model gat --hidden 64"),
    "tensor": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy tensor", ranks=4),
    "hybrid": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy hybrid", ranks=2),
    "offload": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy offload --chunks 4", ranks=2),
    "pipeline": Case(time_epochs, GRAPH, f"--model gcn {WIDE} --strategy pipeline --chunks 4", ranks=2),
    "start-up": Case(time_commands, "digits", "--model gcn"),
    "open": Case(time_openings, "rmat:vertices=1m,edges=10m"),
}


def main() -> int:
    """Compare the cases, print a line for each and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that runs that stand still are killed
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
        order = list(sides)[:: -1 if len(pairs) % 2 else 1]
        scratch = Path(tempfile.mkdtemp(dir=folder))
        try:
            pair = case.measure([sides[role] for role in order], case, scratch)
        except RunFailedError as error:
            return row | {"verdict": str(error)}
        finally:
            shutil.rmtree(scratch)
        if not agree(*pair.outputs):
            return row | {"verdict": "differs", "outputs": dict(zip(order, pair.outputs, strict=True))}
        ratio = pair.ratio if order[0] == "current" else 1 / pair.ratio
        pairs.append(dict(zip(order, pair.seconds, strict=True)) | {"ratio": ratio})
        measured = " ".join(f"{role} {pairs[-1][role]:.4f}" for role in sides)
        print(f"  pair {len(pairs)}: {measured} ratio {ratio:.3f}", file=sys.stderr, flush=True)
        ratios = [pair["ratio"] for pair in pairs]
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
