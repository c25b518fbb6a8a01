"""Metrics that a run computes for its report: validation loss, counts of rows by class, and curves over thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.training.custom_functions import RowLoss
from weft.training.tasks.scores import Metric, binary_classifiers, confusion, counts_by_threshold, predicted, ratio

CURVE_METRICS = ("roc_auc", "average_precision")
"""Metrics that gather the scores of all rows. A run with one of them also records curves, which need the same rows."""
HELD_OUT = ("val", "test")
"""Splits of which a report shows counts."""
MAX_CLASSES = 64
"""Largest number of classes for which rows are counted by class."""
MAX_CURVES = 8
"""Largest number of classes or labels of which each has a curve."""
MAX_POINTS = 512
"""Largest number of points of a recorded curve."""


def report_metrics(kind: str, num_classes: int, loss: RowLoss, metrics: Sequence[Metric]) -> list[Metric]:
    """Return the metrics that a run computes for its report, in addition to those of `--metrics`.

    Curves need the scores of all rows, so they are only computed with a metric that gathers these.

    Args:
        kind: Kind of outputs, as `output_kind` returns it.
        num_classes: Number of classes or labels.
        loss: Loss of each row.
        metrics: The metrics of `--metrics`.
    """
    if kind == "values":
        return [mean_loss(loss)]
    by_class = Metric(
        name="by_class" if kind == "classes" else "by_label",
        sums=lambda logits, y: counts_by_class(logits, y, kind, num_classes),
        score=lambda sums: sums.long().tolist() or None,
        splits=HELD_OUT,
        for_report=True,
    )
    by_threshold = Metric(name="by_threshold", sums=None, score=threshold_curves, splits=HELD_OUT, for_report=True)
    gathers = any(metric.name in CURVE_METRICS for metric in metrics)
    return [mean_loss(loss), by_class, *([by_threshold] if gathers else [])]


def mean_loss(loss: RowLoss) -> Metric:
    """Return the metric `loss` of validation data: the mean of the losses of the rows.

    Args:
        loss: Loss of each row.
    """

    def sums(logits: Tensor, y: Tensor) -> Tensor:
        losses = (loss(logits, y) if len(y) else logits.new_zeros(0)).double()
        return torch.stack([losses.sum(), torch.ones_like(losses).sum()])

    return Metric(name="loss", sums=sums, score=ratio, lower_is_better=True, splits=("val",))


def curve_points(scores: Tensor, true: Tensor) -> dict[str, list[int]] | None:
    """Return true and false positives at up to MAX_POINTS thresholds, which give ROC and precision-recall curve.

    Args:
        scores: Score of each row, [k].
        true: Truth value of each row, bool [k].

    Returns:
        None if there are no positive or no negative rows.
    """
    if not true.any() or true.all():
        return None
    true_positives, false_positives = counts_by_threshold(scores, true)
    if len(true_positives) > MAX_POINTS:
        # Keep thresholds at equal distances along the ROC curve, where distance = share of true + of false positives.
        distance = true_positives / true_positives[-1].double() + false_positives / false_positives[-1].double()
        wanted = torch.linspace(0, 2, MAX_POINTS, dtype=distance.dtype, device=distance.device)
        points = torch.searchsorted(distance, wanted).clamp(max=len(distance) - 1).unique()
        true_positives, false_positives = true_positives[points], false_positives[points]
    return {"true_positives": true_positives.tolist(), "false_positives": false_positives.tolist()}


def threshold_curves(logits: Tensor, y: Tensor) -> list[dict[str, Any]] | None:
    """Return the curve of each binary classifier; see `curve_points`.

    Args:
        logits: Logits, [k, C].
        y: Classes [k], or labels [k, C].

    Returns:
        A curve of each class or label, up to MAX_CURVES (`class` is its number), and the micro-average of all (`class`
        'all'); for two classes, a single curve (`class` None). None: no classifier has positive and negative rows.
    """
    classifiers = binary_classifiers(logits, y)
    curves: list[tuple[int | str | None, Tensor, Tensor]] = []
    if len(classifiers) == 1:
        curves.append((None, *classifiers[0]))
    else:
        columns, true = zip(*classifiers, strict=True)
        curves.append(("all", torch.cat(columns), torch.cat(true)))
    if 1 < len(classifiers) <= MAX_CURVES:
        curves += [(number, *each) for number, each in enumerate(classifiers)]
    return [
        {"class": number, **points} for number, scores, is_class in curves if (points := curve_points(scores, is_class))
    ] or None


def counts_by_class(logits: Tensor, y: Tensor, kind: str, num_classes: int) -> Tensor:
    """Return numbers of rows by class, or an empty tensor for more than MAX_CLASSES.

    Args:
        logits: Logits, [k, C].
        y: Labels, [k] or [k, C].
        kind: 'classes' or 'labels', as `output_kind` returns it.
        num_classes: Number of classes or labels.

    Returns:
        For classes, the confusion matrix [C, C]: the true class is the row, the predicted one the column. For several
        labels per row: true positives, false positives and false negatives of each label, [3, C].
    """
    num_classes = max(num_classes, logits.shape[1], 2 if kind == "classes" else 1)
    if num_classes > MAX_CLASSES:
        return logits.new_zeros(0)
    if kind == "labels":
        return confusion(logits, y, kind)
    pairs = y * num_classes + predicted(logits, kind)
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
