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
CURVE_PIXELS = 260
"""Height of a figure with curves."""
MAX_LABEL_PIXELS = 110
"""Largest width of the label of a curve; longer names end with an ellipsis."""
LETTER_PIXELS = 7
"""Width of a letter of a label."""
DASHES = ([1, 0], [7, 4], [2, 3], [9, 3, 2, 3])
"""Lengths of the dashes and gaps of lines."""
SECONDS = "abs(datum.value) < 1 ? format(datum.value * 1000, ',.4~g') + ' ms' : format(datum.value, ',.4~g') + ' s'"
"""Expression of Vega that formats an axis in seconds."""
IS_SHOWN = "shown === 'all' || datum.split === shown"
"""Expression of Vega that selects the rows of the split that a reader has selected; see `_split_switch`."""
MAX_NUMBERED = 8
"""Most classes of a confusion matrix that has numbers in its cells."""
CELL_PIXELS = {True: 30, False: 12}
"""Height of a cell of a confusion matrix, with and without a number."""
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
    shows_all: bool = False
    """True if a figure first shows all splits. Otherwise it first shows validation, if there is any."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all groups."""
        return list(chain.from_iterable(group.rows() for group in self.groups))

    def table(self) -> list[dict[str, Any]]:
        """Return the rows without the fields that only place marks, as a reader sees them."""
        hidden = ("place", "_")
        return [{name: value for name, value in row.items() if not name.startswith(hidden)} for row in self.rows()]

    def values(self, field: str) -> list[Any]:
        """Return the distinct values of a field, in the order of their first appearance."""
        values: dict[Any, None] = {}
        for group in self.groups:
            values |= dict.fromkeys([group.shared[field]] if field in group.shared else group.columns[field])
        return list(values)

    @property
    def splits(self) -> list[str]:
        """Splits in the order in which a reader can select them; empty for curves that have none."""
        splits = self.values("split") if self.groups and "split" in self.groups[0].shared else []
        return sorted(splits, key=lambda split: split != "val")

    @property
    def default_split(self) -> str:
        """Split that is shown first, or 'all': validation, if there is one. Empty: the data has no splits."""
        return "all" if self.shows_all else (self.splits or [""])[0]


def curves(data: Data, field: str, title: str, *, unit: str = "", log: bool = False, inline: bool = False) -> Any:
    """Return a chart with lines over the epochs, with labels at their ends.

    Several runs have a line each, for the split that the reader selects. A single run has a line for the selected
    split, or for each. Lines have their own colors and dashes, so that coinciding ones can be told apart.
    A diamond marks the best epoch. A band is drawn where the data has its ends.

    Args:
        data: Data with the fields run, epoch, best, `field` and those of the labels, and possibly split, and
            `field`_low and `field`_high.
        field: Field of the vertical axis.
        title: Title of the vertical axis.
        unit: Expression that formats the axis; see `_axis`.
        log: Add a switch for a logarithmic axis.
        inline: True: the chart contains its data, so that it can be shown alone, shows all splits, and has no switches.
    """
    alt = import_extra("altair", "a chart")
    runs, splits = data.values("run"), data.splits
    few = max((len(group.columns["epoch"]) for group in data.groups), default=0) <= LINE_POINTS
    by, names = ("split", data.values("split")) if splits and len(runs) == 1 else ("run", runs)
    params = []
    banded = any(f"{field}_low" in group.columns for group in data.groups)
    heights = {"height": f"datum.{field}"}
    heights |= {end: f"datum.{field}_{end}" for end in ("low", "high") if banded}
    shift, axis = f"datum._{field}", _axis(alt, unit)
    if log and not inline:
        params.append(alt.param(name="logarithmic", value=False, bind=alt.binding_checkbox(name="Logarithmic axis ")))
        heights = {
            name: f"logarithmic ? ({value} > 0 ? log({value}) / LN10 : null) : {value}"
            for name, value in heights.items()
        }
        shift = f"logarithmic ? {shift}_log : {shift}"
        axis = alt.Axis(labelExpr="logarithmic ? format(pow(10, datum.value), '.2~g') : datum.label", tickCount=5)
    base = (
        _chart(alt, data, inline=inline)
        .transform_calculate(**heights)
        .encode(
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1), scale=_tight(alt, padding=6)),
            y=alt.Y("height:Q", title=title, scale=_tight(alt, padding=6), axis=axis),
            color=_hue(alt, by, names, legend=False),
            tooltip=_tooltip(alt, "run:N", *(["split:N"] if splits else []), "epoch:Q", f"{field}:Q", "best:N"),
        )
    )
    if len(splits) > 1 and not inline:
        choices = [*splits, *(["all"] if by == "split" else [])]
        params.append(_split_switch(alt, data, choices))
        base = base.transform_filter(IS_SHOWN)
    lines = base.mark_line(point={"size": 18} if few else False, strokeWidth=2).encode(
        strokeDash=_dashes(alt, by, names, legend=False)
    )
    # Only if there is a best epoch: an empty layer has no range on the axis.
    best = [
        base.mark_point(shape="diamond", size=110, filled=True, opacity=1).transform_filter("datum.best")
        for _ in range(any(data.values("best")))
    ]
    labels = (
        base.mark_text(align="left", dx=6, dy=alt.expr(f"-({shift})"), limit=MAX_LABEL_PIXELS, clip=False)
        .transform_filter("datum.epoch === datum._last")
        .encode(text=alt.Text(f"{by}:N"), tooltip=alt.TooltipValue(None))
    )
    bands = [
        base.mark_area(opacity=0.2)
        .transform_filter("isValid(datum.low)")
        .encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), tooltip=alt.TooltipValue(None))
        for _ in range(banded)
    ]
    lines = lines if inline else lines.add_params(*params, _zoom(alt))
    room = min(MAX_LABEL_PIXELS, LETTER_PIXELS * max(map(len, names), default=0)) + 10
    padding = {} if inline else {"padding": {"left": 5, "top": 5, "right": room, "bottom": 5}}  # of whole charts only
    return alt.layer(*bands, lines, *best, labels).properties(height=CURVE_PIXELS, **padding)


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
            x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1), scale=_tight(alt)),
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
            tooltip=_tooltip(alt, "label:N", f"{by}:N", f"{field}:Q"),
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
            tooltip=_tooltip(alt, "label:N", f"{by}:N", f"{field}:Q"),
        )
        .properties(
            height=len(data.values("label")) * (ROW_PIXELS if len(names) == 1 else 0.75 * ROW_PIXELS * len(names))
        )
    )
    if mark is None:
        return chart
    rule = alt.Chart(alt.Data(values=[{"even": mark}])).mark_rule(strokeDash=[4, 3]).encode(x=alt.X("even:Q"))
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
            tooltip=_tooltip(alt, f"{by}:N", f"{x}:N", f"{y}:Q"),
        )
    )


