"""Data of the curves over the epochs: values, ends of the lines with their labels, and curves that coincide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from weft.reporting.figures import CURVE_PIXELS, Data, FigureGroup
from weft.reporting.page_parts import Runs
from weft.reporting.records import score_names
from weft.reporting.settings import Setting, settings_of

LABEL_PIXELS = 14
"""Smallest distance between the labels of two curves."""
COINCIDING_SHARE = 0.01
"""Largest difference of two curves that look like one, as a share of the range of all curves."""


LOSSES = {"train": "loss", "val": "val_loss"}
"""Name of the loss in the records, by split."""


def loss_data(runs: Runs) -> Data:
    """Return the training loss of each epoch, and the validation loss of those that were evaluated, by split."""
    settings = settings_of(runs)
    curves = [
        _curves_of(setting, {"split": split}, "loss", name) for setting in settings for split, name in LOSSES.items()
    ]
    groups = _with_labels(_over_seeds([seeds for seeds in curves if seeds], "loss"), "loss")
    return Data(name="epochs", groups=groups, shows_all=len(settings) == 1 and len(groups) > 1)


def epoch_data(runs: Runs, field: str) -> Data:
    """Return a number that every epoch has, such as `lr` or `seconds`.

    Args:
        runs: Records of the runs.
        field: Name of the number in the records.
    """
    curves = [_curves_of(setting, {}, field, field) for setting in settings_of(runs)]
    groups = _with_labels(_over_seeds([seeds for seeds in curves if seeds], field), field)
    return Data(name=f"epoch-{field}", groups=groups)


def score_data(runs: Runs) -> dict[str, Data]:
    """Return the values of each kind of score, such as accuracy, by split, in the epochs that were evaluated."""
    curves: dict[str, list[list[FigureGroup]]] = {}
    for setting in settings_of(runs):
        for name in dict.fromkeys(name for run in setting.runs for name in score_names(run.epochs)):
            split, _, kind = name.partition("_")
            if kind and (seeds := _curves_of(setting, {"split": split}, "value", name)):
                curves.setdefault(kind, []).append(seeds)
    return {
        kind: Data(name=f"scores-{number}", groups=_with_labels(_over_seeds(of_kind, "value"), "value"))
        for number, (kind, of_kind) in enumerate(curves.items())
    }


def _curves_of(setting: Setting, shared: dict[str, Any], field: str, name: str) -> list[FigureGroup]:
    """Return the curve of each seed of a setting, in the epochs that have the number.

    Epochs count from 1. `best` is true in the best epoch of a finished run.

    Args:
        setting: The setting.
        shared: Fields that name the curve, next to the run.
        field: Field of the curve.
        name: Name of the number in the records.
    """
    groups = []
    for run in setting.runs:
        if lines := [line for line in run.epochs if isinstance(line.get(name), int | float)]:
            epochs, best = [line["epoch"] for line in lines], run.summary.get("best_epoch")
            columns: dict[str, list[Any]] = {
                "epoch": [epoch + 1 for epoch in epochs],
                field: [finite(line[name]) for line in lines],
                "best": [epoch == best for epoch in epochs],
            }
            groups.append(FigureGroup(shared={"run": setting.name, **shared}, columns=columns))
    return groups


def _over_seeds(curves: Sequence[Sequence[FigureGroup]], field: str) -> list[FigureGroup]:
    """Return the mean over the seeds of each setting, in the epochs that all its seeds have.

    If a setting has several seeds, all curves get the ends of a band, such as `loss_low` and `loss_high`: the mean
    minus and plus the standard deviation, or None for a single seed.

    Args:
        curves: Curves of each setting, one for each seed.
        field: Field of the curves.
    """
    if all(len(seeds) == 1 for seeds in curves):
        return [seeds[0] for seeds in curves]
    groups = []
    for seeds in curves:
        rows = [{row["epoch"]: row for row in seed.rows()} for seed in seeds]
        epochs = sorted(set.intersection(*(set(by_epoch) for by_epoch in rows)))
        values = [[by_epoch[epoch][field] for by_epoch in rows] for epoch in epochs]
        means = [None if None in numbers else statistics.fmean(numbers) for numbers in values]
        spreads = [
            None if mean is None or len(numbers) == 1 else statistics.stdev(numbers)
            for mean, numbers in zip(means, values, strict=True)
        ]
        best = [len(rows) == 1 and rows[0][epoch]["best"] for epoch in epochs]
        columns: dict[str, list[Any]] = {"epoch": epochs, "best": best, field: means}
        for name, sign in ((f"{field}_low", -1), (f"{field}_high", 1)):
            columns[name] = [
                None if mean is None or spread is None else mean + sign * spread
                for mean, spread in zip(means, spreads, strict=True)
            ]
        groups.append(FigureGroup(shared=seeds[0].shared, columns=columns))
    return [group for group in groups if group.columns["epoch"]]


def describe(data: Data, field: str, text: Callable[[float], str] = lambda value: f"{value:.4g}") -> str:
    """Return a sentence for each curve that the figure shows first, with its first and its last value.

    Args:
        data: Curves.
        field: Field of the vertical axis.
        text: Function that formats a value.
    """
    sentences = []
    for group in data.groups:
        points = [
            (epoch, value)
            for epoch, value in zip(group.columns["epoch"], group.columns[field], strict=True)
            if value is not None
        ]
        split = group.shared.get("split", "")
        if points and data.default_split in ("all", split):
            (first, begin), (last, end) = points[0], points[-1]
            name = f"{group.shared['run']}, {split}" if data.shows_all else group.shared["run"]
            sentences.append(f"{name}: {text(begin)} in epoch {first}, {text(end)} in epoch {last}.")
    if any(f"{field}_low" in group.columns for group in data.groups):
        sentences.append("Lines of several seeds are their mean, with a band of one standard deviation.")
    return " ".join(sentences)


def _with_labels(groups: Sequence[FigureGroup], field: str) -> list[FigureGroup]:
    """Return curves with the fields that place their labels: `_last`, the last epoch, and the shift of the label.

    Shifts are in pixels upwards, `_loss` on a linear and `_loss_log` on a logarithmic axis. Curves of several runs are
    only shown together with those of the same split.
    """
    several = len({group.shared["run"] for group in groups}) > 1
    together: dict[str, list[FigureGroup]] = {}
    for group in groups:
        together.setdefault(group.shared.get("split", "") if several else "", []).append(group)
    shifts = {id(group): {"_last": group.columns["epoch"][-1]} for group in groups}
    for shown in together.values():
        for name, scale in ((f"_{field}", float), (f"_{field}_log", _log)):
            values = [[scale(value) for value in group.columns[field] if value is not None] for group in shown]
            for group, pixels in zip(shown, _spread(values), strict=True):
                shifts[id(group)][name] = pixels
    return [FigureGroup(shared=group.shared | shifts[id(group)], columns=group.columns) for group in groups]


def _log(value: float) -> float:
    return math.log(max(value, 1e-12))


def _spread(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the shift in pixels of the label at the end of each curve, so that no two labels overlap.

    Labels are pushed up from the lowest to the highest; those above the figure then push down what is below them.

    Args:
        curves: Values of each curve.
    """
    everything = [value for values in curves for value in values]
    low, high = min(everything, default=0.0), max(everything, default=0.0)
    ends = [CURVE_PIXELS * (values[-1] - low) / ((high - low) or 1.0) if values else 0.0 for values in curves]
    order = sorted(range(len(ends)), key=lambda number: ends[number])
    places, ceiling = list(ends), CURVE_PIXELS + 0.0
    for lower, upper in pairwise(order):
        places[upper] = max(places[upper], places[lower] + LABEL_PIXELS)
    for number in reversed(order):
        places[number] = min(places[number], ceiling)
        ceiling = places[number] - LABEL_PIXELS
    return [round(place - end, 1) for place, end in zip(places, ends, strict=True)]


