"""Report as a single HTML page that needs no network: text and tables are in it, figures are drawn by the browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from weft.reporting.drawing import COLOURS, theme
from weft.reporting.figures import Data
from weft.reporting.page_parts import Code, Figure, PageTable, Runs, Section
from weft.reporting.records import RunRecords
from weft.reporting.sections.curves import configuration, curves, origin, overview
from weft.reporting.sections.inputs import graph, partition
from weft.reporting.sections.predictions import predictions
from weft.reporting.sections.settings import settings
from weft.reporting.sections.time_costs import balance, seconds, timelines
from weft.reporting.sections.volumes import memory, traffic
from weft.utils.notebook import html_text
from weft.utils.optional_packages import import_extra

SECTIONS: tuple[Callable[[Runs], Section], ...] = (
    overview,
    settings,
    curves,
    predictions,
    seconds,
    timelines,
    balance,
    traffic,
    memory,
    graph,
    partition,
    configuration,
)
"""Functions that return the sections of a report, in order. A section without data for any run has no parts."""
FOLDER = Path(__file__).parent
"""Folder of the page's style sheet and script."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""Content security policy: the page loads nothing but itself. Vega needs `unsafe-eval` for a chart's expressions."""
ZOOMS = {"in": "Zoom in", "out": "Zoom out", "left": "Left", "right": "Right", "all": "Reset"}
"""Texts of a figure's buttons that move its horizontal axis."""
SAVES = ("svg", "png", "csv")
"""Formats in which a figure's buttons save it."""
MAX_NAMES = 4
"""Most runs that the title names."""
WIDTH = 640
"""Width in pixels of a figure in a file."""


def make_sections(runs: Runs) -> list[Section]:
    """Return all sections of a report, also those without parts."""
    return [make_section(runs) for make_section in SECTIONS]


def figures_of(sections: Iterable[Section]) -> list[Figure]:
    """Return the figures of some sections."""
    return [part for section in sections for part in section.parts if isinstance(part, Figure)]


def figure_spec(figure: Figure, width: int | str) -> dict[str, Any]:
    """Return a figure as a specification of Vega-Lite, without its data.

    Args:
        figure: The figure.
        width: Width in pixels, or "container" for that of the page.
    """
    return dict(figure.chart.to_dict(validate=False)) | {  # tests validate it, which takes as long as the rest
        "width": width,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "description": f"{figure.title}. {figure.caption}",
    }


def make_page(runs: Sequence[RunRecords], *, follow: str | None = None) -> str:
    """Return the report of some runs as HTML.

    Args:
        runs: Records of the runs.
        follow: State of the records, for a page that is served: the page then asks for newer ones. None: a file.

    Raises:
        InputError: The records cannot be read, or the packages for charts are not installed.
    """
    all_sections = make_sections(runs)
    shown = [section for section in all_sections if section.parts]
    names = [run.name for run in runs[:MAX_NAMES]] + [f"{len(runs) - MAX_NAMES} other runs"] * (len(runs) > MAX_NAMES)
    title = f"weft: {', '.join(names)}"
    contents = "".join(f'<li><a href="#{section.name}">{html_text(section.title)}</a></li>' for section in shown)
    follow_attribute = "" if follow is None else f' data-follow="{html_text(follow)}"'
    figures = figures_of(all_sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html_text(title)}</title>\n<style>\n{_file('page.css')}</style>\n</head>\n<body{follow_attribute}>\n"
        '<a class="skip" href="#main">Skip to the report</a>\n'
        f"<header><h1>{html_text(title)}</h1>\n{_table(start) if (start := origin(runs)).rows else ''}"
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav></header>\n'
        f'<main id="main" tabindex="-1">\n{"".join(map(_section, shown))}{_not_shown(all_sections)}'
        f'<script type="application/json" id="records">{_json(_records(figures))}</script>\n</main>\n'
        '<p id="gone" role="status" hidden>This page is no longer updated: weft report --serve has stopped, or '
        "cannot read the records.</p>\n"
        "<footer>Made by weft from the records of the runs. Move and zoom the figures with their buttons, by dragging, "
        "or with Shift and the wheel.</footer>\n"
        f'<script type="application/json" id="themes">{_json({name: theme(name) for name in COLOURS})}</script>\n'
        f"<script>{vega()}</script>\n<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


