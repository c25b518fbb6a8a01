"""What a notebook shows of an object."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

LEFT = 'style="text-align: left"'


def facts_table(caption: str, facts: Mapping[str, str]) -> str:
    """Facts by name as a table of HTML, whose colours are the page's, light or dark."""
    rows = "".join(
        f'<tr><th scope="row" {LEFT}>{escape(name)}</th><td {LEFT}>{escape(text)}</td></tr>'
        for name, text in facts.items()
    )
    return f"<table><caption {LEFT}>{escape(caption)}</caption><tbody>{rows}</tbody></table>"
