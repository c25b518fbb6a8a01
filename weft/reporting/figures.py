"""Figures as charts of Vega-Altair: Vega-Lite, which needs no network, drawn as SVG with labels for screen readers.

Fields of charts have fixed names: what people name (runs, scores) is values, never a field or an expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from weft.reporting.records import RecordColumns
from weft.utils.optional_packages import import_extra

LINE_POINTS = 40
"""Up to how many epochs of a run each is marked by a point as well."""
ROW = 20
"""Pixels of a bar's row."""
SECONDS = "abs(datum.value) < 1 ? format(datum.value * 1000, ',.4~g') + ' ms' : format(datum.value, ',.4~g') + ' s'"
BYTES = "datum.value == 0 ? '0' : format(datum.value, '.3~s') + 'B'"


@dataclass(frozen=True, kw_only=True)
class FigureGroup:
    """Rows of a figure's data: some columns, and what is alike in all of them."""

    alike: dict[str, Any]
    columns: RecordColumns

    def rows(self) -> list[dict[str, Any]]:
        """One mapping a row."""
        names = list(self.columns)
        return [self.alike | dict(zip(names, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What figures are drawn from."""

    name: str
    groups: Sequence[FigureGroup]

    def rows(self) -> list[dict[str, Any]]:
        """Those of all groups."""
        return list(chain.from_iterable(group.rows() for group in self.groups))

    def values(self, field: str) -> list[Any]:
        """The distinct values of a field, in the order of their first appearance."""
        found: dict[Any, None] = {}
        for group in self.groups:
            found |= dict.fromkeys([group.alike[field]] if field in group.alike else group.columns[field])
        return list(found)


def curves(data: Data, field: str, title: str, *, unit: str = "", inline: bool = False) -> Any:
    """Lines over the epochs of a field, by run and, where data have them, by split. unit: see `_axis`.

    inline: the chart has its data, can be shown by itself, and does not zoom.
    """
    alt = import_extra("altair", "a chart")
    runs = data.values("run")
    splits = data.values("split") if data.groups and "split" in data.groups[0].alike else []
    few = max((len(group.columns["epoch"]) for group in data.groups), default=0) <= LINE_POINTS
    by_run, by_split = _hue(alt, "run", runs), _hue(alt, "split", splits)
    marks = {"color": by_run if len(runs) > 1 or not splits else by_split}
    if len(runs) > 1:
        dashed = ("split", splits) if len(splits) > 1 else ("run", runs)
        marks["strokeDash"] = alt.StrokeDash(
            f"{dashed[0]}:N", title=None, sort=dashed[1], scale=alt.Scale(domain=dashed[1])
        )
    chart = (
        _chart(alt, data, inline=inline)
        .mark_line(point={"size": 18} if few else False, strokeWidth=1.75)
        .encode(
            x=alt.X("epoch:Q", title="epoch, from 0", axis=alt.Axis(tickMinStep=1), scale=_tight(alt)),
            y=alt.Y(f"{field}:Q", title=title, scale=_tight(alt), axis=_axis(alt, unit)),
            tooltip=[*(f"{name}:N" for name in ("run", *(["split"] if splits else []))), "epoch:Q", f"{field}:Q"],
            **marks,
        )
    )
    return chart if inline else chart.add_params(_zoom(alt))


def areas(data: Data) -> Any:
    """Seconds of training by epoch and kind, stacked, of the rank that is chosen in a list."""
    alt = import_extra("altair", "a chart")
    ranks = data.values("who")
    chosen = alt.param(
        name="chosen",
        value=ranks[0],
        bind=alt.binding_select(options=ranks, name="Rank: ") if ranks[1:] else alt.Undefined,
    )
    kinds = ["compute", "network", "waiting"]
    return (
        _chart(alt, data)
        .transform_filter("datum.who === chosen")
        .transform_fold(kinds, as_=["kind", "seconds"])
        .mark_area(interpolate="step")
        .encode(
            x=alt.X("epoch:Q", title="epoch, from 0", axis=alt.Axis(tickMinStep=1), scale=_tight(alt)),
            y=alt.Y("seconds:Q", title="seconds", axis=_axis(alt, SECONDS)),
            color=_hue(alt, "kind", kinds),
            order=alt.Order("rank_of_kind:Q"),
        )
        .transform_calculate(rank_of_kind="indexof(['compute', 'network', 'waiting'], datum.kind)")
        .add_params(chosen, _zoom(alt))
    )


def stacked_bars(data: Data, field: str, title: str, *, by: str, unit: str) -> Any:
    """A bar for each `who`, in parts by `by`, which are drawn in their order in the data."""
    alt = import_extra("altair", "a chart")
    return (
        _chart(alt, data)
        .mark_bar()
        .encode(
            x=alt.X(f"{field}:Q", title=title, axis=_axis(alt, unit)),
            y=_who(alt, data),
            color=_hue(alt, by, data.values(by)),
            order=alt.Order("place:Q"),
            tooltip=["who:N", f"{by}:N", f"{field}:Q"],
        )
        .properties(height=ROW * len(data.values("who")))
    )


def grouped_bars(data: Data, field: str, title: str, *, by: str, unit: str = "", mark: float | None = None) -> Any:
    """For each `who` a bar by each `by`, one below the other. mark: where a line is drawn."""
    alt = import_extra("altair", "a chart")
    names = data.values(by)
    chart = (
        _chart(alt, data)
        .mark_bar()
        .encode(
            x=alt.X(f"{field}:Q", title=title, axis=_axis(alt, unit)),
            y=_who(alt, data),
            yOffset=alt.YOffset(f"{by}:N", sort=names),
            color=_hue(alt, by, names),
            tooltip=["who:N", f"{by}:N", f"{field}:Q"],
        )
        .properties(height=len(data.values("who")) * (ROW if len(names) == 1 else 0.75 * ROW * len(names)))
    )
    if mark is None:
        return chart
    rule = alt.Chart(alt.Data(values=[{"even": mark}])).mark_rule(strokeDash=[4, 3]).encode(x="even:Q")
    return alt.layer(chart, rule).properties(height=chart.height)


def columns(data: Data, x: str, x_title: str, y: str, y_title: str, *, by: str) -> Any:
    """Upright bars, side by side by `by`."""
    alt = import_extra("altair", "a chart")
    names = data.values(by)
    return (
        _chart(alt, data)
        .mark_bar()
        .encode(
            x=alt.X(f"{x}:N", title=x_title, sort=data.values(x), axis=alt.Axis(labelAngle=-45)),
            xOffset=alt.XOffset(f"{by}:N", sort=names),
            y=alt.Y(f"{y}:Q", title=y_title),
            color=_hue(alt, by, names),
            tooltip=[f"{by}:N", f"{x}:N", f"{y}:Q"],
        )
    )


def timeline(data: Data) -> Any:
    """What ranks do when: a row for each stream, `start` to `stop` in milliseconds."""
    alt = import_extra("altair", "a chart")
    lanes, kinds = data.values("lane"), data.values("kind")
    return (
        _chart(alt, data)
        .mark_bar(clip=True, height={"band": 0.85})
        .encode(
            x=alt.X("start:Q", title="milliseconds", scale=_tight(alt)),
            x2="stop:Q",
            y=alt.Y("lane:N", title=None, sort=lanes, axis=_labels(alt)),
            color=_hue(alt, "kind", kinds),
            tooltip=["lane:N", "name:N", "start:Q", "stop:Q"],
        )
        .properties(height=ROW * len(lanes))
        .add_params(_zoom(alt))
    )


def _chart(alt: Any, data: Data, *, inline: bool = False) -> Any:
    return alt.Chart(alt.Data(values=data.rows()) if inline else alt.NamedData(name=data.name))


def _zoom(alt: Any) -> Any:
    """Of the horizontal axis; a wheel that scrolls the page does not zoom, nor does a finger."""
    moving, zooming = "[mousedown, window:mouseup] > window:mousemove!", "wheel![event.shiftKey]"
    return alt.selection_interval(name="zoom", encodings=["x"], bind="scales", translate=moving, zoom=zooming)


def _hue(alt: Any, field: str, names: Sequence[str]) -> Any:
    """A colour by a field, with a legend where there are several values."""
    legend = alt.Legend(title=None) if len(names) > 1 else None
    return alt.Color(f"{field}:N", title=field, sort=list(names), scale=alt.Scale(domain=list(names)), legend=legend)


def _who(alt: Any, data: Data) -> Any:
    return alt.Y("who:N", title=None, sort=data.values("who"), axis=_labels(alt))


def _labels(alt: Any) -> Any:
    return alt.Axis(labelLimit=150, ticks=False, domain=False)


def _tight(alt: Any) -> Any:
    return alt.Scale(zero=False, nice=False)


def _axis(alt: Any, unit: str) -> Any:
    """An axis whose labels an expression of Vega makes; '': numbers."""
    return alt.Axis(labelExpr=unit, tickCount=5) if unit else alt.Axis(tickCount=5)
