"""Times training epochs of weft and PyG (and DGL where it is installed): one graph, one model, the same weights.

    python benchmarks/epoch.py --model gcn --graph rmat:vertices=200k,edges=4.65m,features=128,classes=40 --out NAME
    python benchmarks/epoch.py --model sage --fanout 15,10,5 --contenders weft,dgl

Every contender lives in a process of its own, with that library's own settings, and they take turns (A B C C B A ...),
so that a machine that slows down slows all of them and peak memory is each one's own. Logits are compared first, and no
ratio is reported where they differ. An epoch is forward, loss, backward and Adam. The first rounds warm up and do not
count. With --fanout an epoch is of sampled mini-batches, by each library's own loader; logits are those of the whole
graph. --operations tells what weft's epoch consists of, in further epochs under PyTorch's profiler. The contender
weft-measured has its maps by the implementations that --machine, a profile of `weft probe`, has found the fastest.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from kernels import save
from operations import profile, table
from processes import ask, start, take_turns
from rivals import Forward, run_dgl, run_dgl_batches, run_pyg
from steps import make_plan, train_step
from torch import nn

import weft
from weft.comm import Group
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.cost import Profile
from weft.data import Adjacency, Graph
from weft.data.sampling import Fanout, parse_fanouts
from weft.nn import Workload
from weft.runtime.kernel_selection import DEFAULT, select_kernels
from weft.runtime.memory import heap_environment, keep_freed_memory, peak_memory_bytes
from weft.strategies import Step
from weft.training.cuda_graph import CapturedPass, is_captured
from weft.training.tasks.task import make_task

MEASURED = "weft-measured"
TOLERANCE = 1e-3  # of the largest logit: float32, sums in another order, two layers deep


def main() -> None:
    options = parse()
    names = options.contenders.split(",")
    pipes = {name: start_contender(name, vars(options)) for name in names}
    facts = {name: pipe.recv() for name, pipe in pipes.items()}
    absent = [name for name in names if facts[name].get("absent")]
    present = {name: pipe for name, pipe in pipes.items() if name not in absent}
    differ = [name for name in present if difference(facts[name], facts["weft"]) > TOLERANCE]
    take_turns(present, options.warmups)
    for name, seconds in take_turns(present, options.rounds).items():
        facts[name]["seconds"] = seconds
    for name, pipe in present.items():
        facts[name]["peak_bytes"] = ask(pipe, "peak")
    if options.operations:
        facts["weft"]["profile"] = ask(pipes["weft"], "profile")
    report(options, facts, list(present), absent, differ)


def start_contender(name: str, options: dict[str, Any]) -> Connection:
    """weft's processes have the setting that `weft train` starts itself anew with."""
    keeps = name.startswith("weft") and optimisations_of(name).pages
    return start(contend, name, options, **(heap_environment() if keeps else {}))


