"""Link prediction task: assigns links to ranks, fetches the rows of their endpoints once, and traces these exchanges.

A *pair* is a candidate link: a link of the graph, or a negative sample. A row (source, target, relation) of an int64
tensor [p, 3] stands for a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.comm import Group, Halo, make_route
from weft.config.config import TaskOptions
from weft.cost import Operation, Trace, all_reduce
from weft.data import Adjacency, Links, keeps_sources, negative_key
from weft.kernels import spmm
from weft.nn import Decoder
from weft.strategies import CandidateLinks, Step
from weft.training.tasks.link_losses import make_link_loss
from weft.training.tasks.ranking import auc, filtered_ranks, rank_scores, ranking_operations, sampled_ranks
from weft.training.tasks.report_metrics import threshold_curves
from weft.training.tasks.row_batching import add_rows, fill_zeros, take_rows
from weft.training.tasks.scores import compares_ranks, values_of_k
from weft.training.tasks.top_targets import TOP_METRICS, top_operations, top_scores, top_targets
from weft.utils.dtypes import sum_dtype

MAX_PAIRS = 1 << 16
"""Number of pairs that are scored at once, to bound memory."""


@dataclass(frozen=True, kw_only=True)
class VertexOwners:
    """Ranks that own the vertices."""

    owner: Tensor
    """Rank that owns each vertex, int64 [N]."""
    size: int
    """Number of ranks."""

    def missing(self, pairs: Tensor, rank: int) -> tuple[Tensor, list[int]]:
        """Return the vertices of other ranks whose rows a rank needs for its pairs.

        Args:
            pairs: The pairs of the rank, [p, 3].
            rank: The rank.

        Returns:
            The vertices without duplicates, sorted by owner, and the number of them that each rank owns.
        """
        needed = torch.zeros(len(self.owner), dtype=torch.bool)
        needed[pairs[:, :2].reshape(-1)] = True
        vertices = (needed & (self.owner != rank)).nonzero()[:, 0]
        vertices = vertices[self.owner[vertices].argsort(stable=True)]
        return vertices, torch.bincount(self.owner[vertices], minlength=self.size).tolist()


@dataclass(frozen=True, kw_only=True)
class LinkAssignment(VertexOwners):
    """Assignment of pairs to ranks.

    The rank that owns the source of a link scores the link and its negative samples.
    """

    links: Links
    """Training, validation and test links of the graph."""
    seed: int
    """Seed of the negative samples."""
    num_negatives: int
    """Number of negative samples for each training link, K."""
    keep_sources: bool = False
    """True if negative samples keep the source of their link."""
    num_eval_negatives: int = 0
    """Number of negative samples with which mrr and hits@k compare the links of a source, S; 0: all vertices."""
    _by_rank: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of the training links of each rank."""
    _received: dict[int, list[list[int]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `received` by epoch."""

    def train(self, rank: int, epoch: int) -> Tensor:
        """Return the pairs of a rank in an epoch, [p (1 + K), 3]: first its p links, then their negative samples.

        Args:
            rank: The rank.
            epoch: Number of the epoch, part of the key of the negative samples.
        """
        draw, links = negative_key(self.seed, epoch), self._of_rank(rank)
        return self.links.candidates_of(links, draw, self.num_negatives, keep_sources=self.keep_sources)

    def received(self, epoch: int) -> list[list[int]]:
        """Return the number of rows that each rank receives from each rank in a training step; computed once.

        Args:
            epoch: Number of the epoch.
        """
        if epoch not in self._received:
            pairs = (self.train(rank, epoch) for rank in range(self.size))
            self._received[epoch] = [self.missing(rank_pairs, rank)[1] for rank, rank_pairs in enumerate(pairs)]
        return self._received[epoch]

    def _of_rank(self, rank: int) -> Tensor:
        """Return the training links of a rank."""
        if rank not in self._by_rank:
            self._by_rank[rank] = self.links.train[self.owner[self.links.train[:, 0]] == rank]
        return self._by_rank[rank]

    def held_out(self) -> Tensor:
        """Return all pairs that evaluations score, int64 [., 3].

        They are the validation and test links, then a non-edge for each, and then for each split S non-edges of each
        source and relation of its links: the first one of all, then the second one of all, and so on.
        """
        splits = (self.links.val, self.links.test)
        negatives = [
            self.links.non_edges(split, negative_key(self.seed, number, 0)) for number, split in enumerate(splits)
        ]
        for number, split in enumerate(splits):
            sources = self.sources(split)
            for sample in range(self.num_eval_negatives):
                draw = negative_key(self.seed, number, 1 + sample)
                negatives.append(self.links.non_edges(sources, draw, keep_sources=True))
        return torch.cat([*splits, *negatives])

    def sources(self, split: Tensor) -> Tensor:
        """Return the distinct sources and relations of the links of a split, [q, 3]; the target has the original id 0.

        Negative samples are keyed by original ids, so that they do not depend on the order of the vertices.
        """
        queries = self.links.queries(split)
        queries[:, 1] = self.links.vertex_of_id[0]
        return queries

    def assigned(self, pairs: Tensor, rank: int) -> Tensor:
        """Return the positions of a rank's pairs among all held-out pairs.

        Args:
            pairs: All pairs, from `held_out`.
            rank: The rank.
        """
        num_links = len(self.links.val) + len(self.links.test)
        links, others = pairs[:num_links], pairs[2 * num_links :]
        sources = torch.cat([links[:, 0], links[:, 0], others[:, 0]])
        return (self.owner[sources] == rank).nonzero()[:, 0]

    def trace(self, rank: int, width: int, itemsize: int, *, epoch: int | None, ranked: bool, top: int = 0) -> Trace:
        """Return the exchanges of the task in a training step or an evaluation.

        They come in addition to the exchanges of model and decoder, which the strategy traces.

        Args:
            rank: The rank whose bytes are counted.
            width: Width of the model's output rows.
            itemsize: Bytes of each number.
            epoch: Number of the epoch of the step; None: an evaluation.
            ranked: True if evaluations compute ranks (`--metrics mrr`).
            top: Number of best targets of each source that evaluations compute (`--metrics recall@20`: 20).
        """
        if self.size == 1:
            return Trace(operations=())
        if epoch is None:
            pairs = self.held_out()
            received = [self.missing(pairs[self.assigned(pairs, other)], other)[1] for other in range(self.size)]
            operations = [
                halo_operation(received, rank, width * itemsize),
                all_reduce("scores", len(pairs), itemsize, self.size),
            ]
            for links in (self.links.val, self.links.test):
                if ranked and not self.num_eval_negatives:
                    operations += ranking_operations(len(links), self.links.num_vertices, width, itemsize, self.size)
                if top:
                    queries = self.links.queries(self.links.directed(links))
                    operations += top_operations(self.links, queries, top, width, itemsize, self.size)
            return Trace(operations=tuple(operations))
        received = self.received(epoch)
        # A step first exchanges the number of vertices and the vertex ids that each rank requests, then rows, then
        # gradients.
        counts = Operation(
            kind="collective", tag="route", bytes_sent=8 * (self.size - 1), bytes_received=8 * (self.size - 1)
        )
        ids = halo_operation(received, rank, 8, tag="route").adjoint()
        rows = halo_operation(received, rank, width * itemsize)
        return Trace(operations=(counts, ids, rows, rows.adjoint()))


def halo_operation(received: list[list[int]], rank: int, row_bytes: int, *, tag: str = "halo") -> Operation:
    """Return the exchange of rows as one rank sees it.

    Args:
        received: Number of rows that each rank receives from each rank.
        rank: The rank.
        row_bytes: Bytes of a row.
        tag: Tag under which bytes are counted.
    """
    sent = sum(counts[rank] for counts in received)
    return Operation(
        kind="collective", tag=tag, bytes_sent=sent * row_bytes, bytes_received=sum(received[rank]) * row_bytes
    )


class EndpointBatch(NamedTuple):
    """Pairs as sparse matrices that select the rows of their sources and targets from m distinct endpoint rows."""

    source: Adjacency
    """Matrix [p, m] that selects the source of each pair."""
    target: Adjacency
    """Matrix [p, m] that selects the target of each pair."""
    relation: Tensor
    """Relation of each pair, int64 [p]."""
    local_rows: Tensor
    """Ids of the endpoint rows among this rank's rows, int64, ascending. They are the first of the m rows."""
    remote_rows: Tensor
    """Ids of the endpoint rows among the rows fetched from other ranks, int64, ascending. They follow."""

    @classmethod
    def of(cls, positions: Tensor, relation: Tensor, num_local: int, device: torch.device) -> EndpointBatch:
        """Return the batch of some pairs.

        Args:
            positions: Row of each endpoint, int64 [p, 2]: rows of this rank first, then fetched rows.
            relation: Relation of each pair, int64 [p].
            num_local: Number of rows of this rank.
            device: Device of the rows.
        """
        rows, inverse = positions.unique(return_inverse=True)
        local_rows, remote_rows = rows[rows < num_local], rows[rows >= num_local] - num_local
        source, target = (selection_matrix(side, len(rows)).to(device) for side in inverse.t().contiguous())
        return cls(source, target, relation.to(device), local_rows.to(device), remote_rows.to(device))

    def rows(self, z: Tensor, remote: Tensor) -> Tensor:
        """Return the endpoint rows [m, D].

        Args:
            z: Rows of this rank, [n, D].
            remote: Rows fetched from other ranks, [h, D].
        """
        local = take_rows(z, self.local_rows)
        return torch.cat([local, remote.index_select(0, self.remote_rows)]) if len(self.remote_rows) else local

    def add_back(self, grad: Tensor, grad_z: Tensor, grad_remote: Tensor) -> None:
        """Add the gradient of the endpoint rows to that of all rows. The adjoint of `rows`.

        Args:
            grad: Gradient of the endpoint rows, [m, D].
            grad_z: Gradient of this rank's rows, [n, D], updated in place.
            grad_remote: Gradient of the fetched rows, [h, D], updated in place.
        """
        add_rows(grad_z, self.local_rows, grad[: len(self.local_rows)])
        if len(self.remote_rows):
            add_rows(grad_remote, self.remote_rows, grad[len(self.local_rows) :])

    def score(self, rows: Tensor, decoder: Decoder) -> Tensor:
        """Return the scores [p] of the pairs.

        Args:
            rows: Endpoint rows, [m, D].
            decoder: The decoder.
        """
        return pair_scores(decoder, spmm(self.source, rows), spmm(self.target, rows), self.relation)


def pair_scores(decoder: Decoder, source: Tensor, target: Tensor, relation: Tensor) -> Tensor:
    """Return the scores [p] of pairs.

    Args:
        decoder: The decoder.
        source: Rows of the sources, [p, D].
        target: Rows of the targets, [p, D].
        relation: Relation of each pair, int64 [p].
    """
    return (decoder.query(source, relation) * target).sum(1)


class LinkHalo:
    """Rows at the endpoints of a rank's pairs. Rows of other ranks are fetched once each.

    A block has all pairs of some links: first the links, then a negative sample of each, and so on.

    Args:
        links: The pairs, and the route of the rows to fetch.
        num_local: Number of rows of this rank.
        group: The ranks.
        name: Name of the exchange.
        pairs_per_link: Number of pairs of each link: 1 and its negative samples.
    """

    def __init__(self, links: CandidateLinks, num_local: int, group: Group, name: str, pairs_per_link: int = 1) -> None:
        self.halo, self.meter = Halo(links.route, group, name=name) if links.route else None, group.meter
        by_link = links.pairs.view(pairs_per_link, len(links.pairs) // pairs_per_link, 3)
        self.blocks = [
            EndpointBatch.of(pairs[:, :2], pairs[:, 2], num_local, group.device)
            for block in by_link.split(max(1, MAX_PAIRS // pairs_per_link), 1)
            for pairs in (block.flatten(0, 1),)
        ]

    def fetch(self, z: Tensor) -> Tensor:
        """Return the rows [h, D] of other ranks that the pairs need, given the rows z [n, D] of each rank."""
        return self.halo.fetch(z) if self.halo else z[:0]

    def backpropagate(
        self,
        z: Tensor,
        empty: Callable[[Tensor], Tensor],
        decode: Callable[[int, Tensor], Tensor],
        loss: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of the pairs, [], and its gradient [n, D], and set the gradients of the decoder's parameters.

        Args:
            z: Rows of this rank, [n, D].
            empty: Allocates the gradient of a tensor of rows, in the same kind of memory.
            decode: Returns the decoder's outputs for a block of pairs, given its number and its endpoint rows.
            loss: Returns the loss of a block, and its gradient with respect to the outputs, given its number and these.
        """
        # 1. Fetch the rows of other ranks. 2. For each block: decode, and backpropagate to the endpoint rows.
        # 3. Send the gradients of fetched rows back to their owners.
        with self.meter.timer("decode"):
            leaf = z.detach().requires_grad_()
            fetched_with_grad = self.fetch(leaf)
            z, fetched = leaf.detach(), fetched_with_grad.detach()
            grad_z, grad_fetched = fill_zeros(empty(z)), torch.zeros_like(fetched)
        losses = []
        for number, block in enumerate(self.blocks):
            with self.meter.timer("decode"):
                rows = block.rows(z, fetched).requires_grad_()
                outputs = decode(number, rows)
            block_loss, grad = loss(number, outputs.detach())
            losses.append(block_loss)
            with self.meter.timer("decode"):
                outputs.backward(grad)
                assert rows.grad is not None
                block.add_back(rows.grad, grad_z, grad_fetched)
        with self.meter.timer("decode"):
            if self.halo:
                grad_z += torch.autograd.grad(fetched_with_grad, leaf, grad_fetched)[0]
        return torch.stack(losses).sum(), grad_z


def owner_of_vertices(vertices: Tensor, num_vertices: int, group: Group) -> Tensor:
    """Return the rank that owns each vertex, int64 [N]; all ranks must call it.

    Args:
        vertices: Vertices of this rank's rows, int64 [n].
        num_vertices: Number of vertices, N.
        group: The ranks.
    """
    owner = torch.zeros(num_vertices, dtype=torch.int64, device=group.device)
    owner[vertices] = group.rank
    return group.all_reduce(owner, tag="route").cpu()


def locate_endpoints(owners: VertexOwners, pairs: Tensor, vertices: Tensor, group: Group) -> CandidateLinks:
    """Return the pairs of a rank with row positions in place of vertices, and the route of the rows to fetch.

    All ranks must call it.

    Args:
        owners: Ranks that own the vertices.
        pairs: The pairs of this rank, [p, 3].
        vertices: Vertices of this rank's rows, int64 [n].
        group: The ranks.
    """
    fetched, received = owners.missing(pairs, group.rank)
    route = make_route(fetched, received, vertices, len(vertices), group) if group.size > 1 else None
    position = torch.empty(len(owners.owner), dtype=torch.int64)
    position[vertices] = torch.arange(len(vertices))
    position[fetched] = torch.arange(len(vertices), len(vertices) + len(fetched))
    return CandidateLinks(pairs=torch.cat([position[pairs[:, :2]], pairs[:, 2:]], 1), route=route)


def selection_matrix(positions: Tensor, num_rows: int) -> Adjacency:
    """Return the sparse matrix [p, num_rows] whose product with a table selects p rows. It has a fast adjoint.

    Args:
        positions: Row to select for each result, int64 [p].
        num_rows: Number of rows of the table.
    """
    return Adjacency(indptr=torch.arange(len(positions) + 1), indices=positions, num_sources=num_rows)


class LinkTask:
    """Task that trains a model to distinguish links from negative samples.

    The loss is the mean over the training links of a step of a loss of each link and its negative samples. A rank
    computes the sum over its links, divided by the number of links on all ranks. Negative samples depend on seed, epoch
    and link, not on ranks.

    Args:
        options: The task's options.
        seed: Seed of the negative samples.
        links: Training, validation and test links of the graph.
        decoder: The decoder, whose parameters `loss` gives gradients.
        rows: Vertices of this rank's rows.
        group: The ranks.
        empty: Allocates the gradient of a tensor of rows, in the same kind of memory.
    """

    def __init__(
        self,
        options: TaskOptions,
        seed: int,
        links: Links,
        decoder: Decoder,
        rows: slice | Tensor,
        group: Group,
        empty: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        self.links, self.decoder, self.group, self.empty = links, decoder, group, empty
        self.ranks_at = values_of_k(options.metrics, "hits")
        self.ranked = compares_ranks(options.metrics)
        self.top_at = values_of_k(options.metrics, *TOP_METRICS)
        self.vertices = torch.arange(links.num_vertices)[rows]
        owner = owner_of_vertices(self.vertices, links.num_vertices, group)
        self.assignment = LinkAssignment(
            links=links,
            owner=owner,
            size=group.size,
            seed=seed,
            num_negatives=options.negatives,
            keep_sources=keeps_sources(options.loss),
            num_eval_negatives=options.eval_negatives,
        )
        self.sum_losses = make_link_loss(options)
        self.row_of_vertex = torch.full((links.num_vertices,), -1)
        self.row_of_vertex[self.vertices] = torch.arange(len(self.vertices))
        pairs = self.assignment.held_out()
        self.num_held_out = len(pairs)
        self.assigned = self.assignment.assigned(pairs, group.rank)
        ends = locate_endpoints(self.assignment, pairs[self.assigned], self.vertices, group)
        self.held_out = LinkHalo(ends, len(self.vertices), group, "held-out links")

    def loss(self, z: Tensor, step: Step, span: slice | None = None) -> tuple[Tensor, Tensor]:
        """Compute loss and gradient of a step, and set the gradients of the decoder's parameters.

        Args:
            z: Output rows of the model, [n, D].
            step: The step.
            span: None, for all rows of the rank.

        Returns:
            This rank's part of the loss, [], and its gradient with respect to z, [n, D].
        """
        assert span is None
        with self.group.meter.timer("negatives"):
            links, num_links = self._links_of(step)
            pairs_per_link = 1 + self.assignment.num_negatives
            halo = LinkHalo(links, len(z), self.group, "training links", pairs_per_link)

        def decode(number: int, rows: Tensor) -> Tensor:
            return halo.blocks[number].score(rows, self.decoder)

        def loss(_: int, scores: Tensor) -> tuple[Tensor, Tensor]:
            scores.requires_grad_()
            total = self.sum_losses(scores.view(pairs_per_link, -1)) / num_links
            (grad,) = torch.autograd.grad(total, scores)
            return total.detach(), grad

        return halo.backpropagate(z, self.empty, decode, loss)

    def _links_of(self, step: Step) -> tuple[CandidateLinks, int]:
        """Return the candidate links of this rank in a step, and the number of links of all ranks in it."""
        if step.links is not None:
            return step.links, step.batch_size
        pairs = self.assignment.train(self.group.rank, step.epoch)
        return locate_endpoints(self.assignment, pairs, self.vertices, self.group), len(self.links.train)

    @torch.no_grad()
    def score(self, z: Tensor, pairs: Tensor) -> Tensor:
        """Return the scores [p] of any pairs. All ranks must call it with the same pairs, and get all scores.

        Args:
            z: Output rows of the model, [n, D].
            pairs: The pairs, [p, 3].
        """
        scores = z.new_zeros(len(pairs), dtype=sum_dtype(z.dtype))
        assigned = self.assignment.owner[pairs[:, 0]] == self.group.rank
        ends = locate_endpoints(self.assignment, pairs[assigned], self.vertices, self.group)
        halo = LinkHalo(ends, len(self.vertices), self.group, "pairs")
        fetched = halo.fetch(z)
        local_scores = [block.score(block.rows(z, fetched), self.decoder) for block in halo.blocks]
        scores[assigned.to(z.device)] = torch.cat(local_scores).to(scores.dtype)
        return self.group.all_reduce(scores, tag="scores")

    @torch.no_grad()
    def top(self, z: Tensor, queries: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the k best targets of each query, block by block; see `top_targets`. All ranks must iterate over it.

        Args:
            z: Output rows of the model, [n, D].
            queries: The queries, [q, 3], the same on every rank, ascending by relation.
            k: Number of targets.
        """
        yield from top_targets(z, self.links, queries, k, self.row_of_vertex, self.decoder, self.group)

    @torch.no_grad()
    def counts(self, z: Tensor, step: Step) -> dict[str, Any]:
        """Return `scores` of an evaluation by name and `details` of a report by split. All ranks get all scores.

        Args:
            z: Output rows of the model, [n, D].
            step: Unused.
        """
        del step
        scores = z.new_zeros(self.num_held_out)
        fetched = self.held_out.fetch(z)
        local_scores = torch.cat([block.score(block.rows(z, fetched), self.decoder) for block in self.held_out.blocks])
        scores[self.assigned.to(z.device)] = local_scores
        splits = (self.links.val, self.links.test)
        num_samples = self.assignment.num_eval_negatives
        sources = [self.assignment.sources(split) for split in splits]
        sizes = [len(links) for links in splits] * 2 + [len(queries) * num_samples for queries in sources]
        by_split = self.group.all_reduce(scores, tag="scores").cpu().split(sizes)
        results: dict[str, float | None] = {}
        details: dict[str, dict[str, Any]] = {}
        for number, split in enumerate(("val", "test")):
            if not len(splits[number]):
                continue
            pairs = torch.stack([by_split[number], by_split[2 + number]])  # each link, and a negative sample of it
            results[f"{split}_auc"] = auc(*pairs)
            if self.group.rank == 0:  # it writes the record
                is_link = torch.tensor([True, False])[:, None].expand_as(pairs)
                details[split] = {"by_threshold": threshold_curves(pairs.reshape(-1, 1), is_link.reshape(-1))}
            if self.ranked:
                if num_samples:
                    samples = by_split[4 + number].view(num_samples, -1).t()
                    query = self.links.position_of_query(sources[number], splits[number])
                    ranks = sampled_ranks(by_split[number], samples[query])
                else:
                    ranks = filtered_ranks(z, self.links, splits[number], self.row_of_vertex, self.decoder, self.group)
                results |= rank_scores(split, ranks, self.ranks_at)
            if self.top_at:
                queries = self.links.queries(self.links.directed(splits[number]))
                scores_at = top_scores(self.top(z, queries, self.top_at[-1]), self.links, splits[number], self.top_at)
                results |= {f"{split}_{name}": score for name, score in scores_at.items()}
        if len(self.links.val):
            pairs = torch.stack([by_split[0], by_split[2]]).double()
            results["val_loss"] = float(self.sum_losses(pairs) / len(self.links.val))
        return {"scores": results, "details": details}

    def scores(self, counts: list[dict[str, Any]]) -> dict[str, float | None]:
        """Return the scores of an evaluation, which each rank has."""
        return dict(counts[0]["scores"])

    def details(self, counts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the curves of an evaluation; see `Task.details`."""
        return dict(counts[0]["details"])
