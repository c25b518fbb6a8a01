"""Ranks that are kept: the same for one function after another, others after a failure, none at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

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


def part(group: Group) -> None:
    group.close()


def test_ranks_are_kept_even_when_they_have_parted() -> None:
    before = on_ranks(2, pid)
    on_ranks(2, part)
    assert on_ranks(2, pid) == before


@pytest.mark.parametrize(
    ("how", "said"), [("error", r"rank 1 failed:\n(.|\n)*ValueError: a mistake of mine"), ("death", "rank [01] failed")]
)
def test_others_follow_those_that_fail(how: str, said: str) -> None:
    before = on_ranks(2, pid)
    with pytest.raises(AssertionError, match=said):
        on_ranks(2, fail, how)
    assert not any(Path(f"/proc/{one}").exists() for one in before)
    assert not set(on_ranks(2, pid)) & set(before)


def test_nothing_is_left() -> None:
    pool = Pool(2)
    pids = pool.run(pid)
    pool.close()
    assert not any(Path(f"/proc/{one}").exists() for one in pids)
