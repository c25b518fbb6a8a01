"""Text tables of numbers, plain or gzipped, read in blocks: fast, and exact about the first bad line."""

from __future__ import annotations

import gzip
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from weft.runtime.memory.limit import check_fits_memory
from weft.utils.errors import InputError
from weft.utils.files.file_reading import check_regular, open_regular

BLOCK_BYTES = 1 << 24
MAX_LINE_BYTES = 1 << 24
MAX_SHOWN = 60
"""Number of characters of a line in an error."""
COMMENT = re.compile(rb"(?m)^[ \t]*[#%][^\n]*")
"""Line that is a comment."""
COMMENT_OF_NUMBERS = re.compile(rb"(?m)^[ \t]*[#%][^\n]*|(?<=[ \t])#[^\n]*")
"""Line that is a comment, or a comment after the numbers of a line."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of files in UTF-16, in either byte order."""
SEPARATORS = bytes.maketrans(b",;\t", b"   ")
INTEGER = re.compile(rb"[+-]?\d+")
NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|nan|inf(inity)?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TextBlock:
    """Some whole lines of a table."""

    path: Path
    """File of the table."""
    values: NDArray[Any]
    """int64 or float64 [rows, columns]."""
    text: bytes
    """The lines, with comments and a header replaced by blanks."""
    first_line: int
    """Number of the first line in the file, from 1."""

    def error(self, row: int, reason: str) -> InputError:
        """Return the InputError for a row of this block: file, line number, content, reason.

        Args:
            row: Number of the row in the block.
            reason: Problem and remedy.
        """
        lines = self.text.split(b"\n")
        number = [i for i, line in enumerate(lines) if line.strip()][row]
        return bad_line(self.path, self.first_line + number, lines[number], reason)


def bad_line(path: Path, number: int, line: bytes, reason: str) -> InputError:
    """Return the InputError for a line.

    Args:
        path: The file.
        number: Number of the line, from 1.
        line: The line.
        reason: Problem and remedy.
    """
    return InputError(f"{path}: line {number} '{printable_line(line)}': {reason}")


def printable_line(line: bytes) -> str:
    """Return a piece of a file for an error: printable, and shortened if it is long."""
    text = line.strip(b" \t\r")[: MAX_SHOWN + 1].decode("latin-1").encode("unicode_escape").decode()
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def read_blocks(path: Path, *, integral: bool | None = None, remedy: str = "") -> Iterator[TextBlock]:
    """Yield the lines of a table in blocks. Every line must have as many columns as the first.

    Columns are separated by blanks, tabs, commas or semicolons. Blank lines, lines that begin with # or %, comments
    after a blank and #, and a first line that is not numeric are skipped.

    Args:
        path: The file.
        integral: True: int64. False: float64. None: int64 for one or two columns, else float64.
        remedy: Further remedy to print if something is no number.

    Raises:
        InputError: For a line that is no row of the table, and for a file that cannot be read to its end.
    """
    columns, number, num_bytes = 0, 1, 0
    for text in read_text(path):
        if text.isspace():
            number += text.count(b"\n")
            continue
        clean = COMMENT_OF_NUMBERS.sub(b"", text) if b"#" in text or b"%" in text else text
        if not columns:
            clean, columns = drop_header(clean)
        if columns and not clean.isspace():
            values = parse(path, clean, columns, columns <= 2 if integral is None else integral, number, remedy)
            num_bytes += values.nbytes
            check_fits_memory(num_bytes, f"{path}: its first {number} lines and more", "give fewer of them")
            yield TextBlock(path=path, values=values, text=clean, first_line=number)
        number += text.count(b"\n")


