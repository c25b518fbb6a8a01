"""Runs under offload as users start them: resumed from other strategies, killed, short of memory and disk space."""

from __future__ import annotations

import errno
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.lib.ranks import spawn
from tests.lib.running import (
    command,
    complaints,
    finish,
    losses,
    ranks,
    say,
    start,
    summary,
    train,
    wait_for_epoch,
)
from weft.cli.main import main
from weft.runtime import native
from weft.utils.errors import InputError, RunError

RUN = ["train", "digits", "--hidden", "16", "--dtype", "float64", "--norm", "batch"]
OFFLOAD = ["--strategy", "offload", "--chunks", "3"]
EPOCHS = 12
OPTIONS: dict[str, Any] = {"quiet": True, "hidden": 16, "dtype": "float64", "norm": "batch"}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run under the strategy single."""
    folder = tmp_path_factory.mktemp("runs") / "single"
    return weft.train("digits", out=folder, epochs=EPOCHS, **OPTIONS).folder


def test_a_finished_run(whole: Path, tmp_path: Path) -> None:
    """Two ranks have the losses, scores and weights of one, and leave no file in the scratch folder."""
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    finished = command(*RUN, *OFFLOAD, "--epochs", str(EPOCHS), "--scratch", scratch, "--out", out, workers=2)
    assert finished.result == 0
    assert "3 chunks; device " in finished.err
    torch.testing.assert_close(losses(out), losses(whole), rtol=1e-9, atol=1e-9)
    assert summary(out)["test_accuracy"] == summary(whole)["test_accuracy"]
    for name, value in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(value, load_file(whole / "model.safetensors")[name], rtol=1e-9, atol=1e-9)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(("strategy", "workers"), [pytest.param("single", 1, marks=SLOW), ("tensor", 2)])
def test_resumed_under_offload_and_back(whole: Path, tmp_path: Path, strategy: str, workers: int) -> None:
    """4 epochs under another strategy, 4 under offload and 4 under the other one have an uninterrupted run's losses."""
    out = tmp_path / "run"
    for turn, name in enumerate((strategy, "offload", strategy)):
        chunks = 5 if name == "offload" else 0
        epochs, count = EPOCHS * (turn + 1) // 3, 1 if name == "offload" else workers
        train(
            "digits",
            out=out,
            resume=turn > 0,
            epochs=epochs,
            strategy=name,
            workers=count,
            chunks=chunks,
            checkpoint_every=0,
            **OPTIONS,
        )
    torch.testing.assert_close(losses(out), losses(whole), rtol=1e-9, atol=1e-9)


def test_k_and_k_epochs_are_2k(tmp_path: Path) -> None:
    """A run of 8 epochs and one of 4, resumed for 4 more, are the same bits."""
    options = {**OPTIONS, "strategy": "offload", "chunks": 3, "checkpoint_every": 0}
    weft.train("digits", out=tmp_path / "whole", epochs=8, **options)
    weft.train("digits", out=tmp_path / "halves", epochs=4, **options)
    weft.train("digits", out=tmp_path / "halves", epochs=8, resume=True, **options)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


@SLOW
def test_kill_and_resume(tmp_path: Path) -> None:
    """A killed rank ends the run with a one-line error and leaves no process and no scratch file.

    Resumed, the run has the losses of an uninterrupted one.
    """
    out, scratch = tmp_path / "killed", tmp_path / "scratch"
    scratch.mkdir()
    run = [*RUN, *OFFLOAD, "--workers", "2", "--checkpoint-every", "2", "--scratch", scratch, "--out", out]
    process = start(*run, "--epochs", "100000")
    wait_for_epoch(process, out, 4)
    os.kill(ranks(process)[1], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 1
    assert "Traceback" not in errors
    (line,) = (line for line in errors.splitlines() if "killed" in line)
    assert "was killed by SIGKILL" in line
    assert line.endswith(f"continue with --resume --out {out}")
    assert not list(scratch.iterdir())

    newest = max(int(path.name.removeprefix("epoch-")) for path in (out / "checkpoints").iterdir())
    epochs = newest + 2
    resumed = command(*run, "--resume", "--epochs", str(epochs), workers=2)
    assert resumed.result == 0
    assert not list(scratch.iterdir())
    unbroken = weft.train("digits", out=tmp_path / "unbroken", epochs=epochs, **OPTIONS)
    torch.testing.assert_close(losses(out), losses(unbroken.folder), rtol=1e-9, atol=1e-9)


SMALL = "sbm:vertices=60,degree=4,classes=3,features=5"


def refusal(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str | Path) -> tuple[int, str]:
    """Return exit code and error of a command that is refused before it has written anything."""
    words = ["train", SMALL, "--strategy", "offload", "--epochs", "2", "--out", out, *arguments]
    code = main([str(word) for word in words])
    (line,) = complaints(capsys.readouterr().err)
    assert not out.exists()
    return code, line.removeprefix("weft: error: ")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=SLOW), 2])
def test_too_little_device_memory_is_refused_with_what_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, workers: int
) -> None:
    code, error = refusal(capsys, tmp_path / "out", "--device-memory", "1kB", "--workers", str(workers))
    assert code == 2
    assert error.startswith("--device-memory 1.0 kB: one vertex with its ")
    least = error.partition("give --device-memory ")[2].partition(",")[0]
    works = ["train", SMALL, "--strategy", "offload", "--epochs", "1", "--device-memory", least]
    assert command(*works, "--out", tmp_path / "works", workers=workers).result == 0


