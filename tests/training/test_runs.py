"""Runs as users start them: on several ranks, stopped, killed and resumed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.lib.profiles import profile
from tests.lib.ranks import spawn
from tests.lib.running import (
    complaints,
    finish,
    losses,
    ranks,
    run_on_ranks,
    say,
    start,
    summary,
    train,
    wait_for_epoch,
)
from weft.comm import Group
from weft.partition import make_book
from weft.utils.errors import InputError
from weft.utils.files import jsonl

RUN = ["train", "digits", "--hidden", "16", "--dtype", "float64", "--norm", "batch"]
EPOCHS = 12
OPTIONS: dict[str, Any] = {"quiet": True, "hidden": 16, "dtype": "float64", "norm": "batch"}
"""Options of `RUN` for a call in Python."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run on 2 ranks."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    code, errors = finish(
        start(*RUN, "--strategy", "tensor", "--workers", "2", "--epochs", str(EPOCHS), "--out", folder)
    )
    assert code == 0, errors
    return folder


def test_a_finished_run(whole: Path) -> None:
    """The folder and the summary are complete, and losses, scores and weights equal those on one rank."""
    names = {path.name for path in whole.iterdir()}
    records = {"metrics.jsonl", "epochs.jsonl"}
    assert names == {"config.toml", "choices.json", *records, "checkpoints", "model.safetensors", "card.md"}
    last = summary(whole)
    assert last["test_accuracy"] > 0.5
    assert last["epochs"] == EPOCHS
    assert [rank["rank"] for rank in last["ranks"]] == [0, 1]
    for rank in last["ranks"]:
        assert rank["collectives"]["rows_to_cols"] + rank["collectives"]["cols_to_rows"] == 4
        assert rank["bytes_sent"] > 0
        assert rank["edges"] > 0
        assert rank["compute_seconds"] > 0

    single = train("digits", out=whole.parent / "single", epochs=EPOCHS, **OPTIONS)
    torch.testing.assert_close(losses(whole), losses(single.folder), rtol=1e-9, atol=1e-9)
    assert single.summary["test_accuracy"] == last["test_accuracy"]
    for name, value in load_file(whole / "model.safetensors").items():
        torch.testing.assert_close(value, load_file(single.folder / "model.safetensors")[name], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_real_graph_gives_the_same_scores(weft_data: Callable[[str], Path], tmp_path: Path) -> None:
    """Every score on Cora is equal if it is reordered, on 3 ranks, which divides neither rows nor columns evenly."""
    path = weft_data("cora")
    scores = []
    for strategy, workers, order in (("single", 1, "none"), ("tensor", 3, "bfs")):
        run = train(
            path,
            out=tmp_path / strategy,
            quiet=True,
            dtype="float64",
            epochs=15,
            strategy=strategy,
            workers=workers,
            order=order,
        )
        keys = ("train_accuracy", "val_accuracy", "test_accuracy")
        scores.append([[line[key] for key in keys] for line in run.records if line["kind"] == "epoch"])
    assert scores[0] == scores[1]


@pytest.mark.slow
def test_cached_pages_change_no_losses(tmp_path: Path) -> None:
    """Losses are the same bits without the memory settings that a run changes in its process."""
    for without in ("", "pages"):
        options = {"epochs": 5, "disable": without, "out": tmp_path / f"without-{without}", "quiet": True}
        spawn(1, say, weft.train, ("digits",), options)
    assert losses(tmp_path / "without-") == losses(tmp_path / "without-pages")


@pytest.mark.slow
def test_kill_and_resume(whole: Path, tmp_path: Path) -> None:
    """A killed rank ends the run with a one-line error and leaves no process.

    Resumed on 2 ranks the run is the same bits, and on 3 and on 1 equal to 1e-9.
    """
    folder = tmp_path / "killed"
    run = [
        *RUN,
        "--strategy",
        "tensor",
        "--workers",
        "2",
        "--checkpoint-every",
        "2",
        "--epochs",
        "100000",
        "--out",
        folder,
    ]
    process = start(*run)
    wait_for_epoch(process, folder, 6)
    os.kill(ranks(process)[1], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 1
    assert "Traceback" not in errors
    lines = complaints(errors)
    assert len(lines) == 1
    assert "was killed by SIGKILL" in lines[0]
    assert f"continue with --resume --out {folder}" in lines[0]

    saved = sorted((folder / "checkpoints").iterdir())
    wanted = losses(whole)
    newest = int(saved[-1].name.removeprefix("epoch-"))
    assert newest >= 6
    epochs = max(EPOCHS, newest + 3)
    if epochs > EPOCHS:
        longer = train("digits", out=tmp_path / "longer", epochs=epochs, strategy="tensor", workers=2, **OPTIONS)
        wanted = losses(longer.folder)

    for workers in (3, 1):
        copy = tmp_path / f"resumed-{workers}"
        subprocess.run(["cp", "-r", folder, copy], check=True)
        strategy = "single" if workers == 1 else "tensor"
        train(
            "digits",
            out=copy,
            resume=True,
            epochs=epochs,
            strategy=strategy,
            workers=workers,
            checkpoint_every=2,
            **OPTIONS,
        )
        torch.testing.assert_close(losses(copy), wanted, rtol=1e-9, atol=1e-9)
    code, errors = finish(start("train", "digits", "--resume", "--out", folder, "--epochs", str(epochs)))
    assert code == 0, errors
    assert losses(folder) == wanted


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopped_by_a_signal(tmp_path: Path, workers: int) -> None:
    """SIGTERM, or Ctrl-C in a terminal, stops every rank after a checkpoint."""
    number = signal.SIGTERM if workers == 2 else signal.SIGINT
    folder = tmp_path / "stopped"
    strategy = "single" if workers == 1 else "tensor"
    process = start(
        *RUN,
        "--strategy",
        strategy,
        "--workers",
        str(workers),
        "--checkpoint-every",
        "0",
        "--epochs",
        "100000",
        "--out",
        folder,
    )
    wait_for_epoch(process, folder, 3)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    code, errors = finish(process)
    assert code == 128 + number
    (line,) = complaints(errors)
    assert f"stopped by {number.name}; continue with --resume" in line
    last = jsonl.read(folder / "metrics.jsonl")[-1]
    assert (last["kind"], last["event"]) == ("event", "stopped")
    (saved,) = (folder / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("epoch-")) == last["epoch"] + 1


@pytest.mark.slow
def test_joins_the_ranks_of_torchrun(whole: Path, tmp_path: Path) -> None:
    """Several runs, one after another, join the ranks that torchrun started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "weft", "compare", *RUN[1:]]
    command += ["--strategies", "tensor,hybrid", "--epochs", str(EPOCHS), "--out", str(tmp_path / "joined")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "joined" / "tensor") == losses(whole)
    assert losses(tmp_path / "joined" / "hybrid") == pytest.approx(losses(whole), abs=1e-9)
    assert done.stdout.count("records in") == 1


def test_k_and_k_epochs_are_2k(tmp_path: Path) -> None:
    """A run of 8 epochs and one of 4, resumed for 4 more, are the same bits; the passed model gets the best weights."""
    graph = weft.load("digits")

    def train(name: str, epochs: int, *, resume: bool = False) -> tuple[Path, torch.nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = weft.nn.SAGE(graph.num_features, out_width=graph.num_classes, hidden=8)
        run = weft.train(
            graph, model, out=tmp_path / name, resume=resume, quiet=True, epochs=epochs, checkpoint_every=0
        )
        return run.folder, model

    at_once, model = train("at once", 8)
    train("in two", 4)
    in_two, again = train("in two", 8, resume=True)
    assert losses(in_two) == losses(at_once)
    saved = load_file(at_once / "model.safetensors")
    assert set(saved) == set(model.state_dict())
    for name, value in saved.items():
        assert torch.equal(value, load_file(in_two / "model.safetensors")[name])
        assert torch.equal(value, model.state_dict()[name])
        assert torch.equal(value, again.state_dict()[name])


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_share_a_gpu_print_a_warning(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.training.launch.launcher.Group", partial(Group, staged=True, shares_gpu=shared))
    weft.train("sbm:vertices=60,degree=4,features=4,classes=2", "gcn", out=tmp_path / "run", epochs=1, quiet=True)
    assert capfd.readouterr().err.count("weft: warning: ranks share a GPU") == shared


def test_patience(tmp_path: Path) -> None:
    run = weft.train("digits", out=tmp_path / "run", quiet=True, epochs=500, patience=3, lr=0.05)
    epochs = [line for line in run.records if line["kind"] == "epoch"]
    assert len(epochs) < 500
    assert run.summary["best_epoch"] == len(epochs) - 4
    assert run.summary["val_accuracy"] == max(line["val_accuracy"] for line in epochs)


def test_until(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options: dict[str, Any] = {"out": out, "quiet": True, "epochs": 500, "lr": 0.05}
    run = weft.train("digits", **options, until="val_accuracy=0.6")
    epochs = [line for line in run.records if line["kind"] == "epoch"]
    assert [line["val_accuracy"] >= 0.6 for line in epochs] == [False] * (len(epochs) - 1) + [True]
    assert run.summary["goal_seconds"] == pytest.approx(sum(line["seconds"] for line in epochs))
    with pytest.raises(InputError, match=r"has finished its \d+ epochs: give more --epochs, --patience or --until"):
        weft.train("digits", **options, until="val_accuracy=0.6", resume=True)
    more = weft.train("digits", **options, until="val_accuracy=0.7", resume=True)
    assert more.summary["epochs"] > len(epochs)
    assert more.summary["goal_seconds"] > run.summary["goal_seconds"]
    never = weft.train("digits", out=tmp_path / "never", quiet=True, epochs=2, until="val_accuracy=1")
    assert never.summary["goal_seconds"] is None


@pytest.mark.parametrize(
    ("until", "error"),
    [
        ("0.9", "--until 0.9: give a score and its value, such as val_accuracy=0.9"),
        ("val_accuracy=90", "--until val_accuracy=90: accuracy is at most 1: give a value up to that"),
        ("test_accuracy=0.9", "the validation score is val_accuracy: give val_accuracy=..."),
    ],
)
def test_a_score_that_cannot_be_reached(until: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        weft.train("digits", out=tmp_path / "run", quiet=True, until=until)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    weft.train("digits", out=folder, quiet=True, epochs=4, checkpoint_every=2)
    newest = max((folder / "checkpoints").iterdir())
    with (newest / "state.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    weft.train("digits", out=folder, quiet=True, epochs=6, resume=True)
    begun = [line["epoch"] for line in jsonl.read(folder / "metrics.jsonl") if line["kind"] == "config"]
    assert begun == [0, 2]
    assert len(losses(folder)) == 6


def test_patience_counts_evaluated_epochs_and_its_end_is_final(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = weft.train("digits", out=out, quiet=True, epochs=500, patience=3, eval_every=5, lr=0.05)
    assert run.summary["epochs"] % 5 == 0
    assert run.summary["test_accuracy"] > 0.8
    with pytest.raises(InputError, match="has finished its"):
        weft.train("digits", out=out, quiet=True, epochs=500, patience=3, eval_every=5, lr=0.05, resume=True)
    graph = dataclasses.replace(weft.load("digits"), val_mask=None)
    with pytest.raises(InputError, match="no validation vertices"):
        weft.train(graph, out=tmp_path / "none", quiet=True, patience=3)


def test_a_run_cut_off_before_its_summary_is_completed(tmp_path: Path) -> None:
    """A run that has its last checkpoint, but no weights and no summary, is completed by --resume."""
    out = tmp_path / "run"
    summary = weft.train("digits", out=out, quiet=True, epochs=4).summary
    (out / "model.safetensors").unlink()
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:-1]))
    again = weft.train("digits", out=out, quiet=True, epochs=4, resume=True).summary
    assert again["test_accuracy"] == summary["test_accuracy"]
    assert again["loss"] == summary["loss"]
    assert (out / "model.safetensors").exists()


def test_damaged_newer_checkpoints_do_not_outlive_a_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    weft.train("digits", out=out, quiet=True, epochs=8, checkpoint_every=4)
    for folder in (out / "checkpoints").iterdir():
        if folder.name.endswith("8"):
            (folder / "state.json").write_text("{")
    (out / "checkpoints" / ".epoch-00000007").mkdir()
    weft.train("digits", out=out, quiet=True, epochs=6, resume=True, checkpoint_every=1)
    assert sorted(path.name[-1] for path in (out / "checkpoints").iterdir()) == ["5", "6"]
    for folder in (out / "checkpoints").iterdir():
        (folder / "state.json").write_text("{")
    with pytest.raises(InputError, match="all checkpoints are damaged"):
        weft.train("digits", out=out, quiet=True, epochs=9, resume=True)


def test_a_summary_has_the_ranks_that_ended_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train("digits", out=out, quiet=True, epochs=3, strategy="tensor", workers=2, hidden=8)
    summary = weft.train("digits", out=out, quiet=True, epochs=6, resume=True, hidden=8).summary
    assert len(summary["ranks"]) == 1
    assert summary["ranks"][0]["bytes_sent"] == 0


@pytest.mark.usefixtures("in_a_script")
@pytest.mark.parametrize(
    ("model", "error"),
    [
        (torch.nn.Linear(64, 10), "the model has no num_stages"),
        (weft.nn.GCN(63, out_width=10), "cannot take rows of 64 features"),
        (weft.nn.GCN(64, out_width=9), "returns \\[9\\] logits per vertex, but the graph has 10 classes"),
        (weft.nn.Stack([weft.nn.GCNConv(64, 10)], activation=lambda x: x), "cannot be sent to local ranks"),
    ],
)
def test_models_that_cannot_run(tmp_path: Path, model: torch.nn.Module, error: str) -> None:
    with pytest.raises(InputError, match=error) as caught:
        weft.train("digits", model, out=tmp_path / "run", quiet=True, strategy="tensor", workers=2)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_killed_among_others(tmp_path: Path) -> None:
    """The error names the killed rank, although the others wait for halos of each other."""
    process = start(
        *RUN, "--strategy", "communicated", "--workers", "3", "--epochs", "100000", "--out", tmp_path / "run"
    )
    wait_for_epoch(process, tmp_path / "run", 3)
    os.kill(ranks(process)[2], signal.SIGKILL)
    code, errors = finish(process)
    (line,) = complaints(errors)
    assert code == 1
    assert "was killed by SIGKILL" in line
    assert "in epoch" in line


@pytest.mark.slow
def test_dependencies(tmp_path: Path) -> None:
    """Hybrid decides by a partition file and measured costs, by a profile, and under a memory limit."""
    options = {"hidden": 16, "dtype": "float64", "norm": "batch", "layers": 3, "workers": 2, "quiet": True}
    book, machine = tmp_path / "book.safetensors", tmp_path / "machine.json"
    make_book(weft.load("digits"), 2, method="fennel").save(book)
    profile().save(machine)

    hybrid = {"strategy": "hybrid", "partition": str(book)}
    first = train("digits", out=tmp_path / "first", epochs=6, measure=True, **hybrid, **options)
    begun = first.records[0]
    assert begun["measured"] == ["kernels", "network"]
    assert min(begun["measure_seconds"], *begun["machine"].values()) > 0

    by_profile = {"strategy": "hybrid", "partition": "fennel", "machine": str(machine)}
    again = train("digits", out=tmp_path / "again", epochs=3, **by_profile, **options)
    assert losses(again.folder) == pytest.approx(losses(first.folder)[:3], abs=1e-9)
    for epochs, measure in ((4, True), (5, False)):  # the profile has all prices: nothing is measured
        by_profile["measure"] = measure
        more = train("digits", out=again.folder, resume=True, epochs=epochs, **by_profile, **options)
        begun = [line for line in more.records if line["kind"] == "config"]
        assert begun[-1]["measured"] == []
        assert begun[-1]["machine"] == begun[0]["machine"] is not None
        assert [placed["cached"] for placed in begun[-1]["placement"]] == cached_counts(again)
    resumed = train("digits", out=again.folder, resume=True, epochs=6, strategy="cached", **options)
    assert losses(resumed.folder) == pytest.approx(losses(first.folder), abs=1e-9)

    options |= {"epochs": 1, "strategy": "hybrid", "cache_ratio": 1.0, "cache_memory": "1kB", "out": tmp_path / "few"}
    options |= {"quiet": False}
    few = run_on_ranks(2, weft.train, "digits", **options)
    assert cached_counts(few.result) == [[0, 0, 0]] * 2
    for rank in range(2):
        assert f"rank {rank}: --cache-memory limits caching to 0 vertices" in few.err


def test_hybrid_repeats_bit_for_bit(tmp_path: Path) -> None:
    """Hybrid decides by nominal costs, which do not depend on the machine's load."""
    options = {"hidden": 16, "layers": 3, "workers": 2, "partition": "random", "epochs": 4, "quiet": True}
    first, second = (train("digits", out=tmp_path / name, strategy="hybrid", **options) for name in ("one", "other"))
    assert first.records[0]["machine"] is None
    assert first.records[0]["measure_seconds"] == 0
    assert cached_counts(first) == cached_counts(second)
    assert losses(first.folder) == losses(second.folder)
    assert (first.folder / "model.safetensors").read_bytes() == (second.folder / "model.safetensors").read_bytes()


def cached_counts(run: weft.Run) -> list[list[int]]:
    """Return the numbers of vertices that each rank caches at each layer boundary."""
    return [placed["cached"] for placed in run.records[0]["placement"]]
