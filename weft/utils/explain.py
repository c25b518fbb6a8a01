"""One line about an error that nobody foresaw."""

from __future__ import annotations

import os
import re
import traceback

from weft.utils.errors import cause
from weft.utils.units import format_bytes

OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|unable to allocate|out of memory|storage size calculation overflowed", re.IGNORECASE
)
ASKED = re.compile(r"allocate (\d+) bytes", re.IGNORECASE)


def explained(error: Exception) -> str:
    """What is wrong, and a remedy; the traceback is printed where WEFT_TRACEBACK is set."""
    if os.environ.get("WEFT_TRACEBACK"):
        traceback.print_exception(error)
    said = str(error)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(said):
        asked = ASKED.search(said)
        much = f" ({format_bytes(int(asked[1]))} more were asked for)" if asked else ""
        return f"out of memory{much}: give smaller widths, or --strategy offload, which keeps rows on disk"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return f"{cause(error)}, which weft did not foresee: please report it, with what it prints under WEFT_TRACEBACK=1"
