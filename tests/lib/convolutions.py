"""Every convolution of PyG, and custom ones as in papers: how weft runs a model around it.

`python -m tests.lib.convolutions` writes the table in docs/convolutions.md.
"""

# ruff: noqa: ARG005 (a message function takes the rows of both endpoints and of the edge)

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.lib.cases import Case
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES
from weft.data import Graph
from weft.nn import Converted, PyGConv, convert
from weft.nn.layers.pyg_conv import call_conv
from weft.utils.errors import InputError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "convolutions.md"
EDGE_WIDTH, HIDDEN = 3, 8
PACKAGES = {
    "CuGraphSAGEConv": "pylibcugraphops",
    "CuGraphGATConv": "pylibcugraphops",
    "CuGraphRGCNConv": "pylibcugraphops",
    "FusedGATConv": "dgNN",
    "GravNetConv": "pyg-lib or torch-cluster",
    "DynamicEdgeConv": "pyg-lib or torch-cluster",
    "XConv": "pyg-lib or torch-cluster",
    "SplineConv": "pyg-lib or torch-spline-conv",
    "PANConv": "torch-sparse",
}
"""Packages that convolutions need besides PyG."""
OTHER_ARGUMENTS = {
    "HypergraphConv": "hyperedges in place of edges",
    "SignedConv": "positive and negative edges as two arguments",
    "DNAConv": "a row of several layers for each vertex",
    "WLConv": "classes in place of rows",
    "MeshCNNConv": "exactly four neighbours of each edge of a mesh",
    "HGTConv": "see [by vertex type](models.md#by-vertex-type)",
    "HANConv": "see [by vertex type](models.md#by-vertex-type)",
    "GPSConv": "all vertices in an attention over all pairs",
    "HeteroConv": "see [by vertex type](models.md#by-vertex-type)",
}
"""Convolutions whose forward takes more than rows, edges and their weights or features, and what."""


def mlp(wide: int, out: int = HIDDEN) -> nn.Sequential:
    return nn.Sequential(nn.Linear(wide, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))


def normalized_edges(_: Any, x: Tensor, edge_index: Tensor, __: Tensor) -> tuple[Tensor, Tensor]:
    """Return edges with self-loops, and the normalization of the first custom layer in PyG's documentation."""
    from torch_geometric.utils import add_self_loops, degree

    edge_index, _ = add_self_loops(edge_index, num_nodes=len(x))
    source, target = edge_index
    roots = degree(target, len(x), x.dtype).pow(-0.5)
    return edge_index, roots[source] * roots[target]


