"""Compare test scores over several seeds between weft and a plain PyG training loop.

    WEFT_DATA=shared/data python benchmarks/seeds.py --graphs "cora;citeseer" --models gcn,sage,gin,gat,gatv2 --out NAME
    WEFT_DATA=shared/data python benchmarks/seeds.py --graphs tolokers --models pyg-gcn,pyg-sage-max --metric roc_auc

A model of weft (gcn, ...) is compared with a PyG model of two such convolutions; both have their own initial weights. A
model of pyg_models.py is trained unchanged by both. Options, splits and seeds are the same; the optimizer is Adam, and
the test score is that of the epoch with the best validation score.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch_geometric.nn as pyg
from kernels import save
from pyg_models import PYG_MODELS, Widths
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

import weft

HEADS = 4
DROPOUT = 0.5


class Plain(nn.Module):
    """Two convolutions with an activation and dropout between them."""

    def __init__(self, make: Callable[..., nn.Module], widths: Widths, activation: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = make(widths.features, widths.hidden), make(widths.hidden, widths.classes, last=True)
        self.activation = activation

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.activation(self.conv1(x, edge_index))
        y: Tensor = self.conv2(functional.dropout(x, DROPOUT, self.training), edge_index)
        return y


def plain_conv(kind: Any) -> Callable[..., nn.Module]:
    return lambda a, b, *, last=False: kind(a, b)  # noqa: ARG005


def gin_conv(a: int, b: int, *, last: bool = False) -> nn.Module:  # noqa: ARG001
    conv: nn.Module = pyg.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)), train_eps=True)
    return conv


def attention_conv(kind: Any) -> Callable[..., nn.Module]:
    def make(a: int, b: int, *, last: bool = False) -> nn.Module:
        conv: nn.Module = kind(a, b if last else b // HEADS, heads=HEADS, concat=not last)
        return conv

    return make


FAMILIES: dict[str, tuple[Callable[..., nn.Module], Any]] = {
    "gcn": (plain_conv(pyg.GCNConv), torch.relu),
    "sage": (plain_conv(pyg.SAGEConv), torch.relu),
    "gin": (gin_conv, torch.relu),
    "gat": (attention_conv(pyg.GATConv), functional.elu),
    "gatv2": (attention_conv(pyg.GATv2Conv), functional.elu),
}


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name in options.graphs.split(";"):
        graph = weft.load(name)
        for model in options.models.split(","):
            scores: dict[str, list[float]] = {"pyg": [], "weft": []}
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                scores["pyg"].append(train_pyg(make_pyg(model, graph, options), model, graph, options))
                scores["weft"].append(train_weft(model, graph, seed, options))
            rows.append({"graph": name, "model": model, **scores})
            report(rows[-1])
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def make_pyg(name: str, graph: weft.Graph, options: argparse.Namespace) -> nn.Module:
    widths = Widths(graph.num_features, options.hidden, graph.num_classes)
    if name in FAMILIES:
        make, activation = FAMILIES[name]
        return Plain(make, widths, activation)
    model: nn.Module = PYG_MODELS[name](widths)
    return model


def train_pyg(model: nn.Module, name: str, graph: weft.Graph, options: argparse.Namespace) -> float:
    """Train a PyG model by a plain loop, and return its test score.

    Args:
        model: The model.
        name: Its name: models named pyg-sage take a data object.
        graph: The graph.
        options: The command line options.
    """
    data = SimpleNamespace(x=graph.x, edge_index=torch.stack(graph.in_edges.edges()))
    inputs = (data,) if name.startswith("pyg-sage") else (data.x, data.edge_index)
    masks = {split: graph.labelled(split) for split in ("train", "val", "test")}
    y = graph.y
    assert y is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    best = test = -math.inf
    for epoch in range(options.epochs):
        model.train()
        optimizer.zero_grad()
        functional.cross_entropy(model(*inputs)[masks["train"]], y[masks["train"]]).backward()
        optimizer.step()
        if (epoch + 1) % options.eval_every and epoch + 1 < options.epochs:
            continue
        model.eval()
        with torch.no_grad():
            logits = model(*inputs)
        validation = score(logits[masks["val"]], y[masks["val"]], options.metric)
        if validation > best:
            best, test = validation, score(logits[masks["test"]], y[masks["test"]], options.metric)
    return test


def score(logits: Tensor, y: Tensor, metric: str) -> float:
    if metric == "roc_auc":
        return float(roc_auc_score(y, logits.softmax(1)[:, 1]))
    return float(accuracy_score(y, logits.argmax(1)))


def train_weft(name: str, graph: weft.Graph, seed: int, options: argparse.Namespace) -> float:
    """Train by weft.train, and return the test score."""
    torch.manual_seed(seed)
    families = {"hidden": options.hidden, "heads": HEADS, "dropout": DROPOUT} if name in FAMILIES else {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = weft.train(
            graph,
            name if name in FAMILIES else make_pyg(name, graph, options),
            out=Path(folder) / "run",
            quiet=True,
            epochs=options.epochs,
            eval_every=options.eval_every,
            lr=options.lr,
            weight_decay=options.weight_decay,
            metrics=options.metric,
            seed=seed,
            **families,
        )
    return float(run.summary[f"test_{options.metric}"])


def report(row: dict[str, Any]) -> None:
    """Print means, standard deviations, and the difference of the means, also in standard errors."""
    means = {name: statistics.fmean(row[name]) for name in ("pyg", "weft")}
    spread = {name: statistics.stdev(row[name]) if len(row[name]) > 1 else 0.0 for name in means}
    error = math.sqrt(sum(each**2 for each in spread.values()) / len(row["pyg"]))
    difference = means["weft"] - means["pyg"]
    print(
        f"{row['graph']:18} {row['model']:14}"
        + "".join(f" {name} {means[name]:.4f} +- {spread[name]:.4f} " for name in means)
        + f" difference {difference:+.4f}"
        + (f" ({difference / error:+.1f} standard errors)" if error else ""),
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="cora", help="graphs to train on, separated by semicolons")
    parser.add_argument(
        "--models", default=",".join(FAMILIES), help="models of weft or of pyg_models.py, separated by commas"
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--metric", default="accuracy", choices=("accuracy", "roc_auc"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
