"""Relational graph convolution, for graphs whose edges have types."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.layers.conv import glorot
from weft.nn.layers.linear_transform import linear, plus
from weft.nn.view import View
from weft.utils.errors import InputError


class RGCNConv(nn.Module):
    """y_v = x_v W_0 + sum over relations r of the mean of x_u W_r over N_r(v) + b (Schlichtkrull et al. 2018, eq. 2).

    N_r(v): the in-neighbours of v by r, of R relations. W_r is a matrix of its own; or, with bases, a mixture
    sum_b c_rb V_b of B matrices that all relations share (eq. 3); or, with blocks, block-diagonal (eq. 4).
    InputError where blocks do not divide both widths.
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
            raise InputError(f"bases={bases} and blocks={blocks}: give one of them")
        if blocks and (in_width % blocks or out_width % blocks):
            raise InputError(
                f"blocks={blocks} do not divide the widths {in_width} and {out_width}: give another number"
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
        return related(view, x, self.weight, self.mixture, self.weight_self, self.bias)


def related(
    view: View, x: Tensor, weight: Tensor, mixture: Tensor | None, weight_self: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The rows [n, o] of relational convolution. weight: [R or B, blocks, i, o]; mixture: [R, B], of B bases.

    weight_self: of own rows, which are left out where it is None.
    """
    if mixture is not None:
        weight = linear(mixture, weight.flatten(1)).view(-1, *weight.shape[1:])
    a = view.relate(x, weight)
    return plus(a, bias) if weight_self is None else a + view.linear(view.targets(x), weight_self, bias)


class OneHotRGCNConv(nn.Module):
    """RGCNConv on one-hot vertices, whose matrices have a row for each: y_v = W_0[v] + sum_r mean of W_r[u] + b.

    It maps rows [n, (B + 1) out_width] that a TypedInput trains: those of W_0, then for each column those of B bases
    (Schlichtkrull et al. 2018, section 4.1). Without bases there is one for each relation, so rows are R + 1 times as
    wide as the result.
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
        own, rows = x.split([self.out_width, self.out_width * self.num_bases], 1)
        weight = self.mixture[:, None, :, None].expand(-1, self.out_width, -1, 1)  # a column takes its own B ones
        return view.relate(rows, weight) + plus(view.targets(own), self.bias)
