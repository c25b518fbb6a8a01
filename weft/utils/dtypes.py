"""The types of numbers: rows may be narrower than parameters, and than what they are summed in."""

from __future__ import annotations

import torch


def sum_dtype(rows: torch.dtype) -> torch.dtype:
    """The type in which rows of a type are summed, and that of the parameters and constant factors that they meet."""
    return torch.float64 if rows == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """A type as configurations have it."""
    return str(dtype).removeprefix("torch.")


def is_low_precision(rows: torch.dtype) -> bool:
    """Whether rows of a type are rounded where they are stored."""
    return rows != sum_dtype(rows)
