"""Reads the runs of a report, and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.reporting.page import make_page
from weft.reporting.records import RunRecords
from weft.utils.errors import InputError, readable


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """The records of runs, named by their folders, or by the paths where two folders have one name.

    InputError for a folder given twice, one without a run, and damaged records.
    """
    whole = [folder.resolve() for folder in folders]
    for number, folder in enumerate(whole):
        if folder in whole[:number]:
            raise InputError(f"{folders[number]}: is given twice: give each run once")
    names = [folder.name for folder in whole]
    return [
        RunRecords.read(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def report_page(runs: Sequence[RunRecords], *, follow: str | None = None) -> str:
    """`make_page`; InputError also for what damaged lines make it stumble over."""
    with readable(", ".join(str(run.folder) for run in runs), "the records are not as a run of this weft writes them"):
        return make_page(runs, follow=follow)


def write_report(runs: Sequence[RunRecords], out: Path, *, overwrite: bool = False) -> None:
    """Writes a report whole or not at all. InputError for a file that is there, and one that cannot be written."""
    if out.suffix != ".html":
        raise InputError(f"--out {out}: give a file's name that ends with .html")
    if out.exists() and not overwrite:
        raise InputError(f"--out {out} is there already: give another name, or --overwrite")
    text, draft = report_page(runs), out.with_name(f".{out.name}.tmp")
    try:
        draft.write_text(text)
        draft.replace(out)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InputError(f"--out {out}: {error.strerror}: give a file that can be written") from error
