"""Which GPU a rank takes, and by what ranks talk; what is on a device that is staged comes back there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lib.planted import replaced
from tests.lib.ranks import on_ranks, spawn
from tests.lib.streams import DEVICE_NAME, FakeStreams, RaceError
from weft.comm import Group, local_gpu
from weft.comm.backends import GPU_BACKENDS, gpus_are_distinct
from weft.comm.group import PendingExchange
from weft.runtime.meter import Meter
from weft.utils.errors import InputError

joining: Any = import_module("weft.comm.join")


@pytest.mark.parametrize(("local", "there", "taken"), [("0", 4, 0), ("3", 4, 3), ("3", 1, 0), ("5", 4, 1)])
def test_ranks_beyond_the_gpus_share(local: str, there: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    assert local_gpu() == torch.device("cuda", taken)


@pytest.mark.parametrize(("gpus", "own"), [(["a", "b", "c"], True), (["a", "b", "a"], False)])
def test_all_ranks_know_whether_two_share_a_gpu(gpus: list[str], own: bool, tmp_path: Path) -> None:
    store, found = dist.FileStore(str(tmp_path / "store"), len(gpus)), dict[int, bool]()

    def ask(rank: int) -> None:
        found[rank] = gpus_are_distinct(store, rank, len(gpus), gpus[rank])

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
        whole = PendingExchange(group, numbers, [2, 2], [2, 2], tag="rows", ring=False).wait()
        ring = PendingExchange(group, numbers, [2, 2], [2, 2], tag="rows")
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


@contextmanager
def faked_gpus(names: list[str]) -> Iterator[list[str]]:
    """Ranks on GPUs of these names, by which they would talk by NCCL and do by gloo; the backends that they ask for."""
    asked, begin = list[str](), dist.init_process_group
    patches = [
        (joining, "local_gpu", lambda: torch.device("cuda", 0)),
        (joining, "gpu_uuid", lambda _: names[int(os.environ["RANK"])]),
        (joining, "Group", lambda *_, **named: SimpleNamespace(**named)),
        (torch.cuda, "set_device", lambda _: None),
        (dist, "init_process_group", lambda backend, **named: (asked.append(backend), begin("gloo", **named))),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(replaced(*patch))
        yield asked


def joined_by(folder: Path, device: str) -> Any:
    return joining.join(timeout_seconds=30, meter=Meter(), device=device, init_method=f"file://{folder / 'meeting'}")


def check_meets_anew(group: Group, folder: Path) -> None:
    for_cpu = group.process_group
    with faked_gpus(["a", "a"]) as asked:
        shared = joined_by(folder, "cuda")
        assert (asked, shared.staged, shared.shares_gpu) == (["gloo"], True, True)
        assert shared.process_group is not for_cpu
        again = joined_by(folder, "cuda")
        assert (again.process_group is shared.process_group, again.shares_gpu) == (True, True)
        assert joined_by(folder, "cpu").process_group is shared.process_group, "it serves the host, too"
    dist.destroy_process_group()
    joined_by(folder, "cpu")
    with faked_gpus(["a", "b"]) as asked:
        assert not joined_by(folder, "cuda").shares_gpu
        assert asked == [GPU_BACKENDS]


def test_ranks_that_met_for_the_cpu_meet_anew_for_gpus(tmp_path: Path) -> None:
    """As where a plan's file says that the device is one."""
    spawn(2, check_meets_anew, tmp_path)


def check_process_group_of_ones_own(group: Group, folder: Path) -> None:
    group.close()
    store = dist.FileStore(str(folder / "own"), 2)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=2)
    own = dist.group.WORLD
    with faked_gpus(["a", "b"]) as asked:
        found = joined_by(folder, "cuda")
        assert (found.process_group is own, found.staged, found.shares_gpu, asked) == (True, True, False, [])
        with replaced(dist, "get_backend_config", lambda: GPU_BACKENDS):
            assert not joined_by(folder, "cuda").staged
        with replaced(dist, "get_backend_config", lambda: "cuda:nccl"), pytest.raises(InputError, match=GPU_BACKENDS):
            joined_by(folder, "cuda")
    assert dist.group.WORLD is own


def test_a_process_group_of_ones_own_is_used_as_it_is(tmp_path: Path) -> None:
    spawn(2, check_process_group_of_ones_own, tmp_path)