@pytest.mark.parametrize("strategy", ["offload", "pipeline"])
def test_disabled_prefetch_has_no_effect_without_a_scratch_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str
) -> None:
    arguments = ("--disable", "prefetch", "--strategy", strategy)
    code, error = refusal(capsys, tmp_path / "out", *arguments)
    assert code == 2
    assert error.startswith("--disable prefetch has no effect if rows are in memory")
    assert refusal(capsys, tmp_path / "out", *arguments, "--scratch", "/nowhere")[1] != error


def test_a_missing_scratch_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, error = refusal(capsys, tmp_path / "out", "--scratch", tmp_path / "nowhere")
    assert code == 2
    assert error == f"{tmp_path}/nowhere: No such file or directory: give --scratch another folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_scratch_folder_without_write_permission(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scratch = tmp_path / "locked"
    scratch.mkdir(mode=0o500)
    code, error = refusal(capsys, tmp_path / "out", "--scratch", scratch)
    assert code in {1, 2}
    assert error.startswith(f"{scratch}: ")
    assert "--scratch another folder" in error


def test_too_little_disk_space_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("weft.strategies.offload.chunked_plan.free_bytes", lambda _: 1000)
    code, error = refusal(capsys, tmp_path / "out", "--scratch", tmp_path)
    assert code == 2
    assert error.startswith(f"{tmp_path}: vertex data takes ")
    assert "give another folder with --scratch" in error


def limit_files() -> None:
    """Limit the size of files, so that writes fail as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))


def limited_main(arguments: list[str]) -> int:
    limit_files()
    return main(arguments)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=SLOW), 2])
def test_a_disk_that_gets_full_is_one_line(tmp_path: Path, workers: int) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    graph = "sbm:vertices=4000,degree=4,classes=3,features=7"
    arguments = ["train", graph, *OFFLOAD, "--epochs", "2", "--disable", "pages", "--scratch", str(scratch)]
    arguments += ["--out", str(out)]
    if workers == 1:
        (finished,) = spawn(1, say, limited_main, (arguments,), {})
        code, errors = finished.result, finished.err
    else:
        code, errors = finish(start(*arguments, "--workers", str(workers), prepare=limit_files))
    assert code == 1, errors
    assert "Traceback" not in errors
    (line,) = (line for line in complaints(errors) if line.startswith("weft: "))
    assert f"{scratch}: no space for " in line
    assert "--scratch another folder" in line
    assert not list(scratch.iterdir())


def test_a_model_that_runs_as_a_whole_is_refused(tmp_path: Path) -> None:
    class Whole(torch.nn.Linear):
        num_stages = 1

        def forward(self, views: list[weft.nn.View], x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return views[0].propagate(super().forward(x))

    with pytest.raises(InputError, match=r"make it a weft\.nn\.Stack") as caught:
        weft.train("digits", Whole(64, 10), out=tmp_path / "out", quiet=True, strategy="offload")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def failing(call: Callable[..., Any], after: int, number: int) -> Callable[..., Any]:
    """Return a call that fails with an error number after `after` successful calls."""
    times = iter(range(after))

    def refused(*arguments: Any) -> Any:
        if next(times, None) is None:
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return refused


@pytest.mark.parametrize("after", [0, pytest.param(3, marks=SLOW), 20])
def test_a_disk_that_gets_full_during_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int) -> None:
    """Missing disk space that the check before the run does not detect is a one-line error."""
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, after, errno.ENOSPC))
    with pytest.raises(RunError, match=r"no space for .*No space left on device.*: give --scratch another") as caught:
        weft.train("digits", out=tmp_path / "out", strategy="offload", epochs=2, scratch=str(tmp_path), **OPTIONS)
    assert "\n" not in str(caught.value)


# The loader calls both functions, and the worker calls the second one too.
@pytest.mark.parametrize("call", ["gather_file_rows", "read_bytes"])
def test_a_disk_that_fails_under_the_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str) -> None:
    monkeypatch.setattr(native, call, failing(getattr(native, call), 30, errno.EIO))
    options = {"chunks": 3, "scratch": str(tmp_path)}
    with pytest.raises(RunError, match=r"cannot store .*Input/output error.*: give --scratch another") as caught:
        weft.train("digits", out=tmp_path / "out", strategy="offload", **options, epochs=9, **OPTIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_refused_limit_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A limit below the size of a chunk, and a missing scratch folder, leave no temporary files.

    Only the plan computes the size of a chunk.
    """
    left = tmp_path / "temporary"
    left.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(left))
    for workers in ("1", "2"):
        code, error = refusal(capsys, tmp_path / "out", "--device-memory", "4500", "--workers", workers)
        assert code == 2
        assert "--device-memory 4.5 kB: a chunk takes at least " in error
    code, error = refusal(capsys, tmp_path / "out", "--device-memory", "1MB", "--scratch", tmp_path / "nowhere")
    assert code == 2
    assert error == f"{tmp_path}/nowhere: No such file or directory: give --scratch another folder"
    # PyTorch creates the folder torchinductor with the first optimizer.
    assert {path.name.partition("_")[0] for path in left.iterdir()} <= {"torchinductor"}
