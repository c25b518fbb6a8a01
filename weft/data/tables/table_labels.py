"""Labels and splits of the rows of a table, which are vertices or edges."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.checks.tensor_checks import MASKS, DataWarning, cast, has_label, located, warn_whole_values
from weft.data.splits import SHARES, Masks, random_split, split_by_time
from weft.data.tables.schema import EdgeColumns, TableColumns
from weft.data.tables.table import (
    LABEL,
    TEXT,
    TIME,
    Column,
    ColumnPart,
    InputTable,
    any_of_row,
    num_rows,
    odd_value,
    raise_at_first,
)
from weft.data.tables.transforms import categories_of, require_texts
from weft.data.vertex_names import NameCollector, NameIndex, Texts
from weft.utils.errors import InputError, check_word

SPLIT_WORDS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": -1, "none": -1}
"""Number of the split that each word of a split column means; -1: none."""
SPLIT_WORDS |= {str(number): number for number in range(-1, 3)} | {f"{number}.0": number for number in range(-1, 3)}


@dataclass(frozen=True, kw_only=True)
class TableLabels:
    """Labels and splits of the n rows of a table."""

    y: Tensor | None = None
    """Labels in one of the forms of GraphFields.y, [n] or [n, C]."""
    masks: Masks = field(default_factory=Masks)
    """Rows to train, validate and test on."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, if labels are text."""

    @classmethod
    def read(cls, table: InputTable, columns: TableColumns, seed: int) -> TableLabels:
        """Return the labels and splits in the columns of a table.

        Args:
            table: The table.
            columns: Meaning of its columns.
            seed: Seed of a random split.
        """
        y, class_names = read_label(table, columns.label, columns.label_kind)
        return cls(y=y, masks=read_masks(table, columns, y, seed), class_names=class_names)

    def of_edges(self, num_edges: int) -> TableLabels:
        """Return labels of edges: without labels all are unlabelled, and without splits all are to be predicted.

        Args:
            num_edges: Number of rows of the table.
        """
        nowhere = torch.zeros(num_edges, dtype=torch.bool)
        y = torch.full((num_edges,), -1) if self.y is None else self.y
        masks = self.masks if any(mask is not None for mask in self.masks) else Masks(nowhere, nowhere, ~nowhere)
        return replace(self, y=y, masks=Masks(*(nowhere if mask is None else mask for mask in masks)))

    @property
    def training(self) -> NDArray[np.bool_] | None:
        """Rows to fit transforms on, [n]; None: all."""
        mask = self.masks.train_mask
        return None if mask is None or not mask.any() else mask.numpy()

    @property
    def held_out(self) -> Tensor | None:
        """Rows to validate or test on, bool [n]; None: there are no splits."""
        _, val, test = self.masks
        return None if val is None or test is None else val | test


def read_label(table: InputTable, names: Sequence[str], kind: str = "") -> tuple[Tensor | None, tuple[str, ...]]:
    """Return labels as in GraphFields, None for no columns, and the names of the classes, () if they are numbers.

    Args:
        table: The table.
        names: Names of the columns.
        kind: 'classes' or 'values', the meaning of a single column of numbers; '': its type decides.

    Raises:
        InputError: If the kind is unknown, or has no effect; or if it is needed, because all floats are whole numbers.
    """
    if kind:
        check_word("--label-kind", kind, ("classes", "values"))
        if len(names) != 1:
            raise InputError(f"--label-kind {kind} needs one column of --label, not {len(names)}: leave it out")
    if not names:
        return None, ()
    place = f"{table.place}: column '{names[0]}'"
    if len(names) == 1 and (texts := read_texts(table, names[0])) is not None:
        if kind == "values":
            raise InputError(f"{place}: contains text: leave out --label-kind values, or turn the column into numbers")
        return texts
    label_parts: list[NDArray[np.float64]] = []
    row, integral = 0, True
    for part in table.parts(dict.fromkeys(names, LABEL)):
        label_parts.append(np.concatenate([label_part(part[name], table, name, row) for name in names], 1))
        row += len(label_parts[-1])
        integral &= all(getattr(part[name].values, "dtype", np.dtype("f8")).kind in "biu" for name in names)
    rows = np.concatenate([np.empty((0, len(names))), *label_parts])
    with located(place):
        y = labels_of(rows, kind)
    if y.dtype == torch.int64 and not kind and not integral and (y >= 0).any():
        raise InputError(
            f"{place}: contains whole numbers as floats, which could be classes or values: give --label-kind classes "
            "(learned with --loss cross_entropy), or --label-kind values for a regression (--loss mse); in Python "
            "label_kind"
        )
    return y, ()


