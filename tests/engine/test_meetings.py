"""Ranks of torchrun that meet more than once in a script: after a call that ended, and after one that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engine.running import losses

SCRIPT = """
import os, sys, weft
out, rank = sys.argv[1], int(os.environ["RANK"])
options = {"strategy": "tensor", "epochs": 2, "hidden": 8, "dtype": "float64", "quiet": True, "timeout": 10}

def fail(record):
    raise ValueError("of a callback")

def attempt(function, *arguments, **given):
    try:
        function(*arguments, **given)
        said = "done"
    except (weft.InputError, weft.RunError) as error:
        said = f"{type(error).__name__} {error}"
    sys.stdout.write(f"rank {rank}: {said}\\n")
    sys.stdout.flush()

attempt(weft.train, "digits", out=f"{out}/first", **options)
attempt(weft.train, "digits", out=f"{out}/failed", callbacks=[fail], **options)
attempt(weft.train, "digits", out=f"{out}/second", **options)
if rank == 0:
    attempt(weft.predict, f"{out}/second")
else:
    attempt(weft.train, "digits", out=f"{out}/unlike", **options)
attempt(weft.predict, f"{out}/second", out=f"{out}/rows.npy")
"""


def test_ranks_meet_again(tmp_path: Path) -> None:
    """One whose callback fails parts at once, so the other hears of it and both meet anew; so do unlike calls."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    zero, one = ([line[8:] for line in done.stdout.splitlines() if line.startswith(f"rank {n}: ")] for n in (0, 1))
    assert zero[0] == one[0] == "done"
    assert zero[1].startswith("RunError callback fail raised an error")
    assert one[1].startswith("RunError rank 1 lost rank 0 in")
    assert zero[2] == one[2] == "done"
    assert zero[3] == one[3]
    assert "rank 1 has the call weft.train, and rank 0 weft.predict, logits: let all ranks make the same" in one[3]
    assert zero[4] == one[4] == "done"
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    assert (tmp_path / "rows.npy").exists()
