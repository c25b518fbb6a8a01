"""Rules that express PyG's convolutions by weft's aggregates, which have fused kernels.

A rule is called while a model is traced, with the convolution and the arguments of its call. It records the aggregates
through the scope, and what happens to rows before and after them as PyTorch calls. Its arguments are the scope, the
convolution, and proxies of the call's arguments by name, None for those that are not given. It returns None if the
convolution has options that weft's aggregates do not support; the convolution then runs on blocks of edges (`PyGConv`).
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
from weft.nn.aggregate.reduce import LaplacianSum, Max, Sum
from weft.nn.convert.traced_steps import GraphStep
from weft.nn.layers.conv import LinearConv
from weft.nn.layers.norm import BatchNorm
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedLayer
from weft.nn.layers.pyg_conv import ConvWithSums, PyGConv, from_pyg
from weft.nn.layers.relation_attention import combine_heads
from weft.nn.layers.rgcn import relational_update
from weft.nn.view import View


@dataclass(frozen=True)
class Aggregated(GraphStep):
    """Graph step that requests an aggregate."""

    make: Callable[..., Request]
    """Function that returns the request, from the rows."""
    steps: int = 1
    """Number of times that the aggregate is applied."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del model, view
        return Boundary(request=self.make(*rows), steps=self.steps)


@dataclass(frozen=True)
class Attended(Aggregated):
    """Graph step that requests attention, with dropout of the weights."""

    dropout: float = 0.0
    """Dropout probability of the attention weights."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del model
        return Boundary(request=self.make(*rows, dropout=view.mask_key(self.dropout)))


class Phased(GraphStep):
    """Graph step that delegates to a `PhasedLayer`."""

    def layer(self, model: nn.Module) -> PhasedLayer:
        """Return the layer, with the model's parameters."""
        raise NotImplementedError

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary | Tensor:
        return self.layer(model).begin(view, *rows)

    def resume(self, model: nn.Module, view: View, state: BoundaryState) -> Boundary | Tensor:
        return self.layer(model).resume(view, state)


@dataclass(frozen=True)
class TransformedSum(Phased):
    """Graph step for `A x W` in the cheaper order, plus a linear transform of the vertex's own row."""

    path: str
    """Path of the convolution in the model."""
    aggregate: Sum
    """The sum over in-edges, A."""
    weight: str
    """Path of the linear layer W within the convolution."""
    weight_self: str = ""
    """Path of the linear layer of the vertex's own row within the convolution. Empty: there is none."""

    def layer(self, model: nn.Module) -> TransformedSumLayer:
        conv = model.get_submodule(self.path)
        linear_self = conv.get_submodule(self.weight_self) if self.weight_self else None
        return TransformedSumLayer(self.aggregate, conv.get_submodule(self.weight), linear_self, conv)


class TransformedSumLayer(LinearConv):
    """Layer of a `TransformedSum`, which uses the weights of other modules without owning them.

    Args:
        aggregate: Aggregate A.
        linear: Linear layer W.
        linear_self: Linear layer of the vertex's own row, or None.
        conv: The convolution, for its bias.
    """

    def __init__(self, aggregate: Sum, linear: Any, linear_self: Any, conv: Any) -> None:
        nn.Module.__init__(self)
        bias = linear.bias if linear.bias is not None else getattr(conv, "bias", None)
        self.__dict__["weight"], self.__dict__["bias"] = linear.weight.t(), bias
        self.__dict__["weight_self"] = None if linear_self is None else linear_self.weight.t()
        self.aggregate, self.adds_self, self.out_width = aggregate, linear_self is not None, len(linear.weight)


