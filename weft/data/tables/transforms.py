"""Transforms of table columns into features: fitted in parts on training rows, stored, and applied to later tables.

A requested column is `name` or `name:kind`. Without a kind, the column's values decide:

    numbers        standard   (value - mean) / standard deviation
    True or False  bool       0 or 1
    lists          list       the numbers of the list as they are
    texts          onehot     a column for each value, up to MAX_ONE_HOT different ones
                   hashed=64  a column for each value of a hash, if there are more
    dates          date       days before the latest date, standardised; sine and cosine of year, week and time of day

Further kinds are minmax (0 to 1), rank (Gaussian ranks), log (sign times log(1 + |value|), then standard) and raw. All
arithmetic is in float64 and rounded once, so that a stored transform gives the same bits for the same values.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from weft.data.checks.tensor_checks import DataWarning, Float32Rounding
from weft.data.tables.table import (
    ANY,
    NUMBER,
    TEXT,
    Column,
    ColumnPart,
    InputTable,
    any_of_row,
    numbers_in,
    require_columns,
)
from weft.data.tables.text_table import MAX_SHOWN
from weft.data.tables.text_table import NUMBER as NUMBER_TEXT
from weft.data.vertex_names import NameIndex, Texts
from weft.utils.errors import InputError, check_word

NUMBER_KINDS = ("standard", "minmax", "rank", "log", "bool", "list", "raw")
CATEGORY_KINDS = ("onehot", "hashed")
KINDS = (*NUMBER_KINDS, *CATEGORY_KINDS, "date")
MAX_ONE_HOT = 64
"""Largest number of different texts for which `onehot` is chosen; also the number of columns of `hashed` then."""
TRUTH = {"true": 1.0, "t": 1.0, "yes": 1.0, "y": 1.0, "1": 1.0, "false": 0.0, "f": 0.0, "no": 0.0, "n": 0.0, "0": 0.0}
"""Value of each text, in lower case, of a column of kind `bool`."""
MICROSECONDS_PER_DAY = 86_400e6
PERIODS = (365.2425, 7.0, 1.0)
"""Length in days of the periods of which `date` gives sine and cosine; the last only if dates have a time of day."""
ISO_DATE = re.compile(r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)?)(Z|[+-]\d\d:?\d\d)?")
"""Text that is a date, or a time with or without a time zone."""


class FeatureColumn(NamedTuple):
    """A column that is requested as features."""

    name: str
    """Name of the column."""
    kind: str = ""
    """One of KINDS; '': the values decide."""
    size: int = MAX_ONE_HOT
    """Number of columns of `hashed`."""

    @classmethod
    def parse(cls, text: str, table: InputTable, flag: str) -> FeatureColumn:
        """Return the column that a text such as 'age', 'balance:rank' or 'city:hashed=64' requests.

        Args:
            text: The text. A column of this whole name wins over a name with a kind.
            table: The table.
            flag: Flag that contains the text, for errors.

        Raises:
            InputError: If there is no such column or kind.
        """
        name, colon, kind = text.rpartition(":")
        if text in table.columns or not colon:
            name, kind = text, ""
        require_columns(table, [name], flag)
        kind, equals, size = kind.partition("=")
        if kind or (colon and name != text):
            check_word(f"{flag} {text}: the kind", kind, KINDS)
        if equals and (kind != "hashed" or not size.isdecimal() or not 0 < int(size) <= 1 << 16):
            raise InputError(f"{flag} {text}: only hashed has a number, from 1 to 65,536: write hashed=64")
        return cls(name, kind, int(size) if equals else MAX_ONE_HOT)

    @property
    def read_as(self) -> str:
        """Kind of the column for `InputTable.parts`."""
        kinds = {**dict.fromkeys(NUMBER_KINDS, NUMBER), **dict.fromkeys(CATEGORY_KINDS, TEXT), "bool": ANY}
        return kinds.get(self.kind, ANY)


@dataclass(frozen=True, kw_only=True)
class NumberTransform:
    """Transform of numbers or lists of K numbers: to K columns, and one that flags missing values if any trained."""

    name: str = ""
    """Name of the table's column."""
    kind: str
    """One of NUMBER_KINDS."""
    reason: str
    """Why the column has this kind."""
    center: tuple[float, ...]
    """Number to subtract, [K]; after the logarithm if `kind` is log."""
    scale: tuple[float, ...]
    """Number to divide by, [K]."""
    fill: tuple[float, ...]
    """Result for missing values, [K]: that of the mean of the training rows."""
    quantiles: tuple[tuple[float, ...], ...] = ()
    """Quantiles at equal distances for each of the K numbers, if `kind` is rank."""
    num_ranked: int = 0
    """Number of values from which the quantiles were computed."""
    flags_missing: bool = False
    """True if a further column is 1 where the value is missing."""

    @property
    def num_columns(self) -> int:
        """Number of resulting columns."""
        return len(self.center) + self.flags_missing

    def rows(self, part: ColumnPart) -> NDArray[np.float32]:
        """Return features [n, `num_columns`].

        Raises:
            InputError: At the first value that is no number, or is missing where it may not be.
        """
        values, missing = numbers_of_kind(self.kind, part)
        width = len(self.center)
        if missing.all():
            values = np.zeros((len(missing), width))
        if values.shape[1] != width:
            raise InputError(f"{part.place}: has {values.shape[1]} numbers in each row: give {width}")
        if self.kind == "rank":
            ranked = [self._ranks(v, q) for v, q in zip(values.T, self.quantiles, strict=True)]
            values = np.stack(ranked, 1)
        values = (values - self.center) / self.scale
        values[missing] = self.fill
        return with_flags(values.astype(np.float32), missing, flags_missing=self.flags_missing)

    def _ranks(self, values: NDArray[np.float64], quantiles: Sequence[float]) -> NDArray[np.float64]:
        """Return the normal quantiles of the ranks of values [n]; equal values have the mean of their ranks."""
        # Interpolating from both sides gives the lowest and the highest rank of a value that spans several quantiles.
        shares = np.linspace(0, 1, len(quantiles))
        points = np.array(quantiles)
        below, above = np.interp(values, points, shares), -np.interp(-values, -points[::-1], -shares[::-1])
        margin = 0.5 / max(self.num_ranked, 1)
        ranks = torch.from_numpy(((below + above) / 2).clip(margin, 1 - margin))
        normal: NDArray[np.float64] = torch.special.ndtri(ranks).numpy()
        return normal


