"""Start of gloo: its threads have batch scheduling, and its messages are hidden, while Python's are shown."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.lib.ranks import spawn
from weft.comm import Group
from weft.comm.gloo import batch_scheduling, without_native_stderr
from weft.comm.join import _store


def test_lines_of_libraries_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with without_native_stderr():
        os.write(2, b"of a library\n")
        print("of ours", file=sys.stderr)
    os.write(2, b"afterwards\n")
    print("and of ours", file=sys.stderr)
    assert capfd.readouterr().err == "of ours\nafterwards\nand of ours\n"


@pytest.mark.parametrize("name", ["a#b", "a?b=1", "a\nb", "a%41 \xe9"])
def test_ranks_meet_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    """PyTorch would take the file of another folder, or none, for characters that have a meaning in an address."""
    path = tmp_path / name / "store"
    path.parent.mkdir()
    _store(f"file://{path}", 0, 2, timedelta(seconds=1)).set("key", "value")
    assert path.exists()
    assert list(tmp_path.iterdir()) == [path.parent]


def test_new_threads_have_batch_scheduling() -> None:
    seen = list[int]()
    with batch_scheduling():
        thread = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
    assert seen == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_scheduling_class_set_before_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with batch_scheduling():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_a_system_without_permission_keeps_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with batch_scheduling():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def check_classes(group: Group) -> None:
    group.host_group.all_reduce(torch.zeros(1), tag="check")
    folders = [Path("/proc/self/task", thread) for thread in os.listdir("/proc/self/task")]
    names = {int(folder.name): (folder / "comm").read_text().strip() for folder in folders}
    gloo = {thread for thread, name in names.items() if "gloo" in name}
    assert sum(names[thread] == "gloo_tcp_loop" for thread in gloo) >= 2, "threads of the first and of a second group"
    assert {os.sched_getscheduler(thread) for thread in gloo} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_all_threads_of_gloo_have_batch_scheduling() -> None:
    spawn(2, check_classes)
