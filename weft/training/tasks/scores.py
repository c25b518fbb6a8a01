"""Metrics of scored rows: of sums, which ranks add, or of all rows, which are brought together for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.config.config import Config
from weft.data import Graph
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, RowsMetric, errors_from, require_new_name
from weft.training.tasks.losses import output_kind, values_of
from weft.training.tasks.ranking import auc
from weft.utils.errors import InputError, unknown

LINK_METRICS = ("auc", "mrr")
DEFAULT = {"classes": ("accuracy",), "labels": ("micro_f1",), "values": ("mse", "mae", "r2")}
"""The scores of each kind of outputs."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A score of the rows of a split. `score` is of the sums over all of them, or of all logits and labels."""

    name: str
    sums: Callable[[Tensor, Tensor], Tensor] | None
    """What ranks and blocks of rows add, float64, from logits [k, C] and labels; None: the rows must be together."""
    score: Callable[..., float | None]
    lower_is_better: bool = False
    most: float = math.inf
    """The best that there can be."""


def predicted(logits: Tensor, kind: str) -> Tensor:
    """The classes [k], or whether a vertex has each of several labels: bool [k, C]."""
    if kind == "labels":
        return logits > 0
    return logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()


def one_hot(classes: Tensor, num_classes: int) -> Tensor:
    """Classes [k] as bool [k, C]; several labels [k, C] as they are."""
    return classes > 0.5 if classes.dim() == 2 else classes[:, None] == torch.arange(num_classes, device=classes.device)


def correct(logits: Tensor, y: Tensor, kind: str) -> Tensor:
    """Rows that are right, in all labels, and rows: [2]."""
    same = predicted(logits, kind) == y
    same = same.all(1) if kind == "labels" else same
    return torch.stack([same.sum(), torch.ones_like(same).sum()])


def confusion(logits: Tensor, y: Tensor, kind: str) -> Tensor:
    """TP, FP and FN of each class: [3, C]."""
    num_classes = max(logits.shape[1], 2) if kind == "classes" else logits.shape[1]
    found, true = (one_hot(one, num_classes) for one in (predicted(logits, kind), y))
    return torch.stack([(found & true).sum(0), (found & ~true).sum(0), (~found & true).sum(0)])


def ratio(sums: Tensor) -> float | None:
    """Of two sums; None where the second is none."""
    return float(sums[0] / sums[1]) if sums[1] else None


def micro_f1(sums: Tensor) -> float | None:
    """2 TP / (2 TP + FP + FN) of all classes together."""
    right, wrong = 2 * sums[0].sum(), sums[1:].sum()
    return ratio(torch.stack([right, right + wrong]))


def macro_f1(sums: Tensor, kind: str) -> float | None:
    """The mean over classes of 2 TP / (2 TP + FP + FN), 0 where that is 0 / 0; of classes, over those that occur."""
    right, all_of = 2 * sums[0], 2 * sums[0] + sums[1] + sums[2]
    scores = right / all_of.clamp(min=1)
    scores = scores[all_of > 0] if kind == "classes" else scores
    return float(scores.mean()) if len(scores) else None


def squares(outputs: Tensor, y: Tensor) -> Tensor:
    """The sum of squared errors, and their number: [2]."""
    errors = values_of(y, outputs.double()) - outputs
    return torch.stack([errors.square().sum(), torch.ones_like(errors).sum()])


def absolutes(outputs: Tensor, y: Tensor) -> Tensor:
    """The sum of absolute errors, and their number: [2]."""
    errors = values_of(y, outputs.double()) - outputs
    return torch.stack([errors.abs().sum(), torch.ones_like(errors).sum()])


def r2(outputs: Tensor, y: Tensor) -> float | None:
    """1 - sum e^2 / sum (y - mean y)^2, a mean over the T values; None where one of them is the same everywhere."""
    true = values_of(y, outputs.double())
    spread = (true - true.mean(0)).square().sum(0)
    return float((1 - (true - outputs).square().sum(0) / spread).mean()) if spread.all() else None


