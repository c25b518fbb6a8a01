"""Metrics over ranks equal scikit-learn's on all rows; custom metrics select the best weights and end runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.lib.ranks import on_ranks
from tests.lib.running import train
from weft.comm import Group
from weft.config.config import Config
from weft.data import Graph
from weft.strategies import Step
from weft.training.custom_functions import OwnFunctions
from weft.training.tasks import scores
from weft.training.tasks.losses import make_loss
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.scores import make_metrics
from weft.utils.errors import InputError

sklearn = pytest.importorskip("sklearn.metrics")
NUM_VERTICES = 97
CLASSES = "accuracy,micro_f1,macro_f1,roc_auc,average_precision"
KINDS: dict[str, tuple[int, str]] = {
    "two": (2, CLASSES),
    "one logit": (1, CLASSES),
    "five": (5, CLASSES),
    "labels": (4, CLASSES),
    "value": (1, "mse,mae,r2"),
    "values": (3, "mse,mae,r2"),
}
"""Number of logits, and metrics, by kind of labels."""


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    """Return rounded random numbers, many of which are equal."""
    return (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 8).round() / 8


def labels(kind: str) -> Tensor:
    width = KINDS[kind][0]
    if kind == "labels":
        return (random_rows(NUM_VERTICES, width, seed=1) > 0.3).float()
    if kind.startswith("value"):
        y = random_rows(NUM_VERTICES, width, seed=1).float() * 3 + 100
        return y[:, 0] if kind == "value" else y
    return torch.arange(NUM_VERTICES) * 7 % max(width, 2)


def labelled(kind: str) -> Graph:
    ids = torch.arange(NUM_VERTICES)
    masks = {"train_mask": ids % 3 == 0, "val_mask": ids % 3 == 1, "test_mask": torch.zeros_like(ids).bool()}
    return Graph.from_edges(ids, ids.roll(1), x=torch.ones(NUM_VERTICES, 1), y=labels(kind), **masks)


def expected(metric: str, logits: Tensor, y: Tensor, kind: str) -> float:
    """Return a score computed by scikit-learn."""
    if kind.startswith("value"):
        names = {"mse": "mean_squared_error", "mae": "mean_absolute_error", "r2": "r2_score"}
        return float(getattr(sklearn, names[metric])(y, logits))
    several = kind == "labels"
    predicted = logits > 0 if several or logits.shape[1] == 1 else logits.argmax(1)
    if metric == "accuracy":
        return float(sklearn.accuracy_score(y, predicted))
    if metric.endswith("f1"):
        return float(sklearn.f1_score(y, predicted, average=metric[:5], zero_division=0))
    function = sklearn.roc_auc_score if metric == "roc_auc" else sklearn.average_precision_score
    if several:
        return float(function(y, logits, average="macro"))
    if logits.shape[1] <= 2:
        return float(function(y, logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0)))
    one_hot = torch.nn.functional.one_hot(y)
    return float(function(one_hot, logits.softmax(1).float(), average="macro"))


def half_right(logits: Tensor, y: Tensor) -> float:
    """Custom metric that depends on the order of rows."""
    order = torch.arange(len(y), dtype=logits.dtype)
    return float((logits[:, 0] * order).sum() / (1 + y.double().view(len(y), -1)[:, 0].abs().sum()))


def scored(group: Group, kind: str, batched: bool) -> dict[str, float | None]:
    """Return the scores over all ranks, each of which has a shard of the rows.

    With `batched`, the step evaluates some vertices only.
    """
    width, names = KINDS[kind]
    graph, logits = labelled(kind), random_rows(NUM_VERTICES, width)
    functions = OwnFunctions(metrics={"half_right": half_right})
    config = Config(metrics=f"{names},half_right", loss="bce" if kind == "one logit" else "")
    rows = torch.arange(NUM_VERTICES)[group.rank :: group.size]
    task = NodeTask(graph, rows, group, loss=make_loss(config, graph), metrics=make_metrics(config, graph, functions))
    vertices = rows[(rows % 3 != 2)] if batched else None
    step = Step(epoch=0, training=False, vertices=vertices)
    counts = task.counts(logits[rows if vertices is None else vertices], step)
    return task.scores([report["counts"] for report in group.all_gather_object({"counts": counts})])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_scikit_learns(kind: str, size: int) -> None:
    graph, logits = labelled(kind), random_rows(NUM_VERTICES, KINDS[kind][0])
    for batched in (False, True):
        for result in on_ranks(size, scored, kind, batched):
            for split in ("train", "val"):
                mask, y = getattr(graph, f"{split}_mask"), graph.y
                assert y is not None
                for name in KINDS[kind][1].split(","):
                    wanted = expected(name, logits[mask], y[mask], kind)
                    assert result[f"{split}_{name}"] == pytest.approx(wanted, abs=1e-9), (split, name)
                assert result[f"{split}_half_right"] == pytest.approx(half_right(logits[mask], y[mask]), abs=1e-9)
            assert {result[name] for name in result if name.startswith("test")} == {None}


def scored_locally(group: Group, kind: str) -> dict[str, float | None]:
    """Plant an error: a rank scores only its own rows."""
    alone = Group()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group, "all_reduce", alone.all_reduce)
        return scored(group, kind, False)


def test_scores_of_one_ranks_rows_are_detected() -> None:
    mask = torch.arange(NUM_VERTICES) % 3 == 1
    wanted = expected("roc_auc", random_rows(NUM_VERTICES, 2)[mask], labels("two")[mask], "two")
    assert all(abs((result["val_roc_auc"] or 0) - wanted) > 1e-3 for result in on_ranks(3, scored_locally, "two"))


def test_undefined_scores_are_none() -> None:
    one_class = torch.zeros(5).long()
    of_classes = scores.metrics_of("classes")
    assert of_classes["roc_auc"].score(torch.randn(5, 2), one_class) is None
    assert of_classes["average_precision"].score(torch.randn(5, 3), torch.full((5,), 3)) is None
    assert scores.metrics_of("values")["r2"].score(torch.randn(5, 1), torch.ones(5)) is None


def worst_class(logits: Tensor, y: Tensor) -> float:
    """Return the lowest recall of any class."""
    right = logits.argmax(1) == y
    return min(float(right[y == c].double().mean()) for c in y.unique())


def surprise(logits: Tensor, y: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits, y))


surprise.higher_is_better = False  # type: ignore[attr-defined]
OPTIONS: dict[str, Any] = {"quiet": True, "hidden": 8, "dtype": "float64", "lr": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "best"), [(worst_class, max), pytest.param(surprise, min, marks=pytest.mark.slow)])
def test_the_first_metric_chooses_the_best_weights(
    metric: Callable[[Tensor, Tensor], float], best: Callable[..., float], tmp_path: Path
) -> None:
    """The first metric also decides early stopping and --until, on one rank, on three, and when resumed."""
    name = f"val_{metric.__name__}"
    options = {**OPTIONS, "metrics": [metric, "macro_f1"], "epochs": 25}
    run = weft.train("digits", out=tmp_path / "run", **options)
    scores = [line[name] for line in run.records if line["kind"] == "epoch"]
    assert run.summary[name] == best(scores)
    assert "val_macro_f1" in run.summary
    assert "val_accuracy" not in run.summary
    assert f'metrics = "{metric.__name__},macro_f1"' in (run.folder / "config.toml").read_text()
    many = train("digits", out=tmp_path / "many", strategy="tensor", workers=3, **options)
    assert [line[name] for line in many.records if line["kind"] == "epoch"] == pytest.approx(scores, abs=1e-9)

    value = sorted(scores)[len(scores) // 2]
    reached = next(epoch for epoch, score in enumerate(scores) if (score <= value if best is min else score >= value))
    until = weft.train("digits", out=tmp_path / "until", until=f"{name}={value:.17f}", **options)
    assert until.summary["epochs"] == reached + 1
    assert until.summary["goal_seconds"] is not None
    weft.train("digits", out=tmp_path / "two", **{**options, "epochs": 12})
    again = weft.train("digits", out=tmp_path / "two", resume=True, **options)
    assert (again.summary[name], again.summary["best_epoch"]) == (run.summary[name], run.summary["best_epoch"])


def accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(1) == y).double().mean())


def broken(*_: Tensor) -> float:
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"metrics": "f1"}, "unknown --metrics 'f1'"),
        ({"metrics": "r2"}, "unknown --metrics 'r2': .* accuracy"),
        ({"metrics": "mrr"}, "unknown --metrics 'mrr'"),
        ({"metrics": "accuracy,accuracy"}, "--metrics accuracy,accuracy: give different names"),
        ({"metrics": accuracy}, "metrics: weft has a built-in named accuracy"),
        ({"metrics": [lambda *_: 0.0]}, "metrics: <lambda> is not a valid and unique name for a score"),
        ({"metrics": broken}, "metric broken raised an exception .KeyError"),
        ({"metrics": "macro_f1", "until": "val_accuracy=0.5"}, "the validation score is val_macro_f1"),
        ({"metrics": "macro_f1", "until": "val_macro_f1=90"}, "macro_f1 is at most 1"),
        ({"task": "link", "metrics": worst_class}, "metrics: worst_class has no effect under task link"),
        ({"task": "link", "metrics": "accuracy"}, "unknown --metrics 'accuracy': .*auc"),
    ],
)
def test_mistakes(options: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        weft.train("digits", out=tmp_path / "run", quiet=True, epochs=2, **options)
    assert not (tmp_path / "run").exists()
