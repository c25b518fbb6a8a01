"""Graph layers, written for one device: row by row, then over in-edges by the view, then row by row again.

Formulas: x_v is v's row, N(v) its in-neighbours, W and b are weights and bias. Every layer maps rows [n, in_width] to
rows [n, out_width], takes `steps` to repeat its middle phase, leaves out its own map where `update` is False (the
propagation of a decoupled model), and its bias where `bias` is (in front of a batch norm).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.aggregate.aggregate import Aggregate, Request
from weft.nn.aggregate.attention import Attend, AttendEdges, MaskKey
from weft.nn.aggregate.reduce import Sum
from weft.nn.layers.linear_transform import Linear, linear, apply_rowwise, plus
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedLayer
from weft.nn.view import View


class LinearConv(PhasedLayer):
    """A layer whose map commutes with its aggregate, A (x W) = (A x) W: the order that costs less is taken."""

    aggregate: Aggregate
    adds_own: bool = False
    """Whether a vertex's own row is added, by a map of its own where the layer maps."""

    def __init__(self, in_width: int, out_width: int, *, update: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.in_width, self.out_width = in_width, out_width
        self.weight = self.draw(in_width, out_width) if update else None
        self.weight_self = self.draw(in_width, out_width) if update and self.adds_own else None
        self.bias = self.draw_bias(in_width, out_width) if bias else None

    def extra_repr(self) -> str:
        return f"{self.in_width}, {self.out_width}"

    def draw(self, rows: int, columns: int) -> nn.Parameter:
        """A first weight matrix."""
        return glorot(rows, columns)

    def draw_bias(self, in_width: int, out_width: int) -> nn.Parameter:
        """A first bias, of a map from in_width."""
        del in_width
        return nn.Parameter(torch.zeros(out_width))

    def begin(self, view: View, x: Tensor) -> Boundary:
        """The context is whether rows are mapped before their aggregate."""
        if self.weight is None or not view.transform_first(x, self.out_width):
            rows = {"own": x} if self.adds_own else {}
            return Boundary(request=Request(self.aggregate, {"x": x}), rows=rows, context=False)
        if self.weight_self is None:
            h = view.linear(x, self.weight, summed=True)
            return Boundary(request=Request(self.aggregate, {"x": h}), context=True)
        both = view.linear(x, torch.cat([self.weight_self, self.weight], 1))  # one map reads and writes half as much
        own, h = both.split(self.out_width, 1)
        return Boundary(request=Request(self.aggregate, {"x": h}), rows={"own": own}, context=True)

    def resume(self, view: View, state: BoundaryState) -> Tensor:
        a, own = state.result, state.rows.get("own")
        if self.weight is None or state.context:
            return plus(a, self.bias if own is None else plus(own, self.bias))
        if self.weight_self is None or own is None:
            return linear(a, self.weight, self.bias)
        return linear(a, self.weight, view.linear(own, self.weight_self, self.bias))


class GCNConv(LinearConv):
    """y = D^-1/2 (A + I) D^-1/2 x W + b, D the in-degrees with the loop (Kipf and Welling 2017, eq. 2)."""

    aggregate = Sum(norm="gcn", weighted=True)


class SAGEConv(LinearConv):
    """y_v = x_v W_self + mean of N(v) W + b (Hamilton, Ying, Leskovec 2017, algorithm 1, mean aggregator).

    It begins as PyG's, whose maps are `Linear`s: uniform within one over the root of in_width, the bias too.
    """

    aggregate = Sum(norm="mean")
    adds_own = True

    def draw(self, rows: int, columns: int) -> nn.Parameter:
        return uniform(rows, columns, fan_in=rows)

    def draw_bias(self, in_width: int, out_width: int) -> nn.Parameter:
        return uniform(out_width, fan_in=in_width)


class GINConv(PhasedLayer):
    """y_v = MLP((1 + eps) x_v + sum of N(v)), eps learned (Xu et al. 2019, eq. 4.1)."""

    def __init__(self, in_width: int, out_width: int, *, update: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.in_width, self.out_width = in_width, out_width
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = mlp(in_width, out_width, bias=bias) if update else nn.Identity()

    def begin(self, view: View, x: Tensor) -> Boundary:
        del view
        return Boundary(request=Request(Sum(), {"x": x}), rows={"own": x})

    def resume(self, view: View, state: BoundaryState) -> Tensor:
        del view
        y: Tensor = self.mlp(apply_rowwise(_with_own, [state.rows["own"], state.result], [self.eps]))
        return y


def _with_own(own: Tensor, result: Tensor, eps: Tensor) -> Tensor:
    return (1 + eps) * own + result


class AttentionConv(PhasedLayer):
    """Attention over N(v) and v: y_v = sum of alpha_uv h_u + b with h = x W, alpha the softmax of logits by head.

    The heads' outputs are side by side (`concat`) or averaged; out_width is the result's. edge_width: the features of
    an edge that take part in its logit, 0 for none; v's own edge, where the graph has none, has the mean of v's others.
    dropout: of alpha in training, the same in all steps, as PyG's of that name.
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        heads: int,
        concat: bool = True,
        slope: float = 0.2,
        update: bool = True,
        bias: bool = True,
        edge_width: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_width, self.out_width = in_width, out_width
        self.heads, self.concat, self.slope, self.dropout = heads, concat, slope, dropout
        self.head_width = out_width // heads if concat else out_width
        width = heads * self.head_width
        self.weight = glorot(in_width, width) if update else None
        self.weight_edge = glorot(edge_width, width) if edge_width else None
        self.make_logits(in_width if update else width)
        self.bias = nn.Parameter(torch.zeros(out_width)) if bias else None

    def extra_repr(self) -> str:
        return f"{self.in_width}, {self.out_width}, heads={self.heads}"

    def make_logits(self, in_width: int) -> None:
        """Draws what else logits are made with, of rows [n, in_width]."""
        raise NotImplementedError

    def mask_key(self, view: View) -> MaskKey | None:
        """That of alpha."""
        return view.mask_key(self.dropout if self.training else 0.0)

    def resume(self, view: View, state: BoundaryState) -> Tensor:
        """The rows from the heads' outputs [n, H D]."""
        del view
        a = state.result
        if not self.concat:
            a = a.view(len(a), self.heads, self.head_width).mean(1)
        return plus(a, self.bias)


class GATConv(AttentionConv):
    """The logit is leaky_relu(a_src h_u + a_dst h_v), with edge features f_e also + a_edge (f_e W_edge), as in PyG.

    (Velickovic et al. 2018, eq. 1-6.)
    """

    def make_logits(self, in_width: int) -> None:
        del in_width
        self.attention_src = glorot(self.heads, self.head_width)
        self.attention_dst = glorot(self.heads, self.head_width)
        self.attention_edge = None if self.weight_edge is None else glorot(self.heads, self.head_width)

    def begin(self, view: View, x: Tensor) -> Boundary:
        h = x if self.weight is None else view.linear(x, self.weight)
        vectors = torch.cat([by_head(self.attention_src), by_head(self.attention_dst)], 1)
        logit_src, logit_dst = linear(h, vectors).split(self.heads, 1)
        slope, dropout = self.slope, self.mask_key(view)
        if self.weight_edge is None or self.attention_edge is None:
            return Boundary(request=Attend.of(h, logit_src, logit_dst, slope=slope, dropout=dropout))
        edge_map, ones = self.weight_edge @ by_head(self.attention_edge), h.new_ones(self.heads, 1)
        request = AttendEdges.of(h, logit_src, logit_dst, ones, edge_map=edge_map, slope=slope, dropout=dropout)
        return Boundary(request=request)


class GATv2Conv(AttentionConv):
    """The logit is a . leaky_relu(h_u + x_v W_right), with edge features f_e also + f_e W_edge.

    (Brody et al. 2022, eq. 7.)
    """

    def make_logits(self, in_width: int) -> None:
        self.weight_right = glorot(in_width, self.heads * self.head_width)
        self.attention = glorot(self.heads, self.head_width)

    def begin(self, view: View, x: Tensor) -> Boundary:
        if self.weight is None:
            h, right = x, linear(x, self.weight_right)
        else:
            both = view.linear(x, torch.cat([self.weight, self.weight_right], 1))  # as in SAGEConv
            h, right = both.split(self.weight.shape[1], 1)
        slope, dropout = self.slope, self.mask_key(view)
        request = AttendEdges.of(
            h, None, right, self.attention, edge_map=self.weight_edge, slope=slope, dropout=dropout
        )
        return Boundary(request=request)


def by_head(attention: Tensor) -> Tensor:
    """Vectors [H, D] as a matrix [H D, H], so that a product with it gives a number per head."""
    matrix: Tensor = torch.block_diag(*attention[:, :, None])
    return matrix


def glorot(rows: int, columns: int) -> nn.Parameter:
    """A weight matrix drawn uniformly as in Glorot and Bengio 2010, eq. 16."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(rows, columns)))


def uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """A weight matrix or bias as nn.Linear begins: uniform within one over the root of fan_in."""
    bound = max(fan_in, 1) ** -0.5
    return nn.Parameter(nn.init.uniform_(torch.empty(shape), -bound, bound))


def mlp(in_width: int, out_width: int, *, bias: bool = True) -> nn.Sequential:
    """The two-layer perceptron of GIN."""
    return nn.Sequential(Linear(in_width, out_width), nn.ReLU(), Linear(out_width, out_width, bias=bias))
