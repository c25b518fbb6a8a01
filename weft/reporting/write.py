"""Read the runs of a report, and write it to a file, or its figures to a folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from weft.reporting.drawing import png, svg
from weft.reporting.page import WIDTH, figure_spec, figures_of, make_page, make_sections
from weft.reporting.page_parts import Figure
from weft.reporting.records import RunRecords
from weft.utils.errors import InputError, printable, readable
from weft.utils.files.file_writing import write_bytes, write_text

CONFIG = "config.toml"
"""File that the folder of a run contains."""


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the records of runs. A run is named by its folder, or by its path if two folders have the same name.

    Args:
        folders: Folders of runs, and of sweeps, which contain folders of runs.

    Raises:
        InputError: A folder is named twice or has no run, or its records are damaged.
    """
    folders = run_folders(folders)
    paths = [folder.resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise InputError(f"{folders[number]} is named twice: name each run once")
    names = [path.name for path in paths]
    return [
        RunRecords.read(folder, printable(name if names.count(name) == 1 else str(folder)))
        for folder, name in zip(folders, names, strict=True)
    ]


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return folders of runs. A folder without a run, such as that of a sweep, stands for the runs in its folders."""
    runs: list[Path] = []
    for folder in folders:
        inner = [] if (folder / CONFIG).exists() else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        runs += inner or [folder]
    return runs


def report_page(runs: Sequence[RunRecords], *, follow: str | None = None) -> str:
    """Return the report of some runs as HTML; see `make_page`.

    Args:
        runs: Records of the runs.
        follow: State of the records, for a page that is served.

    Raises:
        InputError: The records are damaged, also in ways that only show when the page is made.
    """
    with _readable(runs):
        return make_page(runs, follow=follow)


def _readable(runs: Sequence[RunRecords]) -> AbstractContextManager[None]:
    return readable(", ".join(str(run.folder) for run in runs), "the records do not have the format of this weft")


def write_report(runs: Sequence[RunRecords], out: Path, *, overwrite: bool = False) -> None:
    """Write a report to a file, completely or not at all.

    Args:
        runs: Records of the runs.
        out: File to write, .html.
        overwrite: Replace an existing file.

    Raises:
        InputError: The file exists or cannot be written, or the records are damaged.
    """
    if out.suffix != ".html":
        raise InputError(f"--out {out}: the name of the file must end with .html")
    if out.exists() and not overwrite:
        raise InputError(f"--out {out} exists already: choose another name, or add --overwrite")
    text = report_page(runs)
    try:
        write_text(out, text)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}: choose a file that can be written") from error


def write_figures(runs: Sequence[RunRecords], folder: Path, *, overwrite: bool = False) -> int:
    """Write each figure of a report as SVG, PNG and CSV, as the page first shows it, and return their number.

    Args:
        runs: Records of the runs.
        folder: Folder to write to, which is created.
        overwrite: Replace existing files.

    Raises:
        InputError: A file exists or cannot be written, or the records are damaged.
    """
    with _readable(runs):
        figures = figures_of(make_sections(runs))
    paths = {figure.name: folder / figure.name for figure in figures}
    for figure in figures if not overwrite else ():
        for path in (paths[figure.name].with_suffix(suffix) for suffix in (".svg", ".png", ".csv")):
            if path.exists():
                raise InputError(f"{path} exists already: choose another --figures, or add --overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            spec = figure_spec(figure, WIDTH) | {"datasets": {figure.data.name: figure.data.rows()}}
            write_text(paths[figure.name].with_suffix(".svg"), svg(spec))
            write_bytes(paths[figure.name].with_suffix(".png"), png(spec))
            write_text(paths[figure.name].with_suffix(".csv"), figure_csv(figure))
    except OSError as error:
        raise InputError(f"--figures {folder}: {error.strerror}: choose a folder that can be written") from error
    return len(figures)


def figure_csv(figure: Figure) -> str:
    """Return the data of a figure as CSV, with a header."""
    rows, text = figure.data.table(), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
