"""Time message functions of PyG's and custom convolutions: run by PyG on all edges, and by weft as programs in tiles.

    WEFT_DATA=shared/data python benchmarks/message_functions.py --graph tolokers --out NAME

Each convolution gets the same random rows, which need gradients, and the graph's edges sorted by target. A step is a
forward and a backward pass. The script compares the results and all gradients of both, then their steps alternate. The
bytes are the peak of tensors in a step, without the convolution's inputs, and without the memory of a tile, which is at
most some megabytes for each thread.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch_geometric.nn as pyg
from kernels import save
from torch import Tensor, nn

import weft
from weft.nn.messages import TiledConv
from weft.runtime.memory.tensor_peak import TensorPeak

EDGE_FEATURES = 8
TOLERANCE = 1e-3
"""Largest difference of results and gradients, relative to their largest number: float32 sums in another order."""


class EdgeMLP(pyg.MessagePassing):
    """An MLP on both endpoints of an edge and its features."""

    def __init__(self, width: int) -> None:
        super().__init__("add")
        self.mlp = nn.Sequential(nn.Linear(2 * width + EDGE_FEATURES, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j, edge_attr], -1))


class EdgeAttention(pyg.MessagePassing):
    """Attention with edge rows in logits and values."""

    def __init__(self, width: int) -> None:
        super().__init__("add", node_dim=0)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.edge = nn.Linear(EDGE_FEATURES, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, q=self.query(x), k=self.key(x), v=self.value(x), edge_attr=edge_attr)

    def message(self, q_i: Tensor, k_j: Tensor, v_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int) -> Tensor:
        edge = self.edge(edge_attr)
        logits = (q_i * (k_j + edge)).sum(-1) / q_i.shape[1] ** 0.5
        return (v_j + edge) * pyg_softmax(logits, index, num_nodes=size_i)[:, None]


def pyg_softmax(*arguments: Any, **named: Any) -> Tensor:
    from torch_geometric.utils import softmax

    return softmax(*arguments, **named)


def convolutions(width: int, degrees: Tensor) -> dict[str, tuple[Callable[[], Any], bool]]:
    """Return functions that create the convolutions, and whether they read edge rows, by name."""
    heads, edge_dim = 4, EDGE_FEATURES
    return {
        "TransformerConv": (lambda: pyg.TransformerConv(width, width // heads, heads, edge_dim=edge_dim), True),
        "PNAConv": (
            lambda: pyg.PNAConv(width, width, ["mean", "max", "std"], ["identity", "amplification"], degrees),
            False,
        ),
        "GENConv": (lambda: pyg.GENConv(width, width, edge_dim=edge_dim), True),
        "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(width, width), False),
        "CGConv": (lambda: pyg.CGConv(width, dim=edge_dim), True),
        "GINEConv": (lambda: pyg.GINEConv(nn.Linear(width, width), edge_dim=edge_dim), True),
        "EdgeConv": (lambda: pyg.EdgeConv(nn.Linear(2 * width, width)), False),
        "SuperGATConv": (lambda: pyg.SuperGATConv(width, width // heads, heads), False),
        "FAConv": (lambda: pyg.FAConv(width), False),
        "custom edge MLP": (lambda: EdgeMLP(width), True),
        "custom attention": (lambda: EdgeAttention(width), True),
    }


class Contender(ABC):
    """A model with its inputs, run by weft or by PyG."""

    @abstractmethod
    def step(self) -> Tensor:
        """Run a forward and a backward pass, and return the result."""

    @abstractmethod
    def numbers(self) -> list[Tensor]:
        """Return the result and the gradients of a step."""

    def seconds(self) -> float:
        """Return the time of a step."""
        begin = time.perf_counter()
        self.step()
        return time.perf_counter() - begin

    def peak(self) -> int:
        """Return the peak of tensors in a step."""
        gc.collect()
        with TensorPeak() as peak:
            self.step()
        return peak.most


class Convolution(Contender):
    """A convolution with its inputs, run by PyG or in tiles."""

    def __init__(self, conv: Any, x: Tensor, edge_index: Tensor, edge_rows: Tensor | None, *, tiled: bool) -> None:
        self.conv, self.x, self.edge_index = conv, x.clone().requires_grad_(), edge_index
        self.edge_rows, self.tiles = edge_rows, TiledConv(conv) if tiled else None

    def step(self) -> Tensor:
        self.conv.zero_grad()
        self.x.grad = None
        arguments = {} if self.edge_rows is None else {"edge_attr": self.edge_rows}
        if "x_0" in inspect.signature(self.conv.forward).parameters:
            arguments["x_0"] = self.x
        with self.tiles.replacing() if self.tiles else nullcontext():
            y: Tensor = self.conv(x=self.x, edge_index=self.edge_index, **arguments)
        y.sum().backward()
        return y.detach()

    def numbers(self) -> list[Tensor]:
        y = self.step()
        grads = (self.x, *self.conv.parameters())
        return [y, *(each.grad for each in grads if each.grad is not None)]


def compare(name: str, contenders: Mapping[str, Contender], rounds: int) -> dict[str, Any]:
    """Compare the numbers of both contenders, time them in turns and return the results."""
    weft_numbers, pyg_numbers = contenders["weft"].numbers(), contenders["pyg"].numbers()
    largest = max(float(theirs.abs().max()) for theirs in pyg_numbers)  # some gradients are zero but for rounding
    for ours, theirs in zip(weft_numbers, pyg_numbers, strict=True):
        difference, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
        assert difference <= TOLERANCE * max(scale, TOLERANCE * largest), name
    seconds: dict[str, list[float]] = {each: [] for each in contenders}
    for number in range(rounds):
        for each in list(contenders)[:: 1 if number % 2 else -1]:
            seconds[each].append(contenders[each].seconds())
    ratios = [theirs / ours for ours, theirs in zip(seconds["weft"], seconds["pyg"], strict=True)]
    peaks = {each: contender.peak() for each, contender in contenders.items()}
    row = {"convolution": name, "seconds": seconds, "ratio": ratios, "bytes": peaks}
    print(
        f"{name:18s} weft {statistics.median(seconds['weft']):.4f} s, {peaks['weft'] / 1e6:8.1f} MB; pyg "
        f"{statistics.median(seconds['pyg']):.4f} s, {peaks['pyg'] / 1e6:8.1f} MB; pyg / weft "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )
    return row


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    graph = weft.load(options.graph)
    edge_index = torch.stack(graph.in_edges.edges())
    x = torch.randn(graph.num_vertices, options.width)
    edge_rows = torch.rand(graph.num_edges, EDGE_FEATURES)
    chosen = convolutions(options.width, torch.bincount(graph.in_edges.degree))
    rows = []
    for name, (make, reads_edges) in chosen.items():
        if options.only and name not in options.only.split(","):
            continue
        conv, features = make().eval(), edge_rows if reads_edges else None
        contenders = {
            "weft": Convolution(conv, x, edge_index, features, tiled=True),
            "pyg": Convolution(copy.deepcopy(conv), x, edge_index, features, tiled=False),
        }
        rows.append(compare(name, contenders, options.rounds))
        del contenders
    medians = [statistics.median(row["ratio"]) for row in rows]
    print(f"pyg / weft: least {min(medians):.2f}, median {statistics.median(medians):.2f}")
    if options.out:
        size = {"vertices": graph.num_vertices, "edges": graph.num_edges}
        save(options.out, {"options": vars(options), "graph": size, "rows": rows})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="tolokers", help="name or recipe of a graph")
    parser.add_argument("--width", type=int, default=64, help="columns of the rows")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each")
    parser.add_argument("--only", default="", help="names of convolutions, separated by commas")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
