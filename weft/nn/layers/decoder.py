"""Decoders: they score a link, or compute the logits of a labelled edge, from the rows of its two endpoints.

A decoder of links computes a query from one endpoint; the score is the dot product of the query and the other endpoint.
These decoders are symmetric: either endpoint can give the query. Shapes: p links, D columns, R relations.
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
    """Dot-product decoder, `s(u, v) = z_u . z_v`, which ignores relations.

    Source: Kipf and Welling 2016, variational graph auto-encoders.
    """

    width = None
    """Any number of columns."""

    def query(self, rows: Tensor, relation: Tensor) -> Tensor:
        """Return queries [p, D].

        Args:
            rows: Rows of one endpoint of each link, [p, D].
            relation: Ignored.
        """
        del relation
        return rows


class DistMult(nn.Module):
    """DistMult decoder, `s(u, r, v) = sum_d z_ud w_rd z_vd`, with a learned vector w_r for each relation.

    Source: Yang et al. 2015, eq. 2.

    Args:
        num_relations: Number of relations R.
        width: Number of columns D of the rows.
    """

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(num_relations, width))
        nn.init.xavier_uniform_(self.weight)

    def query(self, rows: Tensor, relation: Tensor) -> Tensor:
        """Return queries [p, D].

        Args:
            rows: Rows of one endpoint of each link, [p, D].
            relation: Relation of each link, int64 [p].
        """
        return rows * self.weight[relation]


Decoder = Dot | DistMult


class EdgeDecoder(nn.Module):
    """Two-layer perceptron on [z_u, z_v, features of the edge], which computes the logits of a labelled edge.

    Args:
        width: Number of columns D of the rows, and of the hidden layer.
        num_features: Number of features K of a labelled edge.
        num_logits: Number of logits C.
    """

    def __init__(self, width: int, num_features: int, num_logits: int) -> None:
        super().__init__()
        self.width = width
        self.hidden = nn.Linear(2 * width + num_features, width)
        self.out = nn.Linear(width, num_logits)

    def forward(self, source: Tensor, target: Tensor, features: Tensor) -> Tensor:
        """Return logits [p, C].

        Args:
            source: Rows of the sources, [p, D].
            target: Rows of the targets, [p, D].
            features: Features of the edges, [p, K].
        """
        rows = torch.cat([source, target, features.to(source.dtype)], 1).to(self.hidden.weight.dtype)
        logits: Tensor = self.out(self.hidden(rows).relu())
        return logits


class LinkModel(PhasedModel):
    """Model for tasks on edges: an encoder, which computes rows [n, D], and a decoder, which reads pairs of them.

    A call runs only the encoder. The task calls the decoder with the edges. Parameters of both are trained and saved.

    Args:
        encoder: Any model over views.
        decoder: The decoder: `Dot` or `DistMult` for link prediction. For labels of edges `EdgeDecoder`, or any module
            with the arguments of its `forward`.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.num_stages = cast(int, getattr(encoder, "num_stages", None))
        self.row_dtype = getattr(encoder, "row_dtype", None)

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        return self._checked(begin(self.encoder, views, x))

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        return self._checked(resume(self.encoder, views, state))

    def _checked(self, reached: Boundary | Tensor) -> Boundary | Tensor:
        expected = getattr(self.decoder, "width", None)
        if isinstance(reached, Tensor) and expected not in (None, reached.shape[1]):
            width = reached.shape[1]
            raise InputError(
                f"the model returns {width} columns, but its decoder needs {expected}: use --hidden {width}"
            )
        return reached


def make_decoder(name: str, num_relations: int, width: int) -> Decoder:
    """Return a decoder.

    Args:
        name: One of `DECODERS`.
        num_relations: Number of relations of the graph.
        width: Number of columns of the rows that are scored.

    Raises:
        InputError: There is no decoder of this name; the message names the nearest one.
    """
    if name not in DECODERS:
        raise unknown("decoder", name, DECODERS)
    return DistMult(num_relations, width) if name == "distmult" else Dot()


DECODERS = ("dot", "distmult")
"""Names of the decoders."""
