"""Choice of a rank's GPU and of its backend; staged exchanges return their results to the device."""

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


@pytest.mark.parametrize(("local", "count", "taken"), [("0", 4, 0), ("3", 4, 3), ("3", 1, 0), ("5", 4, 1)])
def test_ranks_beyond_the_gpus_share(local: str, count: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert local_gpu() == torch.device("cuda", taken)


@pytest.mark.parametrize(("gpus", "distinct"), [(["a", "b", "c"], True), (["a", "b", "a"], False)])
def test_all_ranks_learn_whether_two_share_a_gpu(gpus: list[str], distinct: bool, tmp_path: Path) -> None:
    store, answers = dist.FileStore(str(tmp_path / "store"), len(gpus)), dict[int, bool]()

    def ask(rank: int) -> None:
        answers[rank] = gpus_are_distinct(store, rank, len(gpus), gpus[rank])

    threads = [Thread(target=ask, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == dict.fromkeys(range(len(gpus)), distinct)


def check_staged(group: Group) -> None:
    """Check that every kind of exchange takes tensors from the device and returns results to it."""
    with FakeStreams() as streams:
        group.device, group.streams, group.staged = DEVICE_NAME, streams, True
        numbers = torch.arange(4.0, device=DEVICE_NAME) + group.rank
        total = group.all_reduce(numbers, tag="sums")
        whole = PendingExchange(group, numbers, [2, 2], [2, 2], tag="rows", ring=False).wait()
        ring = PendingExchange(group, numbers, [2, 2], [2, 2], tag="rows")
        parts = [ring.wait(rank) for rank in range(2)]
        values = numbers.clone()
        group.broadcast(values, tag="values")
        assert all(streams.holds(tensor) for tensor in (total, whole, *parts, ring.wait(), values))
        assert total.tolist() == [1, 3, 5, 7]
        expected = [2 * group.rank, 2 * group.rank + 1, 2 * group.rank + 1, 2 * group.rank + 2]
        assert whole.tolist() == torch.cat(parts).tolist() == expected
        assert values.tolist() == [0, 1, 2, 3]
        host = torch.ones(2)
        assert not streams.holds(group.all_reduce(host, tag="sums")), "what is on the host stays there"
        assert group.all_gather_object({"rank": group.rank}) == [{"rank": 0}, {"rank": 1}]


def test_staged_results_return_to_the_device() -> None:
    on_ranks(2, check_staged)


def check_not_staged(group: Group) -> None:
    group.streams = streams = FakeStreams()
    with pytest.raises(RaceError, match=r"gloo's allreduce_ is given memory of the device"), streams:
        group.all_reduce(torch.arange(4.0, device=DEVICE_NAME), tag="sums")


def test_memory_of_the_device_is_not_for_gloo() -> None:
    on_ranks(2, check_not_staged)


@contextmanager
def faked_gpus(names: list[str]) -> Iterator[list[str]]:
    """Fake GPUs with these names, one per rank, on which gloo replaces NCCL; yield the list of requested backends."""
    backends, init = list[str](), dist.init_process_group
    patches = [
        (joining, "local_gpu", lambda: torch.device("cuda", 0)),
        (joining, "gpu_uuid", lambda _: names[int(os.environ["RANK"])]),
        (joining, "Group", lambda *_, **named: SimpleNamespace(**named)),
        (torch.cuda, "set_device", lambda _: None),
        (dist, "init_process_group", lambda backend, **named: (backends.append(backend), init("gloo", **named))),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(replaced(*patch))
        yield backends


def joined_by(folder: Path, device: str) -> Any:
    return joining.join(timeout_seconds=30, meter=Meter(), device=device, init_method=f"file://{folder / 'meeting'}")


def check_connects_again(group: Group, folder: Path) -> None:
    for_cpu = group.process_group
    with faked_gpus(["a", "a"]) as backends:
        shared = joined_by(folder, "cuda")
        assert (backends, shared.staged, shared.shares_gpu) == (["gloo"], True, True)
        assert shared.process_group is not for_cpu
        again = joined_by(folder, "cuda")
        assert (again.process_group is shared.process_group, again.shares_gpu) == (True, True)
        assert joined_by(folder, "cpu").process_group is shared.process_group, "it also serves the host"
    dist.destroy_process_group()
    joined_by(folder, "cpu")
    with faked_gpus(["a", "b"]) as backends:
        assert not joined_by(folder, "cuda").shares_gpu
        assert backends == [GPU_BACKENDS]


def test_ranks_connected_for_the_cpu_connect_again_for_gpus(tmp_path: Path) -> None:
    """Ranks connected for the CPU connect again for GPUs, for example if the file of a plan sets the device."""
    spawn(2, check_connects_again, tmp_path)


def check_user_process_group(group: Group, folder: Path) -> None:
    group.close()
    store = dist.FileStore(str(folder / "own"), 2)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=2)
    user_group = dist.group.WORLD
    with faked_gpus(["a", "b"]) as backends:
        joined = joined_by(folder, "cuda")
        assert (joined.process_group is user_group, joined.staged, joined.shares_gpu, backends) == (
            True,
            True,
            False,
            [],
        )
        with replaced(dist, "get_backend_config", lambda: GPU_BACKENDS):
            assert not joined_by(folder, "cuda").staged
        with replaced(dist, "get_backend_config", lambda: "cuda:nccl"), pytest.raises(InputError, match=GPU_BACKENDS):
            joined_by(folder, "cuda")
    assert dist.group.WORLD is user_group


def test_a_user_process_group_is_used_unchanged(tmp_path: Path) -> None:
    spawn(2, check_user_process_group, tmp_path)
