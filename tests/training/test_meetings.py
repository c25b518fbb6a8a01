"""Ranks of torchrun connect again for every weft call of a script, also after a call that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.lib.ranks import spawn
from tests.lib.running import losses, say

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


def by_torchrun(script: Path, out: Path) -> list[list[str]]:
    """Run the script by torchrun on two ranks; return the lines that each rank prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return [[line[8:] for line in done.stdout.splitlines() if line.startswith(f"rank {n}: ")] for n in (0, 1)]


def by_forked_ranks(script: Path, out: Path) -> list[list[str]]:
    """Run the script on two forked ranks with a store like torchrun's, which is quicker; return their lines."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = spawn(2, say, run_script, (script, out, store.port), {})
    return [[line[8:] for line in result.out.splitlines()] for result in results]


def run_script(script: Path, out: Path, port: int) -> None:
    """Run the script with the environment variables that torchrun sets."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.argv = [str(script), str(out)]
    exec(script.read_text(), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [by_forked_ranks, by_torchrun])
def test_ranks_meet_again(ranks: Callable[[Path, Path], list[list[str]]], tmp_path: Path) -> None:
    """A rank whose callback fails disconnects at once, so that the other fails too; both connect for the next call.

    Ranks that make different calls fail with an error that names both, and connect again too.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    first, second = ranks(script, tmp_path)
    assert first[0] == second[0] == "done"
    assert first[1].startswith("RunError callback fail raised an exception")
    assert second[1].startswith("RunError rank 1 lost rank 0 in")
    assert first[2] == second[2] == "done"
    assert first[3] == second[3]
    assert "rank 1 has the call weft.train, but rank 0 has weft.predict, logits: use the same calls" in second[3]
    assert first[4] == second[4] == "done"
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    assert (tmp_path / "rows.npy").exists()
