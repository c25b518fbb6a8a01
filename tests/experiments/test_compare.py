"""Comparisons from Python: each strategy trains a copy of a custom model, of weft or of PyG."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.lib.running import losses, run_on_ranks
from tests.training.test_converted_runs import net
from weft.utils.errors import InputError

OPTIONS: dict[str, Any] = {"epochs": 3, "quiet": True}
STRATEGIES = ["single", "tensor"]


def custom_model(kind: str) -> nn.Module:
    """Return a model in float64."""
    torch.manual_seed(1)
    return net() if kind == "pyg" else weft.nn.GCN(64, out_width=10, hidden=8, dropout=0.2).double()


def check_runs(kind: str, model: nn.Module, folder: Path) -> None:
    """Check that all runs have the losses of a single training, and that `model` still has its initial weights."""
    single, tensor = (losses(folder / name) for name in STRATEGIES)
    assert single == pytest.approx(tensor, abs=1e-9)
    weft.train("digits", alone := custom_model(kind), out=folder / "alone", **OPTIONS)
    assert single == losses(folder / "alone")
    before = custom_model(kind).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    best = weft.load_model(folder / "single", model).state_dict()
    assert all(torch.equal(best[name], value) for name, value in alone.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in best.items())


@pytest.mark.parametrize("kind", ["weft", "pyg"])
def test_each_strategy_starts_from_the_same_weights(kind: str, tmp_path: Path) -> None:
    model = custom_model(kind)
    runs = weft.compare(weft.load("digits"), model, strategies=STRATEGIES, workers=2, out=tmp_path / "out", **OPTIONS)
    assert list(runs) == STRATEGIES
    check_runs(kind, model, tmp_path / "out")


def compare_on_rank(kind: str, folder: Path) -> nn.Module:
    """Compare on the ranks that already run, and return the model afterwards."""
    model = custom_model(kind)
    weft.compare("digits", model, strategies={"tensor": {"strategy": "tensor"}}, out=folder, **OPTIONS)
    return model


def test_on_the_ranks_of_torchrun(tmp_path: Path) -> None:
    model = run_on_ranks(2, compare_on_rank, "weft", tmp_path / "out").result
    weft.train("digits", custom_model("weft"), out=tmp_path / "out" / "single", **OPTIONS)
    check_runs("weft", model, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"strategies": ["single", "single"]}, "give different names"),
        ({"strategies": "single"}, r'must be a list of names, such as strategies=\["single", "tensor"\]'),
        ({"strategies": STRATEGIES, "strategy": "tensor"}, "a list of names"),
        ({"strategies": {"one": {"chunks": 2}}}, "strategies: one has no field 'strategy'"),
        ({"strategies": {"one": {"strategy": "tensor", "lr": 1}}}, "--lr is not specific to strategy tensor"),
        ({"strategies": STRATEGIES, "hidden": 8}, "hidden has no effect on a custom model"),
        ({"strategies": STRATEGIES, "fanout": "3"}, "--fanout has no effect under strategy single and tensor"),
    ],
)
def test_errors(options: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        weft.compare("digits", custom_model("weft"), out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_model_that_strategies_share_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks fail if all strategies train the same copy."""
    shared = type("Shared", (), {"deepcopy": staticmethod(lambda model: model)})
    monkeypatch.setattr(sys.modules["weft.experiments.compare"], "copy", shared)
    model = custom_model("weft")
    weft.compare("digits", model, strategies=STRATEGIES, out=tmp_path / "out", **OPTIONS)
    with pytest.raises(AssertionError):
        check_runs("weft", model, tmp_path / "out")
