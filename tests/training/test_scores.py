"""Metrics and report counts over ranks equal scikit-learn's on all rows; custom metrics select the best weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.lib.cases import EXACT
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
from weft.training.tasks.report_metrics import (
    MAX_POINTS,
    counts_by_class,
    curve_points,
    report_metrics,
    threshold_curves,
)
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


def scored(group: Group, kind: str, batched: bool) -> tuple[dict[str, float | None], dict[str, dict[str, Any]]]:
    """Return the scores and the counts for a report over all ranks, each of which has a shard of the rows.

    With `batched`, the step evaluates some vertices only.
    """
    width, names = KINDS[kind]
    graph, logits = labelled(kind), random_rows(NUM_VERTICES, width)
    functions = OwnFunctions(metrics={"half_right": half_right})
    config = Config(metrics=f"{names},half_right", loss="bce" if kind == "one logit" else "")
    rows = torch.arange(NUM_VERTICES)[group.rank :: group.size]
    loss, metrics = make_loss(config, graph), make_metrics(config, graph, functions)
    metrics += report_metrics(graph.label_kind, graph.num_classes, loss, metrics)
    task = NodeTask(graph, rows, group, loss=loss, metrics=metrics)
    vertices = rows[(rows % 3 != 2)] if batched else None
    step = Step(epoch=0, training=False, vertices=vertices)
    counts = group.all_gather_object(task.counts(logits[rows if vertices is None else vertices], step))
    return task.scores(counts), task.details(counts)


def counted(logits: Tensor, y: Tensor, kind: str) -> dict[str, Any]:
    """Return the counts by class, as scikit-learn computes them."""
    if kind == "labels":
        matrices = sklearn.multilabel_confusion_matrix(y, logits > 0)  # [C, 2, 2] by truth and prediction
        return {"by_label": [matrices[:, 1, 1].tolist(), matrices[:, 0, 1].tolist(), matrices[:, 1, 0].tolist()]}
    predicted = logits > 0 if logits.shape[1] == 1 else logits.argmax(1)
    return {"by_class": sklearn.confusion_matrix(y, predicted).tolist()}


def check_curves(curves: list[dict[str, Any]], result: dict[str, float | None]) -> None:
    """Check that the areas below the recorded curves are the validation scores."""
    areas, precisions = [], []
    for curve in curves:
        right, wrong = (torch.tensor([0, *curve[f"{name}_positives"]]).double() for name in ("true", "false"))
        areas.append(float(torch.trapezoid(right / right[-1], wrong / wrong[-1])))
        precisions.append(float((right[1:] / (right + wrong)[1:] * right.diff() / right[-1]).sum()))
    assert sum(areas) / len(areas) == pytest.approx(result["val_roc_auc"], abs=1e-9)
    assert sum(precisions) / len(precisions) == pytest.approx(result["val_average_precision"], abs=1e-9)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_scikit_learns(kind: str, size: int) -> None:
    graph, logits = labelled(kind), random_rows(NUM_VERTICES, KINDS[kind][0])
    for batched in (False, True):
        for result, details in on_ranks(size, scored, kind, batched):
            for split in ("train", "val"):
                mask, y = getattr(graph, f"{split}_mask"), graph.y
                assert y is not None
                for name in KINDS[kind][1].split(","):
                    wanted = expected(name, logits[mask], y[mask], kind)
                    assert result[f"{split}_{name}"] == pytest.approx(wanted, abs=1e-9), (split, name)
                assert result[f"{split}_half_right"] == pytest.approx(half_right(logits[mask], y[mask]), abs=1e-9)
            assert {result[name] for name in result if name.startswith("test")} == {None}
            val_mask, y = labelled(kind).labelled("val"), labels(kind)
            loss = make_loss(Config(loss="bce" if kind == "one logit" else ""), graph)
            losses = loss(logits[val_mask], y[val_mask].double() if y.is_floating_point() else y[val_mask])
            assert result["val_loss"] == pytest.approx(float(losses.mean()), abs=1e-12)
            curves = details.get("val", {}).pop("by_threshold", [])
            assert details == (
                {} if kind.startswith("value") else {"val": counted(logits[val_mask], y[val_mask], kind)}
            )
            assert bool(curves) == bool(details)
            if curves:
                together, *by_class = curves
                assert len(by_class) == {"five": 5, "labels": 4}.get(kind, 0)
                assert together["class"] == ("all" if by_class else None)
                check_curves(by_class or curves, result)


@pytest.mark.parametrize("num_positive", [50, 2500])
def test_long_curves_are_thinned_out(num_positive: int) -> None:
    """A curve of many thresholds keeps its ends and, also with few positives, its area."""
    true = torch.arange(5000) < num_positive
    values = random_rows(5000, 1)[:, 0] + random_rows(5000, 1, seed=1)[:, 0] / 9 + true
    curve = curve_points(values, true)
    assert curve is not None
    right, wrong = (torch.tensor([0, *curve[f"{name}_positives"]]).double() for name in ("true", "false"))
    assert 400 < len(right) <= MAX_POINTS + 1
    assert (right[-1], wrong[-1]) == (num_positive, 5000 - num_positive)
    area = float(torch.trapezoid(right / right[-1], wrong / wrong[-1]))
    assert area == pytest.approx(sklearn.roc_auc_score(true, values), abs=2e-3)


def test_many_classes_have_one_curve_and_no_matrix() -> None:
    y, logits = torch.arange(200) % 65, random_rows(200, 65)
    (curve,) = threshold_curves(logits, y) or []
    assert curve["class"] == "all"
    assert (curve["true_positives"][-1], curve["false_positives"][-1]) == (200, 200 * 64)
    assert counts_by_class(logits, y, "classes", 65).numel() == 0
    assert counts_by_class(logits[:, :64], y % 64, "classes", 64).sum() == 200


def scored_locally(group: Group, kind: str) -> dict[str, float | None]:
    """Plant an error: a rank scores only its own rows."""
    alone = Group()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group, "all_reduce", alone.all_reduce)
        return scored(group, kind, False)[0]


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


def report_of(name: str, size: int, out: Path) -> tuple[list[float], dict[str, Any]]:
    """Train, and return the validation losses and the counts of the best epoch."""
    options = {**OPTIONS, "epochs": 4, "eval_every": 2, "metrics": "accuracy,roc_auc", "chunks": 2}
    if name != "offload":
        del options["chunks"]
    run = train("sbm:vertices=90,degree=5,classes=3,features=6", workers=size, strategy=name, out=out, **options)
    (best,) = (line for line in run.records if line["kind"] == "best")
    assert best["epoch"] == run.summary["best_epoch"]
    return [line["val_loss"] for line in run.history if "val_loss" in line], best["splits"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*((name, 1) for name in EXACT), ("tensor", 3), ("hybrid", 2)])
def test_reports_are_equal_under_all_strategies(name: str, size: int, tmp_path: Path) -> None:
    losses, splits = report_of("single", 1, tmp_path / "single")
    assert len(losses) == 2
    assert splits.keys() == {"val", "test"}
    others, other_splits = report_of(name, size, tmp_path / name)
    assert others == pytest.approx(losses, abs=1e-9)
    assert other_splits == splits


def accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(1) == y).double().mean())


def loss(*_: Tensor) -> float:
    return 0.0


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
        ({"metrics": loss}, "metrics: weft has a built-in named loss"),
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
