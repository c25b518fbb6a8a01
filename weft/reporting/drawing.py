"""Colors of figures on light and dark pages, and figures as SVG and PNG, drawn without a browser or a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.utils.optional_packages import import_extra

FONT = "system-ui, sans-serif"
COLOURS = {
    "light": {
        "text": "#1b1f24",
        "soft": "#57606a",
        "grid": "#e3e7eb",
        "shares": ["#f3f7fb", "#7db4e3"],
        "marks": ["#0b62a8", "#b84a00", "#007a53", "#a0327f", "#6f5b00", "#5746c9", "#7a4a2b", "#4a5560"],
    },
    "dark": {
        "text": "#e6e9ee",
        "soft": "#a9b3be",
        "grid": "#2c333c",
        "shares": ["#1b222b", "#1c5f9c"],
        "marks": ["#62b0f5", "#ff9a57", "#3fc79a", "#ec8fce", "#d9c24a", "#a99cff", "#cf9f80", "#b4bec9"],
    },
}
"""Colors of both schemes.

Marks have a contrast of at least 3 to 1 with the background, and can be told apart without seeing red or green. Shares
are colored between two colors, from 0 to 1, on which text has a contrast of at least 4.5 to 1.
"""
PNG_SCALE = 2
"""Pixels of a PNG for each pixel of the figure on a page."""


@dataclass(frozen=True)
class Plot:
    """Chart that a notebook shows as SVG, without a network."""

    chart: Any
    """Chart of Vega-Altair, to change or to save."""

    def _repr_svg_(self) -> str:
        return svg(self.chart.to_dict())


def svg(spec: Mapping[str, Any]) -> str:
    """Return a figure as SVG, on a white background.

    Args:
        spec: Specification of Vega-Lite with its data.
    """
    return str(_renderer().vegalite_to_svg(spec, config=_printed()))


def png(spec: Mapping[str, Any]) -> bytes:
    """Return a figure as PNG, on a white background.

    Args:
        spec: Specification of Vega-Lite with its data.
    """
    return bytes(_renderer().vegalite_to_png(spec, config=_printed(), scale=PNG_SCALE))


def _renderer() -> Any:
    return import_extra("vl_convert", "a figure")


def _printed() -> dict[str, Any]:
    return theme("light") | {"background": "white"}


def theme(name: str) -> dict[str, Any]:
    """Return the configuration of Vega-Lite for a light or a dark page."""
    colours = COLOURS[name]
    text, soft = colours["text"], colours["soft"]
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "range": {"category": colours["marks"], "heatmap": colours["shares"]},
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
        "text": {"color": text},
    }
