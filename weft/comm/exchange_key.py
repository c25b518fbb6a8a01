"""Keys that identify exchanges which are under way at the same time."""

from __future__ import annotations

import zlib
from typing import NamedTuple

NUM_SLOTS = 1 << 31
"""Number of tags that gloo can attach to a message."""


class Key(NamedTuple):
    """Identifier of an exchange, equal on all ranks. Exchanges under way at the same time have different keys."""

    what: str
    """Kind of exchange: tag, layer, direction."""
    number: int
    """Number of the exchange among those of its kind: a chunk, or a counter."""

    @property
    def slot(self) -> int:
        """Tag of the exchange's messages in gloo."""
        return (zlib.crc32(self.what.encode()) + self.number) % NUM_SLOTS