def learned_weights(layer: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges, with weights that are divided by their sums over the in-edges of the source."""
    weight = torch.sigmoid(layer.g(edge_attr))
    total = torch.zeros(len(x), 2, dtype=x.dtype).index_add_(0, edge_index[1], weight)
    return edge_index, (weight / (1 + total[edge_index[0]])).prod(1)


class Custom(NamedTuple):
    """A custom message function."""

    message: Callable[..., Tensor]
    """Function of the layer's parts and of x_i, x_j and edge_attr."""
    parts: Callable[[], dict[str, nn.Module]]
    """Returns the layer's parts."""
    aggr: Any = "add"
    """The aggregation."""
    edges: Callable[..., tuple[Tensor, Tensor]] = lambda _, __, edge_index, edge_attr: (edge_index, edge_attr)
    """Returns the edges of the messages and their features, from the layer and its arguments."""


F_IN = NUM_FEATURES
CUSTOM = {
    "edge MLP": Custom(lambda m, i, j, e: m.f(torch.cat([i, j, e], -1)), lambda: {"f": mlp(2 * F_IN + EDGE_WIDTH)}),
    "edge MLP, mean": Custom(
        lambda m, i, j, e: m.f(torch.cat([i, j - i, e], -1)), lambda: {"f": mlp(2 * F_IN + EDGE_WIDTH)}, "mean"
    ),
    "edge MLP, maximum": Custom(lambda m, i, j, e: m.f(torch.cat([i, j - i], -1)), lambda: {"f": mlp(2 * F_IN)}, "max"),
    "gated by both ends": Custom(
        lambda m, i, j, e: torch.sigmoid(m.g(i) + m.g(j)) * m.v(j),
        lambda: {"g": nn.Linear(F_IN, HIDDEN), "v": nn.Linear(F_IN, HIDDEN)},
    ),
    "gated by edge rows": Custom(
        lambda m, i, j, e: torch.tanh(m.g(e)) * m.v(j),
        lambda: {"g": nn.Linear(EDGE_WIDTH, HIDDEN), "v": nn.Linear(F_IN, HIDDEN)},
    ),
    "relative positions": Custom(
        lambda m, i, j, e: m.f(torch.cat([j, j[:, :3] - i[:, :3]], -1)), lambda: {"f": mlp(F_IN + 3)}
    ),
    "distance": Custom(
        lambda m, i, j, e: m.v(j) * torch.exp(-(i - j).square().sum(-1, keepdim=True)),
        lambda: {"v": nn.Linear(F_IN, HIDDEN)},
    ),
    "EGNN-like coordinates": Custom(
        lambda m, i, j, e: torch.cat(
            [
                (i[:, :3] - j[:, :3]) * m.f(torch.cat([i, j, (i - j)[:, :3].square().sum(-1, keepdim=True)], -1)),
                m.v(j)[:, 3:],
            ],
            -1,
        ),
        lambda: {"f": mlp(2 * F_IN + 1, 1), "v": nn.Linear(F_IN, HIDDEN)},
        "mean",
    ),
    "bilinear": Custom(
        lambda m, i, j, e: m.a(i) * m.b(j), lambda: {"a": nn.Linear(F_IN, HIDDEN), "b": nn.Linear(F_IN, HIDDEN)}
    ),
    "residual of the target": Custom(
        lambda m, i, j, e: torch.relu(m.a(j) - m.a(i)) + 0.1 * m.a(i), lambda: {"a": nn.Linear(F_IN, HIDDEN)}
    ),
    "several aggregators": Custom(
        lambda m, i, j, e: m.v(j), lambda: {"v": nn.Linear(F_IN, HIDDEN // 4)}, ["mean", "max", "min", "std"]
    ),
    "variance": Custom(lambda m, i, j, e: m.v(j), lambda: {"v": nn.Linear(F_IN, HIDDEN)}, "var"),
    "softmax aggregation": Custom(lambda m, i, j, e: m.v(j), lambda: {"v": nn.Linear(F_IN, HIDDEN)}, "softmax"),
    "clipped": Custom(lambda m, i, j, e: m.v(j).clamp(-0.5, 0.5), lambda: {"v": nn.Linear(F_IN, HIDDEN)}),
    "normalized rows": Custom(
        lambda m, i, j, e: nn.functional.layer_norm(m.v(j) + m.w(e), (HIDDEN,)),
        lambda: {"v": nn.Linear(F_IN, HIDDEN), "w": nn.Linear(EDGE_WIDTH, HIDDEN)},
    ),
    "normalized by degrees": Custom(
        lambda m, i, j, e: e[:, None] * m.v(j), lambda: {"v": nn.Linear(F_IN, HIDDEN)}, edges=normalized_edges
    ),
    "normalized by learned weights": Custom(
        lambda m, i, j, e: e[:, None] * m.v(j),
        lambda: {"g": nn.Linear(EDGE_WIDTH, 2), "v": nn.Linear(F_IN, HIDDEN)},
        edges=learned_weights,
    ),
}
"""Custom layers of the kinds seen in papers."""


def custom_conv(name: str) -> nn.Module:
    """Return a custom convolution."""
    from torch_geometric.nn import MessagePassing

    kind = CUSTOM[name]

    class CustomConv(MessagePassing):
        """A message function of both endpoints and the edge's row."""

        def __init__(self) -> None:
            super().__init__(kind.aggr)
            self.parts, self.in_channels, self.out_channels = nn.ModuleDict(kind.parts()), F_IN, HIDDEN
            for part, module in self.parts.items():
                setattr(self, part, module)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            edge_index, edge_attr = kind.edges(self, x, edge_index, edge_attr)
            return self.propagate(edge_index, x=x, edge_attr=edge_attr)

        def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            return kind.message(self, x_i, x_j, edge_attr)

    return CustomConv()


def constructors() -> dict[str, Callable[[Any], Any]]:
    """Return functions that create PyG's convolutions from its module, by the name of the class."""
    i, o, e, degrees = F_IN, HIDDEN, EDGE_WIDTH, torch.arange(9)
    return {
        "SimpleConv": lambda g: g.SimpleConv("mean"),
        "GCNConv": lambda g: g.GCNConv(i, o),
        "ChebConv": lambda g: g.ChebConv(i, o, 3),
        "SAGEConv": lambda g: g.SAGEConv(i, o),
        "GraphConv": lambda g: g.GraphConv(i, o),
        "GatedGraphConv": lambda g: g.GatedGraphConv(i, 2),
        "ResGatedGraphConv": lambda g: g.ResGatedGraphConv(i, o),
        "GATConv": lambda g: g.GATConv(i, o // 2, heads=2),
        "GATv2Conv": lambda g: g.GATv2Conv(i, o // 2, heads=2),
        "TransformerConv": lambda g: g.TransformerConv(i, o // 2, heads=2, edge_dim=e),
        "AGNNConv": lambda g: g.AGNNConv(),
        "TAGConv": lambda g: g.TAGConv(i, o),
        "GINConv": lambda g: g.GINConv(mlp(i)),
        "GINEConv": lambda g: g.GINEConv(mlp(i), edge_dim=e),
        "ARMAConv": lambda g: g.ARMAConv(i, o),
        "SGConv": lambda g: g.SGConv(i, o, K=2),
        "SSGConv": lambda g: g.SSGConv(i, o, alpha=0.1, K=2),
        "APPNP": lambda g: g.APPNP(K=2, alpha=0.1),
        "MFConv": lambda g: g.MFConv(i, o),
        "RGCNConv": lambda g: g.RGCNConv(i, o, 5),
        "FastRGCNConv": lambda g: g.FastRGCNConv(i, o, 5),
        "RGATConv": lambda g: g.RGATConv(i, o // 2, 5, heads=2),
        "GMMConv": lambda g: g.GMMConv(i, o, dim=e, kernel_size=2),
        "NNConv": lambda g: g.NNConv(i, o, nn.Linear(e, i * o)),
        "CGConv": lambda g: g.CGConv(i, dim=e),
        "EdgeConv": lambda g: g.EdgeConv(mlp(2 * i)),
        "FeaStConv": lambda g: g.FeaStConv(i, o, heads=2),
        "LEConv": lambda g: g.LEConv(i, o),
        "PNAConv": lambda g: g.PNAConv(
            i, o, ["mean", "max", "std"], ["identity", "amplification"], degrees, edge_dim=e
        ),
        "ClusterGCNConv": lambda g: g.ClusterGCNConv(i, o),
        "HEATConv": lambda g: g.HEATConv(i, o // 2, 2, 5, 3, e, 3, heads=2),
        "GENConv": lambda g: g.GENConv(i, o, edge_dim=e, learn_t=True, norm="layer"),
        "GCN2Conv": lambda g: g.GCN2Conv(i, alpha=0.1),
        "WLConvContinuous": lambda g: g.WLConvContinuous(),
        "FiLMConv": lambda g: g.FiLMConv(i, o),
        "SuperGATConv": lambda g: g.SuperGATConv(i, o // 2, heads=2),
        "FAConv": lambda g: g.FAConv(i),
        "EGConv": lambda g: g.EGConv(i, o, num_heads=2),
        "PDNConv": lambda g: g.PDNConv(i, o, e, 4),
        "GeneralConv": lambda g: g.GeneralConv(i, o, in_edge_channels=e),
        "LGConv": lambda g: g.LGConv(),
        "AntiSymmetricConv": lambda g: g.AntiSymmetricConv(i),
        "DirGNNConv": lambda g: g.DirGNNConv(g.SAGEConv(i, o)),
        "MixHopConv": lambda g: g.MixHopConv(i, o),
        "PointNetConv": lambda g: g.PointNetConv(mlp(i + 3), mlp(o)),
        "PPFConv": lambda g: g.PPFConv(mlp(i + 4)),
        "PointTransformerConv": lambda g: g.PointTransformerConv(i, o),
        "PointGNNConv": lambda g: g.PointGNNConv(mlp(i, 3), mlp(i + 3), mlp(o, i)),
    }


WITH_EDGE_ROWS = (
    *("TransformerConv", "GINEConv", "GMMConv", "NNConv", "CGConv", "PNAConv", "GENConv", "PDNConv", "GeneralConv"),
    "HEATConv",
)
"""Convolutions that are called with edge features."""


RELATIONAL = ("RGCNConv", "FastRGCNConv", "RGATConv", "HEATConv")
"""Convolutions that are called with the relation of each edge."""


class Plain(nn.Module):
    """A convolution and a linear layer.

    Args:
        conv: The convolution.
        width: Columns of its result.
    """

    def __init__(self, conv: nn.Module, width: int) -> None:
        super().__init__()
        self.conv, self.out = conv, nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.out(self.conv(x, edge_index).relu())


class WithEdgeRows(Plain):
    """A convolution that gets edge features, and a linear layer."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:  # type: ignore[override]
        return self.out(self.conv(x, edge_index, edge_attr).relu())


class WithFirstRows(Plain):
    """A convolution that gets the rows of the first layer, and a linear layer."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.out(self.conv(x, x, edge_index).relu())


class WithPositions(Plain):
    """A convolution that gets positions in space, between linear layers."""

    def __init__(self, conv: nn.Module, width: int) -> None:
        super().__init__(conv, width)
        self.first = nn.Linear(F_IN, F_IN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        return self.out(self.conv(x, x[:, :3], edge_index).relu())


class WithNormals(WithPositions):
    """A convolution that gets positions and normals, between linear layers."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        return self.out(self.conv(x, x[:, :3], x[:, 3:6], edge_index).relu())


class WithRelations(Plain):
    """A convolution that gets the relation of each edge, and a linear layer."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:  # type: ignore[override]
        return self.out(self.conv(x, edge_index, edge_type).relu())


class WithTypes(Plain):
    """A convolution that gets a type of each vertex, from its first feature, and the type and features of each edge."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, edge_type: Tensor) -> Tensor:  # type: ignore[override]
        vertex_type = (x[:, 0] > 0).long()
        return self.out(self.conv(x, edge_index, vertex_type, edge_type, edge_attr).relu())


NAMES = (*constructors(), *CUSTOM)
"""Names of all convolutions that can be created without other packages."""


def reads_edge_rows(name: str) -> bool:
    """Return whether a convolution is called with edge features."""
    return name in WITH_EDGE_ROWS or name in CUSTOM


def make_net(name: str) -> nn.Module:
    """Return a model around a convolution."""
    import torch_geometric.nn as pyg

    conv = custom_conv(name) if name in CUSTOM else constructors()[name](pyg)
    kinds = {
        "FAConv": WithFirstRows,
        "GCN2Conv": WithFirstRows,
        "RGCNConv": WithRelations,
        "FastRGCNConv": WithRelations,
        "RGATConv": WithRelations,
        "HEATConv": WithTypes,
        "PPFConv": WithNormals,
        **dict.fromkeys(("PointNetConv", "PointTransformerConv", "PointGNNConv"), WithPositions),
    }
    kind = kinds.get(name, WithEdgeRows if reads_edge_rows(name) else Plain)
    narrow = {"SimpleConv", "AGNNConv", "APPNP", "GatedGraphConv", "CGConv", "GCN2Conv", "WLConvContinuous", "FAConv"}
    narrow |= {"LGConv", "AntiSymmetricConv", "PointGNNConv"}
    width = 3 * HIDDEN if name == "MixHopConv" else F_IN if name in narrow else HIDDEN
    return kind(conv, width)


@dataclass(frozen=True, kw_only=True)
class ConvolutionCase(Case):
    """A model around a convolution."""

    convolution: str
    """Name of the convolution."""

    def make_model(self, graph: Graph) -> nn.Module:
        del graph
        optional = ["edge_attr"] if self.edge_features else []
        return convert(make_net(self.convolution), edge_inputs=optional + (["edge_type"] if self.typed else []))

    @property
    def reads_edges(self) -> bool:
        return how(self.convolution).native is False


class How(NamedTuple):
    """How weft runs a convolution."""

    native: bool | None
    """True: with its own kernels; False: as the convolution itself; None: only under `single`, as in PyG."""
    words: str
    """Words for it, or why not."""


def case_of(name: str) -> ConvolutionCase:
    """Return the case of a convolution."""
    typed = "x" if name in RELATIONAL else ""
    edge_width = EDGE_WIDTH if reads_edge_rows(name) else 0
    return ConvolutionCase(model=f"around {name}", convolution=name, edge_features=edge_width, typed=typed)


def how(name: str) -> How:
    """Return how weft runs a convolution."""
    torch.manual_seed(0)
    optional = ["edge_attr"] if reads_edge_rows(name) else []
    optional += ["edge_type"] if name in RELATIONAL else []
    try:
        model = convert(make_net(name), edge_inputs=optional)
    except InputError as error:
        first, _, rest = str(error).partition(": ")  # the line in the model, if it is one
        return How(None, rest.partition(": ")[0] if ".py" in first else first)
    assert isinstance(model, Converted)
    layers = [part for part in model.modules() if isinstance(part, PyGConv)]
    if not layers:
        return How(True, "weft's kernels")
    edge_index = torch.tensor([[0, 1, 2, 3, 3], [0, 0, 1, 1, 2]])
    arguments = {"edge_attr": torch.ones(5, EDGE_WIDTH), "edge_type": torch.zeros(5, dtype=torch.int64)}
    rows = {argument: arguments[argument] for argument in optional}
    for layer in layers:
        with layer.tiled.replacing():
            forms = zip(layer.row_arguments.names, layer.row_arguments.forms[1:], strict=True)
            others = {argument: form.restored(torch.ones(4, form.width)) for argument, form in forms}
            call_conv(layer.conv, torch.ones(4, NUM_FEATURES), others, edge_index, rows)
    reasons = {each for layer in layers for each in layer.tiled.messages.values() if isinstance(each, str)}
    if reasons or not all(layer.tiled.messages for layer in layers):
        return How(False, f"PyG's code on all edges of a block: {', '.join(sorted(reasons)) or 'it reads all edges'}")
    return How(False, "a program in tiles of edges")


def page() -> str:
    """Return the page with the table of all convolutions."""
    import torch_geometric.nn.conv as pyg

    lines = []
    for name in sorted(set(pyg.__all__) - {"MessagePassing"}):
        if name in PACKAGES:
            words = f"not tried: needs {PACKAGES[name]}"
        elif name in OTHER_ARGUMENTS:
            words = OTHER_ARGUMENTS[name]
            words = words if words.startswith("see ") else f"not tried: takes {words}"
        else:
            result = how(name)
            words = result.words if result.native is not None else f"only `single`, as in PyG: {result.words}"
        lines.append(f"| {name} | {words} |")
    custom = [f"| {name} | {how(name).words} |" for name in CUSTOM]
    return "\n".join(
        [
            "# Convolutions of PyG",
            "",
            "*This page is generated: `python -m tests.lib.convolutions` tries `torch_geometric.nn.conv`.*",
            "",
            "How weft runs a model around each convolution, with its usual options. Tests compare logits and gradients",
            "with PyG's, and between strategies (`tests/strategies/test_convolutions.py`).",
            "[Models](models.md#which-strategies-run-it) says which strategies run which kind, and what",
            "[a program in tiles of edges](models.md#in-tiles-of-edges) is. A block has the in-edges of a rank's",
            "vertices.",
            "",
            "| class | runs as |",
            "|---|---|",
            *lines,
            "",
            "## Custom layers",
            "",
            "| message function | runs as |",
            "|---|---|",
            *custom,
            "",
        ]
    )


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
