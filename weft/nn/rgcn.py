"""Relational graph convolution, for graphs whose edges have types."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.nn.conv import glorot
from weft.nn.dense import linear
from weft.nn.view import View


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

    def forward(self, view: View, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.mixture is not None:
            weight = linear(self.mixture, weight.flatten(1)).view(-1, *weight.shape[1:])
        a = view.relate(x, weight)
        return a + view.linear(view.targets(x), self.weight_self, self.bias)
