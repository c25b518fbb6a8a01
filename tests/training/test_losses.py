"""Custom and built-in losses equal PyTorch's on all rows, for every number of ranks, batch size and strategy."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from tests.lib.ranks import on_ranks
from tests.lib.running import losses, run_on_ranks, train
from weft.comm import Group
from weft.config.config import Config
from weft.data import Graph
from weft.strategies import Step
from weft.training.custom_functions import OwnFunctions
from weft.training.tasks.losses import balanced_weights, make_loss
from weft.training.tasks.metrics import NodeTask
from weft.utils.errors import InputError

NUM_VERTICES = 61


def focal(logits: Tensor, y: Tensor, gamma: float = 2.0) -> Tensor:
    """Return the focal loss of every row (Lin et al. 2017), in which well classified rows count little."""
    loss = functional.cross_entropy(logits, y, reduction="none")
    return (1 - (-loss).exp()) ** gamma * loss


def focal_mean(logits: Tensor, y: Tensor) -> Tensor:
    return focal(logits, y).mean()


def centred(logits: Tensor, y: Tensor) -> Tensor:
    """Plant an error: the loss of a row depends on other rows."""
    return focal(logits - logits.mean(0), y)


def counted(logits: Tensor, y: Tensor) -> Tensor:
    """Plant an error: the loss of a row depends on the number of rows of a rank."""
    return focal(logits, y) / len(y)


def broken(*_: Tensor) -> Tensor:
    raise ZeroDivisionError("here")


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def graph(kind: str) -> Graph:
    ids = torch.arange(NUM_VERTICES)
    y = {
        "classes": ids % 5 % 3,
        "two": ids % 3 % 2,
        "labels": (random_rows(NUM_VERTICES, 3) > 0).float(),
        "values": random_rows(NUM_VERTICES, 3).float(),
        "value": random_rows(NUM_VERTICES).float(),
    }[kind]
    return Graph.from_edges(ids, ids.roll(1), x=torch.ones(NUM_VERTICES, 1), y=y, train_mask=ids % 4 != 1)


CASES: dict[str, tuple[str, int, dict[str, Any], Any]] = {
    "cross entropy": ("classes", 3, {}, functional.cross_entropy),
    "bce": ("labels", 3, {}, functional.binary_cross_entropy_with_logits),
    "one logit": (
        "two",
        1,
        {"loss": "bce"},
        lambda z, y: functional.binary_cross_entropy_with_logits(z[:, 0], y.double()),
    ),
    "mse": ("values", 3, {}, functional.mse_loss),
    "mse of one": ("value", 1, {}, lambda z, y: functional.mse_loss(z[:, 0], y)),
    "mse of classes": ("two", 1, {"loss": "mse"}, lambda z, y: functional.mse_loss(z[:, 0], y.double())),
    "l1": ("values", 3, {"loss": "l1"}, functional.l1_loss),
    "huber": ("value", 1, {"loss": "huber"}, lambda z, y: functional.huber_loss(z[:, 0], y)),
    "own": ("classes", 3, {"loss": focal}, focal_mean),
    "module": ("values", 3, {"loss": nn.SmoothL1Loss}, functional.smooth_l1_loss),
}
"""Kind of labels, number of logits, options, and a function that returns the mean loss."""


def sum_over_columns(logits: Tensor, y: Tensor) -> Tensor:
    return nn.SmoothL1Loss(reduction="none")(logits, y).mean(1)


def parts(group: Group, case: str) -> tuple[float, Tensor]:
    """Return the loss summed over all ranks, and this rank's gradient."""
    kind, width, options, _ = CASES[case]
    loss_option = options.get("loss", "")
    functions = (
        OwnFunctions(loss=sum_over_columns if case == "module" else focal) if callable(loss_option) else OwnFunctions()
    )
    config = Config(loss="mine" if callable(loss_option) else loss_option)
    labelled, rows = graph(kind), torch.arange(NUM_VERTICES)[group.rank :: group.size]
    task = NodeTask(labelled, rows, group, loss=make_loss(config, labelled, functions), metrics=[])
    loss, grad = task.loss(random_rows(NUM_VERTICES, width, seed=3)[rows], Step(epoch=0, training=True))
    return sum(report["loss"] for report in group.all_gather_object({"loss": loss.item()})), grad


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_the_mean_over_all_ranks_rows(case: str, size: int) -> None:
    kind, width, _, mean = CASES[case]
    labelled, logits = graph(kind), random_rows(NUM_VERTICES, width, seed=3).requires_grad_()
    mask, y = labelled.train_mask, labelled.y
    assert mask is not None
    assert y is not None
    wanted = mean(logits[mask], y[mask].double() if y.is_floating_point() else y[mask])
    (wanted_grad,) = torch.autograd.grad(wanted, logits)
    for rank, (loss, grad) in enumerate(on_ranks(size, parts, case)):
        assert loss == pytest.approx(wanted.item(), abs=1e-12)
        torch.testing.assert_close(grad, wanted_grad[rank::size], rtol=0, atol=1e-12)


