"""Custom models and graphs: the options that apply to them, and the errors and warnings before a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.config.config import Config
from weft.nn import FAMILY_OPTIONS, Stack, View
from weft.utils.errors import InputError

OTHER: dict[str, Any] = {
    "decoupled": True,
    "layers": 3,
    "hidden": 8,
    "heads": 2,
    "edge_attention": True,
    "attention_dropout": 0.1,
    "bases": 2,
    "blocks": 2,
    "one_hot": True,
    "dropout": 0.1,
    "input_dropout": 0.1,
    "norm": "layer",
    "residual": True,
}


class Layer(nn.Module):
    """Layer with a custom module after its linear transform."""

    def __init__(self, in_width: int, out_width: int, part: nn.Module | None = None) -> None:
        super().__init__()
        self.out_width = out_width
        self.map = nn.Linear(in_width, out_width)
        self.part = part or nn.Identity()

    def forward(self, view: View, x: Tensor) -> Tensor:
        return view.propagate(self.part(self.map(x)), reduce="mean")


def stack(part: nn.Module | None = None, **options: Any) -> Stack:
    return Stack([Layer(64, 8, part), Layer(8, 10)], **options)


def test_every_option_of_a_family_is_tried() -> None:
    assert OTHER.keys() == set(FAMILY_OPTIONS)


@pytest.mark.parametrize("name", OTHER)
def test_an_option_of_the_families_is_refused(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(
        InputError, match=f"^{name} has no effect on a custom model: leave it out, and set it where you create "
    ):
        weft.train("digits", stack(), out=out, quiet=True, **{name: OTHER[name]})
    assert not out.exists()


def test_the_record_has_the_options_that_apply(tmp_path: Path) -> None:
    run = weft.train("digits", stack().double(), out=tmp_path / "run", epochs=2, quiet=True)
    text = (run.folder / "config.toml").read_text()
    assert 'dtype = "float64"' in text
    assert not any(f"\n{name} =" in text for name in FAMILY_OPTIONS)
    again = weft.train("digits", stack().double(), out=run.folder, epochs=3, resume=True, quiet=True)
    assert again.summary["epochs"] == 3
    with pytest.raises(InputError, match="dtype float64: the model's parameters are float32: leave it out, or convert"):
        weft.train("digits", stack(), out=tmp_path / "other", dtype="float64", quiet=True)


def test_options_of_data_act_on_a_graph(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "quiet": True}
    named = weft.train("digits", out=tmp_path / "named", normalize_features=True, **options)
    passed = weft.train(weft.load("digits"), out=tmp_path / "unnamed", normalize_features=True, **options)
    plain = weft.train(weft.load("digits"), out=tmp_path / "plain", **options)
    assert passed.summary["loss"] == named.summary["loss"] != plain.summary["loss"]
    bare = dataclasses.replace(weft.load("digits"), y=None, x=None)
    random = weft.train(bare, out=tmp_path / "drawn", random_classes=3, random_features=5, **options)
    assert random.summary["loss"] > 0
    with pytest.raises(InputError, match="digits already has features: leave out --random-features"):
        weft.train(weft.load("digits"), out=tmp_path / "none", random_features=5, **options)
    with pytest.raises(InputError, match=r"split 1 has no effect on digits, which is already loaded: pass split"):
        weft.train(weft.load("digits"), out=tmp_path / "none", split=1, **options)
    with pytest.raises(InputError, match="--split 1: digits has no splits to choose from: leave it out"):
        weft.train("digits", out=tmp_path / "none", split=1, **options)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("strategy", ["single", "hybrid", "tensor", "offload"])
def test_rows_that_depend_on_each_other_need_all_rows(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "quiet": True, "strategy": strategy, "out": tmp_path / "run"}
    if strategy == "single":
        weft.train("digits", stack(nn.BatchNorm1d(8)), **options)
    else:
        with pytest.raises(InputError, match=r"^BatchNorm1d \(layers\.0\.part\) mixes vertices outside of"):
            weft.train("digits", stack(nn.BatchNorm1d(8)), **options)
    with pytest.raises(InputError, match=r"^Dropout \(layers\.0\.part\) returns different results"):
        weft.train("digits", stack(nn.Dropout()), **{**options, "out": tmp_path / "other"})
    assert not (tmp_path / "other").exists()


def test_biases_without_effect_are_named(tmp_path: Path) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    layers = [weft.nn.from_pyg(pyg.SAGEConv(64, 8)), weft.nn.from_pyg(pyg.SAGEConv(8, 10))]
    with pytest.warns(UserWarning, match=r"^layers\.0\.lin_l\.bias: no effect, because a normalization") as caught:
        weft.train("digits", Stack(layers, norm="batch"), out=tmp_path / "run", epochs=1, quiet=True)
    assert caught[0].filename == __file__
    torch.manual_seed(0)
    layers = [weft.nn.from_pyg(pyg.SAGEConv(64, 8, bias=False)), weft.nn.from_pyg(pyg.SAGEConv(8, 10))]
    weft.train("digits", Stack(layers, norm="batch"), out=tmp_path / "other", epochs=1, quiet=True)


def test_what_is_no_graph_or_model_is_named_by_its_type() -> None:
    with pytest.raises(InputError, match=r"^weft\.train: the graph is of type Tensor: convert it, for example with"):
        weft.train(torch.ones(3), "gcn")  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"^weft\.place: the model is of type type: pass a name, or a module instead of its"
    ):
        weft.place("digits", nn.Linear)  # type: ignore[arg-type]


def test_heads_are_only_for_attention() -> None:
    from weft.training.flag_checks import refuse_foreign_flags

    with pytest.raises(
        InputError, match="--heads has no effect under model sage: leave it out, or give --model gat or"
    ):
        refuse_foreign_flags(Config(model="sage", heads=8))
    refuse_foreign_flags(Config(model="gatv2", heads=8))


class Transposed(nn.Module):
    """Module that transposes groups of columns and views the result as rows again.

    The view is only possible if no operation between copies the tensor to another memory layout.
    """

    def forward(self, h: Tensor) -> Tensor:
        return torch.relu(h.view(len(h), 2, -1).transpose(0, 1)).transpose(0, 1).view(len(h), -1)


def test_a_model_may_view_what_it_has_transposed(tmp_path: Path) -> None:
    run = weft.train("digits", stack(Transposed()), out=tmp_path / "run", quiet=True, epochs=2)
    assert run.summary["epochs"] == 2
