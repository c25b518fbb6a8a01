"""Batches of an epoch, keys of samples, and fanouts as text."""

from __future__ import annotations

import pytest
import torch

from tests.lib.graph_checks import assert_one_line
from weft.data.sampling import ALL, check_fanouts, epoch_batches, layer_key, parse_fanouts
from weft.utils.errors import InputError


def test_every_vertex_once() -> None:
    train = torch.tensor([3, 4, 8, 17, 77, 250, 900])
    batches = epoch_batches(train, 3, seed=1, epoch=0)
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert torch.equal(torch.cat(batches).sort().values, train)
    assert all((batch.diff() > 0).all() for batch in batches)
    assert [len(batch) for batch in epoch_batches(train, 100, seed=1, epoch=0)] == [7]
    assert epoch_batches(train[:0], 3, seed=1, epoch=0) == []
    with pytest.raises(ValueError, match="batch_size is 0"):
        epoch_batches(train, 0, seed=1, epoch=0)


def test_order_is_keyed() -> None:
    """Order depends on seed and epoch, not on the order of the vertices, nor on their numbers if ids are passed."""
    train = torch.arange(100)
    first, other_epoch, other_seed = (
        torch.cat(epoch_batches(train, 10, seed=seed, epoch=epoch)).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )
    assert len({tuple(order) for order in (first, other_epoch, other_seed)}) == 3
    reverse = epoch_batches(train.flip(0), 10, seed=0, epoch=0)
    assert torch.cat([batch.flip(0) for batch in reverse]).tolist() == first
    ids = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    for mine, original in zip(
        epoch_batches(train, 10, seed=0, epoch=0, ids=ids), epoch_batches(train, 10, seed=0, epoch=0), strict=True
    ):
        assert torch.equal(ids[mine].sort().values, original)


def test_links_are_batched_like_vertices() -> None:
    """Every link is in one batch; batches are sorted and depend on original ids."""
    links = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(2))
    batches = epoch_batches(links, 7, seed=0, epoch=0)
    assert [len(batch) for batch in batches] == [7] * 5 + [5]
    assert torch.equal(torch.cat(batches).unique(dim=0), links)
    assert all(torch.equal(batch, batch.unique(dim=0)) for batch in batches)
    ids = torch.tensor([3, 0, 4, 2, 1])
    numbered = torch.cat([ids.argsort()[links[:, :2]], links[:, 2:]], 1)
    for mine, original in zip(epoch_batches(numbered, 7, seed=0, epoch=0, ids=ids), batches, strict=True):
        assert torch.equal(torch.cat([ids[mine[:, :2]], mine[:, 2:]], 1), original)


def test_the_first_vertex_of_an_epoch_is_uniform() -> None:
    first = torch.stack([epoch_batches(torch.arange(10), 1, seed=5, epoch=epoch)[0] for epoch in range(1000)])
    observed = first.flatten().bincount(minlength=10).double()
    assert float(((observed - 100) ** 2 / 100).sum()) < 27.9  # chi-square at 9, tail 1e-3


def test_keys_differ() -> None:
    keys = {layer_key(*parts) for parts in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))}
    assert len(keys) == 5


def test_fanouts() -> None:
    assert parse_fanouts("15,10,5") == (15, 10, 5)
    assert parse_fanouts("all") == (ALL,)
    assert parse_fanouts(" 15 , all") == (15, ALL)
    assert parse_fanouts("15:5,10:all,7") == ((15, 5), (10, ALL), 7)
    assert parse_fanouts("0:3") == ((0, 3),)
    for text in ("", "15,", "0", "-1", "1.5", "15:5:", "ALL ", "9" * 30, "2147483648", "\u0661", "5;5"):
        with pytest.raises(InputError) as error:
            parse_fanouts(text)
        assert_one_line(error, f"fanout '{text}'", "15,10,5")


def test_fanouts_fit_the_model() -> None:
    assert check_fanouts((15, 10), 2) == (15, 10)
    assert check_fanouts((ALL,), 3) == (ALL,) * 3
    assert check_fanouts((15,), 2) == (15, 15)
    assert check_fanouts(((15, 5), 10), 2, num_relations=2) == ((15, 5), 10)
    for fanouts, hops, relations, words in (
        ((15, 10, 5), 2, 0, "3 numbers for a model of 2 hops"),
        ((15, 10), 1, 0, "2 numbers for a model of 1 hop:"),
        (((15, ALL),), 1, 0, "'15:all' is for 2 relations and the graph has none"),
        (((15, 5),), 1, 3, "the graph has 3"),
    ):
        with pytest.raises(InputError) as error:
            check_fanouts(fanouts, hops, relations)
        assert_one_line(error, words)
