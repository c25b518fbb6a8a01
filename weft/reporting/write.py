"""Read the runs of a report, and write it to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.reporting.page import make_page
from weft.reporting.records import RunRecords
from weft.utils.errors import InputError, printable, readable
from weft.utils.files.file_writing import write_text


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the records of runs. A run is named by its folder, or by its path if two folders have the same name.

    Raises:
        InputError: A folder is named twice or has no run, or its records are damaged.
    """
    paths = [folder.resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise InputError(f"{folders[number]} is named twice: name each run once")
    names = [path.name for path in paths]
    return [
        RunRecords.read(folder, printable(name if names.count(name) == 1 else str(folder)))
        for folder, name in zip(folders, names, strict=True)
    ]


def report_page(runs: Sequence[RunRecords], *, follow: str | None = None) -> str:
    """Return the report of some runs as HTML; see `make_page`.

    Args:
        runs: Records of the runs.
        follow: State of the records, for a page that is served.

    Raises:
        InputError: The records are damaged, also in ways that only show when the page is made.
    """
    with readable(", ".join(str(run.folder) for run in runs), "the records do not have the format of this weft"):
        return make_page(runs, follow=follow)


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
