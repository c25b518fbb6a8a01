"""Runs with `--dtype bfloat16`: close to float32, reproducible bit for bit, with float32 in all written files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import weft
from tests.cli.test_main import mistake
from tests.lib.pairwise import param
from tests.lib.running import train
from weft.nn import Stack
from weft.nn.layers.conv import GCNConv
from weft.utils.errors import InputError

GRAPH = "sbm:vertices=400,degree=8,classes=4,features=12"
EPOCHS = 20
UNIT = 2**-8
"""Largest relative error of rounding a number to bfloat16."""
ROUNDINGS = 16
"""Number of roundings from a row to its logits: 8 in each of 2 layers (tests/strategies/test_low_precision_rows.py)."""
OPTIONS: dict[str, Any] = {"quiet": True, "hidden": 64, "epochs": EPOCHS, "dtype": "bfloat16"}
MODELS = ("gcn", "sage", "gin", "gat")


def losses(run: weft.Run) -> Tensor:
    return torch.tensor([line["loss"] for line in run.records if line["kind"] == "epoch"], dtype=torch.float64)


def test_bfloat16_is_not_the_default() -> None:
    assert weft.Config().dtype == "float32"


@pytest.mark.parametrize("norm", [param(norm, name=norm, quick=norm == "batch") for norm in ("none", "batch", "layer")])
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_near_those_of_float32(model: str, norm: str) -> None:
    """Every loss is within the error of `ROUNDINGS` roundings.

    Rows have the default width: in narrower rows, rounding that changes the sign of one input of ReLU changes all later
    epochs.
    """
    rounded, exact = (
        losses(train(GRAPH, model, norm=norm, **{**OPTIONS, **more})) for more in ({}, {"dtype": "float32"})
    )
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=ROUNDINGS * UNIT, atol=0)
    assert rounded[-1] < rounded[0]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("tensor", {}, marks=pytest.mark.slow),
        pytest.param("communicated", {"partition": "random"}, marks=pytest.mark.slow),
        pytest.param("cached", {"partition": "random"}, marks=pytest.mark.slow),
        ("hybrid", {"cache_ratio": 0.5, "partition": "random"}),
        pytest.param("offload", {"device_memory": "500KB"}, marks=pytest.mark.slow),
        pytest.param("pipeline", {"chunks": 3}, marks=pytest.mark.slow),
        pytest.param("stale", {"refresh_every": 1, "partition": "random"}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_near_those_of_one_rank(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    single = losses(train(GRAPH, "sage", norm="batch", **OPTIONS))
    settings = {**OPTIONS, **options, "norm": "batch", "strategy": strategy}
    several = losses(train(GRAPH, "sage", workers=2, out=tmp_path / "several", **settings))
    torch.testing.assert_close(several, single, rtol=ROUNDINGS * UNIT, atol=0)
    again = losses(train(GRAPH, "sage", workers=2, out=tmp_path / "again", **settings))
    assert torch.equal(several, again)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["split", "sampled"])
def test_mini_batches(strategy: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": "64", "fanout": "5", "strategy": strategy, "cache_memory": "4KB"}
    rounded, exact = (
        losses(train(GRAPH, "sage", workers=2, out=tmp_path / str(dtype), **{**OPTIONS, **settings, "dtype": dtype}))
        for dtype in ("bfloat16", "float32")
    )
    torch.testing.assert_close(rounded, exact, rtol=ROUNDINGS * UNIT, atol=0)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    """A resumed run is the same bits, and written weights, predictions and embeddings are float32."""
    whole = train(GRAPH, "gat", out=tmp_path / "whole", **OPTIONS)
    folder = tmp_path / "parts"
    train(GRAPH, "gat", out=folder, **{**OPTIONS, "epochs": EPOCHS // 2})
    resumed = train(GRAPH, "gat", out=folder, resume=True, **OPTIONS)
    assert torch.equal(losses(resumed), losses(whole))
    for values, expected in zip(
        *(load_file(run.folder / "model.safetensors").values() for run in (whole, resumed)), strict=True
    ):
        assert torch.equal(values, expected)
        assert values.dtype == torch.float32
    rows = weft.predict(whole, workers=1, out=tmp_path / "rows.npy")
    assert rows.dtype == torch.float32
    assert np.load(tmp_path / "rows.npy").dtype == np.float32
    embeddings = weft.predict(whole, workers=1, what="embeddings")
    assert embeddings.dtype == torch.float32
    assert torch.equal(embeddings, embeddings.bfloat16().float()), "rows were rounded"
    with pytest.raises(InputError, match="--dtype bfloat16: under strategy offload, attention"):
        weft.predict(whole, workers=1, strategy="offload")


def test_links() -> None:
    rounded = train(GRAPH, "sage", task="link", **OPTIONS)
    exact = train(GRAPH, "sage", task="link", **{**OPTIONS, "dtype": "float32"})
    torch.testing.assert_close(losses(rounded), losses(exact), rtol=ROUNDINGS * UNIT, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--model", "gatv2"],
            "--dtype bfloat16 only works with gcn, sage, gin, gat, and gatv2 computes in float32: leave it out",
        ),
        (["--strategy", "offload", "--model", "gat"], "--dtype bfloat16: under strategy offload, attention stores"),
        (["--strategy", "tensor", "--chunks", "2", "--workers", "2"], "leave out --device-memory and --chunks"),
    ],
)
def test_refused_in_a_line(
    arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    line = mistake(capsys, "train", GRAPH, "--dtype", "bfloat16", "--epochs", "2", "--out", out, *arguments)
    assert error in line
    assert not out.exists()


class CustomModel(Stack):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__([GCNConv(num_features, num_classes)])


@pytest.mark.parametrize("model", [CustomModel(12, 4), CustomModel(12, 4).bfloat16()], ids=["float32", "bfloat16"])
def test_custom_models_are_refused(model: nn.Module) -> None:
    with pytest.raises(InputError, match="dtype bfloat16 is for built-in models, such as gcn"):
        weft.train(weft.load(GRAPH), model, dtype="bfloat16", epochs=1, quiet=True)


def test_plan_and_auto_refuse_custom_models(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan --machines 1xT4", "train --strategy auto --quiet"):
        words = f"{command} {GRAPH} --dtype bfloat16 --model {CustomModel.__module__}:{CustomModel.__name__}"
        assert "dtype bfloat16 is for built-in models" in mistake(capsys, *words.split())


def test_a_model_is_trained_further(tmp_path: Path) -> None:
    first = weft.train(GRAPH, out=tmp_path / "first", **OPTIONS | {"epochs": 2})
    onward = weft.train(GRAPH, first.model, out=tmp_path / "onward", epochs=2, quiet=True)
    assert onward.config.dtype == "bfloat16"
    with pytest.raises(InputError, match="the model's rows are bfloat16: leave it out, or set its row_dtype to None"):
        weft.train(GRAPH, first.model, dtype="float32", epochs=1, quiet=True)


def test_edge_features_are_refused() -> None:
    graph = weft.load(GRAPH)
    features = torch.ones(graph.num_edges, 2)
    with pytest.raises(InputError, match="--dtype bfloat16: attention by edge features computes in float32"):
        weft.train(weft.Graph(**{**vars(graph), "edge_features": features}), "gat", edge_attention=True, **OPTIONS)
