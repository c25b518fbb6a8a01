"""Train attention by relation on a heterogeneous graph, or compare its steps with PyG's.

    python benchmarks/typed_attention.py --scale 0.01 --hidden 64 --out NAME
    export LD_PRELOAD=weft/_heap.so
    python benchmarks/typed_attention.py --scale 0.1 --hidden 512 --layers 3 --epochs 10 --out NAME
    python benchmarks/typed_attention.py --scale 0.1 --hidden 512 --layers 3 --epochs 10 --out NAME \
        --strategy sampled --workers 2 --fanout 15,10,5 --batch-size 8192

The graph has the types and relations of IGBH-small (papers, authors, institutes, fields of study), and `--scale` is its
share; `--graph hetero_acm` names a stored one. Features are class centres with noise. The models are those of
MLPerf's R-GAT, HeteroConv of GATConv with 4 heads, the same with other attention, and HGTConv. Without `--epochs`, the
script compares results and gradients with PyG's, then the steps of both alternate. With `--epochs`, it trains, and then
predicts all papers with all of their neighbours. The training needs 21 GB under `single`, with weft's heap for large
arrays, which `weft train` preloads itself.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
import torch_geometric.nn as pyg
from kernels import save
from message_functions import Contender, compare
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData

import weft
from weft.data import Graph, GraphShape
from weft.nn import GraphView, Inputs, Topology, Workload, convert
from weft.nn.layers.typed_input import typed_rows

VERTICES = {"paper": 1_000_000, "author": 1_900_000, "institute": 14_000, "field": 190_000}
"""Number of vertices of each type of IGBH-small, rounded."""
EDGES = {
    ("paper", "cites", "paper"): 12_000_000,
    ("paper", "written_by", "author"): 3_000_000,
    ("author", "affiliated_to", "institute"): 1_600_000,
    ("paper", "topic", "field"): 10_000_000,
}
"""Number of edges of each relation of IGBH-small, rounded; each but citations has an inverse."""
NUM_CLASSES, HEADS = 19, 4
ATTENTION = {kind.__name__: kind for kind in (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv, pyg.HGTConv)}


def generate(scale: float, width: int) -> Graph:
    """Return a graph with the types and relations of IGBH-small.

    Args:
        scale: Share of its vertices and edges.
        width: Number of features of each vertex.
    """
    random = torch.Generator().manual_seed(0)
    counts = {name: max(20, round(count * scale)) for name, count in VERTICES.items()}
    classes = {name: torch.randint(NUM_CLASSES, (count,), generator=random) for name, count in counts.items()}
    centres, data = torch.randn(NUM_CLASSES, width, generator=random), HeteroData()
    for name, count in counts.items():
        data[name].x = centres[classes[name]] + 4 * torch.randn(count, width, generator=random)
    for (source, relation, target), number in EDGES.items():
        # Skewed ends, of which half are drawn again among the vertices of the same class.
        ends = [
            (torch.rand(round(number * scale), generator=random) ** 2 * counts[end]).long() for end in (source, target)
        ]
        order = classes[target].argsort(stable=True)
        first = torch.searchsorted(classes[target][order], torch.arange(NUM_CLASSES + 1))
        begin, end = first[classes[source][ends[0]]], first[classes[source][ends[0]] + 1]
        drawn = begin + (torch.rand(len(begin), generator=random) * (end - begin)).long()
        same = (torch.rand(len(begin), generator=random) < 0.5) & (end > begin)
        ends[1] = torch.where(same, order[drawn.clamp(max=len(order) - 1)], ends[1])
        data[source, relation, target].edge_index = torch.stack(ends)
        if source != target:
            data[target, f"rev_{relation}", source].edge_index = torch.stack(ends[::-1])
    data["paper"].y = classes["paper"]
    share = torch.rand(counts["paper"], generator=random)
    data["paper"].train_mask, data["paper"].val_mask = share < 0.6, (share >= 0.6) & (share < 0.8)
    data["paper"].test_mask = share >= 0.8
    return Graph.from_pyg(data)


def stored(name: str) -> Graph:
    """Return a stored graph with inverse relations, and random features for types without."""
    data = weft.load(name, inverse_relations=True).by_type().to_pyg()
    for vertex_type in data.node_types:
        if "x" not in data[vertex_type]:
            data[vertex_type].x = torch.randn(data[vertex_type].num_nodes, 16)
    return Graph.from_pyg(data)


class Attention(nn.Module):
    """Layers of HeteroConv with an attention for each relation, as MLPerf's R-GAT, or of HGTConv.

    Args:
        graph: The graph.
        kind: Class of the attention.
        hidden: Number of columns of hidden rows.
        layers: Number of layers.
        dropout: Dropout probability between layers.
    """

    def __init__(self, graph: Graph, kind: Any, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        widths = {name: x.shape[1] for name, x in graph.features.items()}
        relations = [tuple(name.split("|")) for name in graph.relations]
        options = {} if kind is pyg.TransformerConv else {"add_self_loops": False}
        self.layers, self.dropout = nn.ModuleList(), dropout
        for _ in range(layers):
            if kind is pyg.HGTConv:
                layer = pyg.HGTConv(widths, hidden, (list(widths), relations), HEADS)
            else:
                ends = {(source, name, target): (widths[source], widths[target]) for source, name, target in relations}
                convs = {key: kind(pair, hidden // HEADS, HEADS, **options) for key, pair in ends.items()}
                layer = pyg.HeteroConv(convs, aggr="sum")
            self.layers.append(layer)
            widths = dict.fromkeys(widths, hidden)
        self.out = nn.Linear(hidden, graph.num_classes)
        assert graph.train_mask is not None
        labelled = int(graph.train_mask.nonzero()[0])
        self.labelled = next(name for name in graph.vertex_types if labelled in graph.type_range(name))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        for layer in self.layers:
            x_dict = {
                name: functional.dropout(functional.leaky_relu(x), self.dropout, self.training)
                for name, x in layer(x_dict, edge_index_dict).items()
            }
        return self.out(x_dict[self.labelled])


class TypedModel(Contender):
    """A model with its graph, run by PyG or converted."""

    def __init__(self, model: Attention, graph: Graph, *, converted: bool) -> None:
        self.model, self.graph = model, graph
        data = graph.to_pyg()
        self.x, self.edges = data.x_dict, data.edge_index_dict
        self.span = graph.type_range(model.labelled)
        self.converted = convert(model, shape=GraphShape.of(graph)) if converted else None
        if self.converted is not None:
            topology = Topology(graph.in_edges, edge_type=graph.edge_type, num_relations=len(graph.relations))
            densities = Workload(self.converted, graph).typed_densities
            rows = typed_rows(graph, slice(None), "cpu", torch.float32, densities=densities)
            self.inputs = Inputs(rows=torch.empty(graph.num_vertices, 0), typed=rows)
            self.topology = topology

    def step(self) -> Tensor:
        self.model.zero_grad()
        if self.converted is None:
            y: Tensor = self.model(self.x, self.edges)
        else:
            views = [GraphView(self.topology, inputs=self.inputs) for _ in range(self.converted.num_stages)]
            y = self.converted.eval()(views, self.inputs.rows)[self.span.start : self.span.stop]
        y.square().mean().backward()
        return y.detach()

    def numbers(self) -> list[Tensor]:
        y = self.step()
        return [y, *(torch.zeros_like(each) if each.grad is None else each.grad for each in self.model.parameters())]


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    graph = generate(options.scale, options.features) if options.graph == "generated" else stored(options.graph)
    graph = graph.by_type()
    print(graph, flush=True)
    size = {"vertices": graph.num_vertices, "edges": graph.num_edges}
    if options.epochs:
        rows = train(graph, options)
        if options.out:
            save(options.out, {"options": vars(options), "graph": size, "rows": rows})
        return
    rows = []
    for name, kind in ATTENTION.items():
        model = Attention(graph, kind, options.hidden, options.layers, dropout=0.0).eval()
        contenders = {
            "weft": TypedModel(model, graph, converted=True),
            "pyg": TypedModel(copy.deepcopy(model), graph, converted=False),
        }
        rows.append(compare(name, contenders, options.rounds))
    medians = [statistics.median(row["ratio"]) for row in rows]
    print(f"pyg / weft: least {min(medians):.2f}, median {statistics.median(medians):.2f}")
    if options.out:
        save(options.out, {"options": vars(options), "graph": size, "rows": rows})


def train(graph: Graph, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train R-GAT, predict all papers, and return the record of each epoch, with the memory of the largest rank."""
    model = Attention(graph, ATTENTION["GATConv"], options.hidden, options.layers, dropout=0.2)
    model.to(getattr(torch, options.dtype))
    placement = {name: getattr(options, name) for name in ("strategy", "workers", "fanout", "batch_size")}
    run = weft.train(graph, model, epochs=options.epochs, lr=1e-3, weight_decay=0.0, out=options.run, **placement)
    start = time.perf_counter()
    classes = weft.predict(run, graph, what="classes", vertex_type=model.labelled)
    seconds = time.perf_counter() - start
    papers = graph.type_range(model.labelled)
    assert graph.y is not None
    assert graph.test_mask is not None
    right = classes == graph.y[papers.start : papers.stop]
    accuracy = float(right[graph.test_mask[papers.start : papers.stop]].float().mean())
    print(f"predicted {len(classes):,} vertices in {seconds:.1f} s, test accuracy {accuracy:.4f}", flush=True)
    memory = max(rank["peak_memory_bytes"] for rank in run.summary["ranks"])
    predicted = {"predict_seconds": seconds, "predict_accuracy": accuracy}
    return [{**line, "bytes": memory, **predicted} for line in run.history]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="generated", help="generated, or the name of a stored heterogeneous graph")
    parser.add_argument("--scale", type=float, default=0.01, help="share of IGBH-small")
    parser.add_argument("--features", type=int, default=128, help="features of a vertex")
    parser.add_argument("--hidden", type=int, default=64, help="columns of hidden rows")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each")
    parser.add_argument("--epochs", type=int, default=0, help="train for so many epochs instead")
    parser.add_argument("--strategy", default="single", help="with --epochs: the strategy")
    parser.add_argument("--workers", type=int, default=1, help="with --epochs: number of ranks")
    parser.add_argument("--fanout", default="10", help="with --strategy split or sampled: in-edges to sample by hop")
    parser.add_argument("--batch-size", default="", help="with --strategy split or sampled: papers of a batch")
    parser.add_argument("--dtype", default="float32", help="with --epochs: type of the numbers")
    parser.add_argument("--run", help="with --epochs: folder of the run")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
