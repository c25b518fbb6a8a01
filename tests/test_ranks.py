"""Persistent ranks serve one function after another; a failure replaces them, and none is left at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.lib.graph_checks import same_tensor
from tests.lib.ranks import Pool, on_ranks
from weft.comm import Group


def pid(group: Group) -> int:
    group.all_reduce(torch.ones(1), tag="test")
    return os.getpid()


def fail(group: Group, how: str) -> None:
    if group.rank == 1 and how == "error":
        raise ValueError("a mistake of mine")
    if group.rank == 1:
        os._exit(3)
    group.all_reduce(torch.ones(1), tag="test")


def close_group(group: Group) -> None:
    group.close()


def test_ranks_are_reused_even_after_they_close_their_group() -> None:
    before = on_ranks(2, pid)
    on_ranks(2, close_group)
    assert on_ranks(2, pid) == before


@pytest.mark.parametrize(
    ("how", "error"),
    [("error", r"rank 1 failed:\n(.|\n)*ValueError: a mistake of mine"), ("death", "rank [01] failed")],
)
def test_failed_ranks_are_replaced(how: str, error: str) -> None:
    before = on_ranks(2, pid)
    with pytest.raises(AssertionError, match=error):
        on_ranks(2, fail, how)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    assert not set(on_ranks(2, pid)) & set(before)


def assert_planted(group: Group) -> None:
    group.all_reduce(torch.ones(1), tag="test")
    same_tensor("planted", torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize("size", [1, 2])
def test_a_failed_assert_of_a_helper_is_noticed(size: int) -> None:
    """Also under python -O (make test-optimized), in this process and on ranks."""
    with pytest.raises(AssertionError, match="planted"):
        on_ranks(size, assert_planted)


def test_nothing_is_left() -> None:
    pool = Pool(2)
    pids = pool.run(pid)
    pool.close()
    assert not any(Path(f"/proc/{rank_pid}").exists() for rank_pid in pids)