def over_classes(of_one: Callable[[Tensor, Tensor], float | None]) -> Callable[[Tensor, Tensor], float | None]:
    """A score of scores [k] as one of logits [k, C]: of the second of two classes, else a mean of one against the rest.

    Over those classes that some rows have and others have not. Several classes are compared by their softmax.
    """

    def score(logits: Tensor, y: Tensor) -> float | None:
        logits = logits.double()
        if y.dim() == 1 and logits.shape[1] <= 2:
            return of_one(logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0], y > 0)
        columns = logits if y.dim() == 2 else logits.softmax(1)
        true = one_hot(y, logits.shape[1])
        found = [
            one
            for column, one_y in zip(columns.t(), true.t(), strict=True)
            if (one := of_one(column, one_y)) is not None
        ]
        return sum(found) / len(found) if found else None

    return score


def binary_auc(scores: Tensor, true: Tensor) -> float | None:
    """The chance that a row [k] which is true has a higher score than another, ties half; None without both."""
    return auc(scores[true], scores[~true]) if true.any() and not true.all() else None


def binary_average_precision(scores: Tensor, true: Tensor) -> float | None:
    """The sum of precision times the rise of recall over falling thresholds; None without both.

    Scores that are the same in float32, in which rounding breaks no ties, share a threshold.
    """
    if not true.any() or true.all():
        return None
    scores = scores.float()
    order = scores.argsort(descending=True, stable=True)
    found, last = true[order].double().cumsum(0), torch.ones(len(order), dtype=torch.bool, device=scores.device)
    last[:-1] = scores[order].diff() != 0
    found, number = found[last], (last.nonzero().view(-1) + 1).double()
    gained = found.diff(prepend=found.new_zeros(1))
    return float((found / number * gained).sum() / found[-1])


def metrics_of(kind: str) -> dict[str, Metric]:
    """The metrics of one kind of outputs, by name."""
    if kind == "values":
        made = [
            Metric(name="mse", sums=squares, score=ratio, lower_is_better=True),
            Metric(name="mae", sums=absolutes, score=ratio, lower_is_better=True),
            Metric(name="r2", sums=None, score=r2, most=1),
        ]
    else:
        made = [
            Metric(name="accuracy", sums=lambda logits, y: correct(logits, y, kind), score=ratio, most=1),
            Metric(name="micro_f1", sums=lambda logits, y: confusion(logits, y, kind), score=micro_f1, most=1),
            Metric(
                name="macro_f1",
                sums=lambda logits, y: confusion(logits, y, kind),
                score=lambda sums: macro_f1(sums, kind),
                most=1,
            ),
            Metric(name="roc_auc", sums=None, score=over_classes(binary_auc), most=1),
            Metric(name="average_precision", sums=None, score=over_classes(binary_average_precision), most=1),
        ]
    return {metric.name: metric for metric in made}


ALL_METRICS = dict.fromkeys((*metrics_of("classes"), *metrics_of("values"), *LINK_METRICS))
"""The names of all metrics of weft's own."""


def metric_names(config: Config, graph: Graph) -> list[str]:
    """The metrics of a run, of which the first chooses the best weights. InputError where one is named twice."""
    default = LINK_METRICS[:1] if config.task == "link" else DEFAULT[output_kind(config, graph)]
    names = config.metrics.split(",") if config.metrics else list(default)
    if len(set(names)) < len(names):
        raise InputError(f"--metrics {config.metrics}: give different names, separated by commas")
    return names


def make_metrics(config: Config, graph: Graph, own: OwnFunctions = NO_FUNCTIONS) -> list[Metric]:
    """The metrics of a run. InputError for an unknown name, and one that is not for the task or the outputs."""
    if config.task == "link":
        known = {name: Metric(name=name, sums=None, score=lambda *_: None, most=1) for name in LINK_METRICS}
        if own.metrics:
            raise InputError(f"metrics: {next(iter(own.metrics))} has no effect under task link: leave it out")
    else:
        known = metrics_of(output_kind(config, graph))
    for name in own.metrics:
        require_new_name("metrics", name, ALL_METRICS)
    known |= {name: custom_metric(name, function) for name, function in own.metrics.items()}
    names = metric_names(config, graph)
    for name in names:
        if name not in known:
            raise unknown("--metrics", name, known)
    return [known[name] for name in names]


def custom_metric(name: str, function: RowsMetric) -> Metric:
    """A person's metric; higher is better unless it has `higher_is_better = False`, as those of torchmetrics may."""

    def score(logits: Tensor, y: Tensor) -> float | None:
        with errors_from(f"metric {name}"):
            return float(function(logits, y))

    lower = getattr(function, "higher_is_better", True) is False
    return Metric(name=name, sums=None, score=score, lower_is_better=lower)
