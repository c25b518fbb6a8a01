"""Options of the strategies that work chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.strategy_flags import HostRowFlags
from weft.strategies.base import HybridOptions, Options


@dataclass(frozen=True, kw_only=True)
class ChunkOptions(HostRowFlags, Options):
    """Options of chunks."""

    device: str = ""
    """Device of the chunks; '': the CPU."""

    @property
    def on_cpu(self) -> bool:
        """True if the device is the CPU."""
        return self.device in ("", "cpu")


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(ChunkOptions, HybridOptions):
    """Options of `offload`: chunks, partition, and cached sources."""
