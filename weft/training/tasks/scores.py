"""Metrics of vertices: some from sums, which ranks add up, some from all scored rows, which are gathered."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.config.config import TaskOptions
from weft.data import Labels
from weft.training.custom_functions import (
    NO_FUNCTIONS,
    REGISTERED,
    OwnFunctions,
    RowsMetric,
    errors_from,
    require_new_name,
)
from weft.training.tasks.link_losses import LINK_LOSSES
from weft.training.tasks.losses import LOSSES, output_kind, values_of
from weft.training.tasks.ranking import auc
from weft.utils.entry_points import load_entry_point
from weft.utils.errors import InputError, unknown

SPLITS = ("train", "val", "test")
LINK_METRICS = ("auc", "mrr", "hits@10", "recall@20", "ndcg@20", "hit_rate@20")
"""Metrics of link prediction, with an example of those that have a number; the first is the default."""
AT_K = re.compile(r"(hits|recall|ndcg|hit_rate)@([1-9][0-9]{0,3})")
"""Pattern of metrics of link prediction that have a number: name and number."""
DEFAULT_METRICS = {"classes": ("accuracy",), "labels": ("micro_f1",), "values": ("mse", "mae", "r2")}
"""Default metrics for each kind of outputs."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Score of the rows of a split, computed from sums over rows or from all rows."""

    name: str
    """Name of the metric, without the split."""
    sums: Callable[[Tensor, Tensor], Tensor] | None
    """Returns float64 sums over rows, given logits [k, C] and labels; ranks and blocks add them. None: all rows are
    needed at once."""
    score: Callable[..., Any]
    """Returns the score, or None, given the sums over all rows, or all logits and labels if `sums` is None."""
    lower_is_better: bool = False
    """True if a lower score is better."""
    upper_bound: float = math.inf
    """Largest possible score."""
    splits: tuple[str, ...] = SPLITS
    """Splits to score."""
    for_report: bool = False
    """True if `score` returns no number, but JSON values for the report of the best epoch."""


def predicted(logits: Tensor, kind: str) -> Tensor:
    """Return the predicted classes, [k], or for several labels whether each is predicted, bool [k, C].

    Args:
        logits: Logits, [k, C].
        kind: 'classes' or 'labels', as `output_kind` returns it.
    """
    if kind == "labels":
        return logits > 0
    return logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()


def one_hot(classes: Tensor, num_classes: int) -> Tensor:
    """Return classes [k] in one-hot form, bool [k, C]. Several labels [k, C] already have this form.

    Args:
        classes: Classes [k], or labels [k, C].
        num_classes: Number of classes, C.
    """
    return classes > 0.5 if classes.dim() == 2 else classes[:, None] == torch.arange(num_classes, device=classes.device)


def correct(logits: Tensor, y: Tensor, kind: str) -> Tensor:
    """Return the number of correct rows (correct in all labels) and the number of rows, [2].

    Args:
        logits: Logits, [k, C].
        y: Labels, [k] or [k, C].
        kind: 'classes' or 'labels', as `output_kind` returns it.
    """
    same = predicted(logits, kind) == y
    same = same.all(1) if kind == "labels" else same
    return torch.stack([same.sum(), torch.ones_like(same).sum()])


def confusion(logits: Tensor, y: Tensor, kind: str) -> Tensor:
    """Return the numbers of true positives, false positives and false negatives of each class, [3, C].

    Args:
        logits: Logits, [k, C].
        y: Labels, [k] or [k, C].
        kind: 'classes' or 'labels', as `output_kind` returns it.
    """
    num_classes = max(logits.shape[1], 2) if kind == "classes" else logits.shape[1]
    positive, true = (one_hot(values, num_classes) for values in (predicted(logits, kind), y))
    return torch.stack([(positive & true).sum(0), (positive & ~true).sum(0), (~positive & true).sum(0)])


def ratio(sums: Tensor) -> float | None:
    """Return the quotient of two sums, or None if the second is 0."""
    return float(sums[0] / sums[1]) if sums[1] else None


def micro_f1(sums: Tensor) -> float | None:
    """Return 2 TP / (2 TP + FP + FN) over all classes together, from `confusion`."""
    right, wrong = 2 * sums[0].sum(), sums[1:].sum()
    return ratio(torch.stack([right, right + wrong]))


def macro_f1(sums: Tensor, kind: str) -> float | None:
    """Return the mean over classes of 2 TP / (2 TP + FP + FN).

    Args:
        sums: True positives, false positives and false negatives of each class, [3, C].
        kind: 'classes' (one class per vertex): classes that are neither present nor predicted are left out of the
            mean. 'labels' (several labels per vertex): such a label counts as 0.
    """
    right, all_of = 2 * sums[0], 2 * sums[0] + sums[1] + sums[2]
    scores = right / all_of.clamp(min=1)
    scores = scores[all_of > 0] if kind == "classes" else scores
    return float(scores.mean()) if len(scores) else None