@dataclass(frozen=True, kw_only=True)
class CategoryTransform:
    """Transform of texts to columns of which one is 1; a missing value has a column if any is missing in training.

    With `onehot`, a value that no training row had gives zeros in all columns.
    """

    name: str = ""
    """Name of the table's column."""
    kind: str
    """One of CATEGORY_KINDS."""
    reason: str
    """Why the column has this kind."""
    categories: tuple[str, ...] = ()
    """Texts of the training rows, sorted, if `kind` is onehot."""
    size: int
    """Number of columns without the one for missing values."""
    flags_missing: bool = False
    """True if a further column is 1 where the value is missing."""

    @property
    def num_columns(self) -> int:
        """Number of resulting columns."""
        return self.size + self.flags_missing

    def rows(self, part: ColumnPart) -> NDArray[np.float32]:
        """Return features [n, `num_columns`]. Raises InputError at the first value that is no category."""
        texts, missing = categories_of(part)
        if self.kind == "hashed":
            positions = (texts.keys() % np.uint64(self.size)).astype(np.int64)
        else:
            positions = NameIndex(Texts.of(self.categories), part.place).find(texts)
        rows = np.zeros((len(missing), self.size), np.float32)
        present = np.flatnonzero(~missing & (positions >= 0))
        rows[present, positions[present]] = 1
        return with_flags(rows, missing, flags_missing=self.flags_missing)


@dataclass(frozen=True, kw_only=True)
class DateTransform:
    """Transform of dates: standardised days before the latest training date, and sine and cosine of periods."""

    name: str = ""
    """Name of the table's column."""
    kind: str = "date"
    """Always 'date'."""
    reason: str
    """Why the column has this kind."""
    latest: float
    """Latest date of the training rows, in days since 1970."""
    mean: float
    """Mean number of days before `latest` in the training rows."""
    scale: float
    """Standard deviation of that number."""
    periods: tuple[float, ...]
    """Periods in days, each of which gives a sine and a cosine."""
    flags_missing: bool = False
    """True if a further column is 1 where the date is missing; the others are 0 there."""

    @property
    def num_columns(self) -> int:
        """Number of resulting columns."""
        return 1 + 2 * len(self.periods) + self.flags_missing

    def rows(self, part: ColumnPart) -> NDArray[np.float32]:
        """Return features [n, `num_columns`]. Raises InputError at the first value that is no date."""
        days, missing = days_of(part)
        columns = [(self.latest - days - self.mean) / self.scale]
        for period in self.periods:
            angle = 2 * np.pi * (days % period) / period
            columns += [np.sin(angle), np.cos(angle)]
        rows = np.stack(columns, 1)
        rows[missing] = 0
        return with_flags(rows.astype(np.float32), missing, flags_missing=self.flags_missing)


