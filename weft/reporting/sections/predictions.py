"""Section of a report about the predictions of the best epoch: confusion matrix, scores by class, curves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from weft.reporting import figures
from weft.reporting.figures import Data, FigureGroup
from weft.reporting.page_parts import Figure, Runs, Section
from weft.reporting.records import RecordLine, RunRecords
from weft.utils.errors import printable

MAX_RUNS = 4
"""Largest number of runs for which the section is shown."""
DIGITS = 6
"""Decimal digits of ratios."""
NOT_FINISHED = "the run has not finished"
NO_COUNTS = "it predicts values or has more than 64 classes, or an earlier version of weft recorded it"
NO_CURVES = "ROC and precision-recall curves need --metrics roc_auc or average_precision"


def predictions(runs: Runs) -> Section:
    """Return the section with confusion matrix, scores by class, and curves over the thresholds."""
    section = Section(name="predictions", title="Predictions of the best epoch")
    if len(runs) > MAX_RUNS:
        reason = f"only for up to {MAX_RUNS} runs"
        return dataclasses.replace(section, missing=dict.fromkeys((run.name for run in runs), reason))
    parts, curves, missing = [], [], {}
    for number, run in enumerate(runs):
        by_class = list(_by_class(run, number))
        of_run = list(_curves(run, several=len(runs) > 1))
        parts += by_class
        curves += of_run
        if not run.summary:
            missing[run.name] = NOT_FINISHED
        elif not by_class and not of_run:
            missing[run.name] = NO_COUNTS
        elif not of_run:
            missing[run.name] = NO_CURVES
    parts += _threshold_figures(curves) if curves else []
    return dataclasses.replace(section, parts=parts, missing=missing)


def _by_class(run: RunRecords, number: int) -> Iterator[Figure]:
    """Yield the confusion matrix and the scores by class of a run, if they are recorded.

    Args:
        run: Records of the run.
        number: Number of the run in the report.
    """
    rows = "edges" if run.config.task == "edge" else "vertices"
    matrices = {split: counts["by_class"] for split, counts in run.best_splits.items() if "by_class" in counts}
    labels = {split: counts["by_label"] for split, counts in run.best_splits.items() if "by_label" in counts}
    names = _class_names(run)
    if matrices:
        groups = [_matrix_cells(split, matrix, names) for split, matrix in matrices.items()]
        data = Data(name=f"confusion-{number}", groups=groups)
        yield Figure(
            name=data.name,
            title=f"Confusion matrix: {run.name}",
            caption=_describe_matrix(data, rows),
            data=data,
            chart=figures.confusion(data, names),
        )
    totals = labels | {split: _positives(matrix) for split, matrix in matrices.items()}
    if totals:
        groups = [_class_scores(split, positives, names) for split, positives in totals.items()]
        data = Data(name=f"by-class-{number}", groups=groups)
        yield Figure(
            name=data.name,
            title=f"Scores by class: {run.name}",
            caption=f"F1 of each class. The table also has precision, recall, and the number of {rows} of the class.",
            data=data,
            chart=figures.grouped_bars(data, "f1", "F1", by="split"),
        )


def _class_names(run: RunRecords) -> list[str]:
    """Return the names of the counted classes in the tables of the graph, or their numbers if these have none."""
    counts = next(iter(run.best_splits.values()), {})
    numbers = range(len(counts.get("by_class") or counts.get("by_label", [[]])[0]))
    names = run.config_line.get("graph", {}).get("schema", {}).get("class_names", [])
    return [printable(str(name)) for name in (names if len(names) == len(numbers) else numbers)]


def _matrix_cells(split: str, matrix: Sequence[Sequence[int]], names: Sequence[str]) -> FigureGroup:
    """Return the cells of a confusion matrix that are not 0, with their shares of the true class.

    Args:
        split: The split.
        matrix: Number of rows by true and predicted class, [C, C].
        names: Names of the classes, [C].
    """
    cells = [
        {"true": true, "predicted": predicted, "count": count, "share": _ratio(count, sum(row))}
        for true, row in zip(names, matrix, strict=True)
        for predicted, count in zip(names, row, strict=True)
        if count
    ]
    columns = {field: [cell[field] for cell in cells] for field in ("true", "predicted", "count", "share")}
    return FigureGroup(shared={"split": split}, columns=columns)


def _describe_matrix(data: Data, rows: str) -> str:
    """Return the share of correct rows in words, and the most frequent mistake, for the split that is shown first."""
    cells = [cell for cell in data.rows() if cell["split"] == data.default_split]
    mistakes = [cell for cell in cells if cell["true"] != cell["predicted"]]
    total, wrong = (sum(cell["count"] for cell in summed) for summed in (cells, mistakes))
    text = f"Split {data.default_split}: {total - wrong:,} of {total:,} {rows} are predicted correctly (the diagonal)."
    if mistakes:
        worst = max(mistakes, key=lambda cell: cell["count"])
        text += f" The most frequent mistake is {worst['predicted']} instead of {worst['true']} ({worst['count']:,})."
    return text


def _positives(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return true positives, false positives and false negatives of each class, [3, C], from a confusion matrix."""
    right = [row[number] for number, row in enumerate(matrix)]
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    return [
        right,
        [count - hits for count, hits in zip(predicted, right, strict=True)],
        [sum(row) - hits for row, hits in zip(matrix, right, strict=True)],
    ]