def confusion(data: Data, classes: Sequence[str]) -> Any:
    """Return a confusion matrix, colored by the share of the true class, with numbers if there are few classes.

    Args:
        data: Data with the fields split, true, predicted, count and share, without cells that are 0.
        classes: Names of the classes, in order.
    """
    alt = import_extra("altair", "a chart")
    scale, few = alt.Scale(domain=list(classes)), len(classes) <= MAX_NUMBERED
    axis: dict[str, Any] = {"labelLimit": 90, "labelOverlap": True, "ticks": False, "domain": False}
    base = (
        _chart(alt, data)
        .transform_filter(IS_SHOWN)
        .encode(
            x=alt.X("predicted:N", title="predicted class", scale=scale, axis=alt.Axis(labelAngle=-45, **axis)),
            y=alt.Y("true:N", title="true class", scale=scale, axis=alt.Axis(**axis)),
            tooltip=[
                *_tooltip(alt, "split:N", "true:N", "predicted:N", "count:Q"),
                alt.Tooltip("share:Q", format=".1%"),
            ],
        )
    )
    shares = alt.Color("share:Q", title="share of the true class", scale=alt.Scale(domain=[0, 1]))
    cells = base.mark_rect().encode(color=shares.legend(format="%", tickCount=5))
    numbers = [base.mark_text().encode(text=alt.Text("count:Q", format=".3~s")) for _ in range(few)]
    return alt.layer(cells.add_params(_split_switch(alt, data, data.splits)), *numbers).properties(
        height=CELL_PIXELS[few] * len(classes)
    )


