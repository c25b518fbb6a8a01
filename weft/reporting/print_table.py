"""Print tables: on a terminal within its width, elsewhere as wide as they need to be."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from weft.utils.errors import printable
from weft.utils.terminal import is_terminal

MAX_WIDTH = 10_000
"""Columns of text outside of a terminal."""


def print_table(table: Table) -> None:
    """Print a table to standard output; on a terminal, as several tables if the columns do not fit in one."""
    console = Console(
        force_terminal=is_terminal(sys.stdout), soft_wrap=False, markup=False, emoji=False, highlight=False
    )
    if not is_terminal(sys.stdout):
        console.width = MAX_WIDTH
    if table.title:
        console.print("\n".join(map(printable, str(table.title).split("\n"))))
        table.title = None
    for part in fitting_tables(table, console):
        console.print(part)


def fitting_tables(table: Table, console: Console) -> list[Table]:
    """Return a table's columns as tables that fit in a console, each with the first column.

    A column that is too wide even so gets a separate table.

    Args:
        table: The table.
        console: Console whose width is the limit.
    """
    rest, parts = list(range(1, len(table.columns))), []
    while rest:
        number = len(rest)
        while number > 1 and natural_width(with_columns(table, [0, *rest[:number]]), console) > console.width:
            number -= 1
        parts.append(with_columns(table, [0, *rest[:number]]))
        rest = rest[number:]
    return parts or [with_columns(table, [0])]


def with_columns(table: Table, numbers: Sequence[int]) -> Table:
    """Return a table with some of its columns, and with control characters escaped.

    Args:
        table: The table.
        numbers: Numbers of the columns.
    """
    part = Table(box=table.box, pad_edge=table.pad_edge)
    selected = [table.columns[number] for number in numbers]
    for column in selected:
        part.add_column(printable(str(column.header)), justify=column.justify, no_wrap=column.no_wrap)
    for row, cells in zip(table.rows, zip(*(column.cells for column in selected), strict=True), strict=True):
        part.add_row(*(printable(str(cell)) for cell in cells), end_section=row.end_section)
    return part


def natural_width(table: Table, console: Console) -> int:
    """Return the number of columns of text that a table needs.

    Args:
        table: The table.
        console: Console to print it on.
    """
    return console.measure(table, options=console.options.update(width=MAX_WIDTH)).maximum
