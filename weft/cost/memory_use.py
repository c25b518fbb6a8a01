"""Memory that a rank uses, by location."""

from __future__ import annotations

from typing import NamedTuple


class MemoryUse(NamedTuple):
    """Bytes of a rank, or of several ranks, by location."""

    device: int
    """Bytes on the device, which may be the host's processor."""
    host: int
    """Bytes in the host's memory outside of the device."""
    disk: int
    """Bytes in files."""
    shared: int = 0
    """Part of these bytes that belongs to the graph and is in memory once for all ranks of a host."""
    in_file: int = 0
    """Part of the bytes on the device that a CPU keeps in a mapped file, which need not be in memory."""
