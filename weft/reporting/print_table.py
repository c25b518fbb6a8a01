"""Prints tables: on a terminal no wider than that, elsewhere as wide as they need to be."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from weft.utils.terminal import is_terminal

MOST_WIDE = 10_000


def print_table(table: Table) -> None:
    """Prints a table to standard output: its title, and its columns in as many tables as the terminal has room for."""
    console = Console(force_terminal=is_terminal(sys.stdout), soft_wrap=False)
    if not is_terminal(sys.stdout):
        console.width = MOST_WIDE
    if table.title:
        console.print(table.title, highlight=False)
        table.title = None
    for part in fitting_tables(table, console):
        console.print(part)


def fitting_tables(table: Table, console: Console) -> list[Table]:
    """A table's columns in tables that are no wider than a console, each with the first column.

    A column that has no room even so is in a table of its own.
    """
    rest, parts = list(range(1, len(table.columns))), []
    while rest:
        number = len(rest)
        while number > 1 and natural_width(with_columns(table, [0, *rest[:number]]), console) > console.width:
            number -= 1
        parts.append(with_columns(table, [0, *rest[:number]]))
        rest = rest[number:]
    return parts or [table]


def with_columns(table: Table, numbers: Sequence[int]) -> Table:
    """A table with some of its columns."""
    made = Table(box=table.box, pad_edge=table.pad_edge)
    chosen = [table.columns[number] for number in numbers]
    for column in chosen:
        made.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    for row, cells in zip(table.rows, zip(*(column.cells for column in chosen), strict=True), strict=True):
        made.add_row(*cells, end_section=row.end_section)
    return made


def natural_width(table: Table, console: Console) -> int:
    """Columns of text that a table takes where there is room."""
    return console.measure(table, options=console.options.update(width=MOST_WIDE)).maximum
