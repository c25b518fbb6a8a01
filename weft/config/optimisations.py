"""What an epoch leaves out or does in fewer passes. All are exact; each can be switched off to see its worth."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Optimisations:
    """Which optimisations are on.

    reuse: aggregate constant features once, not every epoch.
    swap: map rows before their aggregate where that moves fewer bytes.
    sparse: map constant features by their nonzeros where there are few.
    fuse: ReLU and dropout in one pass.
    onednn: maps of rows by oneDNN where it is chosen (weft.nn.layers.linear_transform).
    lines: rows that sums over edges read begin at cache lines where that saves some (weft.runtime.alignment).
    reach: leave out the rows on which no training vertex's loss depends, or no scored vertex's result.
    ring: fetch halos rank by rank, and add up what each sends as it arrives.
    overlap: multiply what is here while halos are on their way.
    cover: fetch halos by the fewest rows: of sources, or partial results where these add up.
    pipeline: with chunks, exchange the rows of those before and after while one is multiplied.
    share: under offload, load a row that several ranks read at once, and send it to the others.
    keep: under offload, keep on the device what the next chunk reads as well.
    reorder: under offload, order chunks so that more is shared and kept.
    prefetch: under offload and pipeline, load what the next chunk reads while the current one is computed.
    inter: under pipeline, send a chunk's rows as soon as it is done.
    priority: under pipeline, begin with the rows that other ranks read.
    eager: under pipeline, begin a chunk of the next layer as soon as what it reads is there.
    capture: on a GPU, repeat the step of a small graph as a CUDA graph.
    pages: keep the memory that an epoch frees for the next one (weft.runtime.memory).
    """

    reuse: bool = True
    swap: bool = True
    sparse: bool = True
    fuse: bool = True
    onednn: bool = True
    lines: bool = True
    reach: bool = True
    ring: bool = True
    overlap: bool = True
    cover: bool = True
    pipeline: bool = True
    share: bool = True
    keep: bool = True
    reorder: bool = True
    prefetch: bool = True
    inter: bool = True
    priority: bool = True
    eager: bool = True
    capture: bool = True
    pages: bool = True

    @classmethod
    def without(cls, names: str) -> Self:
        """All of them but those named, separated by commas."""
        return replace(cls(), **dict.fromkeys(filter(None, names.split(",")), False))


ALL_OPTIMISATIONS = Optimisations()
OPTIMISATIONS = tuple(spec.name for spec in fields(Optimisations))
