"""A few seeds of each class of attempts, and tests that the shared checks can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import scene
from tests.campaign.lanes import CLASSES, Outcome, run_attempt
from tests.campaign.scene import Broken, Done, Scene, Stage, check_same
from tests.campaign.settings import SMALL, Placement, Setting
from tests.lib.pairwise import param

SEEDS = {
    "kills": (2433,),
    "resumes": (1,),
    "corruption": (0, 1),
    "flags": (0, 1, 3),
    "graphs": (0, 1),
    "disk": (9,),
    "together": (0,),
    "sockets": (0,),
    "determinism": (1,),
    "names": (0, 1),
    "files": (0, 1, 2),
    "streams": (0,),
    "optimized": (0,),
    "users": (0, 1),
    "contents": (0, 1),
    "changes": (0, 1),
}
"""Seeds with fast attempts of different kinds; that of `kills` hits two ranks in their first epochs."""
QUICK = ("flags", "graphs", "disk", "files")
"""Classes whose attempts take less than a second."""
TURNS = 5
"""Number of tries of a seed until its fault happens, which depends on the machine's speed."""
SLOW = 12
"""Number of seeds of each class that `pytest -m slow` tries."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as shared_stage:
        yield shared_stage


@pytest.mark.parametrize(
    ("name", "seed"),
    [param(name, seed, name=f"{name}-{seed}", quick=name in QUICK) for name, seeds in SEEDS.items() for seed in seeds],
)
def test_a_promise_holds(stage: Stage, name: str, seed: int) -> None:
    outcomes = (run_attempt(name, seed, stage) for _ in range(TURNS))
    outcome = next((result for result in outcomes if result.kind != "missed"), Outcome("missed", "always", [], 0))
    assert outcome.kind == "held", "\n".join([outcome.reason, *outcome.notes])


@pytest.mark.slow
@pytest.mark.timeout(1_200)  # twelve attempts, each of which has a time limit of its own
@pytest.mark.parametrize("name", CLASSES)
def test_more_promises_hold(stage: Stage, name: str) -> None:
    outcomes = {seed: run_attempt(name, seed, stage) for seed in range(1_000, 1_000 + SLOW)}
    broken = {seed: outcome for seed, outcome in outcomes.items() if outcome.kind == "broken"}
    assert not broken, "\n".join(f"{seed}: {outcome.reason}" for seed, outcome in broken.items())
    assert any(outcome.kind == "held" for outcome in outcomes.values())


def test_every_class_has_seeds() -> None:
    assert set(QUICK) < set(SEEDS) == set(CLASSES)


@pytest.fixture(scope="module")
def whole(stage: Stage) -> Path:
    """Return the folder of a finished run."""
    setting = Setting(graph=(SMALL,), task=("--dtype", "float64"))
    return stage.whole(setting, Placement(strategy="single", workers=1, more=()), "--epochs", 5).folder


def change(number: int, **values: Any) -> Any:
    def changed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines[number] |= values
        return lines

    return changed


EPOCHS_FIRST, EPOCH_LINES = 1, 3
"""Index of the first epoch's first line, and number of lines per epoch on one rank."""


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (change(EPOCHS_FIRST, loss=1.25), "the loss of epoch 0 is 1.25"),
        (lambda lines: [*lines[:EPOCHS_FIRST], *lines[EPOCHS_FIRST + EPOCH_LINES :]], "the record has epochs"),
        (
            lambda lines: [*lines[:EPOCHS_FIRST], *lines[EPOCHS_FIRST:-1], *lines[EPOCHS_FIRST:]],
            "the record has epochs",
        ),
        (change(-1, best_epoch=77), "the summary's best_epoch is 77"),
        (lambda lines: lines[:-1], "the record ends with"),
        (lambda lines: lines[:EPOCHS_FIRST] + lines[-1:], "the record has 0 epochs, not 5"),
    ],
    ids=["loss", "missing", "twice", "score", "no summary", "no epochs"],
)
def test_a_wrong_record_is_found(whole: Path, tmp_path: Path, planted: Any, message: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    check_same(copy, whole)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in planted(lines)))
    with pytest.raises(Broken, match=message):
        check_same(copy, whole)


@pytest.mark.parametrize(
    ("code", "errors", "message"),
    [
        (1, "Traceback (most recent call last):\n  File\nValueError: x\n", "standard error has 'Traceback"),
        (2, "weft: error: one\nweft: error: two\n", "exit code 2 with 2 lines of error"),
        (2, "", "exit code 2 with 0 lines of error"),
        (0, "weft: error: one\n", "exit code 0 with 1 lines of error"),
        (3, "weft: error: one\n", "exit code 3, not 0 or 2"),
        (0, "[W1122 socket.cpp] warning\n", "standard error has"),
    ],
)
def test_a_wrong_end_is_found(code: int, errors: str, message: str) -> None:
    with pytest.raises(Broken, match=message.replace("[", r"\[")):
        Done(code=code, out="", errors=errors, seconds=1.0).check_ended(0, 2, *((1,) if code == 1 else ()))


def leave_folder() -> None:
    (Path(os.environ["TMPDIR"]) / "left").mkdir()


def leave_file() -> None:
    (Path(os.environ["TMPDIR"]) / "left").touch()


def leave_process() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])


@pytest.mark.parametrize(
    ("leave", "leftover"),
    [(leave_folder, "t/left"), (leave_file, "t/left"), (leave_process, r"process \d+ .*time\.sleep")],
)
def test_what_a_command_leaves_is_found(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, leave: Any, leftover: str
) -> None:
    monkeypatch.setattr(scene, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(Broken, match=f"left after .*{leftover}"), Scene(stage) as attempt_scene:
        attempt_scene.run("train", "--layers", "0", SMALL, prepare=leave).check_refused()


@pytest.mark.parametrize("leave", [leave_folder, leave_file])
def test_what_a_killed_command_may_leave_is_removed(stage: Stage, leave: Any) -> None:
    with Scene(stage) as scene:
        scene.run("train", "--layers", "0", SMALL, prepare=leave).check_refused()
        assert scene.left() == ["t/left"]
        scene.remove_temporary_files()
        scene.check_nothing_left()
