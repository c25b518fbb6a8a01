"""PyG's convolutions in weft's aggregates: the same numbers by fused kernels, cut where an aggregate begins.

Each rule is given the convolution and its arguments while a model is traced, and says in PyTorch's words what the rows
do before and after; None where the convolution has options that weft's aggregates have not. It runs by blocks then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.nn.aggregate.aggregate import Aggregate, Request, WholeLayer
from weft.nn.aggregate.attention import Attend, AttendEdges, MaskKey
from weft.nn.aggregate.reduce import Max, Sum
from weft.nn.convert.traced_steps import GraphStep
from weft.nn.layers.conv import LinearConv
from weft.nn.layers.norm import BatchNorm
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedLayer
from weft.nn.layers.pyg_conv import PyGConv, from_pyg
from weft.nn.layers.rgcn import relational_update
from weft.nn.view import View


@dataclass(frozen=True)
class Aggregated(GraphStep):
    """An aggregate of rows."""

    make: Callable[..., Request]
    """Of the rows."""
    steps: int = 1

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del model, view
        return Boundary(request=self.make(*rows), steps=self.steps)


@dataclass(frozen=True)
class Attended(Aggregated):
    """An attention, whose weights are dropped."""

    dropout: float = 0.0

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del model
        return Boundary(request=self.make(*rows, dropout=view.mask_key(self.dropout)))


class Phased(GraphStep):
    """What a layer in phases does."""

    def layer(self, model: nn.Module) -> PhasedLayer:
        """The layer, with the model's parameters."""
        raise NotImplementedError

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary | Tensor:
        return self.layer(model).begin(view, *rows)

    def resume(self, model: nn.Module, view: View, state: BoundaryState) -> Boundary | Tensor:
        return self.layer(model).resume(view, state)


@dataclass(frozen=True)
class Mapped(Phased):
    """A sum of mapped rows, in the order that costs less: `A x W`, and what rows add by a map of their own."""

    path: str
    """Of the convolution."""
    aggregate: Sum
    weight: str
    """Path of the linear map within the convolution."""
    weight_self: str = ""
    """Of that of the rows themselves; '': none."""

    def layer(self, model: nn.Module) -> MapOf:
        conv = model.get_submodule(self.path)
        own = conv.get_submodule(self.weight_self) if self.weight_self else None
        return MapOf(self.aggregate, conv.get_submodule(self.weight), own, conv)


class MapOf(LinearConv):
    """The layer of a `Mapped`, whose weights are those of another module."""

    def __init__(self, aggregate: Sum, weight: Any, own: Any, conv: Any) -> None:
        nn.Module.__init__(self)
        bias = weight.bias if weight.bias is not None else getattr(conv, "bias", None)
        self.__dict__["weight"], self.__dict__["bias"] = weight.weight.t(), bias
        self.__dict__["weight_self"] = None if own is None else own.weight.t()
        self.aggregate, self.adds_own, self.out_width = aggregate, own is not None, len(weight.weight)


@dataclass(frozen=True)
class WithView(GraphStep):
    """A layer that runs as a whole, in the place of a convolution."""

    path: str
    make: Callable[[Any], nn.Module]
    """The layer, of the convolution."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del view
        (x,) = rows
        return Boundary(request=Request(WholeLayer(model.get_submodule(self.path)), {"x": x, "own": x}))


def by_blocks(conv: Any, given: frozenset[str]) -> PyGConv:
    """A convolution as it is; given: what of the graph's edges the model gives it."""
    layer = from_pyg(conv, reads_edge_attr="edge_attr" in given)
    layer.takes &= given
    return layer


@dataclass(frozen=True)
class GlobalNorm(Phased):
    """A batch norm over all vertices."""

    path: str
    over_edges = False

    def layer(self, model: nn.Module) -> BatchNorm:
        norm = model.get_submodule(self.path)
        assert isinstance(norm, BatchNorm)
        return norm


class LayerScope(Protocol):
    """What a rule writes its steps with."""

    path: str
    """Of the convolution in the model."""

    def over_graph(self, step: GraphStep, *rows: Any) -> Any:
        """The result of a step over the graph."""
        ...


