"""The one line of an error, and who of torchrun's ranks says it."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

from weft.utils.errors import printable

SECONDS_BEHIND = 0.5
"""How much later than the first the other ranks of a host end: torchrun stops all when it sees one that has."""


def print_error(text: str, *, shared: bool) -> None:
    """Prints the line of an error to standard error.

    shared: all ranks have it. Under torchrun the first rank of each host says it then, also in torchrun's summary.
    """
    line = f"weft: error: {printable(text)}"
    if shared and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_BEHIND)
        return
    print(line, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": said}, file)
