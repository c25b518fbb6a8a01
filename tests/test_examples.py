"""The examples run unchanged on two ranks; those with packages of others on one, with stand-ins for the packages."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.lib.running import run_on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
WITH_PACKAGES = ("experiment_trackers.py", "optuna_search.py")
STAND_INS = Path(__file__).parent / "lib" / "stand_ins"


def run_example(path: Path, folder: Path) -> None:
    """Run an example on a rank, as torchrun does; each rank draws its random numbers separately."""
    os.chdir(folder)
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - {*WITH_PACKAGES}))
def test_example(name: str, tmp_path: Path) -> None:
    output = run_on_ranks(2, run_example, EXAMPLES / name, tmp_path)
    figures = [float(figure) for figure in re.findall(r"0\.\d+", output.out)]
    assert figures
    assert min(figures) > 0.5
    if name == "from_pyg.py":
        assert figures[0] == figures[1]


@pytest.fixture
def _stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(STAND_INS)
    for path in STAND_INS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.mark.usefixtures("_stand_ins")
def test_optuna_prunes() -> None:
    study = runpy.run_path(str(EXAMPLES / "optuna_search.py"), run_name="__main__")["study"]
    assert {len(trial.values) for trial in study.finished} == {30}
    assert study.pruned
    assert all(len(trial.values) < 30 for trial in study.pruned)
    assert study.best_value > 0.8


@pytest.mark.usefixtures("_stand_ins")
def test_trackers_get_every_epoch() -> None:
    runpy.run_path(str(EXAMPLES / "experiment_trackers.py"), run_name="__main__")
    (run,), mlflow = sys.modules["wandb"].runs, sys.modules["mlflow"]
    assert run.is_finished
    assert mlflow.calls == ["experiment weft", "start", "end"]
    assert [record["epoch"] for record in run.history] == list(range(30))
    assert [values["loss"] for values in mlflow.history] == [record["loss"] for record in run.history]
