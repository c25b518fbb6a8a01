"""The line of text for an error, and the rank that prints it under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from contextlib import suppress

from weft.utils.errors import cause, printable
from weft.utils.log import LOGGER
from weft.utils.units import format_bytes

OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|unable to allocate|out of memory|storage size calculation overflowed", re.IGNORECASE
)
"""Messages of errors that mean that memory is exhausted."""
REQUESTED_BYTES = re.compile(r"allocate (\d+) bytes", re.IGNORECASE)
"""Part of such messages with the number of bytes."""

SECONDS_BEHIND = 0.5
"""Seconds by which the other ranks of a host end later than the first one: torchrun stops all ranks when one has
ended.
"""


def print_error(text: str, *, shared: bool) -> None:
    """Print the line of an error to standard error.

    Args:
        text: Text of the error.
        shared: True if all ranks have this error. Under torchrun, only the first rank of each host then prints it, also
            to torchrun's summary.
    """
    if shared and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_BEHIND)
        return
    LOGGER.error(text)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        line = f"weft: error: {printable(text)}"
        summary = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": summary}, file)


def killed_by(number: int, remedy: str) -> str:
    """Return words for the end of a process by a signal, with the probable cause.

    Args:
        number: Number of the signal.
        remedy: What to do if memory was exhausted.
    """
    hint = f" (out of memory? {remedy})" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{hint}"


def explain_error(error: Exception, remedy: str) -> str:
    """Return one line about an unexpected error and its remedy. With WEFT_TRACEBACK set, also print the traceback.

    Args:
        error: The error.
        remedy: What to do if memory is exhausted.
    """
    if os.environ.get("WEFT_TRACEBACK"):
        traceback.print_exception(error)
    text = str(error)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(text):
        match = REQUESTED_BYTES.search(text)
        requested = f" ({format_bytes(int(match[1]))} more were requested)" if match else ""
        return f"out of memory{requested}: reduce the widths, or {remedy}"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"unexpected error ({cause(error)}): please report it, with the output under WEFT_TRACEBACK=1"
