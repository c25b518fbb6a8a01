"""Optimisations of an epoch. All are exact; each can be switched off to measure its effect."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Optimisations:
    """Optimisations that can be switched off; each field is True if its optimisation is on."""

    reuse: bool = True
    """Aggregate constant features once instead of in every epoch."""
    swap: bool = True
    """Apply a linear layer before the aggregate instead of after it, if fewer bytes are moved."""
    sparse: bool = True
    """Multiply constant features by sparse products if they have few nonzeros."""
    fuse: bool = True
    """Compute ReLU and dropout in one pass."""
    onednn: bool = True
    """Compute linear layers by oneDNN if the kernel selection says so (weft.nn.layers.linear_transform)."""
    lines: bool = True
    """Align rows that sums over edges read to cache lines (weft.runtime.memory.alignment)."""
    reach: bool = True
    """Skip rows on which no loss of a training vertex depends, or in evaluations, no result of a scored vertex."""
    ring: bool = True
    """Receive halo rows rank by rank, and aggregate those of each rank as they arrive."""
    overlap: bool = True
    """Aggregate local rows while halo rows are in transit."""
    cover: bool = True
    """Exchange the fewest halo rows: source rows, or partial sums where these can be added (minimum vertex cover)."""
    pipeline: bool = True
    """With chunks under tensor, exchange the rows of other chunks while one chunk is aggregated."""
    share: bool = True
    """Under offload, if several ranks read the same row, one rank loads it and sends it to the others."""
    keep: bool = True
    """Under offload, keep rows on the device that the next chunk reads too."""
    reorder: bool = True
    """Under offload, order chunks so that more rows are shared and kept."""
    prefetch: bool = True
    """Under offload and pipeline, load the rows of the next chunk while the current one is computed."""
    inter: bool = True
    """Under pipeline, send the rows of a chunk as soon as it is computed."""
    priority: bool = True
    """Under pipeline, compute rows first that other ranks read."""
    eager: bool = True
    """Under pipeline, start a chunk of the next layer as soon as the rows that it reads have arrived."""
    capture: bool = True
    """On a GPU, run the step of a small graph as a CUDA graph."""
    pages: bool = True
    """Keep the memory that an epoch frees for the next epoch (weft.runtime.memory.heap)."""

    @classmethod
    def without(cls, names: str) -> Self:
        """Return all optimisations except for the named ones, which are separated by commas."""
        return replace(cls(), **dict.fromkeys(filter(None, names.split(",")), False))


ALL_OPTIMISATIONS = Optimisations()
"""All optimisations are on."""
OPTIMISATIONS = tuple(spec.name for spec in fields(Optimisations))
"""Names of all optimisations."""