def optimisations_of(name: str) -> Optimisations:
    return Optimisations.without(name.partition("-without-")[2])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="rmat:vertices=200k,edges=4.65m,features=128,classes=40")
    parser.add_argument("--model", default="gcn", choices=("gcn", "sage", "gat"))
    parser.add_argument("--fanout", help="in-edges drawn for a vertex, by layer from the batch outward; none: all")
    parser.add_argument("--batch-size", type=int, default=1024, help="training vertices of a step, with --fanout")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--contenders", default="weft,pyg-csr,pyg-edges,dgl", help="weft-without-reuse is an ablation")
    parser.add_argument("--warmups", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", action="store_true", help="what weft's epoch consists of")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    parser.add_argument("--machine", help="the profile of weft-measured, as weft probe writes it")
    options = parser.parse_args()
    if (MEASURED in options.contenders.split(",")) != (options.machine is not None):
        parser.error(f"--machine is for the contender {MEASURED}, which needs it: give both or neither")
    if options.fanout and options.model != "sage":
        parser.error("--fanout: libraries scale sums over samples in other ways; give --model sage")
    return options


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """The largest difference between some rows of logits, relative to the largest logit."""
    a, b = torch.tensor(theirs["logits"]), torch.tensor(ours["logits"])
    return float((a - b).abs().max() / b.abs().max())


def contend(name: str, options: dict[str, Any], pipe: Connection) -> None:
    """One contender's process: tells its logits and its graph, then answers questions until its parent ends.

    'epoch' gives seconds, 'peak' the most memory so far above that of the loaded graph, 'profile' weft's operations.
    """
    torch.set_num_threads(options["threads"])
    if name.startswith("weft") and optimisations_of(name).pages:
        keep_freed_memory()
    graph = load(options["graph"])
    torch.manual_seed(0)
    widths = graph.num_features, graph.num_classes
    fanouts = parse_fanouts(options["fanout"]) if options.get("fanout") else ()
    shape = {"hidden": options["hidden"], "heads": options["heads"], "layers": len(fanouts) or 2}
    model = weft.nn.make_model(options["model"], *widths, dropout=0.0, **shape)
    base = resident_bytes()
    with suppress(OSError):  # a kernel that cannot forget the load's own peak leaves it in ours
        Path("/proc/self/clear_refs").write_text("5")
    try:
        if fanouts:
            make, told = LOADERS[name.partition("-")[0]], (fanouts, options["batch_size"])
        else:
            make, told = CONTENDERS[name.partition("-")[0]], ()
        epoch, logits = make(graph, model, name, *told)
        if name == MEASURED:
            select_kernels(Profile.read(Path(options["machine"])).choices)
    except ImportError:
        pipe.send({"absent": True})
        return
    rows = torch.linspace(0, graph.num_vertices - 1, 200).long()
    size = {"vertices": graph.num_vertices, "edges": graph.num_edges, "features": widths[0], "classes": widths[1]}
    pipe.send({"logits": logits().detach()[rows].tolist(), "graph": size})
    answers: dict[str, Callable[[], Any]] = {
        "epoch": lambda: seconds_of(epoch),
        "peak": lambda: peak_memory_bytes() - base,
        "profile": lambda: profile(epoch),
    }
    with suppress(EOFError):
        while True:
            pipe.send(answers[pipe.recv()]())


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def load(name: str) -> Graph:
    """The graph without self loops and repeated edges: the libraries differ in what they make of those."""
    graph = weft.load(name)
    n = graph.num_vertices
    source, target = graph.in_edges.edges()
    pairs = (target * n + source)[source != target].unique()
    edges = Adjacency.from_edges(pairs % n, pairs // n, num_sources=n, num_targets=n)
    return replace(graph, in_edges=edges)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_weft(graph: Graph, model: nn.Module, name: str) -> tuple[Callable[[], object], Forward]:
    """weft's own loop: a strategy's step, a task's loss."""
    return loop("single", graph, model, optimisations_of(name))


def run_weft_batches(
    graph: Graph, model: nn.Module, name: str, fanouts: tuple[Fanout, ...], batch_size: int
) -> tuple[Callable[[], object], Forward]:
    """Mini-batches on one rank, which a thread makes ahead."""
    fanout = ",".join(map(str, fanouts))
    return loop("split", graph, model, optimisations_of(name), fanout=fanout, batch_size=str(batch_size))


def loop(
    strategy: str, graph: Graph, model: nn.Module, optimisations: Optimisations, device: str = "cpu", **options: Any
) -> tuple[Callable[[], object], Forward]:
    select_kernels(DEFAULT if optimisations.onednn else DEFAULT.without_onednn())
    placed = make_plan(strategy, Workload(model, graph, optimisations), **options).place(Group(device=device))
    task = make_task(Config(), placed)
    optimizer = torch.optim.Adam(placed.model.parameters(), lr=0.01)
    captured = is_captured(Config(strategy=strategy), placed)
    train = CapturedPass(placed, task) if captured else partial(train_step, placed, task)

    def epoch() -> None:
        for step in placed.steps(0):
            optimizer.zero_grad()
            train(step)
            optimizer.step()

    return epoch, lambda: placed.forward(Step(epoch=0, training=False))


CONTENDERS = {"weft": run_weft, "pyg": run_pyg, "dgl": run_dgl}
LOADERS = {"weft": run_weft_batches, "dgl": run_dgl_batches}


def report(
    options: argparse.Namespace,
    facts: dict[str, dict[str, Any]],
    present: list[str],
    absent: list[str],
    differ: list[str],
) -> None:
    """Prints and, if asked, writes seconds, ratios pair by pair, and memory."""
    size = facts["weft"]["graph"]
    print(
        f"{options.model} on {options.graph} ({', '.join(f'{count} {name}' for name, count in size.items())}), "
        f"{options.threads} threads",
        flush=True,
    )
    ours = facts["weft"]["seconds"]
    for name in present:
        seconds = facts[name]["seconds"]
        text = f"{name:14} {statistics.median(seconds):7.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
        text += f"  {facts[name]['peak_bytes'] / 1e9:6.2f} GB"
        if name in differ:
            text += "  NO RATIO: the logits differ"
        elif name != "weft":
            ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
            facts[name]["ratios"] = ratios
            text += f"  weft is {statistics.median(ratios):.2f}x as fast ({min(ratios):.2f} to {max(ratios):.2f})"
            text += f" in {facts['weft']['peak_bytes'] / facts[name]['peak_bytes']:.2f} of the memory"
        print(text)
    if absent:
        print(f"not here: {', '.join(absent)}")
    if options.operations:
        print(table(facts["weft"]["profile"], statistics.median(ours)))
    if options.out:
        contenders = {
            name: {key: value for key, value in fact.items() if key not in ("logits", "graph")}
            for name, fact in facts.items()
        }
        save(options.out, {"options": vars(options), "graph": size, "contenders": contenders, "differ": differ})


if __name__ == "__main__":
    main()
