"""Embedded rows of vertices that a rank recomputes: which those are, and how they and their gradients get there."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group, Halo, make_route
from weft.nn import Workload, embeddings, is_embedded
from weft.partition import Dependencies


def recomputed_by_owner(embedded: Tensor, part: Tensor, rows: Tensor, own: int, size: int) -> tuple[Tensor, Tensor]:
    """The embedded ones of the vertices that a rank recomputes, int64 [k], and how many each rank owns, [P].

    embedded: bool [N], which vertices are. rows: int64, those that rank `own` computes.
    """
    recomputed = rows[(part[rows] != own) & embedded[rows]]
    return recomputed, torch.bincount(part[recomputed], minlength=size)


class EmbeddedHalo:
    """The embedded rows that a rank computes with; owners get the gradients of those of others. All ranks make it.

    recomputed, counts: of `recomputed_by_owner`; halo: none where no rank lacks any. own: int64, the embedded vertices
    whose rows the rank keeps. rows: int64, those whose rows it computes with.
    """

    def __init__(
        self, recomputed: Tensor, counts: Tensor, own: Tensor, rows: Tensor, part: Tensor, group: Group, *, halo: bool
    ) -> None:
        by_owner = recomputed[part[recomputed].argsort(stable=True)]
        place = torch.empty(len(part), dtype=torch.int64)
        place[torch.cat([own, by_owner])] = torch.arange(len(own) + len(by_owner))
        self._places = place[rows].to(group.device)
        self._halo: Halo | None = None
        if halo:
            route = make_route(by_owner, counts.tolist(), own, len(own), group)
            self._halo = Halo(route, group, name="embedding")

    def fetch(self, weight: Tensor) -> Tensor:
        """The rows of all embedded vertices of the rank, in the order of its rows, from those that it keeps."""
        rows = weight if self._halo is None else torch.cat([weight, self._halo.fetch(weight)])
        return rows.index_select(0, self._places)


def make_embedded_halo(work: Workload, needed: Dependencies, part: Tensor, group: Group) -> EmbeddedHalo | None:
    """What brings embedded rows to the rows of a rank; None where each rank computes with those that it keeps."""
    if not embeddings(work.model):
        return None
    embedded = is_embedded(work.graph)
    recomputed, counts = recomputed_by_owner(embedded, part, needed.rows, group.rank, group.size)
    own = ((part == group.rank) & embedded).nonzero().view(-1)
    rows = needed.rows[embedded[needed.rows]]
    lacking, others = int(counts.sum()), int(not torch.equal(own, rows))
    told = torch.tensor([lacking, others], device=group.device)
    lacking, others = group.all_reduce(told, tag="route").tolist()
    if not others:
        return None
    return EmbeddedHalo(recomputed, counts, own, rows, part, group, halo=lacking > 0)
