"""Tables of rows in int8 with a scale for each column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from weft.utils.errors import InputError

MAX_VALUE = 128
"""Largest absolute value in int8."""


class QuantizedTable:
    """Rows [n, F] in int8 with a scale for each column, which are read by index: `table[rows]` is float32.

    It is no tensor and has no arithmetic, so a reader cannot forget the scales.

    Args:
        values: int8 [n, F], on the CPU.
        scale: Factor of each column, float32 [F], on the CPU.

    Raises:
        InputError: If values or scale have another dtype or shape, or a scale is not positive or too large for float32.
    """

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        described = f"{values.dtype} {list(values.shape)} with scales {scale.dtype} {list(scale.shape)}"
        if (values.dtype, values.dim(), scale.dtype) != (torch.int8, 2, torch.float32):
            raise InputError(f"quantized features are {described}: give int8 [n, F] with scales float32 [F]")
        if scale.shape != values.shape[1:]:
            raise InputError(f"quantized features are {described}: give one scale for each column")
        if not ((scale > 0) & (scale * MAX_VALUE).isfinite()).all():
            raise InputError("scales of quantized features must be positive, and finite times 128: check the features")
        self.values, self.scale = values, scale

    def __repr__(self) -> str:
        return f"QuantizedTable of {list(self.shape)} in int8 with scales: table[rows] is float32"

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: slice | Tensor | tuple[slice | Tensor, slice]) -> Tensor:
        """Return some rows, or some columns of some rows, as float32.

        Args:
            index: The rows, a range or int64 [m]; or a tuple of rows and a range of columns.
        """
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return self.values[rows, columns].float().mul_(self.scale[columns])

    @property
    def shape(self) -> torch.Size:
        """Number of rows and columns, [n, F]."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values, int8."""
        return self.values.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a stored value."""
        return self.values.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the stored values."""
        return self.values.nbytes

    def dim(self) -> int:
        """Return the number of dimensions, 2."""
        return self.values.dim()

    def new_zeros(self, num_rows: int, width: int) -> QuantizedTable:
        """Return a table of zeros with the same scales.

        Args:
            num_rows: Number of rows.
            width: Number of columns, F.
        """
        return QuantizedTable(self.values.new_zeros(num_rows, width), self.scale)


FeatureTable: TypeAlias = Tensor | QuantizedTable
"""Features [n, F] as they are stored: floats, or int8 with scales. `table[rows]` returns floats."""


def stored_rows(table: FeatureTable, rows: slice | Tensor) -> FeatureTable:
    """Return some rows of a table in the type in which it stores them.

    Args:
        table: The table [n, F].
        rows: The rows, a range or int64 [m].
    """
    return table[rows] if isinstance(table, Tensor) else QuantizedTable(table.values[rows], table.scale)


def feature_arrays(tables: Mapping[str, FeatureTable | None]) -> dict[str, Tensor]:
    """Return the arrays of tables by name; the scales of table NAME are called NAME_scale.

    Args:
        tables: Tables by name; None is left out.
    """
    arrays: dict[str, Tensor] = {}
    for name, table in tables.items():
        if isinstance(table, QuantizedTable):
            arrays |= {name: table.values, f"{name}_scale": table.scale}
        elif table is not None:
            arrays[name] = table
    return arrays
