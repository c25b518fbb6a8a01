"""Which GPU a rank takes, and when ranks cannot talk by NCCL; what is on a device that is staged comes back there."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.streams import DEVICE_NAME, FakeStreams, RaceError
from weft.comm import Group, own_gpu
from weft.comm.gpus import each_has_its_own
from weft.comm.group import Exchange


@pytest.mark.parametrize(("local", "there", "taken"), [("0", 4, 0), ("3", 4, 3), ("3", 1, 0), ("5", 4, 1)])
def test_ranks_beyond_the_gpus_share(local: str, there: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    assert own_gpu() == torch.device("cuda", taken)


@pytest.mark.parametrize(("gpus", "own"), [(["a", "b", "c"], True), (["a", "b", "a"], False)])
def test_all_ranks_know_whether_two_share_a_gpu(gpus: list[str], own: bool, tmp_path: Path) -> None:
    store, found = dist.FileStore(str(tmp_path / "store"), len(gpus)), dict[int, bool]()

    def ask(rank: int) -> None:
        found[rank] = each_has_its_own(store, rank, len(gpus), gpus[rank])

    threads = [Thread(target=ask, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(len(gpus)), own)


def check_staged(group: Group) -> None:
    """Every way of the network, from the device and back."""
    with FakeStreams() as streams:
        group.device, group.streams, group.staged = DEVICE_NAME, streams, True
        numbers = torch.arange(4.0, device=DEVICE_NAME) + group.rank
        total = group.all_reduce(numbers, tag="sums")
        whole = Exchange(group, numbers, [2, 2], [2, 2], tag="rows", ring=False).wait()
        ring = Exchange(group, numbers, [2, 2], [2, 2], tag="rows")
        parts = [ring.wait(rank) for rank in range(2)]
        values = numbers.clone()
        group.broadcast(values, tag="values")
        assert all(streams.holds(one) for one in (total, whole, *parts, ring.wait(), values))
        assert total.tolist() == [1, 3, 5, 7]
        expected = [2 * group.rank, 2 * group.rank + 1, 2 * group.rank + 1, 2 * group.rank + 2]
        assert whole.tolist() == torch.cat(parts).tolist() == expected
        assert values.tolist() == [0, 1, 2, 3]
        host = torch.ones(2)
        assert not streams.holds(group.all_reduce(host, tag="sums")), "what is on the host stays there"
        assert group.all_gather_object({"rank": group.rank}) == [{"rank": 0}, {"rank": 1}]


def test_what_is_staged_comes_back_to_the_device() -> None:
    on_ranks(2, check_staged)


def check_not_staged(group: Group) -> None:
    group.streams = streams = FakeStreams()
    with pytest.raises(RaceError, match=r"gloo's allreduce_ is given memory of the device"), streams:
        group.all_reduce(torch.arange(4.0, device=DEVICE_NAME), tag="sums")


def test_memory_of_the_device_is_not_for_gloo() -> None:
    on_ranks(2, check_not_staged)