@dataclass(frozen=True)
class WithView(GraphStep):
    """Graph step that calls a layer without phases, which replaces a convolution in the model."""

    path: str
    """Path of the convolution in the model."""
    make: Callable[[Any], nn.Module]
    """Function that returns the layer, from the convolution."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del view
        layer = model.get_submodule(self.path)
        x = layer.row_arguments.join(rows) if isinstance(layer, PyGConv) else rows[0]
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))


@dataclass(frozen=True)
class SumOverInEdges(GraphStep):
    """Graph step that computes the in-edge sums of a convolution, such as degrees, before the step that calls it."""

    path: str
    """Path of the convolution in the model."""

    def layer(self, model: nn.Module) -> ConvWithSums:
        """Return the layer that calls the convolution."""
        layer = model.get_submodule(self.path)
        assert isinstance(layer, ConvWithSums)
        return layer

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del view
        layer = self.layer(model)
        zeros = layer.rows_for_sums(rows)
        return Boundary(request=Request(WholeLayer(layer), {"x": zeros, "own": zeros}))


def pyg_conv_layer(conv: Any, edge_arguments: frozenset[str], row_names: tuple[str, ...]) -> PyGConv:
    """Return a layer that calls a convolution on blocks of edges.

    Args:
        conv: The convolution.
        edge_arguments: Names of the edge arguments that the model passes to it.
        row_names: Names of further arguments with rows.
    """
    layer = from_pyg(conv, reads_edge_attr="edge_attr" in edge_arguments, in_model=True, row_names=row_names)
    layer.takes &= edge_arguments
    return layer


@dataclass(frozen=True)
class GlobalNorm(Phased):
    """Graph step that applies a batch norm over all vertices."""

    path: str
    """Path of the batch norm in the model."""
    over_edges, has_effect = False, True  # running statistics

    def layer(self, model: nn.Module) -> BatchNorm:
        norm = model.get_submodule(self.path)
        assert isinstance(norm, BatchNorm)
        return norm


class LayerScope(Protocol):
    """Interface by which a rule records its steps."""

    path: str
    """Path of the convolution in the model."""

    def over_graph(self, step: GraphStep, *rows: Any) -> Any:
        """Record a graph step.

        Args:
            step: The step.
            *rows: Its arguments, [n, .].

        Returns:
            A proxy of its result.
        """
        ...


def request_of(op: Aggregate, x: Tensor) -> Request:
    """Return a request for an aggregate that reads only rows `x`.

    Args:
        op: The aggregate.
        x: Rows [n, F].
    """
    return Request(op, {"x": x})


def aggregated(scope: LayerScope, op: Aggregate, x: Any, steps: int = 1) -> Any:
    """Record an aggregate that reads only rows `x`.

    Args:
        scope: Records the steps.
        op: The aggregate.
        x: Proxy of rows [n, F].
        steps: Number of times that it is applied.
    """
    return scope.over_graph(Aggregated(partial(request_of, op), steps), x)


def reduction(conv: Any, *, weighted: bool) -> Aggregate | None:
    """Return the aggregate of a convolution's `aggr`; None if it is not a sum, mean or maximum.

    Args:
        conv: The convolution.
        weighted: True if messages are multiplied by edge weights.
    """
    if not isinstance(conv.aggr, str):  # several aggregations, whose results are concatenated
        return None
    aggregates = {"add": Sum(weighted=weighted), "sum": Sum(weighted=weighted), "mean": Sum("mean", weighted=weighted)}
    if conv.aggr == "max" and not weighted:
        return Max()
    return aggregates.get(conv.aggr)


def normalized_sum(conv: Any, weight: Any) -> Sum | None:
    """Return the sum of a convolution that may use GCN's normalization.

    Args:
        conv: The convolution.
        weight: Edge weights of the call, or None.

    Returns:
        D^-1/2 (A + I) D^-1/2 if the convolution normalizes like this, A if it does not normalize, otherwise None.
    """
    weighted = weight is not None
    if conv.aggr not in ("add", "sum") or getattr(conv, "improved", False):
        return None
    if not getattr(conv, "normalize", True):
        return None if conv.add_self_loops else Sum(weighted=weighted)
    return Sum("gcn", weighted=weighted) if conv.add_self_loops else None


def _gcn(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert GCNConv (Kipf and Welling 2017, eq. 2)."""
    op = normalized_sum(conv, edge_weight)
    if op is not None:
        return scope.over_graph(TransformedSum(scope.path, op, "lin"), x)
    if conv.improved or conv.add_self_loops or conv.aggr not in ("add", "sum"):
        return None
    h = conv.lin(x)
    step = without_loops(scope, conv, h, edge_weight)
    assert step is not None
    return step(h) if conv.bias is None else step(h) + conv.bias


def _sage(scope: LayerScope, conv: Any, *, x: Any) -> Any:
    """Convert SAGEConv (Hamilton, Ying, Leskovec 2017, algorithm 1)."""
    op = reduction(conv, weighted=False)
    if op is None:
        return None
    if isinstance(op, Sum) and not conv.project:
        y = scope.over_graph(TransformedSum(scope.path, op, "lin_l", "lin_r" if conv.root_weight else ""), x)
    else:
        y = conv.lin_l(aggregated(scope, op, torch.relu(conv.lin(x)) if conv.project else x))
        y = y + conv.lin_r(x) if conv.root_weight else y
    return functional.normalize(y, p=2.0, dim=-1) if conv.normalize else y


