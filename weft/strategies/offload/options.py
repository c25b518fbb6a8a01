"""Options of the strategies that work chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.strategies.base import HybridOptions, Options


@dataclass(frozen=True, kw_only=True)
class ChunkOptions(Options):
    """Options of chunks."""

    device_memory: int | None = None
    """Limit of the peak device memory of a rank, in bytes; None: no limit."""
    chunks: int = 0
    """Smallest number of chunks of an aggregate; 0: as few as the memory allows."""
    intermediates: str = "auto"
    """How backward gets a result: keep (saved), recompute, or auto (whichever costs less)."""
    scratch: Path | None = None
    """Folder of the rows on the host; None: the folder for temporary files."""
    device: str = ""
    """Device of the chunks; '': the CPU."""

    @property
    def on_cpu(self) -> bool:
        """True if the device is the CPU."""
        return self.device in ("", "cpu")


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(ChunkOptions, HybridOptions):
    """Options of `offload`: chunks, partition, and cached sources."""
