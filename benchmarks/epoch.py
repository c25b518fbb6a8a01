"""Times training epochs of weft and PyG (and DGL where it is installed): one graph, one model, the same weights.

    python benchmarks/epoch.py --model gcn --graph rmat:vertices=200k,edges=4.65m,features=128,classes=40 --out NAME

Every contender lives in a process of its own, with that library's own settings, and they take turns (A B C A B C ...),
so that a machine that slows down slows all of them and peak memory is each one's own. Logits are compared first, and no
ratio is reported where they differ. An epoch is forward, loss, backward and Adam. The first rounds warm up and do not
count. --operations tells what weft's epoch consists of, in further epochs under PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from kernels import save
from operations import profile, table
from processes import ask, start, take_turns
from torch import Tensor, nn
from torch.profiler import record_function

import weft
from weft.core.memory import NO_SMALL_CACHES, TUNABLES, keep_pages, peak_memory_bytes
from weft.core.optimisations import Optimisations
from weft.data import Adjacency, Graph

TOLERANCE = 1e-3  # of the largest logit: float32, sums in another order, two layers deep
Forward = Callable[[], Tensor]


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
    keeps = name.startswith("weft") and savings_of(name).pages
    return start(contend, name, options, **({TUNABLES: NO_SMALL_CACHES} if keeps else {}))


def savings_of(name: str) -> Optimisations:
    return Optimisations.without(name.partition("-without-")[2])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="rmat:vertices=200k,edges=4.65m,features=128,classes=40")
    parser.add_argument("--model", default="gcn", choices=("gcn", "sage", "gat"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--contenders", default="weft,pyg-csr,pyg-edges,dgl", help="weft-without-reuse is an ablation")
    parser.add_argument("--warmups", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", action="store_true", help="what weft's epoch consists of")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """The largest difference between some rows of logits, relative to the largest logit."""
    a, b = torch.tensor(theirs["logits"]), torch.tensor(ours["logits"])
    return float((a - b).abs().max() / b.abs().max())


def contend(name: str, options: dict[str, Any], pipe: Connection) -> None:
    """One contender's process: tells its logits and its graph, then answers questions until its parent ends.

    'epoch' gives seconds, 'peak' the most memory so far above that of the loaded graph, 'profile' weft's operations.
    """
    torch.set_num_threads(options["threads"])
    if name.startswith("weft") and savings_of(name).pages:
        keep_pages()
    graph = load(options["graph"])
    torch.manual_seed(0)
    widths = graph.num_features, graph.num_classes
    model = weft.nn.make_model(
        options["model"], widths[0], widths[1], hidden=options["hidden"], heads=options["heads"], dropout=0.0
    )
    base = resident_bytes()
    with suppress(OSError):  # a kernel that cannot forget the load's own peak leaves it in ours
        Path("/proc/self/clear_refs").write_text("5")
    try:
        epoch, logits = CONTENDERS[name.partition("-")[0]](graph, model, name)
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
    from weft.comm import Group
    from weft.engine.metrics import NodeTask
    from weft.nn import use_onednn
    from weft.strategies import Step, get_strategy

    optimisations = savings_of(name)
    use_onednn(optimisations.onednn)
    strategy = get_strategy("single")(graph, model, Group(), optimisations=optimisations)
    task = NodeTask(graph, strategy.rows, strategy.group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    step = Step(epoch=0, training=True)

    def epoch() -> None:
        optimizer.zero_grad()
        logits = strategy.forward(step)
        with record_function("loss"):
            _, grad = task.loss(logits, step)
        strategy.backward(logits, grad)
        optimizer.step()

    return epoch, lambda: strategy.forward(Step(epoch=0, training=False))


def train(model: nn.Module, forward: Forward, graph: Graph) -> tuple[Callable[[], object], Forward]:
    """The loop that a PyG or DGL example writes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert graph.train_mask is not None
    assert graph.y is not None
    train_rows = graph.train_mask.nonzero().view(-1)
    y = graph.y[train_rows]

    def epoch() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward()[train_rows], y).backward()
        optimizer.step()

    return epoch, forward


