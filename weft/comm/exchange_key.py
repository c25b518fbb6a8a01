"""What ranks tell exchanges by that are under way at once."""

from __future__ import annotations

import zlib
from typing import NamedTuple

NUM_SLOTS = 1 << 31  # of gloo's tags, by which messages between two ranks are told apart


class Key(NamedTuple):
    """Which exchange of a group this is, said alike by its ranks: those under way at once have different keys."""

    what: str
    """Of what: tag, layer, direction."""
    number: int
    """Which of those: a chunk, or a count."""

    @property
    def slot(self) -> int:
        """The tag of its messages."""
        return (zlib.crc32(self.what.encode()) + self.number) % NUM_SLOTS
