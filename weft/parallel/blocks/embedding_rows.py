"""Embedding rows of vertices that a rank recomputes: which ones, and how rows and gradients get to and from owners."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group, Halo, make_route
from weft.nn import Workload, embeddings, is_embedded
from weft.partition import Dependencies


def recomputed_by_owner(embedded: Tensor, part: Tensor, rows: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the embedded vertices that a rank recomputes, int64 [k], and the number that each rank owns, [P].

    Args:
        embedded: Mask of the vertices with embedding rows, bool [N].
        part: Rank of every vertex, int32 [N].
        rows: Vertices that the rank computes, int64.
        rank: The rank.
        size: Number of ranks.
    """
    recomputed = rows[(part[rows] != rank) & embedded[rows]]
    return recomputed, torch.bincount(part[recomputed], minlength=size)


class EmbeddedHalo:
    """Exchange of embedding rows; their owners get the gradients back.

    Args:
        places: Position of each row that the rank computes with among those that it stores and then fetches, int64.
        halo: Exchange of the rows that ranks lack; None if none lacks any.
    """

    def __init__(self, places: Tensor, halo: Halo | None) -> None:
        self._places, self._halo = places, halo

    def fetch(self, weight: Tensor) -> Tensor:
        """Return the rows of all embedded vertices of the rank, in the order of its rows, from those that it stores."""
        rows = weight if self._halo is None else torch.cat([weight, self._halo.fetch(weight)])
        return rows.index_select(0, self._places)


def make_embedded_halo(work: Workload, needed: Dependencies, part: Tensor, group: Group) -> EmbeddedHalo | None:
    """Return the exchange of embedding rows; None if each rank computes only with rows that it stores.

    All ranks must call it.

    Args:
        work: The workload.
        needed: What the rank computes and fetches.
        part: Rank of every vertex, int32 [N].
        group: The ranks.
    """
    if not embeddings(work.model):
        return None
    embedded = is_embedded(work.graph)
    recomputed, counts = recomputed_by_owner(embedded, part, needed.rows, group.rank, group.size)
    stored = ((part == group.rank) & embedded).nonzero().view(-1)
    rows = needed.rows[embedded[needed.rows]]
    lacking, others = int(counts.sum()), int(not torch.equal(stored, rows))
    counted = torch.tensor([lacking, others], device=group.device)
    lacking, others = group.all_reduce(counted, tag="route").tolist()
    if not others:
        return None
    by_owner = recomputed[part[recomputed].argsort(stable=True)]
    position = torch.empty(len(part), dtype=torch.int64)
    position[torch.cat([stored, by_owner])] = torch.arange(len(stored) + len(by_owner))
    halo = None
    if lacking:
        route = make_route(by_owner, counts.tolist(), stored, len(stored), group)
        halo = Halo(route, group, name="embedding")
    return EmbeddedHalo(position[rows].to(group.device), halo)
