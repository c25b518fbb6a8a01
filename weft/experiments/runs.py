"""Several runs as one table: those below a folder, of a comparison, or of a sweep."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.config.config import OPTIONS
from weft.reporting.write import read_runs, write_report
from weft.training.run import Run
from weft.utils.errors import InputError, unknown
from weft.utils.notebook import rows_table
from weft.utils.optional_packages import import_extra

LOWER_IS_BETTER = ("mse", "mae", "loss", "seconds")
"""Ends of the names of columns of which the lowest value is the best."""


class Runs(dict[str, Run]):
    """Runs by name, which a notebook shows as a table."""

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Columns of the table by name: options that differ between the runs, and the numbers of their summaries.

        Scores belong to the epoch with the best validation score, and `epoch_seconds` is the median of the training
        epochs. None: the run has no such number, or has not ended.
        """
        configs, numbers = [run.config for run in self.values()], [_numbers(run) for run in self.values()]
        options = {name: [getattr(config, name) for config in configs] for name in OPTIONS}
        differing = {name: values for name, values in options.items() if any(value != values[0] for value in values)}
        names = dict.fromkeys(name for entry in numbers for name in entry)
        return differing | {name: [entry.get(name) for entry in numbers] for name in names}

    def to_pandas(self) -> Any:
        """Return the table as a pandas.DataFrame with a row for each run; see `columns`.

        Raises:
            InputError: `weft[tables]` is not installed.
        """
        return import_extra("pandas", "to_pandas").DataFrame(self.columns, index=list(self))

    def best(self, score: str = "") -> Run:
        """Return the run with the best value of a score: the highest, or the lowest of an error, a loss or a time.

        Args:
            score: Name of a column. Default: the first score on validation data.

        Raises:
            InputError: No run has this score.
        """
        numbers = {name: _numbers(run) for name, run in self.items()}
        names = dict.fromkeys(name for entry in numbers.values() for name in entry)
        score = score or next((name for name in names if name.startswith("val_")), "val_")
        if score not in names:
            raise unknown("score", score, names)
        choose = min if score.endswith(LOWER_IS_BETTER) else max
        return self[choose((name for name in numbers if score in numbers[name]), key=lambda name: numbers[name][score])]

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        columns = {"run": list(self), **self.columns}
        return rows_table(f"{len(self):,} runs", {name: list(map(_text, values)) for name, values in columns.items()})


def _numbers(run: Run) -> dict[str, float]:
    """Return the numbers of a run's summary. Empty: it has not ended."""
    return {name: value for name, value in run.summary.items() if isinstance(value, int | float)}


def _text(value: Any) -> str:
    """Return the text of a cell."""
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def runs(folder: str | Path = "runs") -> Runs:
    """Return all runs in a folder and its subfolders, by their paths in it. Runs that were stopped are included.

    Args:
        folder: The folder.

    Raises:
        InputError: The folder contains no run, or the files of a run are damaged.
    """
    root = Path(folder)
    folders = [path.parent for path in sorted(root.rglob("metrics.jsonl")) if (path.parent / "config.toml").exists()]
    if not folders:
        raise InputError(f"{root} contains no run: give the folder of runs")
    return Runs({str(path.relative_to(root)): Run.open(path) for path in folders})


def report(
    runs: Run | str | Path | Iterable[Run | str | Path] | Runs, out: str | Path, *, overwrite: bool = False
) -> Path:
    """Write a report of one or several runs: a page that needs no network. See docs/report.md.

    Args:
        runs: A run or its folder, several of them, or a table of runs.
        out: File to write, .html.
        overwrite: Replace an existing file.

    Returns:
        The file.

    Raises:
        InputError: A folder has no run, the file exists, or `weft[report]` is not installed.
    """
    if isinstance(runs, Run | str | Path):
        runs = [runs]
    entries = runs.values() if isinstance(runs, Runs) else runs
    folders = [entry.folder if isinstance(entry, Run) else Path(entry) for entry in entries]
    write_report(read_runs(folders), Path(out), overwrite=overwrite)
    return Path(out)