def test_balanced_classes_count_as_much() -> None:
    labelled = graph("classes")
    weight = balanced_weights(labelled)
    assert labelled.y is not None
    assert labelled.train_mask is not None
    y, logits = labelled.y[labelled.train_mask], random_rows(NUM_VERTICES, 3)[labelled.train_mask]
    shares = torch.bincount(y, weight[y])
    torch.testing.assert_close(shares, shares.mean().expand(3))
    loss = make_loss(Config(class_weights="balanced"), labelled)(logits, y)
    torch.testing.assert_close(loss.mean(), functional.cross_entropy(logits, y, weight))


OPTIONS: dict[str, Any] = {"quiet": True, "hidden": 8, "dtype": "float64", "lr": 0.02, "epochs": 4, "dropout": 0.0}


@pytest.mark.slow
def test_losses_are_equal_under_every_strategy(tmp_path: Path) -> None:
    """A mini-batch of all vertices gives equal losses too, and smaller ones do on any number of ranks."""
    options = {**OPTIONS, "loss": partial(focal, gamma=1.5)}
    expected = losses(weft.train("digits", out=tmp_path / "one", **options).folder)
    batches = {"batch_size": "all", "fanout": "all"}
    for name, workers, more in (
        ("tensor", 2, {}),
        ("communicated", 3, {}),
        ("split", 2, batches),
        ("sampled", 2, batches),
    ):
        run = train("digits", out=tmp_path / name, strategy=name, workers=workers, **options, **more)
        assert losses(run.folder) == pytest.approx(expected, abs=1e-9), name
    few = {**options, "strategy": "split", "batch_size": "64", "fanout": "5"}
    alone = losses(weft.train("digits", out=tmp_path / "few", **few).folder)
    assert losses(train("digits", out=tmp_path / "few on 3", workers=3, **few).folder) == pytest.approx(alone, abs=1e-9)
    assert 'loss = "focal"' in (tmp_path / "one" / "config.toml").read_text()


def train_counted(out: Path) -> weft.Run:
    """Plant an error: train without the check that losses of rows are independent."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("weft.training.tasks.losses.require_row_independence", lambda *_: None)
        return weft.train("digits", out=out, strategy="tensor", workers=2, loss=counted, **OPTIONS)


def test_a_mean_over_the_rows_of_a_rank_is_detected(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("weft.training.tasks.losses.require_row_independence", lambda *_: None)
        single = weft.train("digits", out=tmp_path / "one", loss=counted, **OPTIONS)
    parallel = run_on_ranks(2, train_counted, tmp_path / "two").result
    assert losses(parallel.folder) != pytest.approx(losses(single.folder), rel=1e-3)


@pytest.mark.slow
def test_values_train(tmp_path: Path) -> None:
    """Regression of two values selects the weights with the least validation error, equal on one rank and three."""
    digits = weft.load("digits")
    assert digits.x is not None
    assert digits.y is not None
    y = torch.stack([digits.y / 10, digits.x.mean(1)], 1).float()
    regression = dataclasses.replace(digits, y=y)
    regression.save(tmp_path / "graph")
    options = {**OPTIONS, "epochs": 30}
    run = weft.train(regression, out=tmp_path / "one", **options)
    errors = [line["val_mse"] for line in run.records if line["kind"] == "epoch"]
    assert run.summary["val_mse"] == min(errors) < errors[0] / 2
    assert run.summary["val_r2"] > max(line["val_r2"] for line in run.records[:20] if line["kind"] == "epoch")
    many = train(tmp_path / "graph", out=tmp_path / "many", strategy="communicated", workers=3, **options)
    for score in ("val_mse", "val_mae", "val_r2"):
        assert many.summary[score] == pytest.approx(run.summary[score], abs=1e-9)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"loss": "crossentropy"}, "unknown --loss 'crossentropy': did you mean 'cross_entropy'"),
        ({"loss": "bce"}, "--loss bce: .* has 10 classes: give --loss cross_entropy"),
        ({"loss": focal_mean}, r"loss focal_mean returns shape \[\] for \d+ rows: return one loss for each row"),
        ({"loss": centred}, "loss centred of a row depends on other rows"),
        ({"loss": counted}, "loss counted of a row depends on other rows"),
        ({"loss": broken}, "loss broken raised an exception .ZeroDivisionError"),
        ({"loss": functional.cross_entropy}, "loss: weft has a built-in named cross_entropy"),
        ({"loss": focal, "class_weights": "balanced"}, "--class-weights balanced has no effect on loss focal"),
        ({"loss": "mse", "task": "link"}, "unknown --loss 'mse': choose one of bce, bpr"),
        ({"loss": focal, "task": "link"}, "a custom loss has no effect under task link: leave it out"),
    ],
)
def test_mistakes(options: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        weft.train("digits", out=tmp_path / "run", quiet=True, epochs=2, **options)
    assert not (tmp_path / "run").exists()
