"""The watchdog reports a rank whose operation takes too long."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.lib.running import finish, ranks, start, wait_for_epoch
from weft.runtime.meter import Meter
from weft.training.launch.watchdog import Watchdog


def test_a_slow_operation_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    meter = Meter()
    with Watchdog(meter, 3, 0.2):
        for _ in range(8):  # each takes less than the timeout
            meter.set_status("epoch 0, training")
            time.sleep(0.05)
        meter.set_status("epoch 1, training, all_reduce 'gradients'")
        time.sleep(0.8)
        meter.set_status("epoch 2, training")
    errors = capsys.readouterr().err
    assert errors == (
        f"weft: rank 3 has been in epoch 1, training, all_reduce 'gradients' for 0 s; kill -USR1 {os.getpid()} prints "
        "its stack trace\n"
    )


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_and_stacks_are_printed(tmp_path: Path) -> None:
    options = "train digits --strategy tensor --workers 2 --epochs 1000000 --timeout 3 --out"
    run = start(*options.split(), tmp_path / "run")
    wait_for_epoch(run, tmp_path / "run", 2)
    first, second = ranks(run)
    os.kill(first, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(second, signal.SIGSTOP)
    stopped = time.monotonic()
    code, errors = finish(run)
    assert code == 1
    assert time.monotonic() - stopped < 3 + 20
    assert "(most recent call first)" in errors
    assert "loop.py" in errors
    assert errors.splitlines()[-1].startswith("weft: error: rank ")
    assert " lost rank " in errors.splitlines()[-1]
