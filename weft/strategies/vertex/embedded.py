"""Embedded rows of vertices that a rank recomputes: which those are, and how they and their gradients get there."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group, Halo, make_route
from weft.nn import Workload, embeddings, is_embedded
from weft.partition import Dependencies


def recomputed_by_owner(embedded: Tensor, part: Tensor, rows: Tensor, num_own: int, size: int) -> tuple[Tensor, Tensor]:
    """The embedded ones of the vertices that a rank recomputes, int64 [k], and how many each rank owns, [P].

    embedded: bool [N], which vertices are. rows: int64, the rank's `num_own` vertices, and then those that it computes
    again.
    """
    recomputed = rows[num_own:]
    recomputed = recomputed[embedded[recomputed]]
    return recomputed, torch.bincount(part[recomputed], minlength=size)


class EmbeddedHalo:
    """Embedded rows of vertices that a rank computes again; their owners get the gradients. All ranks make it.

    recomputed, counts: of `recomputed_by_owner`. own: int64, the rank's embedded vertices.
    """

    def __init__(self, recomputed: Tensor, counts: Tensor, own: Tensor, part: Tensor, group: Group) -> None:
        by_owner = part[recomputed].argsort(stable=True)
        route = make_route(recomputed[by_owner], counts.tolist(), own, len(own), group)
        self._halo, self._order = Halo(route, group, name="embedding"), by_owner.argsort().to(group.device)

    def fetch(self, weight: Tensor) -> Tensor:
        """The rows of all embedded vertices of the rank, in the order of its rows, from those that it keeps."""
        return torch.cat([weight, self._halo.fetch(weight).index_select(0, self._order)])


def make_embedded_halo(work: Workload, needed: Dependencies, part: Tensor, group: Group) -> EmbeddedHalo | None:
    """What fetches embedded rows of vertices that a rank computes again; None where no rank lacks any."""
    if not embeddings(work.model):
        return None
    embedded = is_embedded(work.graph)
    recomputed, counts = recomputed_by_owner(embedded, part, needed.rows, needed.num_own, group.size)
    if not group.all_reduce(counts.sum().to(group.device), tag="route"):
        return None
    own = needed.own[embedded[needed.own]]
    return EmbeddedHalo(recomputed, counts, own, part, group)