def run_pyg(graph: Graph, model: nn.Module, name: str) -> tuple[Callable[[], object], Forward]:
    """PyG's layers with weft's weights; its CSR aggregate where it has one, the normalisation made beforehand."""
    from torch_geometric import nn as pyg
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    source, target = graph.in_edges.edges()
    edges: Tensor = torch.stack([source, target])
    weight = None
    layers: list[nn.Module] = []
    for ours in model.layers:
        gat = {"heads": ours.heads, "concat": ours.concat} if hasattr(ours, "heads") else {}
        if gat:
            layer = pyg.GATConv(ours.in_width, ours.head_width, **gat)
            layer.lin.weight.data = ours.weight.data.t().contiguous()
            layer.att_src.data, layer.att_dst.data = ours.attention_src.data[None], ours.attention_dst.data[None]
        elif hasattr(ours, "weight_self"):
            layer = pyg.SAGEConv(ours.in_width, ours.out_width)
            layer.lin_l.weight.data = ours.weight.data.t().contiguous()
            layer.lin_r.weight.data = ours.weight_self.data.t().contiguous()
            layer.lin_l.bias.data.zero_()
        else:
            layer = pyg.GCNConv(ours.in_width, ours.out_width, normalize=False)
            layer.lin.weight.data = ours.weight.data.t().contiguous()
        layers.append(layer)
    if not gat and not hasattr(ours, "weight_self"):
        edges, weight = gcn_norm(edges, None, graph.num_vertices, dtype=torch.float32)
    if name == "pyg-csr":
        if gat:
            raise ImportError("PyG's attention has no CSR form")
        size = (graph.num_vertices, graph.num_vertices)
        values = torch.ones(edges.shape[1]) if weight is None else weight
        edges, weight = torch.sparse_coo_tensor(edges.flip(0), values, size).coalesce().to_sparse_csr(), None
    activation = nn.functional.elu if gat else torch.relu
    return train(nn.ModuleList(layers), lambda: pyg_forward(layers, graph, edges, weight, activation), graph)


def pyg_forward(
    layers: list[nn.Module], graph: Graph, edges: Tensor, weight: Tensor | None, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    x = graph.x
    for stage, layer in enumerate(layers):
        x = layer(x, edges) if weight is None else layer(x, edges, weight)
        x = activation(x) if stage + 1 < len(layers) else x
    assert x is not None
    return x


def run_dgl(graph: Graph, model: nn.Module, name: str) -> tuple[Callable[[], object], Forward]:  # noqa: ARG001
    """DGL's layers with weft's weights."""
    import dgl
    from dgl import nn as dgl_nn

    source, target = graph.in_edges.edges()
    sage = hasattr(model.layers[0], "weight_self")
    blocks = dgl.graph((source, target), num_nodes=graph.num_vertices)
    if not sage:
        blocks = dgl.add_self_loop(dgl.remove_self_loop(blocks))
    blocks.create_formats_()
    layers: list[nn.Module] = []
    for ours in model.layers:
        if hasattr(ours, "heads"):
            layer = dgl_nn.GATConv(ours.in_width, ours.head_width, ours.heads, allow_zero_in_degree=True)
            layer.fc.weight.data = ours.weight.data.t().contiguous()
            layer.attn_l.data, layer.attn_r.data = ours.attention_src.data[None], ours.attention_dst.data[None]
        elif sage:
            layer = dgl_nn.SAGEConv(ours.in_width, ours.out_width, "mean")
            layer.fc_neigh.weight.data = ours.weight.data.t().contiguous()
            layer.fc_self.weight.data = ours.weight_self.data.t().contiguous()
            layer.fc_self.bias.data.zero_()
        else:
            norm = "none"
            layer = dgl_nn.GraphConv(ours.in_width, ours.out_width, norm=norm, allow_zero_in_degree=True)
            layer.weight.data = ours.weight.data.clone()
        layers.append(layer)
    root = blocks.in_degrees().float().rsqrt()[:, None]

    def forward() -> Tensor:
        x = graph.x
        assert x is not None
        for stage, (ours, layer) in enumerate(zip(model.layers, layers, strict=True)):
            if hasattr(ours, "heads"):
                x = layer(blocks, x)
                x = x.flatten(1) if ours.concat else x.mean(1)
            else:
                x = layer(blocks, x) if sage else layer(blocks, x * root) * root
            if stage + 1 < len(layers):
                x = nn.functional.elu(x) if hasattr(ours, "heads") else torch.relu(x)
        return x

    return train(nn.ModuleList(layers), forward, graph)


CONTENDERS = {"weft": run_weft, "pyg": run_pyg, "dgl": run_dgl}


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
