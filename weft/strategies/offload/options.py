"""What can be said of a strategy that works chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.strategies.base import Options
from weft.strategies.vertex.plan import HybridOptions


@dataclass(frozen=True, kw_only=True)
class ChunkOptions(Options):
    """What can be said of chunks."""

    device_memory: int | None = None
    """Bytes that a rank may have on the device at once; None: no limit."""
    chunks: int = 0
    """In how many chunks aggregates are made at least; 0: as few as that allows."""
    intermediates: str = "auto"
    """What the backward pass has of a result: keep, recompute, or auto, what costs less."""
    scratch: Path | None = None
    """The folder of rows on the host; None: that for temporary files."""
    device: str = ""
    """The device of the chunks; '': the CPU."""

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self.device in ("", "cpu")


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(ChunkOptions, HybridOptions):
    """What can be said of chunks, and of where vertices live and which sources are cached."""