def squares(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the sum of squared errors and their number, [2].

    Args:
        outputs: Predicted values, [k, T].
        y: True values, [k] or [k, T].
    """
    errors = values_of(y, outputs.double()) - outputs
    return torch.stack([errors.square().sum(), torch.ones_like(errors).sum()])


def absolutes(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the sum of absolute errors and their number, [2].

    Args:
        outputs: Predicted values, [k, T].
        y: True values, [k] or [k, T].
    """
    errors = values_of(y, outputs.double()) - outputs
    return torch.stack([errors.abs().sum(), torch.ones_like(errors).sum()])


def r2(outputs: Tensor, y: Tensor) -> float | None:
    """Return the coefficient of determination, 1 - sum e^2 / sum (y - mean y)^2, as a mean over the T values.

    Args:
        outputs: Predicted values, [k, T].
        y: True values, [k] or [k, T].

    Returns:
        None if one of the T values is constant.
    """
    # The squared errors e^2 are divided by the squared deviations of the true values from their mean.
    true = values_of(y, outputs.double())
    spread = (true - true.mean(0)).square().sum(0)
    return float((1 - (true - outputs).square().sum(0) / spread).mean()) if spread.all() else None


def binary_classifiers(logits: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return scores [k] and truth values, bool [k], of each binary classifier that logits contain.

    Two classes are one classifier. Otherwise, each class (by its softmax) or each label is a classifier of its own.

    Args:
        logits: Logits, [k, C].
        y: Classes [k], or labels [k, C].
    """
    logits = logits.double()
    if y.dim() == 1 and logits.shape[1] <= 2:
        return [(logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0], y > 0)]
    columns = logits if y.dim() == 2 else logits.softmax(1)
    return list(zip(columns.t(), one_hot(y, logits.shape[1]).t(), strict=True))


def over_classes(binary_score: Callable[[Tensor, Tensor], float | None]) -> Callable[[Tensor, Tensor], float | None]:
    """Extend a score of binary classifiers to logits [k, C], by its mean over the classifiers that have one.

    Args:
        binary_score: Returns a score, or None, given scores [k] and truth values [k].
    """

    def score(logits: Tensor, y: Tensor) -> float | None:
        class_scores = [
            class_score
            for column, is_class in binary_classifiers(logits, y)
            if (class_score := binary_score(column, is_class)) is not None
        ]
        return sum(class_scores) / len(class_scores) if class_scores else None

    return score


def binary_auc(scores: Tensor, true: Tensor) -> float | None:
    """Return the probability that a positive row scores higher than a negative one; ties count half.

    Args:
        scores: Score of each row, [k].
        true: Truth value of each row, bool [k].

    Returns:
        None if there are no positive or no negative rows.
    """
    return auc(scores[true], scores[~true]) if true.any() and not true.all() else None


def counts_by_threshold(scores: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of true and of false positives for each threshold, from the highest, int64 [t].

    Scores that are equal in float32 share a threshold, so that rounding does not break ties.

    Args:
        scores: Score of each row, [k].
        true: Truth value of each row, bool [k].
    """
    # Sort by falling score. The counts at a threshold are those up to the last of its tied scores.
    scores = scores.float()
    order = scores.argsort(descending=True, stable=True)
    is_last_tie = torch.ones(len(order), dtype=torch.bool, device=scores.device)
    is_last_tie[:-1] = scores[order].diff() != 0
    true_positives = true[order].cumsum(0)[is_last_tie]
    return true_positives, is_last_tie.nonzero().view(-1) + 1 - true_positives


def binary_average_precision(scores: Tensor, true: Tensor) -> float | None:
    """Return the sum of precision times increase of recall over falling thresholds; see `counts_by_threshold`.

    Args:
        scores: Score of each row, [k].
        true: Truth value of each row, bool [k].

    Returns:
        None if there are no positive or no negative rows.
    """
    if not true.any() or true.all():
        return None
    true_positives, false_positives = (counts.double() for counts in counts_by_threshold(scores, true))
    precision = true_positives / (true_positives + false_positives)
    gained = true_positives.diff(prepend=true_positives.new_zeros(1))
    return float((precision * gained).sum() / true_positives[-1])


def metrics_of(kind: str) -> dict[str, Metric]:
    """Return the built-in metrics for a kind of outputs, by name."""
    if kind == "values":
        metrics = [
            Metric(name="mse", sums=squares, score=ratio, lower_is_better=True),
            Metric(name="mae", sums=absolutes, score=ratio, lower_is_better=True),
            Metric(name="r2", sums=None, score=r2, upper_bound=1),
        ]
    else:
        metrics = [
            Metric(name="accuracy", sums=lambda logits, y: correct(logits, y, kind), score=ratio, upper_bound=1),
            Metric(name="micro_f1", sums=lambda logits, y: confusion(logits, y, kind), score=micro_f1, upper_bound=1),
            Metric(
                name="macro_f1",
                sums=lambda logits, y: confusion(logits, y, kind),
                score=lambda sums: macro_f1(sums, kind),
                upper_bound=1,
            ),
            Metric(name="roc_auc", sums=None, score=over_classes(binary_auc), upper_bound=1),
            Metric(name="average_precision", sums=None, score=over_classes(binary_average_precision), upper_bound=1),
        ]
    return {metric.name: metric for metric in metrics}


REPORT_METRICS = ("loss", "by_class", "by_label", "by_threshold")
"""Names of metrics that runs compute without `--metrics`; see `report_metrics`."""
ALL_METRICS = dict.fromkeys((*metrics_of("classes"), *metrics_of("values"), *LINK_METRICS, *REPORT_METRICS))
"""Names of all built-in metrics."""


def with_registered(functions: OwnFunctions, config: TaskOptions) -> OwnFunctions:
    """Return the user-defined functions of a run, with the extensions that its configuration names.

    Args:
        functions: Functions that the caller passed.
        config: Options of the task, whose loss and metrics may be registered or declared by an installed package.

    Raises:
        InputError: An extension cannot be imported.
    """
    loss = functions.loss or find_extension("loss", config.loss, (*LOSSES, *LINK_LOSSES))
    names = [name for name in config.metrics.split(",") if name not in functions.metrics and not AT_K.fullmatch(name)]
    extensions = {name: find_extension("metric", name, ALL_METRICS) for name in names}
    metrics = {name: metric for name, metric in extensions.items() if metric is not None}
    return replace(functions, loss=loss, metrics={**metrics, **functions.metrics})


def find_extension(kind: str, name: str, builtins: Collection[str]) -> Any | None:
    """Return a loss or metric that was registered or that an installed package declares, or None.

    Args:
        kind: "loss" or "metric".
        name: Its name.
        builtins: Names of weft.
    """
    return REGISTERED[kind].get(name) or load_entry_point(kind, name, builtins)


def metric_names(config: TaskOptions, labels: Labels) -> list[str]:
    """Return the names of a run's metrics. The validation score of the first one chooses the best weights.

    Args:
        config: Options of the task.
        labels: The labels.

    Raises:
        InputError: A metric is named twice.
    """
    default = LINK_METRICS[:1] if config.task == "link" else DEFAULT_METRICS[output_kind(config, labels)]
    names = config.metrics.split(",") if config.metrics else list(default)
    if len(set(names)) < len(names):
        raise InputError(f"--metrics {config.metrics}: give different names, separated by commas")
    return names


def values_of_k(metrics: str, *names: str) -> list[int]:
    """Return the distinct numbers K of metrics such as recall@K, ascending.

    Args:
        metrics: Names of metrics, separated by commas.
        *names: Names of the metrics to select, without @K.
    """
    matches = [AT_K.fullmatch(metric) for metric in metrics.split(",")]
    return sorted({int(match[2]) for match in matches if match and match[1] in names})


def compares_ranks(metrics: str) -> bool:
    """Return whether metrics, separated by commas, contain mrr or hits@K, which need the rank of each link."""
    return "mrr" in metrics.split(",") or bool(values_of_k(metrics, "hits"))


def make_metrics(config: TaskOptions, labels: Labels, functions: OwnFunctions = NO_FUNCTIONS) -> list[Metric]:
    """Return the metrics of a run.

    Args:
        config: Options of the task.
        labels: The labels.
        functions: User-defined functions of the run.

    Raises:
        InputError: A name is unknown, or the metric does not suit the task or the outputs.
    """
    if config.task == "link":
        valid = [*LINK_METRICS, *filter(AT_K.fullmatch, metric_names(config, labels))]
        metrics = {name: Metric(name=name, sums=None, score=lambda *_: None, upper_bound=1) for name in valid}
        if functions.metrics:
            raise InputError(f"metrics: {next(iter(functions.metrics))} has no effect under task link: leave it out")
    else:
        metrics = metrics_of(output_kind(config, labels))
    for name in functions.metrics:
        require_new_name("metrics", name, ALL_METRICS)
    metrics |= {name: custom_metric(name, function) for name, function in functions.metrics.items()}
    names = metric_names(config, labels)
    for name in names:
        if name not in metrics:
            raise unknown("--metrics", name, metrics)
    return [metrics[name] for name in names]


def custom_metric(name: str, function: RowsMetric) -> Metric:
    """Return the metric of a user-defined function.

    Higher is better unless the function has an attribute `higher_is_better = False`, as metrics of torchmetrics may.

    Args:
        name: Name of the score.
        function: The function, of logits and labels.
    """

    def score(logits: Tensor, y: Tensor) -> float | None:
        with errors_from(f"metric {name}"):
            return float(function(logits, y))

    lower = getattr(function, "higher_is_better", True) is False
    return Metric(name=name, sums=None, score=score, lower_is_better=lower)
