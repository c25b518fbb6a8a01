"""Receptive fields equal sets in plain Python, and a part computes only rows of its receptive field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.graph_checks import CALM
from tests.lib.graphs import make_graph
from weft.data import Adjacency
from weft.nn import ReceptiveField
from weft.partition import Caching, make_dependencies

NUM_PARTS = 3
CACHING = Caching(costs=torch.ones(3, 5, dtype=torch.float64), ratio=0.5)


def layers_of(adj: Adjacency, vertices: set[int], num_hops: int) -> list[set[int]]:
    """Return the vertices at each layer boundary of the receptive field."""
    sources = [row.tolist() for row in adj.indices.split(adj.degree.tolist())]
    layers = [vertices]
    for _ in range(num_hops):
        layers.insert(0, layers[0] | {u for v in layers[0] for u in sources[v]})
    return layers


@given(st.integers(2, 40), st.integers(0, 4), st.data())
@CALM
def test_each_layer_boundary_has_the_sources_of_the_next(num_vertices: int, num_hops: int, data: st.DataObject) -> None:
    adj = make_graph(num_vertices).in_edges
    vertices = data.draw(st.sets(st.integers(0, num_vertices - 1), max_size=3))
    field, expected = (
        ReceptiveField.of(adj, torch.tensor(sorted(vertices), dtype=torch.int64), num_hops),
        layers_of(adj, vertices, num_hops),
    )
    for level, members in enumerate(expected):
        assert set((field.last_boundary >= level).nonzero().view(-1).tolist()) == members
    assert field.rows == tuple(map(len, expected))
    assert field.edges == tuple(sum(int(adj.degree[v]) for v in members) for members in expected[1:])


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_parts_compute_their_receptive_field(ratio: float) -> None:
    """A part computes its rows of the receptive field and recomputed rows that these read, and fetches the others."""
    adj = make_graph(120).in_edges
    part = torch.arange(120, dtype=torch.int32) * 7 % NUM_PARTS
    field = ReceptiveField.of(adj, torch.tensor([3, 50, 81]), 3)
    caching = replace(CACHING, ratio=ratio)
    for rank in range(NUM_PARTS):
        needed = make_dependencies(adj, part, rank, NUM_PARTS, caching, last_read=field.last_boundary)
        whole = make_dependencies(adj, part, rank, NUM_PARTS, caching)
        assert needed.owned.tolist() == [v for v in (3, 50, 81) if part[v] == rank]
        for level, hop in enumerate(needed.hops):
            inputs = needed.rows[: hop.num_inputs]
            targets, read = inputs[: hop.block.num_targets], set(read_by(adj, inputs[: hop.block.num_targets]))
            mine = ((part == rank) & (field.last_boundary >= level)).nonzero().view(-1)
            assert set(inputs[part[inputs] == rank].tolist()) == set(mine.tolist())
            assert set(inputs[part[inputs] != rank].tolist()) <= read | set(targets.tolist())
            assert set(inputs.tolist()) <= set(whole.rows[: whole.hops[level].num_inputs].tolist())
            assert set(hop.fetched.tolist()) == read - set(inputs.tolist())
            assert (field.last_boundary[hop.fetched] >= level).all()
            sources = torch.cat([inputs, hop.fetched])
            assert torch.equal(sources[hop.block.indices.long()], adj.indices.long()[hop.edge_ids])
        assert ratio < 1 or not any(len(hop.fetched) for hop in needed.hops)


def read_by(adj: Adjacency, targets: Tensor) -> list[int]:
    return [int(u) for v in targets for u in adj.indices[adj.indptr[v] : adj.indptr[v + 1]]]
