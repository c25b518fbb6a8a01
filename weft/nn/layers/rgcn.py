"""Relational graph convolution, for graphs whose edges have types."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.layers.conv import glorot
from weft.nn.layers.linear_transform import linear, plus
from weft.nn.view import View
from weft.utils.errors import InputError


class RGCNConv(nn.Module):
    """R-GCN layer: y_v = x_v W_0 + sum over relations r of the mean of x_u W_r over u in N_r(v) + b.

    N_r(v) are the in-neighbours of v by relation r. Source: Schlichtkrull et al. 2018, eq. 2.

    Args:
        in_width: Number of columns of the input.
        out_width: Number of columns of the result.
        num_relations: Number of relations R.
        bases: Number of matrices V_b that all relations share, W_r = sum_b c_rb V_b (eq. 3). 0: one W_r per relation.
        blocks: Number of blocks of block-diagonal matrices W_r (eq. 4). 0: full matrices.
        bias: False leaves out b.

    Raises:
        InputError: `blocks` does not divide both widths, or `bases` and `blocks` are both given.
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        num_relations: int,
        bases: int = 0,
        blocks: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if bases and blocks:
            raise InputError(f"bases={bases} and blocks={blocks} exclude each other: give one of them")
        if blocks and (in_width % blocks or out_width % blocks):
            raise InputError(
                f"blocks={blocks} does not divide the widths {in_width} and {out_width}: give a common divisor of both"
            )
        self.in_width, self.out_width, self.num_relations = in_width, out_width, num_relations
        num_blocks = blocks or 1
        matrices = torch.empty(bases or num_relations, num_blocks, in_width // num_blocks, out_width // num_blocks)
        self.weight = nn.Parameter(matrices)
        for matrix in self.weight.data.flatten(0, 1):
            nn.init.xavier_uniform_(matrix)
        self.mixture = glorot(num_relations, bases) if bases else None
        self.weight_self = glorot(in_width, out_width)
        self.bias = nn.Parameter(torch.zeros(out_width)) if bias else None

    def extra_repr(self) -> str:
        return f"{self.in_width}, {self.out_width}, num_relations={self.num_relations}"

    def forward(self, view: View, x: Tensor) -> Tensor:
        return relational_update(view, x, self.weight, self.mixture, self.weight_self, self.bias)


def relational_update(
    view: View, x: Tensor, weight: Tensor, mixture: Tensor | None, weight_self: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the rows [n, out_width] of a relational graph convolution.

    Args:
        view: The graph.
        x: Rows [n, in_width].
        weight: Block-diagonal matrices [R, blocks, i, o] of the relations, or [B, blocks, i, o] of the bases.
        mixture: Coefficient [R, B] of each basis in the matrix of each relation; None: `weight` is by relation.
        weight_self: Matrix [in_width, out_width] of the target's own row; None: that row is not added.
        bias: [out_width], or None.
    """
    if mixture is not None:
        weight = linear(mixture, weight.flatten(1)).view(-1, *weight.shape[1:])
    a = view.relate(x, weight)
    return plus(a, bias) if weight_self is None else a + view.linear(view.targets(x), weight_self, bias)


class OneHotRGCNConv(nn.Module):
    """R-GCN layer on one-hot vertices: y_v = W_0[v] + sum over relations r of the mean of W_r[u] over u in N_r(v) + b.

    The matrices have a row for each vertex, so they are the embeddings that a `TypedInput` trains: its rows
    [n, (B + 1) out_width] contain W_0[v], then for each output column the values of B bases. Without bases, B = R.
    Source: Schlichtkrull et al. 2018, section 4.1.

    Args:
        out_width: Number of columns of the result.
        num_relations: Number of relations R.
        bases: Number of bases B; 0: one for each relation.
        bias: False leaves out b.
    """

    def __init__(self, out_width: int, *, num_relations: int, bases: int = 0, bias: bool = True) -> None:
        super().__init__()
        self.num_bases, self.out_width = bases or num_relations, out_width
        self.in_width = (self.num_bases + 1) * out_width
        self.mixture = nn.Parameter(torch.eye(num_relations), requires_grad=False)
        if bases:
            self.mixture = glorot(num_relations, bases)
        self.bias = nn.Parameter(torch.zeros(out_width)) if bias else None

    def forward(self, view: View, x: Tensor) -> Tensor:
        self_rows, rows = x.split([self.out_width, self.out_width * self.num_bases], 1)
        weight = self.mixture[:, None, :, None].expand(
            -1, self.out_width, -1, 1
        )  # column j of the result combines the B values of column j
        return view.relate(rows, weight) + plus(view.targets(self_rows), self.bias)
