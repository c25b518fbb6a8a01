"""Ranks that torchrun restarts after one was lost connect again and resume from the newest checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.running import children, losses, train
from weft.utils.files import jsonl

RUN = ("train", "digits", "--hidden", "16", "--dtype", "float64", "--strategy", "communicated")
EPOCHS = 150
SECONDS = 130
"""Timeout of each part of the run, on a busy machine."""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_restarted(tmp_path: Path, lost: int) -> None:
    """The first restart succeeds, although torchrun's store still has the addresses of the lost ranks."""
    out, errors = tmp_path / "run", tmp_path / "errors"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--master-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "weft"]
    command += [*RUN, "--epochs", str(EPOCHS), "--checkpoint-every", "5", "--timeout", "30", "--out", str(out)]
    with errors.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + SECONDS
        while not any(out.glob("checkpoints/epoch-*")):
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.01)
        os.kill(rank_pid(process.pid, lost), signal.SIGKILL)
        code = process.wait(SECONDS)
    finally:
        process.terminate()
        process.wait()
    assert code == 0, errors.read_text()
    assert "could not connect" not in errors.read_text()
    first_epochs = [line["epoch"] for line in jsonl.read(out / "metrics.jsonl") if line["kind"] == "config"]
    assert len(first_epochs) == 2
    assert 0 == first_epochs[0] < first_epochs[1] < EPOCHS
    whole = train(
        "digits", out=tmp_path / "whole", workers=2, epochs=EPOCHS, strategy="communicated", hidden=16, dtype="float64"
    )
    assert losses(out) == losses(whole.folder)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_of_two_hosts_meet_again(tmp_path: Path, lost: int) -> None:
    """Each agent of torchrun counts its own restarts, so only the ranks can agree on where they meet."""
    out, errors = tmp_path / "run", tmp_path / "errors"
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--max-restarts", "3", "--local-addr"]
    command += ["127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "weft", "-m", "weft"]
    command += [*RUN, "--epochs", str(EPOCHS), "--checkpoint-every", "5", "--timeout", "600", "--out", str(out)]
    with errors.open("wb") as file:
        agents = [subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2)]
    try:
        deadline = time.monotonic() + SECONDS
        while not any(out.glob("checkpoints/epoch-*")):
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.01)
        os.kill(children(agents[lost].pid)[0], signal.SIGKILL)
        codes = [agent.wait(SECONDS) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()
    assert codes == [0, 0], errors.read_text()
    first_epochs = [line["epoch"] for line in jsonl.read(out / "metrics.jsonl") if line["kind"] == "config"]
    assert first_epochs[0] == 0
    assert len(first_epochs) > 1
    assert first_epochs[-1] < EPOCHS


def rank_pid(torchrun: int, rank: int) -> int:
    """Return the process id of a rank by the environment variables that torchrun set."""
    (rank_process,) = (
        pid for pid in children(torchrun) if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    )
    return rank_process
