"""PyG models in the style of PyG's examples, for benchmarks and tests."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F


class Widths(NamedTuple):
    """Widths of the rows of a model."""

    features: int
    """Number of features."""
    hidden: int
    """Width of the hidden layers, a multiple of 2."""
    classes: int
    """Number of classes."""


SMALL = Widths(7, 8, 5)


class GCN(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.conv1 = pyg.GCNConv(widths.features, widths.hidden, cached=True)
        self.conv2 = pyg.GCNConv(widths.hidden, widths.classes, cached=True)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = F.dropout(x, p=0.4, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=0.4, training=self.training)
        return self.conv2(x, edge_index, edge_weight)


class GAT(nn.Module):
    def __init__(self, widths: Widths = SMALL, conv: Any = pyg.GATConv, **options: Any) -> None:
        super().__init__()
        self.conv1 = conv(widths.features, widths.hidden, heads=3, **options)
        self.conv2 = conv(3 * widths.hidden, widths.classes, heads=2, concat=False, **options)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = F.elu(self.conv1(x, edge_index, edge_attr))
        return self.conv2(F.dropout(x, p=0.4, training=self.training), edge_index, edge_attr)


class SAGE(nn.Module):
    """GraphSAGE that takes a `Data` object, with batch norm and in-place activations; it returns log-probabilities."""

    def __init__(self, widths: Widths = SMALL, **options: Any) -> None:
        super().__init__()
        columns = [widths.features, widths.hidden, widths.hidden, widths.classes]
        self.convs = nn.ModuleList(pyg.SAGEConv(a, b, **options) for a, b in pairwise(columns))
        self.norms = nn.ModuleList(nn.BatchNorm1d(widths.hidden) for _ in range(2))

    def forward(self, data: Any) -> Tensor:
        x, edge_index = data.x, data.edge_index
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index))
            x.relu_()
            x = F.dropout(x, p=0.4, training=self.training)
        return F.log_softmax(self.convs[-1](x, edge_index), dim=-1)


class GIN(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        hidden = widths.hidden
        self.convs = nn.ModuleList()
        for width in (widths.features, hidden):
            norm, act = nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)
            mlp = nn.Sequential(nn.Linear(width, hidden), norm, act, nn.Linear(hidden, hidden))
            self.convs.append(pyg.GINConv(mlp, train_eps=True))
        self.drop, self.out = nn.Dropout(0.4), nn.Linear(widths.hidden, widths.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.out(self.drop(x))


class GCNII(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(*widths[:2]), nn.Linear(*widths[1:])])
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(widths.hidden, 0.1, theta=0.5, layer=i + 1, shared_weights=i != 1) for i in range(3)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x_0 = self.linears[0](F.dropout(x, 0.4, self.training)).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, 0.4, self.training), x_0, edge_index).relu()
        return self.linears[1](x)


class APPNP(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.lin1, self.lin2 = pyg.Linear(widths.features, widths.hidden), pyg.Linear(widths.hidden, widths.classes)
        self.prop = pyg.APPNP(3, 0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.relu(self.lin1(F.dropout(x, p=0.4, training=self.training)))
        return self.prop(self.lin2(x), edge_index)


class JK(nn.Module):
    """GCN with a residual connection and jumping knowledge."""

    def __init__(self, widths: Widths = SMALL, mode: str = "cat") -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            pyg.GCNConv(w, widths.hidden) for w in (widths.features, widths.hidden, widths.hidden)
        )
        self.jump = pyg.JumpingKnowledge(mode, channels=widths.hidden, num_layers=3)
        self.lin = nn.Linear(3 * widths.hidden if mode == "cat" else widths.hidden, widths.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        xs: list[Tensor] = []
        for conv in self.convs:
            y = F.relu(conv(x, edge_index))
            x = y + x if xs else y
            xs += [x]
        return self.lin(self.jump(xs))


class Recurrent(nn.Module):
    """Message passing whose rows update the state of a GRU, [1, n, F] (Gilmer et al. 2017)."""

    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.first, self.conv = pyg.GCNConv(widths.features, widths.hidden), pyg.GCNConv(widths.hidden, widths.hidden)
        self.gru, self.lin = nn.GRU(widths.hidden, widths.hidden), nn.Linear(widths.hidden, widths.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.relu(self.first(x, edge_index))
        state = x.unsqueeze(0)
        for _ in range(2):
            rows, state = self.gru(F.relu(self.conv(x, edge_index)).unsqueeze(0), state)
            x = rows.squeeze(0)
        return self.lin(x)


class RGCN(nn.Module):
    """R-GCN, for a graph with edge types."""

    def __init__(self, widths: Widths = SMALL, relations: int = 5, **options: Any) -> None:
        super().__init__()
        self.lin = pyg.Linear(widths.features, widths.hidden)
        self.conv1 = pyg.RGCNConv(widths.hidden, widths.hidden, relations, **options)
        self.conv2 = pyg.FastRGCNConv(widths.hidden, widths.classes, relations, num_bases=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = F.dropout(self.lin(x), p=0.4, training=self.training)
        x = x + self.conv1(x, edge_index, edge_type).relu()
        return self.conv2(x, edge_index, edge_type)


FORWARD = (("a", "r0", "a"), ("b", "r1", "a"), ("c", "r2", "a"), ("a", "r3", "c"), ("b", "r4", "c"))
RELATIONS = (*FORWARD, *((target, f"rev_{name}", source) for source, name, target in FORWARD))
"""Relations between three vertex types: (source type, name, target type), in both directions."""


class Hetero(nn.Module):
    """HeteroConv model that takes dicts. Vertices of type c may have no features: `features` then lacks this type.

    The first convolutions read rows of other widths for each type.
    """

    def __init__(
        self,
        widths: Widths = SMALL,
        features: dict[str, int] | None = None,
        aggr: str = "sum",
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        features = features or dict.fromkeys("abc", widths.features)
        hidden, self.convs = widths.hidden, nn.ModuleList()
        sizes = {name: hidden + number for number, name in enumerate(features)}
        self.maps = nn.ModuleDict({name: nn.Linear(width, sizes[name]) for name, width in features.items()})
        for _ in range(2):
            relations = [relation for relation in RELATIONS if {relation[0], relation[2]} <= features.keys()]
            ends = [(sizes[source], sizes[target]) for source, _, target in relations]
            convs = {relation: self.conv(number, ends[number], hidden) for number, relation in enumerate(relations)}
            self.convs.append(pyg.HeteroConv(convs, aggr=aggr))
            sizes = dict.fromkeys(features, hidden)
        self.norms = nn.ModuleDict({name: norm(hidden) for name in "abc"})
        self.out = nn.Linear(hidden, widths.classes)

    def conv(self, number: int, ends: tuple[int, int], hidden: int) -> nn.Module:
        kind = pyg.GraphConv if number % 2 else pyg.SAGEConv
        return kind(ends, hidden, aggr="mean", **({"project": True} if number == 2 else {}))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict = {name: self.maps[name](x).relu_() for name, x in x_dict.items()}
        for conv in self.convs:
            rows = {name: self.norms[name](x) for name, x in conv(x_dict, edge_index_dict).items()}
            x_dict = x_dict | {name: F.dropout(x.relu(), 0.4, self.training) for name, x in rows.items()}
        return self.out(x_dict["a"])


class HeteroAttention(Hetero):
    """HeteroConv model with attention by relation, of another kind for each relation."""

    def conv(self, number: int, ends: tuple[int, int], hidden: int) -> nn.Module:
        kind = (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv, pyg.SAGEConv)[number % 4]
        options = {} if kind in (pyg.TransformerConv, pyg.SAGEConv) else {"add_self_loops": False}
        return kind(ends, hidden // 2, heads=2, **options) if number % 4 < 3 else kind(ends, hidden)


class HeteroEdges(Hetero):
    """HeteroConv model with attention by relation that reads three features of each edge."""

    def conv(self, number: int, ends: tuple[int, int], hidden: int) -> nn.Module:
        kind = (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv)[number % 3]
        options = {} if kind is pyg.TransformerConv else {"add_self_loops": False}
        return kind(ends, hidden // 2, heads=2, edge_dim=3, **options)

    def forward(  # type: ignore[override]
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor], edge_attr_dict: dict[Any, Tensor]
    ) -> Tensor:
        x_dict = {name: self.maps[name](x).relu() for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = x_dict | conv(x_dict, edge_index_dict, edge_attr_dict)
        return self.out(x_dict["a"])


class HGT(nn.Module):
    """Two layers of heterogeneous graph transformers, over all relations at once."""

    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        metadata, features = (["a", "b", "c"], [*RELATIONS]), dict.fromkeys("abc", widths.features)
        self.conv1 = pyg.HGTConv(features, widths.hidden, metadata, heads=2)
        self.conv2 = pyg.HGTConv(widths.hidden, widths.hidden, metadata, heads=2)
        self.out = nn.Linear(widths.hidden, widths.classes)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict = {name: x.relu() for name, x in self.conv1(x_dict, edge_index_dict).items()}
        return self.out(self.conv2(x_dict, edge_index_dict)["a"])


class HAN(nn.Module):
    """Two layers of heterogeneous attention: over the in-edges by each relation, and over the relations."""

    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        metadata, features = (["a", "b", "c"], [*RELATIONS]), dict.fromkeys("abc", widths.features)
        self.conv1 = pyg.HANConv(features, widths.hidden, metadata, heads=2)
        self.conv2 = pyg.HANConv(widths.hidden, widths.hidden, metadata, heads=2)
        self.out = nn.Linear(widths.hidden, widths.classes)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict = x_dict | {name: x for name, x in self.conv1(x_dict, edge_index_dict).items() if x is not None}
        return self.out(self.conv2(x_dict, edge_index_dict)["a"])


class Homogeneous(nn.Module):
    """Model for one vertex and edge type, which `to_hetero` turns into a heterogeneous model."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(widths.features, widths.hidden), nn.Dropout(0.4)
        self.conv1 = pyg.SAGEConv((widths.hidden, widths.hidden), widths.hidden)
        self.conv2 = pyg.GraphConv((widths.hidden, widths.hidden), widths.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        x = x + self.drop(self.conv1(x, edge_index)).relu()
        return self.conv2(x, edge_index)


def to_hetero(widths: Widths = SMALL, aggr: str = "mean") -> nn.Module:
    """Return `Homogeneous` as a heterogeneous model, with logits for several vertex types."""
    return pyg.to_hetero(Homogeneous(widths), (["a", "b", "c"], [*RELATIONS]), aggr=aggr)


class PNA(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        options = {"aggregators": ["mean", "max", "std"], "scalers": ["identity"], "deg": torch.arange(9)}
        self.conv = pyg.PNAConv(widths.features, widths.hidden, **options)
        self.norm = pyg.BatchNorm(widths.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(widths.hidden, widths.hidden), nn.ReLU(), nn.Linear(widths.hidden, widths.classes)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.mlp(F.relu(self.norm(self.conv(x, edge_index))))


class Transformer(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.conv1 = pyg.TransformerConv(widths.features, widths.hidden // 2, heads=2, beta=True)
        self.norm = nn.LayerNorm(widths.hidden)
        self.conv2 = pyg.TransformerConv(widths.hidden, widths.classes, heads=2, concat=False, beta=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(F.relu(self.norm(self.conv1(x, edge_index))), edge_index)


class DeeperGCN(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.encoder = nn.Linear(widths.features, widths.hidden)
        self.layers = nn.ModuleList()
        for _ in range(3):
            conv = pyg.GENConv(widths.hidden, widths.hidden, aggr="softmax", t=1.0, learn_t=True, norm="layer")
            self.layers.append(pyg.DeepGCNLayer(conv, nn.LayerNorm(widths.hidden), nn.ReLU(inplace=True), dropout=0.1))
        self.out = nn.Linear(widths.hidden, widths.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first: Any = self.layers[0]
        x = first.conv(self.encoder(x), edge_index)
        for layer in self.layers[1:]:
            x = layer(x, edge_index)
        x = first.act(first.norm(x))
        return self.out(F.dropout(x, p=0.1, training=self.training))


class EdgeMessage(pyg.MessagePassing):
    """A custom layer whose forward takes only x and edge_index."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__(aggr="max")
        self.mlp = nn.Sequential(nn.Linear(2 * in_width, out_width), nn.ReLU(), nn.Linear(out_width, out_width))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j - x_i], dim=1))


class Custom(nn.Module):
    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.conv1, self.conv2 = EdgeMessage(widths.features, widths.hidden), EdgeMessage(widths.hidden, widths.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index)


class EdgeFeatures(pyg.MessagePassing):
    """A custom layer that takes edge_attr; no attribute of the layer says how wide edge_attr is."""

    def __init__(self, in_width: int, out_width: int, edge_width: int) -> None:
        super().__init__(aggr="mean")
        self.of_row, self.of_edge = nn.Linear(in_width, out_width), nn.Linear(edge_width, out_width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        y: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return y

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.tanh(self.of_row(x_j) + self.of_edge(edge_attr))


class OwnEdges(nn.Module):
    """Two `EdgeFeatures` layers; between them, some rows are computed without gradients."""

    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.conv1, self.conv2 = EdgeFeatures(*widths[:2], 3), EdgeFeatures(widths.hidden, widths.classes, 3)
        self.map = nn.Linear(widths.hidden, widths.hidden)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h = self.conv1(x, edge_index, edge_attr)
        with torch.no_grad():
            constant = F.relu(self.map(h))
        return self.conv2(h + constant, edge_index, edge_attr)


class ConstantFirst(nn.Module):
    """Two GCNConv layers; the first one runs under torch.no_grad, so it is not trained."""

    def __init__(self, widths: Widths = SMALL) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.GCNConv(*widths[:2]), pyg.GCNConv(widths.hidden, widths.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.no_grad():
            h = F.relu(self.conv1(x, edge_index))
        return self.conv2(h, edge_index)


def mixed(widths: Widths = SMALL) -> nn.Module:
    """Return a pyg.Sequential in which two convolutions share their weights."""
    shared = pyg.GraphConv(widths.hidden, widths.hidden, aggr="mean")
    return pyg.Sequential(
        "x, edge_index",
        [
            (pyg.SGConv(widths.features, widths.hidden, K=2), "x, edge_index -> x"),
            nn.ELU(inplace=True),
            (shared, "x, edge_index -> x"),
            nn.Dropout(0.4),
            (shared, "x, edge_index -> x"),
            nn.Linear(widths.hidden, widths.classes),
        ],
    )


def basic(widths: Widths = SMALL) -> nn.Module:
    """Return a model from torch_geometric.nn.models."""
    return pyg.GraphSAGE(*widths[:2], 3, widths.classes, dropout=0.4, norm="batch_norm", jk="cat")


NATIVE: dict[str, Any] = {
    "pyg-gcn": GCN,
    "pyg-gat": GAT,
    "pyg-gatv2": partial(GAT, conv=pyg.GATv2Conv, share_weights=True),
    "pyg-gat-edges": partial(GAT, edge_dim=3),
    "pyg-gatv2-edges": partial(GAT, conv=pyg.GATv2Conv, edge_dim=3),
    "pyg-gat-dropout": partial(GAT, dropout=0.6),
    "pyg-gatv2-dropout": partial(GAT, conv=pyg.GATv2Conv, dropout=0.6),
    "pyg-gatv2-dropout-edges": partial(GAT, conv=pyg.GATv2Conv, edge_dim=3, dropout=0.6),
    "pyg-sage": SAGE,
    "pyg-sage-max": partial(SAGE, aggr="max", project=True, normalize=True),
    "pyg-gin": GIN,
    "pyg-gcnii": GCNII,
    "pyg-appnp": APPNP,
    "pyg-jk": JK,
    "pyg-jk-lstm": partial(JK, mode="lstm"),
    "pyg-mixed": mixed,
    "pyg-gru": Recurrent,
    "pyg-basic": basic,
    "pyg-constant": ConstantFirst,
}
"""Models that weft converts to its own aggregates."""
TYPED: dict[str, Any] = {
    "pyg-rgcn": RGCN,
    "pyg-rgcn-bases": partial(RGCN, num_bases=3, root_weight=False, bias=False),
    "pyg-rgcn-blocks": partial(RGCN, num_blocks=2),
}
"""Models that weft converts to means by relation, for edges of five types."""
BY_TYPE: dict[str, Any] = {
    "pyg-hetero": Hetero,
    "pyg-hetero-max": partial(Hetero, aggr="max", norm=nn.BatchNorm1d),
    "pyg-hetero-attention": HeteroAttention,
    "pyg-hetero-edges": HeteroEdges,
    "pyg-hetero-hgt": HGT,
    "pyg-hetero-han": HAN,
    "pyg-hetero-some": partial(Hetero, features={"a": 4, "b": 3}, aggr="mean"),
    "pyg-to-hetero": to_hetero,
}
"""Models that take x_dict and edge_index_dict, for a graph with three vertex types."""
BY_BLOCKS: dict[str, Any] = {
    "pyg-pna": PNA,
    "pyg-transformer": Transformer,
    "pyg-deeper": DeeperGCN,
    "pyg-custom": Custom,
    "pyg-own-edges": OwnEdges,
}
"""Models with convolutions that weft runs unchanged."""
PYG_MODELS = NATIVE | TYPED | BY_TYPE | BY_BLOCKS
