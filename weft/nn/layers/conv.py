"""Graph convolutions, written as for one device: row by row, then message passing through the view, then row by row.

In formulas, x_v is the row of vertex v, N(v) are its in-neighbours, W and b are weights and bias. Every layer takes
rows [n, in_width] and returns rows [n, out_width]. Common arguments: `steps` repeats the message passing;
`update=False` leaves out the linear transform, for the propagation of a decoupled model; `bias=False` leaves out the
bias, for a layer before a batch norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.aggregate.aggregate import Aggregate, Request
from weft.nn.aggregate.attention import Attend, AttendEdges, MaskKey
from weft.nn.aggregate.reduce import Sum
from weft.nn.layers.linear_transform import Linear, apply_rowwise, linear, plus
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedLayer
from weft.nn.view import View


class LinearConv(PhasedLayer):
    """Base class of layers whose linear transform commutes with their aggregate, A (x W) = (A x) W.

    The view selects the cheaper order.

    Args:
        in_width: Number of columns of the input.
        out_width: Number of columns of the result.
        update: False leaves out the linear transform.
        bias: False leaves out the bias.
    """

    aggregate: Aggregate
    """Aggregate over in-edges of the layer, A."""
    adds_self: bool = False
    """True if the vertex's own row, under a linear transform of its own, is added."""

    def __init__(self, in_width: int, out_width: int, *, update: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.in_width, self.out_width = in_width, out_width
        self.weight = self.new_weight(in_width, out_width) if update else None
        self.weight_self = self.new_weight(in_width, out_width) if update and self.adds_self else None
        self.bias = self.new_bias(in_width, out_width) if bias else None

    def extra_repr(self) -> str:
        return f"{self.in_width}, {self.out_width}"

    def new_weight(self, rows: int, columns: int) -> nn.Parameter:
        """Return a new weight matrix [rows, columns] with random initial values.

        Args:
            rows: Number of input columns.
            columns: Number of output columns.
        """
        return glorot(rows, columns)

    def new_bias(self, in_width: int, out_width: int) -> nn.Parameter:
        """Return a new bias.

        Args:
            in_width: Number of input columns of the linear transform.
            out_width: Number of output columns.
        """
        del in_width
        return nn.Parameter(torch.zeros(out_width))

    def begin(self, view: View, x: Tensor) -> Boundary:
        # The boundary's context is True if rows are transformed before their aggregate.
        if self.weight is None or not view.transform_first(x, self.out_width):
            rows = {"own": x} if self.adds_self else {}
            return Boundary(request=Request(self.aggregate, {"x": x}), rows=rows, context=False)
        if self.weight_self is None:
            h = view.linear(x, self.weight, summed=True)
            return Boundary(request=Request(self.aggregate, {"x": h}), context=True)
        both = view.linear(x, torch.cat([self.weight_self, self.weight], 1))  # faster than two products
        self_rows, h = both.split(self.out_width, 1)
        return Boundary(request=Request(self.aggregate, {"x": h}), rows={"own": self_rows}, context=True)

    def resume(self, view: View, state: BoundaryState) -> Tensor:
        a, self_rows = state.result, state.rows.get("own")
        if self.weight is None or state.context:
            return plus(a, self.bias if self_rows is None else plus(self_rows, self.bias))
        if self.weight_self is None or self_rows is None:
            return linear(a, self.weight, self.bias)
        return linear(a, self.weight, view.linear(self_rows, self.weight_self, self.bias))


class GCNConv(LinearConv):
    """GCN layer: y = D^-1/2 (A + I) D^-1/2 x W + b, with in-degrees D including self-loops.

    Source: Kipf and Welling 2017, eq. 2.
    """

    aggregate = Sum(norm="gcn", weighted=True)


class SAGEConv(LinearConv):
    """GraphSAGE layer with the mean aggregator: y_v = x_v W_self + mean of x_u over u in N(v) W + b.

    Source: Hamilton, Ying, Leskovec 2017, algorithm 1. Initial values are those of PyG's SAGEConv: weights and bias
    uniform in +-1 / sqrt(in_width).
    """

    aggregate = Sum(norm="mean")
    adds_self = True

    def new_weight(self, rows: int, columns: int) -> nn.Parameter:
        return uniform(rows, columns, fan_in=rows)

    def new_bias(self, in_width: int, out_width: int) -> nn.Parameter:
        return uniform(out_width, fan_in=in_width)


class GINConv(PhasedLayer):
    """GIN layer: y_v = MLP((1 + eps) x_v + sum of x_u over u in N(v)), with learned eps (Xu et al. 2019, eq. 4.1).

    Args:
        in_width: Number of columns of the input.
        out_width: Number of columns of the result.
        update: False leaves out the MLP.
        bias: False leaves out the bias of the MLP's last layer.
    """

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
        y: Tensor = self.mlp(apply_rowwise(_add_self, [state.rows["own"], state.result], [self.eps]))
        return y


def _add_self(self_rows: Tensor, result: Tensor, eps: Tensor) -> Tensor:
    return (1 + eps) * self_rows + result


class AttentionConv(PhasedLayer):
    """Base class of attention layers over N(v) and v: y_v = sum of alpha_uv h_u + b.

    Here h = x W, and alpha is the softmax of logits over the in-edges of v, by head. A self-loop that is added has the
    mean edge features of the other in-edges of v.

    Args:
        in_width: Number of columns of the input.
        out_width: Number of columns of the result, over all heads if `concat`.
        heads: Number of attention heads.
        concat: True concatenates the outputs of the heads, False averages them.
        slope: Slope of the logits' leaky ReLU for negative arguments.
        update: False leaves out W.
        bias: False leaves out b.
        edge_width: Number of edge features on which logits depend; 0: none.
        dropout: Dropout probability of alpha in training, the same mask in all steps.
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
        """Create the remaining parameters of the logits, for input rows [n, in_width]."""
        raise NotImplementedError

    def mask_key(self, view: View) -> MaskKey | None:
        """Return the key of alpha's dropout mask; None: no dropout."""
        return view.mask_key(self.dropout if self.training else 0.0)

    def resume(self, view: View, state: BoundaryState) -> Tensor:
        del view
        a = state.result  # outputs of the heads, [n, H D]
        if not self.concat:
            a = a.view(len(a), self.heads, self.head_width).mean(1)
        return plus(a, self.bias)


class GATConv(AttentionConv):
    """GAT layer: attention with the logits leaky_relu(a_src . h_u + a_dst . h_v), by head.

    With edge features f_e, the argument of leaky_relu has the further term a_edge . (f_e W_edge), as in PyG.
    Source: Velickovic et al. 2018, eqs. 1-6.
    """

    def make_logits(self, in_width: int) -> None:
        del in_width
        self.attention_src = glorot(self.heads, self.head_width)
        self.attention_dst = glorot(self.heads, self.head_width)
        self.attention_edge = None if self.weight_edge is None else glorot(self.heads, self.head_width)

    def begin(self, view: View, x: Tensor) -> Boundary:
        h = x if self.weight is None else view.linear(x, self.weight)
        # a . h_u by head is linear in h: one product gives both parts of the logits of all heads. The edges' part is
        # f_e (W_edge a_edge), so the weights of edge features are combined before they meet the edges.
        vectors = torch.cat([by_head(self.attention_src), by_head(self.attention_dst)], 1)
        logit_src, logit_dst = linear(h, vectors).split(self.heads, 1)
        slope, dropout = self.slope, self.mask_key(view)
        if self.weight_edge is None or self.attention_edge is None:
            return Boundary(request=Attend.of(h, logit_src, logit_dst, slope=slope, dropout=dropout))
        edge_map, ones = self.weight_edge @ by_head(self.attention_edge), h.new_ones(self.heads, 1)
        request = AttendEdges.of(h, logit_src, logit_dst, ones, edge_map=edge_map, slope=slope, dropout=dropout)
        return Boundary(request=request)


class GATv2Conv(AttentionConv):
    """GATv2 layer: attention with the logits a . leaky_relu(h_u + x_v W_right), by head.

    With edge features f_e, the argument of leaky_relu has the further term f_e W_edge.
    Source: Brody et al. 2022, eq. 7.
    """

    def make_logits(self, in_width: int) -> None:
        self.weight_right = glorot(in_width, self.heads * self.head_width)
        self.attention = glorot(self.heads, self.head_width)

    def begin(self, view: View, x: Tensor) -> Boundary:
        if self.weight is None:
            h, right = x, linear(x, self.weight_right)
        else:
            both = view.linear(x, torch.cat([self.weight, self.weight_right], 1))  # one product, as in LinearConv
            h, right = both.split(self.weight.shape[1], 1)
        slope, dropout = self.slope, self.mask_key(view)
        request = AttendEdges.of(
            h, None, right, self.attention, edge_map=self.weight_edge, slope=slope, dropout=dropout
        )
        return Boundary(request=request)


def by_head(attention: Tensor) -> Tensor:
    """Return vectors [H, D] as a matrix [H D, H]: rows [n, H D] times this matrix are the dot products by head."""
    matrix: Tensor = torch.block_diag(*attention[:, :, None])
    return matrix


def glorot(rows: int, columns: int) -> nn.Parameter:
    """Return a random weight matrix with the uniform distribution of Glorot and Bengio 2010, eq. 16.

    Args:
        rows: Number of input columns.
        columns: Number of output columns.
    """
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(rows, columns)))


def uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """Return a weight matrix or bias with the initial values of nn.Linear: uniform in +-1 / sqrt(fan_in).

    Args:
        *shape: Shape of the parameter.
        fan_in: Number of input columns.
    """
    bound = max(fan_in, 1) ** -0.5
    return nn.Parameter(nn.init.uniform_(torch.empty(shape), -bound, bound))


def mlp(in_width: int, out_width: int, *, bias: bool = True) -> nn.Sequential:
    """Return the two-layer perceptron of GIN.

    Args:
        in_width: Number of columns of the input.
        out_width: Number of columns of the hidden layer and of the result.
        bias: False leaves out the bias of the second layer.
    """
    return nn.Sequential(Linear(in_width, out_width), nn.ReLU(), Linear(out_width, out_width, bias=bias))
