"""HTML of text, and of an object in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from weft.utils.errors import printable

LEFT = 'style="text-align: left"'


def html_text(text: str) -> str:
    """Return HTML that shows text as it is, with control characters escaped, except line breaks."""
    return escape("\n".join(map(printable, text.split("\n"))))


def facts_table(caption: str, facts: Mapping[str, str]) -> str:
    """Return an HTML table of names and texts. It uses the colours of the page, light or dark.

    Args:
        caption: Caption of the table.
        facts: Texts by name.
    """
    rows = "".join(
        f'<tr><th scope="row" {LEFT}>{html_text(name)}</th><td {LEFT}>{html_text(text)}</td></tr>'
        for name, text in facts.items()
    )
    return f"<table><caption {LEFT}>{html_text(caption)}</caption><tbody>{rows}</tbody></table>"


def rows_table(caption: str, columns: Mapping[str, Sequence[str]]) -> str:
    """Return an HTML table of texts. It uses the colours of the page, light or dark.

    Args:
        caption: Caption of the table.
        columns: Texts of each column by its name, all of the same number. The first column names the rows.
    """
    head = "".join(f'<th scope="col" {LEFT}>{html_text(name)}</th>' for name in columns)
    rows = "".join(
        f'<tr><th scope="row" {LEFT}>{html_text(name)}</th>'
        + "".join(f"<td {LEFT}>{html_text(text)}</td>" for text in texts)
        + "</tr>"
        for name, *texts in zip(*columns.values(), strict=True)
    )
    return f"<table><caption {LEFT}>{html_text(caption)}</caption><tbody><tr>{head}</tr>{rows}</tbody></table>"
