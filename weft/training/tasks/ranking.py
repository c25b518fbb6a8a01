"""How well scores tell links from other pairs: the area under the ROC curve, and filtered ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group
from weft.cost import Operation, all_reduce
from weft.data import Links
from weft.nn import Decoder
from weft.training.tasks.row_batching import parts_in_memory

MAX_SCORES = 1 << 23  # held at once, by all ranks together
HITS = (1, 3, 10)


def auc(positive: Tensor, negative: Tensor) -> float:
    """The chance that a link's score is above another pair's, ties counted half: the area under the ROC curve.

    Scores are compared in float32, so that the rounding of float64 sums, which ranks and strategies differ by, does not
    break ties.
    """
    low, values = negative.float().sort().values, positive.float()
    below, not_above = (torch.searchsorted(low, values, right=right).sum() for right in (False, True))
    return float(below + not_above) / (2 * len(positive) * len(negative))


def rank_scores(split: str, ranks: Tensor) -> dict[str, float]:
    """Mean reciprocal rank, and the share of ranks up to 1, 3 and 10."""
    hits = {f"{split}_hits@{most}": float((ranks <= most).double().mean()) for most in HITS}
    return {f"{split}_mrr": float((1 / ranks).mean()), **hits}


def filtered_ranks(z: Tensor, links: Links, asked: Tensor, place: Tensor, decoder: Decoder, group: Group) -> Tensor:
    """The rank of each link among all that one end could be instead, float64 [2 m]: of targets, then of sources.

    Other true links are left out (Bordes et al. 2013, the filtered setting), and so are vertices that the relation
    does not join. Ties share a rank: the mean of the first and the last that they could have. Scores that differ by
    no more than rounding are ties, so that the order of sums does not decide.

    z: the rows [n, D] of this rank, each of which it compares; nothing but the ends of the asked links is exchanged.
    asked: [m, 3], the same on every rank. place: int64 [N], a vertex's row among z, or -1.
    """
    parts = [
        _block_ranks(z, links, block, place, decoder, group) for block in asked.split(block_size(links.num_vertices))
    ]
    return torch.cat(parts, 1).view(-1)


def block_size(num_vertices: int) -> int:
    """Links that are ranked together."""
    return max(1, MAX_SCORES // num_vertices)


def ranking_operations(num_links: int, num_vertices: int, width: int, itemsize: int, size: int) -> list[Operation]:
    """What `filtered_ranks` exchanges."""
    most = block_size(num_vertices)
    made = []
    for first in range(0, num_links if size > 1 else 0, most):
        count = min(most, num_links - first)
        made.append(all_reduce("ends", 2 * count * width, itemsize, size))
        made.append(all_reduce("ranks", 4 * count, 8, size))
    return made


def _block_ranks(z: Tensor, links: Links, block: Tensor, place: Tensor, decoder: Decoder, group: Group) -> Tensor:
    """The ranks [2, b] of some links."""
    here = place[block[:, :2]].t().to(z.device)  # [2, b]
    ends = z.new_zeros(2, len(block), z.shape[1])
    ends[here >= 0] = z[here[here >= 0]]
    ends = group.all_reduce(ends, tag="ends")
    relation = block[:, 2].to(z.device)
    counts = []
    for side in (1, 0):
        query, wanted = decoder.query(ends[1 - side], relation), ends[side]
        score = (query * wanted).sum(1)
        rounding = z.shape[1] * torch.finfo(z.dtype).eps * query.norm(dim=1) * wanted.norm(dim=1)
        left_out = _left_out(links, block, side, place, len(z))
        count = here.new_zeros(2, len(block))
        for rows in parts_in_memory(z):
            scores = query @ z[rows].t()  # [b, n]
            scores.masked_fill_(left_out[:, rows].to(z.device), -torch.inf)
            higher = (scores > (score + rounding)[:, None]).sum(1)
            count += torch.stack([higher, (scores >= (score - rounding)[:, None]).sum(1) - higher])
        counts.append(count)
    higher, tied = group.all_reduce(torch.stack(counts, 1), tag="ranks").double()
    ranks: Tensor = 1 + higher + tied / 2
    return ranks


def _left_out(links: Links, block: Tensor, side: int, place: Tensor, num_rows: int) -> Tensor:
    """Which rows [b, n] are no candidates for a side of each link: true ones, and those of other types."""
    link, vertex = links.true_endpoints(block, side)
    row = place[vertex]
    out = torch.zeros(len(block), num_rows, dtype=torch.bool)
    if links.num_types > 1:
        own = (place >= 0).nonzero()[:, 0]
        own = own[place[own].argsort()]  # as the rows stand
        first, stop = links.candidates[block[:, 2], side].unbind(1)
        out |= (own < first[:, None]) | (own >= stop[:, None])
    out[link[row >= 0], row[row >= 0]] = True
    if not links.typed:  # a vertex is not linked to itself
        itself = place[block[:, 1 - side]]
        out[itself >= 0, itself[itself >= 0]] = True
    return out
