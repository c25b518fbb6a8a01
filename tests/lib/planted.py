"""Planted errors, which show that the tests fail if a strategy is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.cases import Case
from tests.lib.ranks import on_ranks
from tests.lib.session import Given, check_case, reference
from weft.comm import Group, columns, halo
from weft.nn import Attend, EdgeSoftmax, RelationRows, SubTopology, embedding_rows
from weft.nn.layers import typed_input
from weft.parallel.blocks.embedding_rows import EmbeddedHalo
from weft.parallel.chunks.run.chunk_halos import GradFlow, RowFlow
from weft.storage.host_rows import HostRows, MemoryRows
from weft.strategies.tensor.attention_columns import AttentionPlan
from weft.strategies.vertex.plan import PlacedVertices


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    right = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, right)


def too_large(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(*arguments: object) -> Tensor:
        x = move(*arguments).clone()
        x[:, -1:] *= 1.001
        return x

    return wrong


def wrong_gather(gather: Callable[..., None]) -> Callable[..., None]:
    def wrong(home: HostRows, rows: Tensor, out: Tensor, places: Tensor) -> None:
        gather(home, rows, out, places)
        out[places, -1:] *= 1.001

    return wrong


def wrong_write(write: Callable[..., None]) -> Callable[..., None]:
    def wrong(home: MemoryRows, first: int, rows: Tensor) -> None:
        write(home, first, rows)
        home.tensor()[first : first + len(rows), -1:] *= 1.001

    return wrong


def wrong_flow(take: Callable[..., Iterator[tuple[Any, Tensor]]]) -> Callable[..., Iterator[tuple[Any, Tensor]]]:
    def wrong(*arguments: Any) -> Iterator[tuple[Any, Tensor]]:
        for place, rows in take(*arguments):
            rows[:, -1:] *= 1.001
            yield place, rows

    return wrong


def wrong_ids(place: Callable[..., None]) -> Callable[..., None]:
    def wrong(home: PlacedVertices, *arguments: Any, **options: Any) -> None:
        place(home, *arguments, **options)
        home.whole.exchanges[0].row_ids[home.whole.needed.num_own :] += 1  # which all stages share

    return wrong


@contextmanager
def wrong_relation_rows() -> Iterator[None]:
    """Shift the rows of (vertex, relation) pairs by one, so that vertices get the rows of others."""
    right = RelationRows.transform

    def wrong(pairs: RelationRows, z: Tensor, weight: Tensor) -> Tensor:
        return right(pairs, z.roll(1, 0), weight)

    with replaced(RelationRows, "transform", wrong):
        yield


@contextmanager
def wrong_embedded_rows() -> Iterator[None]:
    """Drop the gradients of embedding rows that other ranks hold as copies."""
    right = EmbeddedHalo.fetch

    def wrong(halo: EmbeddedHalo, weight: Tensor) -> Tensor:
        rows = right(halo, weight)
        return torch.cat([weight, rows[len(weight) :].detach()])

    with replaced(EmbeddedHalo, "fetch", wrong):
        yield


@contextmanager
def summed_embedding() -> Iterator[None]:
    """Assign each rank embedding rows of other vertices than its own."""
    with replaced(typed_input, "embedding_rows", lambda graph, rows: embedding_rows(graph, rows).flip(0)):
        yield


@contextmanager
def masks_by_local_ids() -> Iterator[None]:
    """Derive dropout masks of edges from local row numbers of their endpoints instead of vertex ids."""
    places = property(lambda block: torch.arange(len(block.sources)))
    first = property(lambda block: torch.arange(block.adjacency.num_targets))
    with replaced(SubTopology, "ids", places), replaced(SubTopology, "target_ids", first):
        yield


@contextmanager
def masks_of_first_heads() -> Iterator[None]:
    """Number the attention heads of every rank from 0."""
    right = AttentionPlan.rank_part

    def wrong(plan: AttentionPlan, op: EdgeSoftmax, rank: int) -> EdgeSoftmax:
        mine = right(plan, op, rank)
        return replace(mine, dropout=mine.dropout and mine.dropout._replace(first_head=0))

    with replaced(AttentionPlan, "rank_part", wrong):
        yield


@contextmanager
def other_masks_backward() -> Iterator[None]:
    """Draw other dropout masks in the backward pass than in the forward pass."""
    right = Attend.gradients

    def wrong(op: Attend, *arguments: Any) -> Any:
        return right(replace(op, dropout=op.dropout and op.dropout._replace(key=op.dropout.key ^ 1)), *arguments)

    with replaced(Attend, "gradients", wrong):
        yield


PLANTED: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "tensor": ("tensor", lambda: replaced(columns, "_join_columns", too_large(columns._join_columns))),
    "columns": ("tensor", lambda: replaced(MemoryRows, "write", wrong_write(MemoryRows.write))),
    "logits": ("tensor", lambda: replaced(columns, "_sum_shared", too_large(columns._sum_shared))),
    "communicated": ("communicated", lambda: replaced(halo.RowsInTransit, "wait", too_large(halo.RowsInTransit.wait))),
    "hybrid": ("hybrid", lambda: replaced(halo.RowsInTransit, "wait", too_large(halo.RowsInTransit.wait))),
    "cached": ("cached", lambda: replaced(PlacedVertices, "__init__", wrong_ids(PlacedVertices.__init__))),
    "offload": ("offload", lambda: replaced(HostRows, "gather", wrong_gather(HostRows.gather))),
    "rows_flow": ("pipeline", lambda: replaced(RowFlow, "receive", wrong_flow(RowFlow.receive))),
    "grads_flow": ("pipeline", lambda: replaced(GradFlow, "receive", wrong_flow(GradFlow.receive))),
    "pairs": ("tensor", wrong_relation_rows),
    "embedded_rows": ("cached", wrong_embedded_rows),
    "summed_embedding": ("communicated", summed_embedding),
    "masks_by_local_ids": ("communicated", masks_by_local_ids),
    "masks_of_first_heads": ("tensor", masks_of_first_heads),
    "other_masks_backward": ("offload", other_masks_backward),
}
"""Strategy and context manager of each planted error, by its name.

The last column of the rows that a strategy moves is 0.1 % too large, or as each context manager describes.
"""


def check_planted(size: int, error: str, case: Case, options: Given, *, shows: str = r"logits|gradient") -> None:
    """Check that the planted error fails the check on each of `size` ranks, with a message that matches `shows`."""
    reference(case, full=True)
    on_ranks(size, _finds, error, case, options, shows)


def _finds(group: Group, error: str, case: Case, options: Given, shows: str) -> None:
    name, planted = PLANTED[error]
    with planted(), pytest.raises(AssertionError, match=shows):
        check_case(group, case, name, options, full=True)
