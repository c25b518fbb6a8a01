"""Embedded rows of vertices that a rank computes again: which those are, and how they and their gradients get there."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group, Halo, make_route


def again_by_owner(embedded: Tensor, part: Tensor, rows: Tensor, num_own: int, size: int) -> tuple[Tensor, Tensor]:
    """The embedded ones of the vertices that a rank computes again, int64 [k], and how many each rank owns, [P].

    embedded: bool [N], which vertices are. rows: int64, the rank's `num_own` vertices, and then those that it computes
    again.
    """
    again = rows[num_own:]
    again = again[embedded[again]]
    return again, torch.bincount(part[again], minlength=size)


class EmbeddedHalo:
    """Embedded rows of vertices that a rank computes again; their owners get the gradients. All ranks make it.

    again, counts: of `again_by_owner`. own: int64, the rank's embedded vertices.
    """

    def __init__(self, again: Tensor, counts: Tensor, own: Tensor, part: Tensor, group: Group) -> None:
        by_owner = part[again].argsort(stable=True)
        route = make_route(again[by_owner], counts.tolist(), own, len(own), group)
        self._halo, self._order = Halo(route, group, name="embedding"), by_owner.argsort().to(group.device)

    def fetch(self, weight: Tensor) -> Tensor:
        """The rows of all embedded vertices of the rank, in the order of its rows, from those that it keeps."""
        return torch.cat([weight, self._halo.fetch(weight).index_select(0, self._order)])