def threshold_curves(data: Data, x: str, y: str, *, steps: bool = False) -> Any:
    """Return a chart with a line for each curve, over falling thresholds; both axes are from 0 to 1.

    Args:
        data: Data with the fields split, curve (its name), place (position along the curve), `x` and `y`.
        x: Field of the horizontal axis.
        y: Field of the vertical axis.
        steps: True: `y` belongs to the interval of `x` that ends at its point. False: straight lines, and a dashed one
            for random scores.
    """
    alt = import_extra("altair", "a chart")
    names, scale = data.values("curve"), alt.Scale(domain=[0, 1])
    lines = (
        _chart(alt, data)
        .transform_filter(IS_SHOWN)
        .mark_line(strokeWidth=2, interpolate="step-before" if steps else "linear")
        .encode(
            x=alt.X(f"{x}:Q", title=x.replace("_", " "), scale=scale),
            y=alt.Y(f"{y}:Q", title=y.replace("_", " "), scale=scale),
            color=_hue(alt, "curve", names),
            strokeDash=_dashes(alt, "curve", names),
            order=alt.Order("place:Q"),
            tooltip=_tooltip(alt, "curve:N", "split:N", f"{x}:Q", f"{y}:Q"),
        )
        .add_params(_split_switch(alt, data, data.splits))
    )
    ends = alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}])
    random = [alt.Chart(ends).mark_line(strokeDash=[4, 3], strokeWidth=1).encode(x="x:Q", y="y:Q")] * (not steps)
    return alt.layer(lines, *random).properties(height=CURVE_PIXELS)


def timeline(data: Data) -> Any:
    """Return a chart with a row for each lane of the data, and a bar from start to stop, in milliseconds."""
    alt = import_extra("altair", "a chart")
    lanes, kinds = data.values("lane"), data.values("kind")
    return (
        _chart(alt, data)
        .mark_bar(clip=True, height={"band": 0.85})
        .encode(
            x=alt.X("start:Q", title="milliseconds", scale=_tight(alt)),
            x2=alt.X2("stop:Q"),
            y=alt.Y("lane:N", title=None, sort=lanes, axis=_labels(alt)),
            color=_hue(alt, "kind", kinds),
            tooltip=_tooltip(alt, "lane:N", "name:N", "start:Q", "stop:Q"),
        )
        .properties(height=ROW_PIXELS * len(lanes))
        .add_params(_zoom(alt))
    )


def _chart(alt: Any, data: Data, *, inline: bool = False) -> Any:
    return alt.Chart(alt.Data(values=data.rows()) if inline else alt.NamedData(name=data.name))


def _tooltip(alt: Any, *fields: str) -> list[Any]:
    """Return the tooltip of some fields. Altair needs a third of a report's time to make it from their names alone."""
    return [alt.Tooltip(field) for field in fields]


def _zoom(alt: Any) -> Any:
    """Return the zoom of the horizontal axis.

    It needs Shift with the wheel, so that scrolling the page does not zoom.
    """
    moving, zooming = "[mousedown, window:mouseup] > window:mousemove!", "wheel![event.shiftKey]"
    return alt.selection_interval(name="zoom", encodings=["x"], bind="scales", translate=moving, zoom=zooming)


def _split_switch(alt: Any, data: Data, splits: Sequence[str]) -> Any:
    """Return the parameter of the split to show, which the reader selects if there are several."""
    select = alt.binding_select(options=list(splits), name="Split: ") if len(splits) > 1 else alt.Undefined
    return alt.param(name="shown", value=data.default_split, bind=select)


def _dashes(alt: Any, field: str, names: Sequence[str], *, legend: bool = True) -> Any:
    """Return dashes by a field, so that lines which coincide can be told apart, in the legend of `_hue`."""
    dashes = [DASHES[number % len(DASHES)] for number in range(len(names))]
    scale, sort = alt.Scale(domain=list(names), range=dashes), list(names)
    return alt.StrokeDash(f"{field}:N", title=field, sort=sort, scale=scale, legend=_legend(alt, names, legend))


def _hue(alt: Any, field: str, names: Sequence[str], *, legend: bool = True) -> Any:
    """Return colors by a field, with a legend if it is wanted and the field has several values."""
    scale, sort = alt.Scale(domain=list(names)), list(names)
    return alt.Color(f"{field}:N", title=field, sort=sort, scale=scale, legend=_legend(alt, names, legend))


def _legend(alt: Any, names: Sequence[str], wanted: bool) -> Any:
    return alt.Legend(title=None) if wanted and len(names) > 1 else None


def _labels_axis(alt: Any, data: Data) -> Any:
    return alt.Y("label:N", title=None, sort=data.values("label"), axis=_labels(alt))


def _labels(alt: Any) -> Any:
    return alt.Axis(labelLimit=150, ticks=False, domain=False)


def _tight(alt: Any, padding: int = 0) -> Any:
    return alt.Scale(zero=False, nice=False, padding=padding)


def _axis(alt: Any, unit: str) -> Any:
    """Return an axis whose labels an expression of Vega formats. Empty `unit`: plain numbers."""
    return alt.Axis(labelExpr=unit, tickCount=5) if unit else alt.Axis(tickCount=5)
