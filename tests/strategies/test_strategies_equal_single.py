"""The parity matrix: every exact strategy x every model x P, in one spawn per P."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from parity import (
    EXACT,
    MACHINE,
    NOTHING,
    NUM_CLASSES,
    NUM_FEATURES,
    PARTS_OF_LOGITS,
    RESIDENT,
    Case,
    Given,
    Session,
    cases,
    check_case,
    check_close,
    part_by,
    planted_error,
    planted_typed_errors,
    pyg_cases,
    replaced,
    too_large,
    typed_cases,
)
from ranks import spawn

from weft.comm import Group, exchange
from weft.core.errors import InputError
from weft.nn import MODELS, Linear, RowLayer, Stack, View, Workload
from weft.partition import METHODS
from weft.strategies import STRATEGIES, Step


def check_all(group: Group, turns: int) -> int:
    """Every case under every strategy, or, in turns, under a half or a quarter of them."""
    checked = 0
    for number, case in enumerate(cases() + pyg_cases()):
        for name in RESIDENT[number % turns :: turns]:
            if case in pyg_cases() and STRATEGIES[name].traits.block_error:
                with pytest.raises(InputError, match=r"view\.block"):
                    Session(case, name, group).trace(group.rank, training=True)
            else:
                check_case(group, case, name, Given(machine=MACHINE))
            checked += 1
    for name in EXACT if group.size > 1 else ():
        with planted_error(name), pytest.raises(AssertionError, match=r"logits|gradient"):
            check_case(group, Case(model="gcn"), name, Given(cache_ratio=0.5))
    if group.size > 1:
        wrong_sum = replaced(exchange, "_sum_shared", too_large(exchange._sum_shared))
        with wrong_sum, pytest.raises(AssertionError, match="logits"):
            check_case(group, PARTS_OF_LOGITS, "tensor")
    return checked


def check_partitions(group: Group, turns: int) -> list[bool]:
    """Models under partitioners, one in `turns`; whether hybrid cached some sources of a hop and fetched others."""
    mixed = []
    for number, ((model, decoupled), method) in enumerate(product(product(MODELS, (False, True)), METHODS)):
        if number % turns:
            continue
        case = Case(model=model, decoupled=decoupled, input_dropout=0.3, weighted=True)
        given = Given(partition=part_by(method, case, group.size), machine=MACHINE)
        facts = check_case(group, case, "hybrid", given).strategy.describe()
        hops = list(zip(facts["cached"], facts["fetched"], strict=True))
        mixed.append(any(cached and fetched for cached, fetched in hops[1:]))
    empty = torch.zeros(23, dtype=torch.int32)  # all vertices are rank 0's
    for name in ("communicated", "cached", "hybrid"):
        check_case(group, Case(model="sage", norm="batch"), name, Given(partition=empty, cache_ratio=0.5))
    for ratio in (0.25, 0.75):
        check_case(group, Case(model="gat", layers=4), "hybrid", Given(cache_ratio=ratio))
    limited = check_case(group, Case(model="gcn"), "hybrid", Given(cache_ratio=1.0, cache_memory=2000))
    assert limited.strategy.describe()["cached_bytes"] <= 2000
    return mixed


def check_types(group: Group) -> int:
    """Every typed case under every strategy; rows that are computed again, and rows that nobody has."""
    for case, name in product(typed_cases(), RESIDENT):
        check_case(group, case, name, Given(machine=MACHINE))
    case = Case(model="rgcn", typed="some", layers=2, bases=2)
    empty = torch.zeros(case.num_vertices, dtype=torch.int32)
    check_case(group, case, "cached", Given(partition=empty))
    check_case(group, case, "hybrid", Given(partition=part_by("random", case, group.size), cache_ratio=0.5))
    if group.size > 1:
        for planted in planted_typed_errors():
            with planted as name, pytest.raises(AssertionError, match=r"logits|gradient|losses"):
                check_case(group, case, name, Given(cache_ratio=0.5))
    return len(typed_cases())


class TwoProducts(torch.nn.Module):
    """A layer that asks for a second product of the first one's result, and adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.map = torch.nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.out_width = NUM_CLASSES

    def forward(self, view: View, x: torch.Tensor) -> torch.Tensor:
        h = self.map(x)
        y: torch.Tensor = h + view.propagate(view.propagate(h, reduce="mean"), norm="gcn")
        return y


class OwnRows(TwoProducts):
    """A layer that forgets that it may have fewer targets than sources."""

    def forward(self, view: View, x: torch.Tensor) -> torch.Tensor:
        h = self.map(x)
        y: torch.Tensor = h + view.propagate(h)
        return y


def check_own_layers(group: Group) -> None:
    """Such layers run where every row stays, and are refused in a sentence where rows may be cached."""
    graph, _ = Case(model="gcn").build()
    for layer, said in ((TwoProducts, "give each its own stage"), (OwnRows, r"use view\.targets\(x\)")):
        torch.manual_seed(1)
        model = Stack([layer()]).double()
        step = Step(epoch=0, training=False)
        work = Workload(model, graph)
        whole = NOTHING.plan("single", work, 1).place(Group()).forward(step)
        placed = NOTHING.plan("communicated", work, group.size).place(group)
        check_close(placed.forward(step), whole[placed.rows], layer.__name__)
        for name in ("cached", "hybrid"):
            with pytest.raises(InputError, match=said):
                Given(machine=MACHINE).plan(name, work, group.size).place(group)


def check_rows_alone(group: Group) -> None:
    """A model that aggregates nothing."""
    graph, _ = Case(model="gcn").build()
    torch.manual_seed(1)
    model = Stack([RowLayer(Linear(NUM_FEATURES, 4), 4), RowLayer(Linear(4, NUM_CLASSES), NUM_CLASSES)]).double()
    step = Step(epoch=0, training=False)
    work = Workload(model, graph)
    whole = NOTHING.plan("single", work, 1).place(Group()).forward(step)
    for name in EXACT:
        placed = Given(machine=MACHINE).plan(name, work, group.size).place(group)
        check_close(placed.forward(step), whole[placed.rows], name)


def test_layers_that_keep_every_row() -> None:
    spawn(2, check_own_layers)


def test_models_without_a_product() -> None:
    spawn(2, check_rows_alone)


def test_single_equals_itself_in_another_order() -> None:
    reordered = [case for case in cases() if case.order != "none"]
    assert reordered
    for case in reordered:
        check_case(Group(), case, "single")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_single(size: int) -> None:
    turns = {1: 1, 2: 2, 3: 4, 4: 4}[size]
    num_checked = len(RESIDENT) * len(cases() + pyg_cases()) // turns
    assert spawn(size, check_all, turns) == [num_checked] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_strategy_equals_single(size: int) -> None:
    assert spawn(size, check_all, 1) == [len(RESIDENT) * len(cases() + pyg_cases())] * size


@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_typed_graphs_equal_single(size: int) -> None:
    ranks = spawn(size, check_types) if size > 1 else [check_types(Group())]
    assert ranks == [len(typed_cases())] * size


def check_mixed(size: int, turns: int) -> None:
    mixed = torch.tensor(spawn(size, check_partitions, turns))
    assert len(mixed[0]) == -(-2 * len(MODELS) * len(METHODS) // turns)
    assert mixed.any(0).sum() > 20 // turns  # else the factors decide nothing


def test_equals_single_under_partitioners_in_turn() -> None:
    check_mixed(3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_single_under_every_partitioner(size: int) -> None:
    check_mixed(size, 1)
