"""Ranks that torchrun starts again after one was lost: they meet anew, and go on from the newest checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.running import children, losses, train
from weft.utils import jsonl

RUN = ("train", "digits", "--hidden", "16", "--dtype", "float64", "--strategy", "communicated")
EPOCHS = 150
SECONDS = 130
"""What a part of the run may take, beside other work."""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_started_again(tmp_path: Path, lost: int) -> None:
    """At the first try: torchrun's store has the addresses of before still, where nobody listens any more."""
    out, said = tmp_path / "run", tmp_path / "said"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--master-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "weft"]
    command += [*RUN, "--epochs", str(EPOCHS), "--checkpoint-every", "5", "--timeout", "30", "--out", str(out)]
    with said.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + SECONDS
        while not any(out.glob("checkpoints/epoch-*")):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.01)
        os.kill(rank_pid(process.pid, lost), signal.SIGKILL)
        code = process.wait(SECONDS)
    finally:
        process.terminate()
        process.wait()
    assert code == 0, said.read_text()
    assert "could not connect" not in said.read_text()
    begun = [line["epoch"] for line in jsonl.read(out / "metrics.jsonl") if line["kind"] == "config"]
    assert len(begun) == 2
    assert 0 == begun[0] < begun[1] < EPOCHS
    whole = train(
        "digits", out=tmp_path / "whole", workers=2, epochs=EPOCHS, strategy="communicated", hidden=16, dtype="float64"
    )
    assert losses(out) == losses(whole.folder)


def rank_pid(torchrun: int, rank: int) -> int:
    """The process of a rank, by what torchrun told it."""
    (found,) = (
        pid for pid in children(torchrun) if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    )
    return found
