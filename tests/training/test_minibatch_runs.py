"""Runs on mini-batches from the command line: killed during an epoch, resumed, and refused."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.lib.running import command, complaints, finish, losses, ranks, start, train, wait_for_epoch
from weft.cli.main import main

OPTIONS = {"model": "sage", "fanout": "4,3", "hidden": 16, "dtype": "float64"}
BATCHES = {"node": {"batch_size": "64"}, "link": {"task": "link", "batch_size": "2048"}}


def words(options: dict[str, Any]) -> list[str]:
    """Return the arguments of a command that trains with some options."""
    flags = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    return ["train", "digits", *(word for pair in flags for word in pair)]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["node", "link"])
def test_killed_in_an_epoch_and_resumed(task: str, tmp_path: Path) -> None:
    """A rank killed while a thread samples batches ends the run with a one-line error and leaves no process.

    Resumed on as many ranks the run is the same bits, and on one rank equal to 1e-9.
    """
    out, options = tmp_path / "killed", OPTIONS | BATCHES[task]
    run = [*words(options), "--strategy", "split", "--workers", "2", "--checkpoint-every", "2", "--out", out]
    process = start(*run, "--epochs", "100000")
    wait_for_epoch(process, out, 4)
    time.sleep(0.02)
    os.kill(ranks(process)[1], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 1
    (line,) = complaints(errors)
    assert "was killed by SIGKILL" in line
    assert "in epoch" in line
    assert line.endswith(f"continue with --resume --out {out}")

    newest = max(int(path.name.removeprefix("epoch-")) for path in (out / "checkpoints").iterdir())
    epochs = newest + 2
    assert command(*run, "--resume", "--epochs", str(epochs), workers=2).result == 0
    settings = options | {"strategy": "split", "workers": 2, "cache_memory": "200kB"}
    unbroken = train("digits", out=tmp_path / "unbroken", epochs=epochs, **settings)
    assert losses(out) == losses(unbroken.folder)
    check_records(unbroken)
    alone = weft.train("digits", out=tmp_path / "alone", epochs=epochs, strategy="sampled", quiet=True, **options)
    assert losses(out) == pytest.approx(losses(alone.folder), rel=1e-9)
    samples = [line["sampled"] for line in alone.records if line.get("phase") == "train"]
    assert all(sampled["edges"] > sampled["vertices"] > sampled["rows_loaded"] > 0 for sampled in samples)


def check_records(run: weft.Run) -> None:
    """Check the record's numbers of cached, hit and loaded rows."""
    placement = run.records[0]["placement"]
    assert [rank_placement["feature_cache_rows"] for rank_placement in placement] == [200_000 // (64 * 8)] * 2
    assert all(rank_placement["presampled_edges"] > 0 for rank_placement in placement)
    last = {line["rank"]: line["sampled"] for line in run.records if line.get("phase") == "train"}
    for rank, sampled in last.items():
        assert sampled["rows_loaded"] == sampled["cache_hits"] + sampled["cache_misses"]
        assert min(sampled["cache_hits"], sampled["cache_misses"]) > 0
        assert run.summary["ranks"][rank]["sampled"] == sampled


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--fanout 5,5,5", "fanout has 3 numbers for a model of 2 hops: give one for each, or one for all"),
        ("--fanout 5,x", "'x' is neither a number from 1"),
        ("--fanout 5:5", "is for 2 relations and the graph has none"),
        ("--batch-size 100000", "--batch-size 100000: digits has 200 training vertices: give all"),
        ("--batch-size 0", "--batch-size 0: give a number from 1, or all"),
        ("--sampling weighted", "--sampling weighted: digits has no edge weights: give uniform or labor"),
        ("--task link --batch-size 100000", "--batch-size 100000: digits has 8440 training links: give all"),
        ("--cache-memory 100", "--cache-memory 100: the features of a vertex take 256 bytes: give as many"),
        ("--cache-memory 900TB", "--cache-memory 900000.00 GB on 1 rank would need 900000.00 GB of memory"),
        ("--workers 2 --strategy sampled --norm batch", "means over vertices, as in batch norm and HANConv"),
        ("--workers 2 --decoupled --model gat", "--strategy split supports no --decoupled model with attention"),
    ],
)
def test_refused_in_one_line(flags: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "digits", "--strategy", "split", "--epochs", "1", "--out", str(out), *flags.split()]) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert error in line
    assert not out.exists()
