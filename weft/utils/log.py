"""Messages of weft: they go through Python's logger `weft` to standard error, and to the file of --log-file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TextIO

from weft.utils.errors import InputError, printable
from weft.utils.files.file_writing import open_in_place
from weft.utils.standard_streams import lossy
from weft.utils.terminal import print_line

LOG_FILE = "WEFT_LOG_FILE"
"""Environment variable with the file of --log-file, for the ranks that a command starts."""
LIVE = {"live": True}
"""Value of `extra` for a message that is not printed, because a live line on the terminal shows it."""

LOGGER = logging.getLogger("weft")
PROGRESS = logging.getLogger("weft.progress")
"""Logger of the lines of epochs."""


class ScreenHandler(logging.Handler):
    """Prints messages to standard error, unless the program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_configured() or hasattr(record, "live"):
            return
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        prefix = "" if record.name == PROGRESS.name else f"weft: {level}"
        print_line(prefix + record.getMessage(), lossy(sys.stderr))


class LogFile(logging.StreamHandler[TextIO]):
    """Appends messages to a file, with date, level and rank.

    Args:
        path: The file.

    Raises:
        InputError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            handle = open_in_place(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise InputError(f"--log-file {path}: {error.strerror}: give a file that can be written") from error
        super().__init__(lossy(os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")))
        rank = os.environ.get("RANK", "0")
        self.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s rank {rank}: %(message)s"))

    def close(self) -> None:
        self.stream.close()
        super().close()


def is_configured() -> bool:
    """Return True if the program has configured logging, so that its handlers get the messages."""
    return LOGGER.propagate and bool(logging.getLogger().handlers)


def open_log(path: Path) -> None:
    """Append all further messages of this process and of the ranks that it starts to a file.

    Args:
        path: The file.

    Raises:
        InputError: The file cannot be written.
    """
    LOGGER.addHandler(LogFile(path))
    os.environ[LOG_FILE] = str(path.absolute())


def open_log_of_launcher() -> None:
    """Append the messages and warnings of this rank to the log file of the process that started it, if it has one."""
    if path := os.environ.get(LOG_FILE):
        open_log(Path(path))
        log_warnings()


def log_warnings() -> None:
    """Send Python's warnings to weft's logger, each in one line."""
    warnings.showwarning = lambda text, *_: LOGGER.warning(str(text))


def close_log() -> None:
    """Close the log file, if there is one."""
    os.environ.pop(LOG_FILE, None)
    for handler in [handler for handler in LOGGER.handlers if isinstance(handler, LogFile)]:
        LOGGER.removeHandler(handler)
        handler.close()


def _escape(record: logging.LogRecord) -> bool:
    """Escape control characters for all handlers, since names of graphs and files come from others."""
    record.msg = printable(str(record.msg))
    return True


def _prepare_loggers() -> None:
    """Let weft's loggers print, as long as the program does not configure them."""
    for logger in (LOGGER, PROGRESS):
        logger.addFilter(_escape)
    LOGGER.addHandler(ScreenHandler())
    LOGGER.setLevel(LOGGER.level or logging.INFO)


_prepare_loggers()
