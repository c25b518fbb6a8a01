"""Time training epochs of weft, PyG and (if installed) DGL on one graph, with one model and the same weights.

    python benchmarks/epoch.py --model gcn --graph rmat:vertices=200k,edges=4.65m,features=128,classes=40 --out NAME
    python benchmarks/epoch.py --model sage --fanout 15,10,5 --contenders weft,dgl

Every contender runs in its own process with the default settings of its library, so that peak memory is measured
separately. Contenders take turns (A B C C B A ...), so that a machine that slows down slows all of them. Their logits
are compared first; no ratio is reported if they differ. An epoch is a forward pass, the loss, a backward pass and a
step of Adam. The first rounds warm up and do not count. With --fanout an epoch consists of sampled mini-batches from
each library's data loader, while logits are compared on the whole graph. --operations lists the operations of weft's
epoch, from further epochs under PyTorch's profiler. The contender weft-measured uses the dense kernels that were
fastest in --machine, a profile from `weft probe`.
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
from weft.runtime.memory.heap import heap_environment, keep_freed_memory
from weft.runtime.memory.limit import peak_memory_bytes
from weft.strategies import Step
from weft.training.cuda_graph import CapturedPass, is_captured
from weft.training.custom_functions import NO_FUNCTIONS
from weft.training.tasks.task import make_task

MEASURED = "weft-measured"
TOLERANCE = 1e-3  # relative to the largest logit: float32 sums in another order, in two layers


def main() -> None:
    options = parse()
    names = options.contenders.split(",")
    pipes = {name: start_contender(name, vars(options)) for name in names}
    facts = {name: pipe.recv() for name, pipe in pipes.items()}
    absent = [name for name in names if facts[name].get("absent")]
    present = {name: pipe for name, pipe in pipes.items() if name not in absent}
    differ = [name for name in present if not difference(facts[name], facts["weft"]) <= TOLERANCE]
    take_turns(present, options.warmups)
    for name, seconds in take_turns(present, options.rounds).items():
        facts[name]["seconds"] = seconds
    for name, pipe in present.items():
        facts[name]["peak_bytes"] = ask(pipe, "peak")
    if options.operations:
        facts["weft"]["profile"] = ask(pipes["weft"], "profile")
    report(options, facts, list(present), absent, differ)


def start_contender(name: str, options: dict[str, Any]) -> Connection:
    """Start the process of a contender; weft gets the heap settings with which `weft train` restarts itself."""
    keeps = name.startswith("weft") and optimisations_of(name).pages
    return start(contend, name, options, **(heap_environment() if keeps else {}))


def optimisations_of(name: str) -> Optimisations:
    return Optimisations.without(name.partition("-without-")[2])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="rmat:vertices=200k,edges=4.65m,features=128,classes=40")
    parser.add_argument("--model", default="gcn", choices=("gcn", "sage", "gat"))
    parser.add_argument(
        "--fanout", help="in-edges to sample per vertex, from the batch outward; default: the full graph"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1024, help="number of training vertices per step, with --fanout"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--contenders",
        default="weft,pyg-csr,pyg-edges,dgl",
        help="contenders, separated by commas; weft-without-reuse disables an optimisation",
    )
    parser.add_argument("--warmups", type=int, default=3, help="number of rounds before those that count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", action="store_true", help="list the operations of weft's epoch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    parser.add_argument("--machine", help="profile from weft probe, for the contender weft-measured")
    options = parser.parse_args()
    if (MEASURED in options.contenders.split(",")) != (options.machine is not None):
        parser.error(f"--machine and the contender {MEASURED} need each other: give both or neither")
    if options.fanout and options.model != "sage":
        parser.error("--fanout needs --model sage: libraries scale sampled sums in different ways")
    return options


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """Return the largest difference between the logits of two contenders, relative to the largest logit."""
    a, b = torch.tensor(theirs["logits"]), torch.tensor(ours["logits"])
    return float((a - b).abs().max() / b.abs().max())


def contend(name: str, options: dict[str, Any], pipe: Connection) -> None:
    """Run a contender in its process: send some logits and the graph's size, then answer requests.

    Requests are 'epoch' (train an epoch; answers its seconds), 'peak' (peak memory so far, in bytes beyond that of the
    loaded graph) and 'profile' (weft's operations). The process ends when its parent does.

    Args:
        name: Name of the contender.
        options: The command line options.
        pipe: Connection to the parent.
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
    with suppress(OSError):  # without it, the peak of loading counts as well
        Path("/proc/self/clear_refs").write_text("5")
    try:
        if fanouts:
            epoch, logits = LOADERS[name.partition("-")[0]](graph, model, name, fanouts, options["batch_size"])
        else:
            epoch, logits = CONTENDERS[name.partition("-")[0]](graph, model, name)
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
    """Load a graph without self-loops and repeated edges, which the libraries treat differently."""
    graph = weft.load(name)
    n = graph.num_vertices
    source, target = graph.in_edges.edges()
    pairs = (target * n + source)[source != target].unique()
    edges = Adjacency.from_edges(pairs % n, pairs // n, num_sources=n, num_targets=n)
    return replace(graph, in_edges=edges)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_weft(graph: Graph, model: nn.Module, name: str) -> tuple[Callable[[], object], Forward]:
    """Prepare epochs of weft on the full graph, and return functions that train an epoch and compute logits."""
    return loop("single", graph, model, optimisations_of(name))


def run_weft_batches(
    graph: Graph, model: nn.Module, name: str, fanouts: tuple[Fanout, ...], batch_size: int
) -> tuple[Callable[[], object], Forward]:
    """Prepare epochs of sampled mini-batches on one rank, which a thread samples ahead of time."""
    fanout = ",".join(map(str, fanouts))
    return loop("split", graph, model, optimisations_of(name), fanout=fanout, batch_size=str(batch_size))


def loop(
    strategy: str, graph: Graph, model: nn.Module, optimisations: Optimisations, device: str = "cpu", **options: Any
) -> tuple[Callable[[], object], Forward]:
    select_kernels(DEFAULT if optimisations.onednn else DEFAULT.without_onednn())
    placed = make_plan(strategy, Workload(model, graph, optimisations), **options).place(Group(device=device))
    task = make_task(Config(), placed)
    optimizer = torch.optim.Adam(placed.model.parameters(), lr=0.01)
    captured = is_captured(placed, task, NO_FUNCTIONS, timeline=0)
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
    """Print seconds, ratios round by round, and memory; write them to a file if --out is set.

    Args:
        options: The command line options.
        facts: Answers of each contender, by its name.
        present: Contenders that ran.
        absent: Contenders whose library is not installed.
        differ: Contenders whose logits differ from weft's.
    """
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
            ratios = [rival / weft_seconds for rival, weft_seconds in zip(seconds, ours, strict=True)]
            facts[name]["ratios"] = ratios
            text += f"  weft is {statistics.median(ratios):.2f}x as fast ({min(ratios):.2f} to {max(ratios):.2f})"
            text += f" in {facts['weft']['peak_bytes'] / facts[name]['peak_bytes']:.2f} of the memory"
        print(text)
    if absent:
        print(f"not installed: {', '.join(absent)}")
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