Transform: TypeAlias = NumberTransform | CategoryTransform | DateTransform
"""Fitted transform of one column."""


def describe(transform: Transform) -> str:
    """Return one line that says what a transform does and why."""
    columns = f"{transform.num_columns} column" + "s" * (transform.num_columns != 1)
    missing = ", one of them flags missing values" * transform.flags_missing
    return f"{transform.kind} ({columns}{missing}): {transform.reason}"


def transform_from(record: Mapping[str, Any]) -> Transform:
    """Return the transform whose fields are in a record. Raises TypeError or KeyError if the record is damaged."""
    classes: dict[str, type[Any]] = dict.fromkeys(NUMBER_KINDS, NumberTransform)
    classes |= dict.fromkeys(CATEGORY_KINDS, CategoryTransform) | {"date": DateTransform}
    transform: Transform = classes[record["kind"]](**{name: as_tuples(value) for name, value in record.items()})
    for field in fields(transform):
        if isinstance(getattr(transform, field.name), tuple) != str(field.type).startswith("tuple"):
            raise TypeError(f"{field.name} is {getattr(transform, field.name)!r}")
    return transform


def as_tuples(value: Any) -> Any:
    """Return JSON values with tuples instead of lists."""
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value


def numbers_of_kind(kind: str, part: ColumnPart) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return numbers [n, K] before their transform, and which rows are missing [n].

    Args:
        kind: One of NUMBER_KINDS.
        part: Some rows of a column.

    Raises:
        InputError: At the first value that the kind does not allow.
    """
    missing = part.column.missing
    if kind == "raw":
        part.refuse(missing, "is missing: fill it in, or leave the column out")
    if missing.all():
        return np.zeros((len(missing), 1)), missing
    if kind == "bool" and isinstance(part.column.values, Texts):
        texts = [text.lower() for text in part.column.values.tolist()]
        missing = missing | np.array([not text for text in texts], bool)
        wrong = np.array([text not in TRUTH for text in texts], bool) & ~missing
        part.refuse(wrong, "is neither true nor false: give another kind, such as onehot")
        return np.array([[TRUTH.get(text, 0.0)] for text in texts]), missing
    values = numbers_in(part)
    if kind == "bool":
        wrong = any_of_row((values != 0) & (values != 1)) & ~missing
        part.refuse(wrong, "is neither 0 nor 1: give another kind, such as standard")
    return np.sign(values) * np.log1p(np.abs(values)) if kind == "log" else values, missing


def categories_of(part: ColumnPart) -> tuple[Texts, NDArray[np.bool_]]:
    """Return values as texts, and which rows are missing or empty [n]; the number 3 and the text '3' are equal.

    Raises:
        InputError: At the first value that is neither text nor a whole number.
    """
    values, missing = part.column
    if isinstance(values, Texts):
        return values, missing | (np.diff(values.offsets) == 0)
    if values.ndim > 1:
        raise InputError(f"{part.place}: contains lists: leave out the kind, which makes a column of each number")
    if values.dtype.kind == "f":
        fraction = ~missing & (values != np.round(values))
        part.refuse(fraction, "has a fraction, so it is no category: give rank or standard")
        values = np.where(missing, 0, values).astype(np.int64)
    texts = ["" if absent else str(value) for value, absent in zip(values.tolist(), missing, strict=True)]
    return Texts.of(texts), missing


def require_texts(texts: Sequence[str], place: str) -> None:
    """Check that texts are not numbers or dates with a few mistakes.

    Args:
        texts: Distinct texts of a column.
        place: Table and column, for errors.

    Raises:
        InputError: If some texts, but fewer than the others, are no numbers or no dates.
    """
    numbers = [text for text in texts if NUMBER_TEXT.fullmatch(text.encode()) is not None]
    dates = [text for text in texts if ISO_DATE.fullmatch(text) is not None]
    for kind, regular in (("numbers", numbers), ("dates", dates)):
        if len(texts) / 2 < len(regular) < len(texts):
            odd = next(text for text in texts if text not in regular)[:MAX_SHOWN]
            raise InputError(
                f"{place}: contains {kind} and texts such as {odd!r}: correct them, or give a kind, such as onehot for "
                "categories"
            )


def days_of(part: ColumnPart) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return dates as days since 1970 with fractions [n], 0 if missing, and which rows are missing [n].

    Dates are points in time, or texts such as 2026-11-28 or 2026-11-28 14:30:00.

    Raises:
        InputError: At the first value that is no date.
    """
    values, missing = part.column
    remedy = "write dates as 2026-11-28, or convert the column by pandas.to_datetime"
    if isinstance(values, Texts):
        missing = missing | (np.diff(values.offsets) == 0)
        matches = [ISO_DATE.fullmatch(text) for text in values.tolist()]
        part.refuse(np.array([match is None for match in matches], bool) & ~missing, f"is no date: {remedy}")
        zones = [match[2] if match else None for match in matches]
        part.refuse(
            np.array([(zone is None) == any(zones) for zone in zones], bool) & ~missing & any(zones),
            "has no time zone, but other rows have one: give all the same",
        )
        try:
            values = np.array([match[1] if match else "NaT" for match in matches], "datetime64[us]")
        except ValueError as error:  # such as a 31st of February
            raise InputError(f"{part.place}, rows from {part.first_row}: {error}: correct the date") from None
        values = values - np.array([minutes_of(zone) for zone in zones], "timedelta64[m]")
    elif missing.all():
        values = np.zeros(len(missing), "datetime64[us]")
    elif values.dtype.kind != "M":
        raise InputError(f"{part.place}: contains {values.dtype}, no dates: {remedy}")
    days = values.astype("datetime64[us]").astype(np.int64) / MICROSECONDS_PER_DAY
    return np.where(missing, 0.0, days), missing