def coinciding(data: Data, field: str) -> Iterator[str]:
    """Yield a sentence for each run whose curve looks like that of an earlier run.

    Args:
        data: Curves.
        field: Field of the vertical axis. For scores, only the split that the figure shows first is compared.
    """
    split = data.default_split
    curves = [group for group in data.groups if group.shared.get("split", "") == split]
    values = [value for group in curves for value in group.columns[field] if value is not None]
    limit = COINCIDING_SHARE * (max(values, default=0.0) - min(values, default=0.0))
    for number, later in enumerate(curves):
        for earlier in curves[:number]:
            difference = _difference(earlier.columns, later.columns, field)
            if difference <= limit:
                yield (
                    f"{later.shared['run']} coincides with {earlier.shared['run']} "
                    f"(largest difference {difference:.2g})."
                )
                break


def _difference(first: dict[str, list[Any]], second: dict[str, list[Any]], field: str) -> float:
    """Return the largest difference between two curves; infinite if they have different epochs or gaps."""
    if first["epoch"] != second["epoch"]:
        return math.inf
    pairs = list(zip(first[field], second[field], strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return math.inf
    return max((abs(a - b) for a, b in pairs if a is not None), default=math.inf)


def finite(value: Any) -> Any:
    """Return a value for JSON and charts: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