def read_text(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of whole lines, each with a newline at its end; .gz files are unpacked.

    A byte-order mark of UTF-8 at the start of the file is left out.

    Raises:
        InputError: For a line that is too long for a table, and for a file that is damaged or in UTF-16.
    """
    rest, number = b"", 1
    try:
        with open_binary(path) as file:
            start = file.read(max(BLOCK_BYTES, len(BYTE_ORDER_MARK)))
            if start.startswith(UTF_16):
                raise InputError(f"{path}: is text in UTF-16: save it as UTF-8")
            data = start.removeprefix(BYTE_ORDER_MARK)
            while data:
                whole, newline, tail = data.rpartition(b"\n")
                if newline:
                    whole = rest + whole + newline
                    number += whole.count(newline)
                    yield whole
                    rest = tail
                else:
                    rest += data
                if len(rest) > MAX_LINE_BYTES:
                    raise bad_line(path, number, rest, f"is longer than {MAX_LINE_BYTES} bytes: break it up")
                data = file.read(BLOCK_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path}: is no whole gzip file ({error}): fetch it again, or rename it if it is plain text"
        ) from None
    if rest:
        yield rest + b"\n"


def open_binary(path: Path) -> IO[bytes]:
    """Open a file, unpacked if its name ends in .gz. Raises InputError if there is none."""
    if path.is_dir() or not path.exists():
        raise InputError(f"{path}: no such file: check the path")
    check_regular(path)
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else open_regular(path)


def drop_header(text: bytes) -> tuple[bytes, int]:
    """Return the text without a nonnumeric first line, and the number of columns (0: no data yet)."""
    lines = (match for match in re.finditer(rb"[^\n]+", text) if match.group().strip())
    line = next(lines, None)
    if line is None:
        return text, 0
    fields = line.group().translate(SEPARATORS).split()
    if not any(NUMBER.fullmatch(part) for part in fields):
        text = text[: line.start()] + b" " * len(line.group()) + text[line.end() :]
        line = next(lines, None)
    return text, 0 if line is None else len(line.group().translate(SEPARATORS).split())


def parse(path: Path, text: bytes, columns: int, integral: bool, first_line: int, remedy: str) -> NDArray[Any]:
    """Return the numbers of some whole lines, int64 or float64 [rows, columns].

    Args:
        path: The file, for errors.
        text: The lines.
        columns: Number of columns.
        integral: int64 instead of float64.
        first_line: Number of the first line, for errors.
        remedy: Further remedy to print if something is no number.

    Raises:
        InputError: At the first bad line.
    """
    spaced = text.translate(SEPARATORS)
    rows = count_rows(spaced, columns)
    if text.count(b",") + text.count(b";") in (0, rows * (columns - 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # older NumPy versions warn instead of raising
            try:
                values = np.fromstring(spaced, dtype=np.int64 if integral else np.float64, sep=" ")
            except (ValueError, DeprecationWarning):
                values = np.empty(0)
        if values.size == rows * columns:
            return values.reshape(rows, columns)
    raise find_bad_line(path, text, columns, integral, first_line, remedy)


def count_rows(text: bytes, columns: int) -> int:
    """Return the number of nonblank lines; -1 if any of them does not have exactly `columns` fields.

    Args:
        text: The lines, with blanks as separators.
        columns: Number of columns.
    """
    data = np.frombuffer(text, dtype=np.uint8)
    filled = data > ord(" ")
    begins = filled.copy()
    begins[1:] &= ~filled[:-1]
    before = np.searchsorted(np.flatnonzero(begins), np.flatnonzero(data == ord("\n")))
    per_line = np.diff(before, prepend=0)
    per_line = per_line[per_line > 0]
    return len(per_line) if (per_line == columns).all() else -1


def find_bad_line(path: Path, text: bytes, columns: int, integral: bool, first_line: int, remedy: str) -> InputError:
    """Return the InputError for the first line that is no row of the table.

    Args:
        path: The file.
        text: The lines.
        columns: Number of columns.
        integral: Whether numbers must be whole.
        first_line: Number of the first line.
        remedy: Further remedy to print if something is no number.
    """
    number = INTEGER if integral else NUMBER
    kind = "whole numbers" if integral else "numbers"
    for i, line in enumerate(text.split(b"\n")):
        if not line.strip():
            continue
        fields = re.split(rb"[,;]", line) if b"," in line or b";" in line else line.split()
        if len(fields) != columns:
            reason = f"has {len(fields)} columns, not {columns}: give every line the same, with one kind of separator"
            return bad_line(path, first_line + i, line, reason)
        for field in fields:
            if not number.fullmatch(field.strip()):
                reason = f"'{printable_line(field)}' is no number: expected {columns} {kind}{remedy}"
                return bad_line(path, first_line + i, line, reason)
    return InputError(f"{path}: lines {first_line} and on mix commas and blanks as separators: use one of them")
