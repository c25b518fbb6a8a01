"""Local ids equal those of a dictionary, in every call of a relabeller."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.graph_checks import CALM
from weft.data.sampling import Relabeller


def expected(first: list[int], others: list[int]) -> tuple[list[int], list[int]]:
    new = sorted(set(others) - set(first))
    local = {v: i for i, v in enumerate(first + new)}
    return [local[v] for v in others], new


def check(relabeller: Relabeller, first: Tensor, others: Tensor, threads: int = 1) -> None:
    positions, new = relabeller.relabel(first, others, num_threads=threads)
    assert positions.dtype == torch.int32
    assert new.dtype == torch.int64
    assert (positions.tolist(), new.tolist()) == expected(first.tolist(), others.tolist())


@CALM
@given(st.data())
def test_equals_a_dictionary(data: st.DataObject) -> None:
    """Relabelling handles word and page boundaries, empty lists and duplicates, and clears the map afterwards."""
    size = data.draw(st.sampled_from([1, 63, 64, 65, 4096, 4097, 100_000]))
    ids = st.one_of(st.integers(0, size - 1), st.sampled_from([0, size - 1, size // 2]))
    relabeller = Relabeller(size)
    for _ in range(2):
        first = torch.tensor(data.draw(st.lists(ids, unique=True, max_size=20)), dtype=torch.int64)
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        check(relabeller, first, torch.tensor(data.draw(st.lists(ids, max_size=50)), dtype=dtype))


def test_local_ids_do_not_depend_on_threads() -> None:
    random = torch.Generator().manual_seed(0)
    relabeller = Relabeller(30_000)
    for threads in (1, 2, 3):
        first = torch.randperm(30_000, generator=random)[:5000]
        check(relabeller, first, torch.randint(30_000, (50_000,), generator=random, dtype=torch.int32), threads)


def test_errors_leave_the_map_clear() -> None:
    relabeller = Relabeller(100)
    good = torch.tensor([5, 7])
    for first, others, words in (
        (torch.tensor([5, 100]), good, "not a vertex"),
        (good, torch.tensor([1, -1]), "not a vertex"),
        (torch.tensor([5, 8, 5]), good, "twice"),
        (torch.tensor([5, 5]), torch.tensor([], dtype=torch.int64), "twice"),
    ):
        for threads in (1, 2):
            with pytest.raises(ValueError, match=words):
                relabeller.relabel(first, others, num_threads=threads)
            check(relabeller, torch.tensor([9, 3]), torch.tensor([99, 3, 0]))
