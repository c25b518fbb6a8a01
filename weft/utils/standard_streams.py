"""Standard output and standard error that never fail: output that cannot be written is no reason to stop training."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

STDERR = 2
"""File descriptor of standard error."""


class LossyStream:
    """Text stream that discards what cannot be written, such as to a full disk or to a reader that has ended.

    Characters that the stream's encoding lacks are escaped.

    Args:
        stream: Stream to write to. None: everything is discarded.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = cast(Any, stream)  # only used within `_discarding`, or for attributes that a caller requests
        self.error: OSError | None = None
        """First error of writing."""

    def write(self, text: str) -> int:
        """Write text, or discard it, and return its number of characters."""
        with self._discarding():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Write buffered text, or discard it."""
        with self._discarding():
            self._stream.flush()

    def close(self) -> None:
        """Close the stream, also if buffered text cannot be written."""
        with self._discarding():
            self._stream.close()

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """Discard what is written in the `with` block if the stream refuses it, is closed or does not exist."""
        try:
            yield
        except OSError as error:
            self.error = self.error or error
        except (ValueError, AttributeError):
            if self._stream is not None and not self._stream.closed:
                raise


def lossy(stream: TextIO | None) -> TextIO:
    """Return a `LossyStream` that writes to a stream; the stream itself if it is one already."""
    return cast(TextIO, stream if isinstance(stream, LossyStream) else LossyStream(stream))


def guard_standard_streams() -> None:
    """Open the standard streams that are closed, and let no write to them fail. For processes that belong to weft.

    A file that is opened later would otherwise get the number of a closed stream, and the messages of C++ code with it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    sys.stdout, sys.stderr = lossy(sys.stdout), lossy(sys.stderr)
