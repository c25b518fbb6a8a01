"""Dtypes of rows and of their sums: rows may have a lower precision than parameters and sums."""

from __future__ import annotations

import torch


def sum_dtype(rows: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of rows, which is also that of parameters and constant factors of the rows."""
    return torch.float64 if rows == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configurations, such as float32."""
    return str(dtype).removeprefix("torch.")


def is_low_precision(rows: torch.dtype) -> bool:
    """Return True if rows of this dtype are rounded when they are stored."""
    return rows != sum_dtype(rows)