@cache
def vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    return str(import_extra("vl_convert", "a report").javascript_bundle()).replace("</script", "<\\/script")


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Return JSON that can stand inside a script element: it contains no `<`, which could end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _records(figures: Iterable[Figure]) -> dict[str, list[dict[str, Any]]]:
    """Return the data of all figures by name, in columns."""
    data: dict[str, Data] = {figure.data.name: figure.data for figure in figures}
    return {name: [vars(group) for group in figure_data.groups] for name, figure_data in data.items()}


def _section(section: Section) -> str:
    parts = "".join(_part(part) for part in section.parts)
    missing = "; ".join(f"{', '.join(runs)}: {reason}" for reason, runs in _by_reason(section).items())
    notes = f'<p class="soft">Not shown: {html_text(missing)}.</p>\n' if missing else ""
    head = f'<h2 id="{section.name}-title">{html_text(section.title)}</h2>'
    return f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n{head}\n{parts}{notes}</section>\n'


def _by_reason(section: Section) -> dict[str, list[str]]:
    """Return the runs that a section does not show, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for run, reason in section.missing.items():
        by_reason.setdefault(reason, []).append(run)
    return by_reason


def _part(part: Figure | PageTable | Code) -> str:
    match part:
        case Figure():
            return _figure(part)
        case PageTable():
            return _table(part)
        case Code():
            return f"<h3>{html_text(part.title)}</h3>\n<pre><code>{html_text(part.text)}</code></pre>\n"


def _figure(figure: Figure) -> str:
    name = f"figure-{figure.name}"
    spec = figure_spec(figure, "container")
    moves = ZOOMS if figure.zoom else {}
    buttons = "".join(
        [_button(figure, move, f'data-zoom="{move}"', text) for move, text in moves.items()]
        + [_button(figure, form, f'data-save="{form}"', form.upper()) for form in SAVES]
    )
    empty_table = PageTable(caption=figure.title, head=(), rows=())
    table = _table(figure.table or empty_table)
    # Without a table, the page's script fills it from the figure's data when the reader opens it.
    data_table = "" if figure.table else f' data-table="{figure.data.name}"'
    return (
        f"<h3>{html_text(figure.title)}</h3>\n"
        f'<figure id="{name}" data-table="{figure.data.name}" data-zoom="{figure.zoom}" '
        f'aria-labelledby="{name}-caption">\n'
        f'<figcaption id="{name}-caption">{html_text(figure.caption)}</figcaption>\n'
        f'<div class="tools">{buttons}</div><div class="chart"></div>\n'
        f'<script type="application/json">{_json(spec)}</script>\n</figure>\n'
        f'<details id="{name}-table"{data_table}><summary>Table: {html_text(figure.title)}</summary>{table}</details>\n'
    )


def _button(figure: Figure, name: str, action: str, text: str) -> str:
    """Return a button of a figure, of which the attribute `action` says what it does."""
    label = html_text(f"{text}: {figure.title}")
    return f'<button type="button" id="figure-{figure.name}-{name}" {action} aria-label="{label}">{text}</button>'


def _table(table: PageTable) -> str:
    head = "".join(f'<th scope="col">{html_text(cell)}</th>' if cell else "<td></td>" for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{html_text(first)}</th>{"".join(f"<td>{html_text(cell)}</td>" for cell in rest)}</tr>\n'
        for first, *rest in table.rows
    )
    code = ' class="code"' if table.code else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html_text(table.caption)}"><table{code}>'
        f"<caption>{html_text(table.caption)}</caption><thead>{f'<tr>{head}</tr>' if head else ''}</thead>"
        f"<tbody>{rows}</tbody></table></div>\n"
    )


def _not_shown(all_sections: Sequence[Section]) -> str:
    """Return the list of sections that no run has data for, with the reasons."""
    lines = "".join(
        f"<li>{html_text(section.title)}: {html_text('; '.join(_by_reason(section)))}.</li>"
        for section in all_sections
        if not section.parts
    )
    if not lines:
        return ""
    return (
        '<section id="left-out" aria-labelledby="left-out-title">\n<h2 id="left-out-title">Not shown</h2>\n'
        f"<ul>{lines}</ul></section>\n"
    )
