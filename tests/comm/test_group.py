"""Exchanges under way at once are told apart by their keys; ranks have axes, each a group of its own."""

from __future__ import annotations

import pytest
import torch

from tests.lib.ranks import spawn
from weft.comm import Group, Key
from weft.comm.group import Exchange
from weft.core.errors import InputError

NUM_NUMBERS = 5
LAYERS = {"first": 10.0, "second": 20.0}


def swap(group: Group, keys: dict[str, Key]) -> list[list[float]]:
    """What two ranks get of each other for two layers, begun in opposite order: the layer's number plus the rank's."""
    names = list(LAYERS) if group.rank == 0 else list(LAYERS)[::-1]
    sizes = [NUM_NUMBERS * (rank != group.rank) for rank in range(2)]
    pending = {}
    for name in names:
        numbers = torch.full((NUM_NUMBERS,), LAYERS[name] + group.rank)
        pending[name] = group.all_to_all_async(numbers, sizes, sizes, tag="halo", key=keys.get(name))
    found = {name: pending[name].wait().tolist() for name in reversed(names)}
    return [found[name] for name in LAYERS]


def check_orders(group: Group) -> None:
    right = [[number + 1 - group.rank] * NUM_NUMBERS for number in LAYERS.values()]
    for chunk in range(3):
        assert swap(group, {name: Key(f"{name} rows", chunk) for name in LAYERS}) == right
        assert (
            swap(group, {"first": Key("aggregate 1 rows", chunk), "second": Key("aggregate 1 rows", chunk + 1)})
            == right
        )
    assert swap(group, {}) == right[::-1], "a count of all is no key: the planted error gives the other layer's rows"
    with pytest.raises(AssertionError, match=r"Key\(what='rows', number=0\) is under way already"):
        swap(group, dict.fromkeys(LAYERS, Key("rows", 0)))


def test_ranks_begin_exchanges_in_any_order() -> None:
    spawn(2, check_orders)


def test_keys_are_the_same_in_every_process() -> None:
    """Python's own hash of a string is not."""
    assert Key("halo 1 rows", 3).slot == 1_723_629_653 + 3
    slots = [Key(what, number).slot for what in ("halo 0 rows", "halo 0 gradients") for number in range(1000)]
    assert len(set(slots)) == 2000


def check_axes(group: Group) -> None:
    """Ranks 0 to 3 as a mesh of 2 columns x 2 halos: 0 and 1 have the same column, 0 and 2 the same halo."""
    group.declare_axes(columns=2, halo=2)
    me, first = group.rank, torch.arange(4.0)
    for name, peers in (("columns", [me % 2, me % 2 + 2]), ("halo", [me // 2 * 2, me // 2 * 2 + 1])):
        axis, rank = group.axis(name), peers.index(me)
        other = peers[1 - rank]
        assert (axis.rank, axis.size, list(axis.world_ranks)) == (rank, 2, peers)
        group.meter.take("setup")
        assert torch.equal(axis.all_reduce(first + 10 * me, tag="sums"), 2 * first + 10 * sum(peers))
        counts = group.meter.take("setup")
        assert (counts.collectives["sums"], counts.bytes_sent["sums"]) == (1, 16)
        for ring in (True, False):
            sent = torch.tensor([me, me, me, 100.0 + me])  # 3 numbers stay, 1 goes
            sizes = [3, 1] if rank == 0 else [1, 3]
            sent = sent if rank == 0 else sent.flip(0)
            arrived = Exchange(axis, sent, sizes, sizes, tag="rows", ring=ring).wait()
            expected = [me] * 3 + [100 + other] if rank == 0 else [100 + other] + [me] * 3
            assert arrived.tolist() == expected
        assert group.meter.take("setup").bytes_sent["rows"] == 8
        values = torch.tensor([float(me)])
        axis.broadcast(values, tag="values")
        assert values.item() == peers[0]
        assert axis.all_gather_object({"rank": me}) == [{"rank": peer} for peer in peers]
    both = [group.axis(name).all_to_all_async(first + me, [2, 2], [2, 2], tag="rows") for name in ("columns", "halo")]
    assert [pending.wait().tolist() for pending in reversed(both)] == [crossed(me, me ^ 1), crossed(me, me ^ 2)]
    assert group.all_reduce(torch.ones(1), tag="sums").item() == 4


def crossed(me: int, peer: int) -> list[float]:
    """What two ranks hand each other of 0 to 3 plus their number, each keeping a half."""
    half = [0.0, 1.0] if me < peer else [2.0, 3.0]
    return [number + rank for rank in sorted((me, peer)) for number in half]


def test_axes() -> None:
    spawn(4, check_axes)


def test_axes_must_have_all_ranks() -> None:
    group = Group()
    with pytest.raises(InputError, match="a mesh of columns=2 x halo=3 has 6 ranks, not 1: give sizes that do"):
        group.declare_axes(columns=2, halo=3)
    group.declare_axes(columns=1, halo=1)
    assert group.axis("halo").size == 1
