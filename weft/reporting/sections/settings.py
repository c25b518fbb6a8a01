"""Section of a report about settings and seeds: which setting is the best, and the influence of each option."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from weft.reporting.page_parts import PageTable, Runs, Section
from weft.reporting.records import RunRecords, score_names
from weft.reporting.settings import settings_of

MIN_RUNS = 3
"""Smallest number of runs for which the section is shown; the overview compares two."""


def settings(runs: Runs) -> Section:
    """Return the section with the settings, the best first, and the mean score of each value of each option."""
    section = Section(name="settings", title="Settings and seeds")
    if len(runs) < MIN_RUNS:
        return dataclasses.replace(
            section, missing=dict.fromkeys((run.name for run in runs), "only for three runs or more")
        )
    score = next((name for run in runs for name in score_names(run.epochs) if name.startswith("val_")), "val_")
    ended = [run for run in runs if isinstance(run.summary.get(score), int | float)]
    missing = {run.name: "the run has no validation score yet" for run in runs if run not in ended}
    if not ended:
        return dataclasses.replace(section, missing=missing)
    sign = -1 if higher_is_better(ended, score) else 1
    test, title = score.replace("val_", "test_"), score.replace("_", " ")
    ranked = sorted(settings_of(ended), key=lambda setting: sign * statistics.fmean(_values(setting.runs, score)))
    rows = [
        [
            setting.name,
            str(len(setting.runs)),
            _spread(_values(setting.runs, score)),
            _spread(_values(setting.runs, test)),
            _spread([run.summary["loss"] for run in setting.runs]),
            ", ".join(str(run.summary["best_epoch"] + 1) for run in setting.runs),
        ]
        for setting in ranked
    ]
    head = ["setting", "runs", title, test.replace("_", " "), "last loss", "best epoch"]
    best = min(ended, key=lambda run: sign * run.summary[score])
    caption = (
        f"Settings by {title}, the best first: mean +- standard deviation over the seeds. "
        f"The best run is {best.name} ({best.summary[score]:.4f})"
    )
    tables = [PageTable(caption=caption, head=head, rows=rows)]
    if influences := _influences(ended, score, sign):
        head = ["option", "value", "runs", f"{title}, mean", f"{title}, best"]
        caption = f"Influence of each option: {title} of all runs with a value"
        tables.append(PageTable(caption=caption, head=head, rows=influences))
    return dataclasses.replace(section, parts=tables, missing=missing)


def higher_is_better(runs: Runs, score: str) -> bool:
    """Return False if the best epochs of the runs have the lowest validation scores, as for errors.

    Args:
        runs: Finished runs.
        score: Name of the score.
    """
    return all(
        run.summary[score] >= line[score]
        for run in runs
        for line in run.epochs
        if isinstance(line.get(score), int | float)
    )


def _influences(runs: Sequence[RunRecords], score: str, sign: int) -> list[list[str]]:
    """Return a row for each value of each option that varies, with the mean and the best score of its runs."""
    rows = []
    for name in (spec.name for spec in dataclasses.fields(runs[0].config)):
        by_value: dict[str, list[RunRecords]] = {}
        for run in runs:
            by_value.setdefault(str(getattr(run.config, name)), []).append(run)
        if len(by_value) > 1 and name != "seed":
            for value, group in by_value.items():
                scores = _values(group, score)
                best = min(scores, key=lambda number: sign * number)
                rows.append([name, value, str(len(group)), _spread(scores), f"{best:.4f}"])
    return rows


def _values(runs: Sequence[RunRecords], name: str) -> list[float]:
    """Return a number of the summaries of some runs, where it is recorded."""
    return [run.summary[name] for run in runs if isinstance(run.summary.get(name), int | float)]


def _spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation as a text."""
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else "-"
    return f"{statistics.fmean(values):.4f} +- {statistics.stdev(values):.4f}"
