"""Quality measures of a partition equal those of sets in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.graph_checks import CALM, graphs
from weft.data import Graph
from weft.partition import Quality
from weft.reporting import partition_table


def recount(graph: Graph, part: list[int], num_parts: int) -> Quality:
    """Compute the quality of a partition by its definition."""
    edges = list(zip(*(ids.tolist() for ids in graph.in_edges.edges()), strict=True))
    remote = [{u for u, v in edges if part[v] == p and part[u] != p} for p in range(num_parts)]
    return Quality(
        vertices=tuple(part.count(p) for p in range(num_parts)),
        in_edges=tuple(sum(part[v] == p for _, v in edges) for p in range(num_parts)),
        remote=tuple(map(len, remote)),
        cut=sum(part[u] != part[v] for u, v in edges),
        replication=(len(part) + sum(map(len, remote))) / max(len(part), 1),
        seconds=1.0,
    )


@CALM
@given(graph=graphs(), num_parts=st.integers(1, 5), seed=st.integers(0, 99))
def test_equals_the_definition(graph: Graph, num_parts: int, seed: int) -> None:
    """Measures equal the definition, also with empty parts."""
    random = torch.Generator().manual_seed(seed)
    part = torch.randint(0, num_parts, (graph.num_vertices,), generator=random, dtype=torch.int32)
    quality = Quality.measure(graph, part, num_parts, seconds=1.0)
    assert quality == recount(graph, part.tolist(), num_parts)
    assert len(partition_table(quality.record()).rows) == num_parts + 2


def test_a_small_graph() -> None:
    """The edges are 0 -> 1 (twice), 2 -> 1, 1 -> 1, 3 -> 0; the parts are {0, 1}, {2}, {3}."""
    graph = Graph.from_edges(torch.tensor([0, 0, 2, 1, 3]), torch.tensor([1, 1, 1, 1, 0]))
    quality = Quality.measure(graph, torch.tensor([0, 0, 1, 2], dtype=torch.int32), 3, seconds=0.5)
    assert quality == Quality(
        vertices=(2, 1, 1), in_edges=(5, 0, 0), remote=(2, 0, 0), cut=2, replication=1.5, seconds=0.5
    )
