"""Inverse relations add every edge reversed, in an additional relation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.lib.graph_checks import CALM, assert_one_line, graphs
from weft.data import Graph, with_inverse_relations
from weft.utils.errors import InputError


@CALM
@given(graphs().filter(lambda graph: bool(graph.relations)))
def test_every_edge_is_reversed(graph: Graph) -> None:
    both = with_inverse_relations(graph)
    assert both.num_edges == 2 * graph.num_edges
    for name in graph.relations:
        source_type, middle, target_type = name.split("|")
        source, target = graph.relation(name).edges()
        back = both.relation(f"{target_type}|inverse of {middle}|{source_type}")
        assert sorted(zip(*(ids.tolist() for ids in back.edges()), strict=True)) == sorted(
            zip(target.tolist(), source.tolist(), strict=True)
        )
        assert torch.equal(torch.stack(both.relation(name).edges()), torch.stack([source, target]))


def test_errors() -> None:
    plain = Graph.from_edges(torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(InputError) as error:
        with_inverse_relations(plain)
    assert_one_line(error, "no relations", "--inverse-relations")
    typed = Graph.from_edges(
        torch.tensor([0]),
        torch.tensor([1]),
        edge_type=torch.tensor([0]),
        relations=("v|likes|v",),
        vertex_types=("v",),
        type_offsets=(0, 2),
    )
    with pytest.raises(InputError) as error:
        with_inverse_relations(with_inverse_relations(typed))
    assert_one_line(error, "inverse relations already")
