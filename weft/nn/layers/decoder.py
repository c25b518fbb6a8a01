"""Decoders of link prediction: the score of a link from the rows of its two ends.

Each makes a query of one end, and the score is the query's dot product with the other end. Both are symmetric: it does
not matter which end the query is made of. p links, D columns, R relations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel, begin, resume
from weft.nn.view import View
from weft.utils.errors import InputError, unknown


class Dot(nn.Module):
    """`s(u, v) = z_u . z_v` (Kipf and Welling 2016, variational graph auto-encoders); knows no relations."""

    def query(self, rows: Tensor, relation: Tensor) -> Tensor:
        """The queries [p, D] of rows [p, D]."""
        del relation
        return rows


class DistMult(nn.Module):
    """`s(u, r, v) = sum_d z_ud w_rd z_vd` (Yang et al. 2015, eq. 2). weight: [R, D], a vector for each relation."""

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_relations, width))
        nn.init.xavier_uniform_(self.weight)

    def query(self, rows: Tensor, relation: Tensor) -> Tensor:
        """The queries [p, D] of rows [p, D] under relations, int64 [p]."""
        return rows * self.weight[relation]


Decoder = Dot | DistMult


class LinkModel(PhasedModel):
    """Any model as an encoder, with a decoder whose parameters are trained and kept with its own.

    Called as the encoder is: it gives rows [n, D]; the decoder is for whoever has the links.
    """

    def __init__(self, encoder: nn.Module, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.num_stages = cast(int, getattr(encoder, "num_stages", None))
        self.row_dtype = getattr(encoder, "row_dtype", None)

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        return self._checked(begin(self.encoder, views, x))

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        return self._checked(resume(self.encoder, views, state))

    def _checked(self, reached: Boundary | Tensor) -> Boundary | Tensor:
        if isinstance(reached, Tensor) and isinstance(self.decoder, DistMult):
            width, wanted = reached.shape[1], self.decoder.weight.shape[1]
            if width != wanted:
                raise InputError(f"the model gives {width} columns, its decoder has {wanted}: --hidden {width}")
        return reached


def make_decoder(name: str, num_relations: int, width: int) -> Decoder:
    """The decoder of that name; InputError with the nearest name if there is none."""
    if name not in DECODERS:
        raise unknown("decoder", name, DECODERS)
    return DistMult(num_relations, width) if name == "distmult" else Dot()


DECODERS = ("dot", "distmult")
