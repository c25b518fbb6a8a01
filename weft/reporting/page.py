"""A report as one page of HTML that needs no network: text and tables as they are, figures drawn when it is opened."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from weft.reporting.figures import Data
from weft.reporting.page_parts import Code, Figure, PageTable, Section
from weft.reporting.records import RunRecords
from weft.reporting.sections import sections
from weft.utils.optional_packages import import_extra

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""What the page may load: nothing but itself. Vega makes functions of a chart's expressions."""
FONT = "system-ui, sans-serif"
COLOURS = {
    "light": {
        "text": "#1b1f24",
        "soft": "#57606a",
        "grid": "#e3e7eb",
        "marks": ["#0b62a8", "#b84a00", "#007a53", "#a0327f", "#6f5b00", "#5746c9", "#7a4a2b", "#4a5560"],
    },
    "dark": {
        "text": "#e6e9ee",
        "soft": "#a9b3be",
        "grid": "#2c333c",
        "marks": ["#62b0f5", "#ff9a57", "#3fc79a", "#ec8fce", "#d9c24a", "#a99cff", "#cf9f80", "#b4bec9"],
    },
}
"""Marks differ from the ground by 3 to 1 and more, and from each other also without red or green."""
ZOOMS = {"in": "Zoom in", "out": "Zoom out", "left": "Left", "right": "Right", "all": "Whole"}


def make_page(runs: Sequence[RunRecords], *, follow: str | None = None) -> str:
    """The report of some runs. follow: the state that a served page is of, which asks for newer ones then.

    InputError for records that cannot be read, and where the packages for figures are not installed.
    """
    found = sections(runs)
    shown = [section for section in found if section.parts]
    title = f"weft: {', '.join(run.name for run in runs)}"
    contents = "".join(f'<li><a href="#{one.name}">{escape(one.title)}</a></li>' for one in shown)
    going_on = "" if follow is None else f' data-follow="{escape(follow)}"'
    figures = [part for section in shown for part in section.parts if isinstance(part, Figure)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_file('page.css')}</style>\n</head>\n<body{going_on}>\n"
        '<a class="skip" href="#main">To the report</a>\n'
        f"<header><h1>{escape(title)}</h1>\n"
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav></header>\n'
        f'<main id="main" tabindex="-1">\n{"".join(map(_section, shown))}{_left_out(found)}'
        f'<script type="application/json" id="records">{_json(_records(figures))}</script>\n</main>\n'
        '<p id="gone" role="status" hidden>The report is not renewed: weft report --serve has ended, or cannot read '
        "the records.</p>\n"
        "<footer>Made by weft from the records of the runs. Figures move by their buttons and by dragging, and zoom by "
        "the wheel with Shift.</footer>\n"
        f'<script type="application/json" id="themes">{_json({name: _theme(name) for name in COLOURS})}</script>\n'
        f"<script>{vega()}</script>\n<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


@cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    return str(import_extra("vl_convert", "a report").javascript_bundle()).replace("</script", "<\\/script")


def _file(name: str) -> str:
    return (HERE / name).read_text()


def _json(value: Any) -> str:
    """As it can stand inside a script: nothing in it ends that."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _records(figures: Iterable[Figure]) -> dict[str, list[dict[str, Any]]]:
    """The data of all figures by name, in columns."""
    data: dict[str, Data] = {figure.data.name: figure.data for figure in figures}
    return {name: [vars(group) for group in one.groups] for name, one in data.items()}


def _section(section: Section) -> str:
    parts = "".join(_part(part) for part in section.parts)
    lacking = "; ".join(f"{', '.join(runs)}: {why}" for why, runs in _by_reason(section).items())
    notes = f'<p class="soft">Left out here. {escape(lacking)}.</p>\n' if lacking else ""
    head = f'<h2 id="{section.name}-title">{escape(section.title)}</h2>'
    return f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n{head}\n{parts}{notes}</section>\n'


def _by_reason(section: Section) -> dict[str, list[str]]:
    """Why runs are left out of a section, with the names of those."""
    found: dict[str, list[str]] = {}
    for run, why in section.lacking.items():
        found.setdefault(why, []).append(run)
    return found


def _part(part: Figure | PageTable | Code) -> str:
    match part:
        case Figure():
            return _figure(part)
        case PageTable():
            return _table(part)
        case Code():
            return f"<h3>{escape(part.title)}</h3>\n<pre><code>{escape(part.text)}</code></pre>\n"


def _figure(figure: Figure) -> str:
    name = f"figure-{figure.name}"
    spec = figure.chart.to_dict() | {
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "description": f"{figure.title}. {figure.caption}",
    }
    buttons = "".join(
        f'<button type="button" id="{name}-{move}" data-zoom="{move}" aria-label="{text}: {escape(figure.title)}">'
        f"{text}</button>"
        for move, text in ZOOMS.items()
    )
    tools = f'<div class="tools">{buttons}</div>' if figure.zoom else ""
    lazy = PageTable(caption=figure.title, head=(), rows=())
    table = _table(figure.table or lazy)
    of = "" if figure.table else f' data-table="{figure.data.name}"'
    return (
        f"<h3>{escape(figure.title)}</h3>\n"
        f'<figure id="{name}" data-table="{figure.data.name}" data-zoom="{figure.zoom}" '
        f'aria-labelledby="{name}-caption">\n'
        f'<figcaption id="{name}-caption">{escape(figure.caption)}</figcaption>\n'
        f'{tools}<div class="chart"></div>\n<script type="application/json">{_json(spec)}</script>\n</figure>\n'
        f'<details id="{name}-table"{of}><summary>Numbers of {escape(figure.title)}</summary>{table}</details>\n'
    )


def _table(table: PageTable) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' if cell else "<td></td>" for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>\n'
        for first, *rest in table.rows
    )
    code = ' class="code"' if table.code else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}"><table{code}>'
        f"<caption>{escape(table.caption)}</caption><thead>{f'<tr>{head}</tr>' if head else ''}</thead>"
        f"<tbody>{rows}</tbody></table></div>\n"
    )


def _left_out(found: Sequence[Section]) -> str:
    """The sections that no run has data for, by name."""
    lines = "".join(
        f"<li>{escape(one.title)}: {escape('; '.join(_by_reason(one)))}.</li>" for one in found if not one.parts
    )
    if not lines:
        return ""
    return (
        '<section id="left-out" aria-labelledby="left-out-title">\n<h2 id="left-out-title">What is left out</h2>\n'
        f"<ul>{lines}</ul></section>\n"
    )


def _theme(name: str) -> dict[str, Any]:
    """The configuration of Vega-Lite for a light or a dark page."""
    colours = COLOURS[name]
    text, soft = colours["text"], colours["soft"]
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "range": {"category": colours["marks"]},
        "axis": {
            "labelColor": text,
            "titleColor": text,
            "gridColor": colours["grid"],
            "tickColor": soft,
            "domainColor": soft,
        }
        | {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
        "legend": {"labelColor": text, "titleColor": text, "orient": "top", "columns": 2, "labelLimit": 170}
        | {"labelFontSize": 12, "symbolStrokeWidth": 2},
        "mark": {"color": colours["marks"][0]},
        "rule": {"color": text},
    }