def read_texts(table: InputTable, name: str) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return the class of each row of a column of texts, -1 if missing or empty, and the sorted names of the classes.

    Args:
        table: The table.
        name: Name of the column.

    Returns:
        None if the column contains no text.
    """
    collector, row, parts = NameCollector(), 0, []
    for part in table.parts({name: LABEL}):
        if not isinstance(part[name].values, Texts) and not part[name].missing.all():
            return None
        texts, missing = categories_of(ColumnPart(part[name], f"{table.place}: column '{name}'", row))
        row += len(missing)
        collector.add(texts.take(np.flatnonzero(~missing)))
        parts.append(texts)
    if not collector.count:
        return None
    names = sorted(collector.ids().tolist())
    require_texts(names, f"{table.place}: column '{name}'")
    index = NameIndex(Texts.of(names), name)
    return torch.from_numpy(np.concatenate([index.find(texts) for texts in parts])), tuple(names)


def label_part(column: Column, table: InputTable, name: str, first_row: int) -> NDArray[np.float64]:
    """Return some rows of labels as float64 [n, C], NaN if unlabelled.

    Args:
        column: Some rows of a column.
        table: The table, for errors.
        name: Name of the column, for errors.
        first_row: Number of the first row, for errors.

    Raises:
        InputError: If they are no finite numbers.
    """
    values, missing = column
    if isinstance(values, Texts) or values.dtype.kind not in "biuf":
        row, text = odd_value(column)
        raise InputError(
            f"{table.place}: column '{name}', row {first_row + row}: {text} is no number: give class numbers from 0, "
            "such as pandas.factorize(column)[0]"
        )
    rows = values.reshape(len(values), -1).astype(np.float64)
    raise_at_first(any_of_row(np.isinf(rows)), f"{table.place}: column '{name}'", first_row, "is infinite: correct it")
    rows[missing] = np.nan
    return rows


def labels_of(rows: NDArray[np.float64], kind: str = "") -> Tensor:
    """Return labels in the form of GraphFields from float64 [n, C] with NaN for none.

    Args:
        rows: The labels.
        kind: 'classes' or 'values', the meaning of one column; '': one column of whole numbers contains classes.

    Raises:
        InputError: If classes are requested, and a number has a fraction.
    """
    y = torch.from_numpy(rows)
    y = y[:, 0] if y.shape[1] == 1 else y
    fraction = ~y.isnan() & (y != y.round())
    if kind == "classes" and fraction.any():
        raise_at_first(fraction.numpy(), "labels", 0, "has a fraction: leave out --label-kind classes, or correct it")
    if y.dim() == 1 and kind != "values" and not fraction.any():
        return torch.where(y.isnan(), -1.0, y).long()
    if not kind:
        warn_whole_values(y)
    return cast("y", y, torch.float32)


def read_masks(
    table: InputTable,
    columns: TableColumns,
    y: Tensor | None,
    seed: int,
) -> Masks:
    """Return the split of a column, or a split by time, or a random split of the labelled rows.

    Args:
        table: The table.
        columns: Meaning of its columns.
        y: Labels, or None.
        seed: Seed of a random split.

    Raises:
        InputError: If several kinds of splits are requested.
    """
    shares = columns.shares
    if columns.split and (shares is not None or columns.split_time):
        raise InputError(f"--split {columns.split} is a column: leave out --split-time, and fractions of a split")
    if columns.split:
        masks = split_column(table, columns.split)
        return masks if y is None or isinstance(columns, EdgeColumns) else of_labelled(masks, y, table.place)
    if y is None and not columns.split_time and shares is None:
        return Masks()
    labelled = torch.ones(num_rows(table), dtype=torch.bool) if y is None else has_label(y)
    if columns.split_time:
        return split_by_time(read_time(table, columns.split_time), labelled, shares or SHARES)
    return random_split(labelled, seed, shares or SHARES)


def of_labelled(masks: Masks, y: Tensor, place: str) -> Masks:
    """Return splits without the vertices that have no label, with a warning (DataWarning) that counts them.

    Args:
        masks: Splits of all vertices.
        y: Labels.
        place: Name of the table in the warning.
    """
    labelled = has_label(y)
    chosen = [torch.zeros_like(labelled) if mask is None else mask for mask in masks]
    if count := int((torch.stack(chosen).any(0) & ~labelled).sum()):
        warnings.warn(
            f"{place}: {count} rows have a split, but no label: they are in no split", DataWarning, stacklevel=5
        )
    return Masks(*(mask & labelled for mask in chosen))


def split_column(table: InputTable, name: str) -> Masks:
    """Return the split of a column of words.

    Args:
        table: The table.
        name: Name of the column.

    Raises:
        InputError: At the first word that means no split.
    """
    place, row, splits = f"{table.place}: column '{name}'", 0, []
    for part in table.parts({name: TEXT}):
        values, missing = part[name]
        words = ["" if absent else str(value).lower() for value, absent in zip(values.tolist(), missing, strict=True)]
        for number, word in enumerate(words):
            if word not in SPLIT_WORDS:
                raise InputError(f"{place}, row {row + number}: '{word}' is not train, val, test, or nothing")
        splits += [SPLIT_WORDS[word] for word in words]
        row += len(words)
    split_of_vertex = torch.tensor(splits, dtype=torch.int64)
    return Masks(*(split_of_vertex == number for number in range(len(MASKS))))


def read_time(table: InputTable, name: str) -> Tensor:
    """Return a column of numbers or points in time, float64 [N].

    Args:
        table: The table.
        name: Name of the column.

    Raises:
        InputError: At the first row without a value.
    """
    place, row, parts = f"{table.place}: column '{name}'", 0, [np.empty(0)]
    for part in table.parts({name: TIME}):
        values, missing = part[name]
        if isinstance(values, Texts) or values.dtype.kind not in "iufM" or values.ndim != 1:
            raise InputError(f"{place}: is text: give numbers or points in time, as pandas.to_datetime makes them")
        raise_at_first(missing, place, row, "is missing: fill it in, or leave out --split-time")
        parts.append(values.astype("datetime64[us]").astype(np.int64) if values.dtype.kind == "M" else values)
        row += len(values)
    return torch.from_numpy(np.concatenate(parts).astype(np.float64))
