"""HTML that notebooks show for an object."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

LEFT = 'style="text-align: left"'


def facts_table(caption: str, facts: Mapping[str, str]) -> str:
    """Return an HTML table of names and texts. It uses the colours of the page, light or dark.

    Args:
        caption: Caption of the table.
        facts: Texts by name.
    """
    rows = "".join(
        f'<tr><th scope="row" {LEFT}>{escape(name)}</th><td {LEFT}>{escape(text)}</td></tr>'
        for name, text in facts.items()
    )
    return f"<table><caption {LEFT}>{escape(caption)}</caption><tbody>{rows}</tbody></table>"