def _graph(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert GraphConv (Morris et al. 2019, eq. 3)."""
    op = reduction(conv, weighted=edge_weight is not None)
    if isinstance(op, Sum):
        return scope.over_graph(TransformedSum(scope.path, op, "lin_rel", "lin_root"), x)
    return op and conv.lin_rel(aggregated(scope, op, x)) + conv.lin_root(x)


def _gin(scope: LayerScope, conv: Any, *, x: Any) -> Any:
    """Convert GINConv (Xu et al. 2019, eq. 4.1)."""
    op = reduction(conv, weighted=False)
    return op and conv.nn((1 + conv.eps) * x + aggregated(scope, op, x))


def has_native_attention(conv: Any) -> bool:
    """Return whether attention adds self-loops with mean edge features and sums, which `View.attend` supports."""
    return bool(conv.add_self_loops and conv.fill_value == "mean" and conv.aggr in ("add", "sum"))


def attention(scope: LayerScope, conv: Any, make: Callable[..., Request], *rows: Any) -> Any:
    """Record the attention of a convolution.

    Args:
        scope: Records the steps.
        conv: The convolution.
        make: Function that returns the request, from the rows, `slope` and `dropout`.
        *rows: Arguments of `make`.
    """
    dropout = conv.dropout if conv.training else 0.0
    return scope.over_graph(Attended(partial(make, slope=conv.negative_slope), dropout=dropout), *rows)


def _gat(scope: LayerScope, conv: Any, *, x: Any, edge_attr: Any) -> Any:
    """Convert GATConv (Velickovic et al. 2018, eqs. 1-6)."""
    if not has_native_attention(conv) or conv.lin is None:
        return None
    h = conv.lin(x)
    by_head = h.view(-1, conv.heads, conv.out_channels)
    logits = [(by_head * part).sum(-1) for part in (conv.att_src, conv.att_dst)]
    if edge_attr is None or conv.lin_edge is None:
        return combine_heads(conv, attention(scope, conv, Attend.of, h, *logits), x)
    # a_edge . (f_e W_edge) by head is linear in the edge features: combine weights [K, H] once, instead of by edge.
    edges = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
    edge_map = (edges * conv.att_edge.view(conv.heads, -1, 1)).sum(1).t()
    return combine_heads(conv, attention(scope, conv, attend_with_edges, h, *logits, edge_map), x)


def attend_with_edges(
    h: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    edge_map: Tensor,
    *,
    slope: float,
    dropout: MaskKey | None,
) -> Request:
    """Return the request of GAT with edge features.

    Its logits are leaky_relu(logit_src_u + logit_dst_v + f_uv edge_map), as in `AttendEdges` with one column per head.

    Args:
        h: Rows [n, H D].
        logit_src: Source part of the logits, [n, H].
        logit_dst: Target part of the logits, [n, H].
        edge_map: Weights [K, H] of edge features.
        slope: Slope of the leaky ReLU for negative arguments.
        dropout: Dropout of the attention weights.
    """
    ones = h.new_ones(logit_src.shape[1], 1)
    return AttendEdges.of(h, logit_src, logit_dst, ones, edge_map=edge_map, slope=slope, dropout=dropout)


def _gatv2(scope: LayerScope, conv: Any, *, x: Any, edge_attr: Any) -> Any:
    """Convert GATv2Conv (Brody et al. 2022, eq. 7)."""
    if not has_native_attention(conv):
        return None
    left = conv.lin_l(x)
    right = left if conv.share_weights else conv.lin_r(x)
    shared = [conv.att[0]] + ([] if edge_attr is None else [conv.lin_edge.weight.t()])
    return combine_heads(conv, attention(scope, conv, attend_pairs, left, right, *shared), x)


def attend_pairs(
    left: Tensor,
    right: Tensor,
    attention: Tensor,
    edge_map: Tensor | None = None,
    *,
    slope: float,
    dropout: MaskKey | None,
) -> Request:
    """Return the request of GATv2.

    Args:
        left: Rows [n, H D], which are also the source part of the logits' argument.
        right: Target part of the logits' argument, [n, H D].
        attention: Attention vectors [H, D].
        edge_map: Weights [K, H D] of edge features, or None.
        slope: Slope of the leaky ReLU for negative arguments.
        dropout: Dropout of the attention weights.
    """
    return AttendEdges.of(left, None, right, attention, edge_map=edge_map, slope=slope, dropout=dropout)


def _appnp(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert APPNP (Gasteiger et al. 2019, eq. 4)."""
    op, y = normalized_sum(conv, edge_weight), x
    if op is None or conv.dropout:
        return None
    for _ in range(conv.K):
        y = aggregated(scope, op, y) * (1 - conv.alpha) + conv.alpha * x
    return y


def _sgc(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert SGConv (Wu et al. 2019, eq. 8)."""
    op = normalized_sum(conv, edge_weight)
    return op and conv.lin(aggregated(scope, op, x, steps=conv.K))


def _ssg(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert SSGConv (Zhu and Koniusz 2021, eq. 8)."""
    op, y, power = normalized_sum(conv, edge_weight), conv.alpha * x, x
    if op is None or conv.cached:
        return None
    for _ in range(conv.K):
        power = aggregated(scope, op, power)
        y = y + (1 - conv.alpha) / conv.K * power
    return conv.lin(y)


def _mix_hop(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert MixHopConv (Abu-El-Haija et al. 2019, eq. 2)."""
    op, power = normalized_sum(conv, edge_weight), x
    if op is None:
        return None
    results = {0: conv.lins[0](x) if 0 in conv.powers else x}
    for number in range(1, len(conv.lins)):
        power = aggregated(scope, op, power)
        results[number] = conv.lins[number](power) if number in conv.powers else power
    y = torch.cat([results[number] for number in conv.powers], dim=-1)
    return y if conv.bias is None else y + conv.bias


def _gated_graph(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert GatedGraphConv (Li et al. 2016, eqs. 2-6)."""
    op = reduction(conv, weighted=edge_weight is not None)
    if op is None:
        return None
    y = functional.pad(x, (0, conv.out_channels - x.shape[-1]))
    for number in range(conv.num_layers):
        y = conv.rnn(aggregated(scope, op, y @ conv.weight[number]), y)
    return y


def without_loops(scope: LayerScope, conv: Any, x: Any, weight: Any) -> Callable[[Any], Any] | None:
    """Return a function that applies D^-1/2 A D^-1/2, or A if the convolution does not normalize.

    The degrees are sums of ones, so each rank has those of its own vertices.

    Args:
        scope: Records the steps.
        conv: The convolution, which adds no self-loops.
        x: Proxy of rows [n, F].
        weight: Edge weights of the call, or None.

    Returns:
        A function of rows; None if the convolution does not sum.
    """
    op = reduction(conv, weighted=weight is not None)
    if conv.aggr not in ("add", "sum") or op is None:
        return None
    if not getattr(conv, "normalize", True):
        return partial(aggregated, scope, op)
    degree = aggregated(scope, op, torch.ones_like(x[:, :1]))
    scale = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    return lambda rows: scale * aggregated(scope, op, scale * rows)


def _tag(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert TAGConv (Du et al. 2017, eq. 3)."""
    step = without_loops(scope, conv, x, edge_weight)
    if step is None:
        return None
    y, power = conv.lins[0](x), x
    for lin in conv.lins[1:]:
        power = step(power)
        y = y + lin(power)
    return y if conv.bias is None else y + conv.bias


def _light_gcn(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert LGConv (He et al. 2020, eq. 3)."""
    step = without_loops(scope, conv, x, edge_weight)
    return step and step(x)


def _cheb(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert ChebConv (Defferrard et al. 2016, eqs. 4 and 5).

    The largest entry of the Laplacian L is 1, so PyG scales it to L - I, which is the negative of `LaplacianSum`.
    """
    if conv.normalization != "sym" or conv.aggr not in ("add", "sum"):
        return None
    op, y, before, term = LaplacianSum(weighted=edge_weight is not None), conv.lins[0](x), x, x
    for number, lin in enumerate(conv.lins[1:], 1):
        step = -aggregated(scope, op, term)
        before, term = term, step if number == 1 else 2 * step - before
        y = y + lin(term)
    return y if conv.bias is None else y + conv.bias


def _gcn2(scope: LayerScope, conv: Any, *, x: Any, x_0: Any, edge_weight: Any) -> Any:
    """Convert GCN2Conv (Chen et al. 2020, eq. 5)."""
    op = normalized_sum(conv, edge_weight)
    if op is None:
        return None
    y, first = aggregated(scope, op, x) * (1 - conv.alpha), conv.alpha * x_0
    mix = partial(torch.addmm, beta=1 - conv.beta, alpha=conv.beta)
    if conv.weight2 is None:
        y = y + first
        return mix(y, y, conv.weight1)
    return mix(y, y, conv.weight1) + mix(first, first, conv.weight2)


def _arma(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert ARMAConv (Bianchi et al. 2021, eqs. 13-15)."""
    step = without_loops(scope, conv, x, edge_weight)
    if step is None:
        return None
    stacks, width, y = conv.num_stacks, conv.out_channels, x
    for layer in range(conv.num_layers):
        number = 0 if conv.shared_weights else layer
        if layer:  # a matrix for each stack
            weight = conv.weight[0 if conv.shared_weights else layer - 1]
            y = torch.einsum("nki,kio->nko", y, weight).reshape(-1, stacks * width)
        else:  # all stacks read the same rows: one product
            y = x @ conv.init_weight.transpose(0, 1).reshape(-1, stacks * width)
        weight = conv.root_weight[number].transpose(0, 1).reshape(-1, stacks * width)
        root = functional.dropout(x, conv.dropout, conv.training) @ weight
        y = (step(y) + root).view(-1, stacks, width)
        y = y if conv.bias is None else y + conv.bias[number].view(stacks, width)
        y = y if conv.act is None else conv.act(y)
    return y.mean(1)


def _eg(scope: LayerScope, conv: Any, *, x: Any) -> Any:
    """Convert EGConv (Tailor et al. 2022, eqs. 2 and 3) with its symmetrically normalized sum."""
    if conv.aggregators != ["symnorm"]:
        return None
    bases, weights = conv.bases_lin(x), conv.comb_lin(x).view(-1, conv.num_heads, conv.num_bases)
    if conv.add_self_loops:
        y = aggregated(scope, Sum("gcn"), bases)
    else:
        step = without_loops(scope, conv, x, None)
        assert step is not None
        y = step(bases)
    y = torch.matmul(weights, y.view(-1, conv.num_bases, conv.out_channels // conv.num_heads))
    y = y.reshape(-1, conv.out_channels)
    return y if conv.bias is None else y + conv.bias


class RelationalConv(nn.Module):
    """Layer that computes PyG's RGCNConv with `View.relate`, and has its parameters under the same names.

    Args:
        conv: The convolution.
    """

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.comp, self.root, self.bias = conv.weight, conv.comp, conv.root, conv.bias
        self.out_width = conv.out_channels

    def forward(self, view: View, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.dim() == 4 else self.weight[:, None]
        return relational_update(view, x, weight, self.comp, self.root, self.bias)


def _rgcn(scope: LayerScope, conv: Any, *, x: Any) -> Any:
    """Convert RGCNConv (Schlichtkrull et al. 2018, eq. 2)."""
    return scope.over_graph(WithView(scope.path, RelationalConv), x) if conv.aggr == "mean" else None


def _simple(scope: LayerScope, conv: Any, *, x: Any, edge_weight: Any) -> Any:
    """Convert SimpleConv: a sum, mean or maximum without a linear transform."""
    op = reduction(conv, weighted=edge_weight is not None)
    return None if conv.combine_root is not None or op is None else aggregated(scope, op, x)


RULES: dict[str, Callable[..., Any]] = {
    "APPNP": _appnp,
    "ARMAConv": _arma,
    "ChebConv": _cheb,
    "EGConv": _eg,
    "FastRGCNConv": _rgcn,
    "GatedGraphConv": _gated_graph,
    "GATConv": _gat,
    "GATv2Conv": _gatv2,
    "GCN2Conv": _gcn2,
    "GCNConv": _gcn,
    "GINConv": _gin,
    "GraphConv": _graph,
    "LGConv": _light_gcn,
    "MixHopConv": _mix_hop,
    "RGCNConv": _rgcn,
    "SAGEConv": _sage,
    "SGConv": _sgc,
    "SSGConv": _ssg,
    "SimpleConv": _simple,
    "TAGConv": _tag,
}
"""Rule of each convolution, by the name of PyG's class."""