def minutes_of(zone: str | None) -> int:
    """Return by how many minutes a time zone such as +02:00 or Z is ahead of UTC; 0 for None."""
    if zone is None or zone == "Z":
        return 0
    minutes = 60 * int(zone[1:3]) + int(zone[-2:])
    return -minutes if zone[0] == "-" else minutes


def with_flags(rows: NDArray[np.float32], missing: NDArray[np.bool_], *, flags_missing: bool) -> NDArray[np.float32]:
    """Return rows [n, K] with a further column that flags missing values, if requested.

    Args:
        rows: The rows.
        missing: Rows without a value, [n].
        flags_missing: Whether to add the column.
    """
    return np.concatenate([rows, missing[:, None].astype(np.float32)], 1) if flags_missing else rows


class FeatureReader:
    """Features of a table in parts, by fitted transforms; calling it starts from the first row.

    Args:
        table: The table.
        transforms: The transforms, at least one.
    """

    def __init__(self, table: InputTable, transforms: Sequence[Transform]) -> None:
        self._table, self._transforms = table, transforms
        self.num_columns = sum(transform.num_columns for transform in transforms)

    def __call__(self) -> Iterator[torch.Tensor]:
        """Yield the features in parts, float32 [n, `num_columns`]."""
        row, joined = 0, RowsOfColumns(self._table, self._transforms)
        for part in self._table.parts(joined.read_as):
            yield joined.rows(part, row)
            row += len(part[self._transforms[0].name].missing)
        joined.warn()


class RowsOfColumns:
    """Applies the transforms of some columns to one part of a table after the other, and counts what it cannot keep.

    Args:
        table: The table.
        transforms: The transforms.
    """

    def __init__(self, table: InputTable, transforms: Sequence[Transform]) -> None:
        self._place, self._transforms = table.place, transforms
        self._rounding, self._num_unseen = Float32Rounding(), dict.fromkeys((t.name for t in transforms), 0)
        self.read_as = {t.name: FeatureColumn(t.name, t.kind).read_as for t in transforms}

    def rows(self, part: Mapping[str, Column], first_row: int) -> torch.Tensor:
        """Return features, float32 [n, F].

        Args:
            part: Some rows of the columns.
            first_row: Number of the first row, for errors.
        """
        matrices = []
        for transform in self._transforms:
            place, column = f"{self._place}: column '{transform.name}'", part[transform.name]
            rows = transform.rows(ColumnPart(column, place, first_row))
            if transform.kind in ("raw", "list") and not isinstance(column.values, Texts) and len(rows):
                values = column.values.reshape(len(rows), -1)
                self._rounding.add(place, values, rows[:, : values.shape[1]])
            if transform.kind == "onehot":
                self._num_unseen[transform.name] += int((~column.missing & ~rows.any(1)).sum())
            matrices.append(rows)
        return torch.from_numpy(np.concatenate(matrices, 1))

    def warn(self) -> None:
        """Warn about numbers that became equal in float32, and about values that no training row had."""
        self._rounding.warn()
        for name, count in self._num_unseen.items():
            if count:
                warnings.warn(
                    f"{self._place}: column '{name}' has {count} values that no training row has: all its features are "
                    "0 there",
                    DataWarning,
                    stacklevel=4,
                )
