"""Charts of a report by Vega-Altair: as Vega-Lite, which needs no network, as SVG with labels for screen readers.

The fields of charts have fixed names. Names that users choose (of runs or scores) are values, never fields or
expressions, since these could contain code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from weft.reporting.records import RecordColumns
from weft.utils.optional_packages import import_extra

LINE_POINTS = 40
"""Most epochs of a curve that marks each epoch with a point."""
ROW_PIXELS = 20
"""Height of a row of bars."""
SECONDS = "abs(datum.value) < 1 ? format(datum.value * 1000, ',.4~g') + ' ms' : format(datum.value, ',.4~g') + ' s'"
"""Expression of Vega that formats an axis in seconds."""
BYTES = "datum.value == 0 ? '0' : format(datum.value, '.3~s') + 'B'"
"""Expression of Vega that formats an axis in bytes."""


@dataclass(frozen=True, kw_only=True)
class FigureGroup:
    """Group of rows of a figure's data."""

    shared: dict[str, Any]
    """Fields that have the same value in all rows."""
    columns: RecordColumns
    """All other fields, with a value for each row, as columns of equal length."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict from field to value for each row."""
        names = list(self.columns)
        return [self.shared | dict(zip(names, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data of one or more figures."""

    name: str
    """Name that is unique in a report."""
    groups: Sequence[FigureGroup]
    """Rows, in groups."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all groups."""
        return list(chain.from_iterable(group.rows() for group in self.groups))

    def values(self, field: str) -> list[Any]:
        """Return the distinct values of a field, in the order of their first appearance."""
        values: dict[Any, None] = {}
        for group in self.groups:
            values |= dict.fromkeys([group.shared[field]] if field in group.shared else group.columns[field])
        return list(values)


def curves(data: Data, field: str, title: str, *, unit: str = "", inline: bool = False) -> Any:
    """Return a chart with lines over the epochs, by run and (if the data has it) by split.

    Args:
        data: Data with the fields run, epoch and `field`, and possibly split.
        field: Field of the vertical axis.
        title: Title of the vertical axis.
        unit: Expression that formats the axis; see `_axis`.
        inline: True: the chart contains its data, so that it can be shown alone, and does not zoom.
    """
    alt = import_extra("altair", "a chart")
    runs = data.values("run")
    splits = data.values("split") if data.groups and "split" in data.groups[0].shared else []
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
    """Return a chart of training seconds over the epochs, stacked by kind, for the rank that the reader selects."""
    alt = import_extra("altair", "a chart")
    ranks = data.values("label")
    chosen = alt.param(
        name="chosen",
        value=ranks[0],
        bind=alt.binding_select(options=ranks, name="Rank: ") if ranks[1:] else alt.Undefined,
    )
    kinds = ["compute", "network", "waiting"]
    return (
        _chart(alt, data)
        .transform_filter("datum.label === chosen")
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
    """Return a chart with a bar for each `label` of the data, stacked by another field.

    Args:
        data: Data with the fields label, `by`, `field` and place (position in the stack).
        field: Field that gives the lengths.
        title: Title of the horizontal axis.
        by: Field that the parts of a bar stand for.
        unit: Expression that formats the axis; see `_axis`.
    """
    alt = import_extra("altair", "a chart")
    return (
        _chart(alt, data)
        .mark_bar()
        .encode(
            x=alt.X(f"{field}:Q", title=title, axis=_axis(alt, unit)),
            y=_labels_axis(alt, data),
            color=_hue(alt, by, data.values(by)),
            order=alt.Order("place:Q"),
            tooltip=["label:N", f"{by}:N", f"{field}:Q"],
        )
        .properties(height=ROW_PIXELS * len(data.values("label")))
    )


def grouped_bars(data: Data, field: str, title: str, *, by: str, unit: str = "", mark: float | None = None) -> Any:
    """Return a chart with a bar for each value of a field, grouped by `label`.

    Args:
        data: Data with the fields label, `by` and `field`.
        field: Field that gives the lengths.
        title: Title of the horizontal axis.
        by: Field that the bars of a group stand for.
        unit: Expression that formats the axis; see `_axis`.
        mark: Value at which a line is drawn. None: no line.
    """
    alt = import_extra("altair", "a chart")
    names = data.values(by)
    chart = (
        _chart(alt, data)
        .mark_bar()
        .encode(
            x=alt.X(f"{field}:Q", title=title, axis=_axis(alt, unit)),
            y=_labels_axis(alt, data),
            yOffset=alt.YOffset(f"{by}:N", sort=names),
            color=_hue(alt, by, names),
            tooltip=["label:N", f"{by}:N", f"{field}:Q"],
        )
        .properties(
            height=len(data.values("label")) * (ROW_PIXELS if len(names) == 1 else 0.75 * ROW_PIXELS * len(names))
        )
    )
    if mark is None:
        return chart
    rule = alt.Chart(alt.Data(values=[{"even": mark}])).mark_rule(strokeDash=[4, 3]).encode(x="even:Q")
    return alt.layer(chart, rule).properties(height=chart.height)


def columns(data: Data, x: str, x_title: str, y: str, y_title: str, *, by: str) -> Any:
    """Return a chart with vertical bars, side by side.

    Args:
        data: Data with the fields `x`, `y` and `by`.
        x: Field of the horizontal axis.
        x_title: Title of the horizontal axis.
        y: Field of the heights.
        y_title: Title of the vertical axis.
        by: Field that the bars next to each other stand for.
    """
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
    """Return a chart with a row for each lane of the data, and a bar from start to stop, in milliseconds."""
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
        .properties(height=ROW_PIXELS * len(lanes))
        .add_params(_zoom(alt))
    )


def _chart(alt: Any, data: Data, *, inline: bool = False) -> Any:
    return alt.Chart(alt.Data(values=data.rows()) if inline else alt.NamedData(name=data.name))


def _zoom(alt: Any) -> Any:
    """Return the zoom of the horizontal axis.

    It needs Shift with the wheel, so that scrolling the page does not zoom.
    """
    moving, zooming = "[mousedown, window:mouseup] > window:mousemove!", "wheel![event.shiftKey]"
    return alt.selection_interval(name="zoom", encodings=["x"], bind="scales", translate=moving, zoom=zooming)


def _hue(alt: Any, field: str, names: Sequence[str]) -> Any:
    """Return colors by a field, with a legend if it has several values."""
    legend = alt.Legend(title=None) if len(names) > 1 else None
    return alt.Color(f"{field}:N", title=field, sort=list(names), scale=alt.Scale(domain=list(names)), legend=legend)


def _labels_axis(alt: Any, data: Data) -> Any:
    return alt.Y("label:N", title=None, sort=data.values("label"), axis=_labels(alt))


def _labels(alt: Any) -> Any:
    return alt.Axis(labelLimit=150, ticks=False, domain=False)


def _tight(alt: Any) -> Any:
    return alt.Scale(zero=False, nice=False)


def _axis(alt: Any, unit: str) -> Any:
    """Return an axis whose labels an expression of Vega formats. Empty `unit`: plain numbers."""
    return alt.Axis(labelExpr=unit, tickCount=5) if unit else alt.Axis(tickCount=5)
