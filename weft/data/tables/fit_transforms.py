"""Fitting of transforms to the training rows of a table, in one pass that keeps one part in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft.data.checks.tensor_checks import DataWarning
from weft.data.tables.table import ColumnPart, InputTable, numbers_in
from weft.data.tables.transforms import (
    CATEGORY_KINDS,
    MAX_ONE_HOT,
    PERIODS,
    CategoryTransform,
    DateTransform,
    FeatureColumn,
    NumberTransform,
    Transform,
    as_tuples,
    categories_of,
    days_of,
    numbers_of_kind,
    require_texts,
)
from weft.data.vertex_names import NameCollector, Texts, mix_bits
from weft.utils.errors import InputError

RANK_SAMPLE = 1 << 17
"""Number of values from which the quantiles of `rank` are computed; of more values, a sample."""
MOSTLY_DIFFERENT = 0.9
"""Share of different texts in a column from which a warning says that they are no categories."""
NUM_QUANTILES = 1001
"""Number of stored quantiles of `rank`."""


def fit_transforms(
    table: InputTable, requests: Sequence[FeatureColumn], training: NDArray[np.bool_] | None = None
) -> tuple[Transform, ...]:
    """Fit the transforms of some columns. All rows are checked; only training rows have an influence.

    Args:
        table: The table.
        requests: The columns.
        training: Rows to fit on, [n]; None: all rows.

    Raises:
        InputError: At the first value that a column's kind does not allow, or if a column has no value in training.
    """
    if not requests:
        return ()
    places = [f"{table.place}: column '{request.name}'" for request in requests]
    fits = [ColumnFit(request, place) for request, place in zip(requests, places, strict=True)]
    first_row = 0
    for part in table.parts({request.name: request.read_as for request in requests}):
        num_rows = len(part[requests[0].name].missing)
        rows = np.ones(num_rows, bool) if training is None else training[first_row : first_row + num_rows]
        for request, place, fit in zip(requests, places, fits, strict=True):
            fit.add(ColumnPart(part[request.name], place, first_row), rows)
        first_row += num_rows
    return tuple(fit.finish() for fit in fits)


class ColumnFit:
    """Fit of the transform of one column, whose first values decide its kind if none is requested.

    Args:
        request: The column.
        place: Table and column, for errors.
    """

    def __init__(self, request: FeatureColumn, place: str) -> None:
        self._request, self._place = request, place
        self._fit: NumberFit | CategoryFit | DateFit | None = None
        self._num_missing = 0

    def add(self, part: ColumnPart, training: NDArray[np.bool_]) -> None:
        """Check some rows, and use those for training.

        Args:
            part: The rows.
            training: Which of them to fit on, [n].

        Raises:
            InputError: At the first value that the kind does not allow.
        """
        missing = part.column.missing
        if not missing.all():
            self._fit = self._fit or self._choose(part)
            missing = self._fit.add(part, training)
        elif self._request.kind == "raw":
            numbers_of_kind("raw", part)  # raises an error
        self._num_missing += int((missing & training).sum())

    def _choose(self, part: ColumnPart) -> NumberFit | CategoryFit | DateFit:
        """Return a fit of the requested kind, or of the kind that suits the values of a part."""
        kind, values = self._request.kind, part.column.values
        if kind in CATEGORY_KINDS or (not kind and isinstance(values, Texts)):
            return CategoryFit(kind, self._request.size, self._place)
        if kind == "date" or (not kind and not isinstance(values, Texts) and values.dtype.kind == "M"):
            return DateFit()
        if kind:
            return NumberFit(kind, "")
        if not isinstance(values, Texts) and values.dtype.kind == "b":
            return NumberFit("bool", "True and False")
        lists = numbers_in(part).shape[1:] != (1,)  # raises an error if they are no numbers
        return NumberFit("list", "lists of numbers") if lists else NumberFit("standard", "numbers")

    def finish(self) -> Transform:
        """Return the transform. Raises InputError if no training row has a value."""
        if self._fit is None or not self._fit.has_values:
            raise InputError(f"{self._place}: no training row has a value: leave the column out")
        transform = self._fit.finish()
        return replace(
            transform,
            name=self._request.name,
            reason="requested" if self._request.kind else transform.reason,
            flags_missing=self._num_missing > 0,
        )


class Moments:
    """Number, mean, variance, minimum and maximum of rows that come in parts (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, np.zeros(1), np.zeros(1)
        self.low, self.high = np.full(1, np.inf), np.full(1, -np.inf)

    def add(self, values: NDArray[np.float64]) -> None:
        """Add rows [n, K]."""
        if not len(values):
            return
        count, mean = self.count + len(values), values.mean(0)
        shift = mean - self.mean
        self._squares = self._squares + ((values - mean) ** 2).sum(0) + shift**2 * self.count * len(values) / count
        self.mean = self.mean + shift * len(values) / count
        self.low, self.high = np.minimum(self.low, values.min(0)), np.maximum(self.high, values.max(0))
        self.count = count

    @property
    def deviation(self) -> NDArray[np.float64]:
        """Standard deviation [K]; 1 for constant values, which are only centered then."""
        return np.where(self.low < self.high, np.sqrt(self._squares / max(self.count, 1)), 1.0)


class MomentsFit:
    """Fit to moments of the training rows."""

    def __init__(self) -> None:
        self._moments = Moments()

    @property
    def has_values(self) -> bool:
        """True if a training row has a value."""
        return self._moments.count > 0


class NumberFit(MomentsFit):
    """Fit of a NumberTransform.

    Args:
        kind: One of NUMBER_KINDS.
        reason: Why the column has this kind.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__()
        self._kind, self._reason = kind, reason
        self._sample, self._keys = np.empty((0, 0)), np.empty(0, np.uint64)

    def add(self, part: ColumnPart, training: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Add some rows, and return which are missing.

        Args:
            part: The rows.
            training: Which of them to fit on, [n].

        Raises:
            InputError: At the first value that the kind does not allow.
        """
        values, missing = numbers_of_kind(self._kind, part)
        rows = np.flatnonzero(training & ~missing)
        if self.has_values and values.shape[1] != len(self._moments.mean):
            raise InputError(
                f"{part.place}, row {part.first_row}: is a list of {values.shape[1]} numbers, and lists before have "
                f"{len(self._moments.mean)}: give all the same length"
            )
        self._moments.add(values[rows])
        if self._kind == "rank" and len(rows):
            # The sample must not depend on how the table is cut: the values of the rows with the smallest hashes.
            self._keys = np.concatenate([self._keys, mix_bits((part.first_row + rows).astype(np.uint64))])
            self._sample = np.concatenate([self._sample.reshape(-1, values.shape[1]), values[rows]])
            smallest = self._keys.argsort(kind="stable")[:RANK_SAMPLE]
            self._sample, self._keys = self._sample[smallest], self._keys[smallest]
        return missing

    def finish(self) -> NumberTransform:
        """Return the transform, without the name of the column."""
        kind, moments, zeros = self._kind, self._moments, np.zeros_like(self._moments.mean)
        center, scale, fill = zeros, zeros + 1, moments.mean
        if kind in ("standard", "log"):
            center, scale, fill = moments.mean, moments.deviation, zeros
        elif kind == "minmax":
            center, scale = moments.low, np.where(moments.low < moments.high, moments.high - moments.low, 1.0)
            fill = (moments.mean - center) / scale
        quantiles: tuple[tuple[float, ...], ...] = ()
        if kind == "rank":
            shares = np.linspace(0, 1, min(NUM_QUANTILES, len(self._sample)))
            quantiles, fill = as_tuples(np.quantile(self._sample, shares, axis=0).T.tolist()), zeros
        return NumberTransform(
            kind=kind,
            reason=self._reason,
            center=as_tuples(center.tolist()),
            scale=as_tuples(scale.tolist()),
            fill=as_tuples(fill.tolist()),
            quantiles=quantiles,
            num_ranked=len(self._sample),
        )


class DateFit(MomentsFit):
    """Fit of a DateTransform."""

    def __init__(self) -> None:
        super().__init__()
        self._has_time = False

    def add(self, part: ColumnPart, training: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Add some rows, and return which are missing.

        Args:
            part: The rows.
            training: Which of them to fit on, [n].

        Raises:
            InputError: At the first value that the kind does not allow.
        """
        days, missing = days_of(part)
        chosen = days[training & ~missing]
        self._has_time |= bool((chosen % 1 != 0).any())
        self._moments.add(chosen[:, None])
        return missing

    def finish(self) -> DateTransform:
        """Return the transform, without the name of the column."""
        latest = float(self._moments.high[0])
        return DateTransform(
            reason="dates",
            latest=latest,
            mean=latest - float(self._moments.mean[0]),
            scale=float(self._moments.deviation[0]),
            periods=PERIODS if self._has_time else PERIODS[:-1],
        )


class CategoryFit:
    """Fit of a CategoryTransform; without a kind, of a DateTransform if all texts are dates.

    Args:
        kind: One of CATEGORY_KINDS, or ''.
        size: Number of columns of `hashed`.
        place: Table and column, for errors.
    """

    def __init__(self, kind: str, size: int, place: str) -> None:
        self._kind, self._size, self._place, self._collector = kind, size, place, NameCollector()
        self._dates = None if kind else DateFit()
        self._share_of_different = 0.0  # of the first part
        self.has_values = False

    def add(self, part: ColumnPart, training: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Add some rows, and return which are missing.

        Args:
            part: The rows.
            training: Which of them to fit on, [n].

        Raises:
            InputError: At the first value that the kind does not allow.
        """
        texts, missing = categories_of(part)
        chosen = texts.take(np.flatnonzero(training & ~missing))
        if not self.has_values and len(chosen):
            self._share_of_different = len(np.unique(chosen.keys())) / len(chosen)
        self.has_values |= len(chosen) > 0
        if self._dates is not None:
            try:
                self._dates.add(part, training)
            except InputError:
                self._dates = None
        if len(chosen) and (self._kind == "onehot" or (not self._kind and self._collector.count <= MAX_ONE_HOT)):
            self._collector.add(chosen)
        return missing

    def finish(self) -> CategoryTransform | DateTransform:
        """Return the transform, without the name of the column. Raises InputError if most texts are numbers."""
        if self._dates is not None:
            return replace(self._dates.finish(), reason="texts that are dates")
        if not self._kind:
            require_texts(self._collector.ids().tolist(), self._place)
        if self._kind == "hashed" or (not self._kind and self._collector.count > MAX_ONE_HOT):
            if not self._kind and self._share_of_different > MOSTLY_DIFFERENT:
                warnings.warn(
                    f"{self._place}: nearly every text is different, so their hashes say little: leave the column out, "
                    "or turn it into numbers or dates",
                    DataWarning,
                    stacklevel=5,
                )
            return CategoryTransform(
                kind="hashed",
                reason=f"more than {MAX_ONE_HOT} different texts",
                size=self._size,
            )
        categories = tuple(sorted(self._collector.ids().tolist()))
        return CategoryTransform(
            kind="onehot",
            reason=f"{len(categories)} different texts",
            categories=categories,
            size=len(categories),
        )
