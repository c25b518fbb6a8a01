"""Concurrent exchanges are matched by their keys; collectives return correct results and count their bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.lib.ranks import spawn
from weft.comm import Group, Key, sum_gradients
from weft.comm.group import PendingExchange

NUM_NUMBERS = 5
LAYERS = {"first": 10.0, "second": 20.0}


def swap(group: Group, keys: dict[str, Key]) -> list[list[float]]:
    """Exchange rows of two layers, which two ranks begin in opposite order; each number is layer number plus rank."""
    names = list(LAYERS) if group.rank == 0 else list(LAYERS)[::-1]
    sizes = [NUM_NUMBERS * (rank != group.rank) for rank in range(2)]
    pending = {}
    for name in names:
        numbers = torch.full((NUM_NUMBERS,), LAYERS[name] + group.rank)
        pending[name] = group.all_to_all_async(numbers, sizes, sizes, tag="halo", key=keys.get(name))
    received = {name: pending[name].wait().tolist() for name in reversed(names)}
    return [received[name] for name in LAYERS]


def check_orders(group: Group) -> None:
    right = [[number + 1 - group.rank] * NUM_NUMBERS for number in LAYERS.values()]
    for chunk in range(3):
        assert swap(group, {name: Key(f"{name} rows", chunk) for name in LAYERS}) == right
        assert (
            swap(group, {"first": Key("aggregate 1 rows", chunk), "second": Key("aggregate 1 rows", chunk + 1)})
            == right
        )
    assert swap(group, {}) == right[::-1], "a global counter is no key: without keys, layers get each other's rows"
    if __debug__:  # python -O leaves out the asserts of weft
        with pytest.raises(AssertionError, match=r"Key\(what='rows', number=0\) is under way already"):
            swap(group, dict.fromkeys(LAYERS, Key("rows", 0)))


def test_ranks_begin_exchanges_in_any_order() -> None:
    spawn(2, check_orders)


def test_keys_are_the_same_in_every_process() -> None:
    """Slots do not depend on Python's hash of strings, which differs between processes."""
    assert Key("halo 1 rows", 3).slot == 1_723_629_653 + 3
    slots = [Key(what, number).slot for what in ("halo 0 rows", "halo 0 gradients") for number in range(1000)]
    assert len(set(slots)) == 2000


def check_collectives(group: Group) -> None:
    """Check results and bytes of a sum, of an exchange of one of four numbers, and of a broadcast."""
    me, other = group.rank, 1 - group.rank
    group.meter.take("setup")
    assert group.all_reduce(torch.arange(4.0) + me, tag="sums").tolist() == [1, 3, 5, 7]
    counts = group.meter.take("setup")
    assert (counts.collectives["sums"], counts.bytes_sent["sums"]) == (1, 16)
    stays, goes, comes = [me] * 3, [100 + me], [100 + other]
    sent, expected, sizes = (stays + goes, stays + comes, [3, 1]) if me == 0 else (goes + stays, comes + stays, [1, 3])
    for ring in (True, False):
        exchange = PendingExchange(group, torch.tensor(sent, dtype=torch.float32), sizes, sizes, tag="rows", ring=ring)
        assert exchange.wait().tolist() == expected
    assert group.meter.take("setup").bytes_sent["rows"] == 8
    values = torch.tensor([10.0 + me])
    group.broadcast(values, tag="values")
    assert values.item() == 10


def test_collectives() -> None:
    spawn(2, check_collectives)


def check_partial_gradients(group: Group) -> None:
    """A parameter gets a gradient on all ranks if it has one on any, even one of zeros; otherwise on none."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    with_gradient = {0: (0, 1), 1: (0, 2)}[group.rank]
    for number in with_gradient:
        parameters[number].grad = torch.full((2,), 0.0 if number == 2 else 1.0 + group.rank)
    sum_gradients(parameters, group)
    sums = [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]
    assert sums == [[3.0, 3.0], [1.0, 1.0], [0.0, 0.0], None]


def test_a_gradient_on_one_rank_is_on_all() -> None:
    """A rank without edges of a relation computes no gradient for its weights; its optimizer must step all the same."""
    spawn(2, check_partial_gradients)