def _class_scores(split: str, positives: Sequence[Sequence[int]], names: Sequence[str]) -> FigureGroup:
    """Return precision, recall, F1 and number of rows of each class.

    Args:
        split: The split.
        positives: True positives, false positives and false negatives of each class, [3, C].
        names: Names of the classes, [C].
    """
    columns: dict[str, list[Any]] = {"label": list(names), "precision": [], "recall": [], "f1": [], "count": []}
    for right, wrong, missed in zip(*positives, strict=True):
        columns["precision"].append(_ratio(right, right + wrong))
        columns["recall"].append(_ratio(right, right + missed))
        columns["f1"].append(_ratio(2 * right, 2 * right + wrong + missed))
        columns["count"].append(right + missed)
    return FigureGroup(shared={"split": split}, columns=columns)


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, DIGITS) if whole else None


def _curves(run: RunRecords, *, several: bool) -> Iterator[FigureGroup]:
    """Yield the points of each recorded curve, from no positives to all.

    Args:
        run: Records of the run.
        several: True if the report has several runs: then only the curve of all classes together, if it is recorded.
    """
    for split, counts in run.best_splits.items():
        curves = counts.get("by_threshold", ())
        together = [curve for curve in curves if curve["class"] in (None, "all")]
        for curve in together if several and together else curves:
            right, wrong = [0, *curve["true_positives"]], [0, *curve["false_positives"]]
            precision = [_ratio(true, true + false) for true, false in zip(right[1:], wrong[1:], strict=True)]
            columns = {
                "place": [*range(len(right))],
                "true_positives": right,
                "false_positives": wrong,
                "recall": [_ratio(true, right[-1]) for true in right],
                "false_positive_rate": [_ratio(false, wrong[-1]) for false in wrong],
                "precision": [precision[0], *precision],
            }
            name = _curve_name(run, curve, several=several)
            yield FigureGroup(shared={"curve": name, "split": split}, columns=columns)


def _curve_name(run: RunRecords, curve: RecordLine, *, several: bool) -> str:
    """Return the name of a curve: its run, its class, or both where several runs have curves by class."""
    if curve["class"] is None:
        return run.name
    if curve["class"] == "all":
        return run.name if several else "all classes together"
    name = _class_names(run)[curve["class"]]
    return f"{run.name}, {name}" if several else name


def _threshold_figures(curves: Sequence[FigureGroup]) -> list[Figure]:
    """Return the ROC and the precision-recall figure.

    Args:
        curves: Points of each curve.
    """
    data = Data(name="thresholds", groups=curves)
    shown = [group for group in curves if group.shared["split"] == data.default_split]
    ends = {group.shared["curve"]: group.columns for group in shown}
    recalls = "; ".join(
        f"{name} {_best(points, 'recall', 'false_positive_rate', 0, 0.1):.3f}" for name, points in ends.items()
    )
    precisions = "; ".join(
        f"{name} {_best(points, 'precision', 'recall', 0.5, 1):.3f}" for name, points in ends.items()
    )
    return [
        Figure(
            name="roc",
            title="ROC curve",
            caption=f"Split {data.default_split}. Best recall at a false positive rate of at most 10 %: {recalls}. "
            "Dashed: random scores.",
            data=data,
            chart=figures.threshold_curves(data, "false_positive_rate", "recall"),
        ),
        Figure(
            name="precision-recall",
            title="Precision-recall curve",
            caption=f"Split {data.default_split}. Best precision at a recall of at least 50 %: {precisions}.",
            data=data,
            chart=figures.threshold_curves(data, "recall", "precision", steps=True),
        ),
    ]


def _best(points: dict[str, list[Any]], field: str, other: str, low: float, high: float) -> float:
    """Return the largest value of a field among the points whose other field is in a range."""
    best: float = max(value for value, bound in zip(points[field], points[other], strict=True) if low <= bound <= high)
    return best