def gathered(op: Aggregate, x: Tensor) -> Request:
    """A request of one tensor."""
    return Request(op, {"x": x})


def summed(scope: LayerScope, op: Aggregate, x: Any, steps: int = 1) -> Any:
    """An aggregate of x alone."""
    return scope.over_graph(Aggregated(partial(gathered, op), steps), x)


def reduction(conv: Any, *, weighted: bool) -> Aggregate | None:
    """The aggregate of a convolution's `aggr`; None for another than sum, mean and max."""
    known = {"add": Sum(weighted=weighted), "sum": Sum(weighted=weighted), "mean": Sum("mean", weighted=weighted)}
    if conv.aggr == "max" and not weighted:
        return Max()
    return known.get(conv.aggr)


def kipf(conv: Any, weight: Any) -> Sum | None:
    """D^-1/2 (A + I) D^-1/2 where a convolution normalises so, A where it does not at all; else None."""
    weighted = weight is not None
    if conv.aggr not in ("add", "sum") or getattr(conv, "improved", False):
        return None
    if not getattr(conv, "normalize", True):
        return None if conv.add_self_loops else Sum(weighted=weighted)
    return Sum("gcn", weighted=weighted) if conv.add_self_loops else None


def gcn(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Kipf and Welling 2017, eq. 2."""
    op = kipf(conv, edge_weight)
    return op and scope.over_graph(Mapped(scope.path, op, "lin"), x)


def sage(scope: LayerScope, conv: Any, *, x: Any) -> Any:
    """Hamilton, Ying, Leskovec 2017, algorithm 1."""
    op = reduction(conv, weighted=False)
    if op is None:
        return None
    if isinstance(op, Sum) and not conv.project:
        y = scope.over_graph(Mapped(scope.path, op, "lin_l", "lin_r" if conv.root_weight else ""), x)
    else:
        y = conv.lin_l(summed(scope, op, torch.relu(conv.lin(x)) if conv.project else x))
        y = y + conv.lin_r(x) if conv.root_weight else y
    return functional.normalize(y, p=2.0, dim=-1) if conv.normalize else y


def graph(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Morris et al. 2019, eq. 3."""
    op = reduction(conv, weighted=edge_weight is not None)
    if isinstance(op, Sum):
        return scope.over_graph(Mapped(scope.path, op, "lin_rel", "lin_root"), x)
    return op and conv.lin_rel(summed(scope, op, x)) + conv.lin_root(x)


def gin(scope: LayerScope, conv: Any, *, x: Any) -> Any:
    """Xu et al. 2019, eq. 4.1."""
    op = reduction(conv, weighted=False)
    return op and conv.nn((1 + conv.eps) * x + summed(scope, op, x))


def attended(conv: Any, y: Any, x: Any) -> Any:
    """What a convolution makes of its heads' results, side by side."""
    if not conv.concat:
        y = y.view(-1, conv.heads, conv.out_channels).mean(1)
    y = y if getattr(conv, "res", None) is None else y + conv.res(x)
    return y if conv.bias is None else y + conv.bias


def attends_as_weft(conv: Any) -> bool:
    """Whether attention goes over in-edges and the vertex itself, whose edge features are their mean."""
    return bool(conv.add_self_loops and conv.fill_value == "mean" and conv.aggr in ("add", "sum"))


def attention(scope: LayerScope, conv: Any, make: Callable[..., Request], *rows: Any) -> Any:
    """The attention of a convolution."""
    dropout = conv.dropout if conv.training else 0.0
    return scope.over_graph(Attended(partial(make, slope=conv.negative_slope), dropout=dropout), *rows)


def gat(scope: LayerScope, conv: Any, *, x: Any, edge_attr: Any) -> Any:
    """Velickovic et al. 2018, eqs. 1-6."""
    if not attends_as_weft(conv) or conv.lin is None:
        return None
    h = conv.lin(x)
    by_head = h.view(-1, conv.heads, conv.out_channels)
    logits = [(by_head * part).sum(-1) for part in (conv.att_src, conv.att_dst)]
    if edge_attr is None or conv.lin_edge is None:
        return attended(conv, attention(scope, conv, Attend.of, h, *logits), x)
    edges = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
    edge_map = (edges * conv.att_edge.view(conv.heads, -1, 1)).sum(1).t()
    return attended(conv, attention(scope, conv, attend_with_edges, h, *logits, edge_map), x)


def attend_with_edges(
    h: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    edge_map: Tensor,
    *,
    slope: float,
    dropout: MaskKey | None,
) -> Request:
    """The request of GAT with edge features, whose logits are sums of numbers by head."""
    ones = h.new_ones(logit_src.shape[1], 1)
    return AttendEdges.of(h, logit_src, logit_dst, ones, edge_map=edge_map, slope=slope, dropout=dropout)


def gatv2(scope: LayerScope, conv: Any, *, x: Any, edge_attr: Any) -> Any:
    """Brody et al. 2022, eq. 7."""
    if not attends_as_weft(conv):
        return None
    left = conv.lin_l(x)
    right = left if conv.share_weights else conv.lin_r(x)
    shared = [conv.att[0]] + ([] if edge_attr is None else [conv.lin_edge.weight.t()])
    return attended(conv, attention(scope, conv, attend_pairs, left, right, *shared), x)


def attend_pairs(
    left: Tensor,
    right: Tensor,
    attention: Tensor,
    edge_map: Tensor | None = None,
    *,
    slope: float,
    dropout: MaskKey | None,
) -> Request:
    """The request of GATv2."""
    return AttendEdges.of(left, None, right, attention, edge_map=edge_map, slope=slope, dropout=dropout)


def appnp(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Gasteiger et al. 2019, eq. 4."""
    op, y = kipf(conv, edge_weight), x
    if op is None or conv.dropout:
        return None
    for _ in range(conv.K):
        y = summed(scope, op, y) * (1 - conv.alpha) + conv.alpha * x
    return y


def sgc(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Wu et al. 2019, eq. 8."""
    op = kipf(conv, edge_weight)
    return op and conv.lin(summed(scope, op, x, steps=conv.K))


def gcn2(scope: LayerScope, conv: Any, *, x: Any, x_0: Any, edge_weight: Any) -> Any:
    """Chen et al. 2020, eq. 5."""
    op = kipf(conv, edge_weight)
    if op is None:
        return None
    y, first = summed(scope, op, x) * (1 - conv.alpha), conv.alpha * x_0
    mix = partial(torch.addmm, beta=1 - conv.beta, alpha=conv.beta)
    if conv.weight2 is None:
        y = y + first
        return mix(y, y, conv.weight1)
    return mix(y, y, conv.weight1) + mix(first, first, conv.weight2)


class RelationalConv(nn.Module):
    """PyG's RGCNConv, whose parameters it has by the same names, by `View.relate`."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.comp, self.root, self.bias = conv.weight, conv.comp, conv.root, conv.bias
        self.out_width = conv.out_channels

    def forward(self, view: View, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.dim() == 4 else self.weight[:, None]
        return relational_update(view, x, weight, self.comp, self.root, self.bias)


def rgcn(scope: LayerScope, conv: Any, *, x: Any) -> Any:
    """Schlichtkrull et al. 2018, eq. 2."""
    return scope.over_graph(WithView(scope.path, RelationalConv), x) if conv.aggr == "mean" else None


def simple(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """A sum, mean or maximum, and no map."""
    op = reduction(conv, weighted=edge_weight is not None)
    return None if conv.combine_root is not None or op is None else summed(scope, op, x)


RULES: dict[str, Callable[..., Any]] = {
    "APPNP": appnp,
    "FastRGCNConv": rgcn,
    "GATConv": gat,
    "GATv2Conv": gatv2,
    "GCN2Conv": gcn2,
    "GCNConv": gcn,
    "GINConv": gin,
    "GraphConv": graph,
    "RGCNConv": rgcn,
    "SAGEConv": sage,
    "SGConv": sgc,
    "SimpleConv": simple,
}
"""By the name of PyG's class."""
