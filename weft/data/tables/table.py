"""Tables as columns in parts: data frames, arrays, Parquet, Arrow and CSV files, and plain text.

Every kind of table is a class with `place`, `columns` and `parts`; table_graph.py interprets the columns.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.checks.tensor_checks import located
from weft.data.tables.text_table import COMMENT, MAX_SHOWN, SEPARATORS, bad_line, read_text
from weft.data.tables.text_table import NUMBER as NUMBER_TEXT
from weft.data.vertex_names import Ids, Texts
from weft.utils.errors import InputError, readable, unknown
from weft.utils.files.file_reading import check_regular
from weft.utils.optional_packages import import_extra
from weft.utils.user_folders import expand_user

if TYPE_CHECKING:
    import pyarrow

PART_ROWS = 1 << 17
"""Number of rows of a part."""
ARROW_FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc", ".ipc": "ipc", ".csv": "csv", ".tsv": "csv"}
SUFFIXES = (*ARROW_FORMATS, ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
ID, NUMBER, TEXT, TIME, LABEL, ANY = "id", "number", "text", "time", "label", "any"
"""Kinds of columns, which decide how values are read from files without types. ANY: the values decide."""
CSV_MISTAKE = re.compile(r"CSV column #(\d+): Row #(\d+): .* invalid value '(.*)'")
"""Error of pyarrow for a value that is no number, with column, row and value."""
CSV_RAGGED = re.compile(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+): (.*)")
"""Error of pyarrow for a line with another number of values than the header, with line, both numbers and its text."""
CSV_EMPTY = "Empty CSV file"
"""Start of pyarrow's error for a CSV file without a line."""
ARROW_REMEDY = "correct the file, or give a whole file of that format"
MAX_ARROW_CAUSE = 1000
"""Number of characters of pyarrow's message that are shown: its end, not its start, names the line."""
MAX_EXACT_FLOAT = 1 << 53
"""Largest whole number up to which every whole number is a float64."""


class Column(NamedTuple):
    """Some rows of a column."""

    values: NDArray[Any] | Texts
    """Numbers or points in time [n], numbers [n, K] of a column of lists, or texts."""
    missing: NDArray[np.bool_]
    """True for rows without a value, whose entry in `values` is arbitrary, [n]."""


class ColumnPart(NamedTuple):
    """Some rows of a column with their place."""

    column: Column
    """The rows."""
    place: str
    """Table and column, for errors."""
    first_row: int
    """Number of the first row, for errors."""

    def refuse(self, wrong: NDArray[np.bool_], reason: str) -> None:
        """Raise InputError at the first flagged row.

        Args:
            wrong: Flags, [n].
            reason: Problem and remedy.
        """
        raise_at_first(wrong, self.place, self.first_row, reason)


class InputTable(Protocol):
    """Columns of equal length that can be read repeatedly, in parts."""

    @property
    def place(self) -> str:
        """Name of the table in messages."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""

    def parts(self, columns: Mapping[str, str]) -> Iterator[dict[str, Column]]:
        """Yield consecutive parts of some columns, from the first row on.

        `columns` maps the name of each column to its kind: ID, NUMBER, TEXT, TIME, LABEL or ANY.
        """


class FrameTable:
    """A pandas DataFrame, or arrays and lists by name.

    Args:
        frame: The DataFrame or mapping. A named index becomes a column.
        place: Name of the table in messages.
    """

    def __init__(self, frame: Any, place: str) -> None:
        index = getattr(getattr(frame, "index", None), "name", None)
        self._frame = frame.reset_index() if index is not None and index not in frame else frame
        self.place = place
        self.columns = tuple(str(name) for name in self._frame)
        self._names = dict(zip(self.columns, self._frame, strict=True))
        sizes = {name: len(self._frame[key]) for name, key in self._names.items()}
        if len(set(sizes.values())) > 1:
            raise InputError(f"{place}: columns have {sizes} rows: give all the same number")
        self._num_rows = next(iter(sizes.values()), 0)

    def parts(self, columns: Mapping[str, str]) -> Iterator[dict[str, Column]]:
        """Yield consecutive parts of some columns; see InputTable."""
        for start in range(0, self._num_rows, PART_ROWS):
            part = {}
            for name in columns:
                values = self._frame[self._names[name]]
                part[name] = column_of(getattr(values, "iloc", values)[start : start + PART_ROWS])
            yield part


class ArrowTable:
    """A file or folder of Parquet, Arrow or CSV files, or a pyarrow.Table. Needs pyarrow.

    Args:
        source: Path or pyarrow.Table.
        place: Name of the table in messages.
    """

    def __init__(self, source: Any, place: str) -> None:
        dataset = import_extra("pyarrow.dataset", place)
        self._source, self.place, self._kind = source, place, format_of(source)
        with readable(place, ARROW_REMEDY, max_cause=MAX_ARROW_CAUSE), self._explained({}):
            schema = dataset.dataset(source, format=self._format({})).schema
        if not schema.names:
            raise InputError(f"{place}: contains no table: give a file or folder of {', '.join(ARROW_FORMATS)}")
        self.columns, self._types = tuple(schema.names), dict(zip(schema.names, schema.types, strict=True))

    def parts(self, columns: Mapping[str, str]) -> Iterator[dict[str, Column]]:
        """Yield consecutive parts of some columns; see InputTable."""
        import pyarrow
        from pyarrow import dataset

        with readable(self.place, ARROW_REMEDY, max_cause=MAX_ARROW_CAUSE), self._explained(columns):
            table = dataset.dataset(self._source, format=self._format(columns))
            batches = table.to_batches(
                columns=list(columns),
                batch_size=PART_ROWS,
                batch_readahead=1,
                fragment_readahead=1,
                use_threads=False,
                fragment_scan_options=self._scan_options(),
            )
            for batch in batches:
                if len(batch):
                    part = {}
                    for name in columns:
                        with located(f"{self.place}: column '{name}'"):
                            part[name] = column_from_arrow(batch.column(name))
                    yield part
            pyarrow.default_memory_pool().release_unused()

    @contextmanager
    def _explained(self, columns: Mapping[str, str]) -> Iterator[None]:
        """Convert pyarrow's errors about common mistakes in CSV files, raised in the `with` block, to InputError.

        Args:
            columns: Kind of each column that is read.
        """
        import pyarrow

        try:
            yield
        except pyarrow.ArrowInvalid as error:
            if mistake := CSV_MISTAKE.search(str(error)):
                number, line, value = mistake.groups()
                name = self.columns[int(number)]
                kind = "number" if columns.get(name) == NUMBER else f"{self._types[name]} like the lines before"
                raise InputError(
                    f"{self.place}: column '{name}', line {line}: '{value}' is no {kind}: correct it"
                ) from None
            if ragged := CSV_RAGGED.search(str(error)):
                line, expected, actual, text = ragged.groups()
                values = f"{actual} value{'s' * (actual != '1')}"
                raise InputError(
                    f"{self.place}, line {line}: has {values}, and the header has {expected} ({text[:MAX_SHOWN]}): "
                    "correct it, or quote a text that contains the separator"
                ) from None
            if CSV_EMPTY in str(error):
                raise InputError(
                    f"{self.place}: is empty: its first line must contain the names of the columns"
                ) from None
            raise

    def _scan_options(self) -> Any:
        """Return options with which pyarrow does not keep a compressed group of rows in memory next to its columns."""
        from pyarrow import dataset

        parquet = self._kind == "parquet"
        return dataset.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True) if parquet else None

    def _format(self, columns: Mapping[str, str]) -> Any:
        """Return the format as pyarrow expects it, with the types of CSV columns."""
        if self._kind != "csv":
            return self._kind
        import pyarrow
        from pyarrow import csv, dataset

        kinds = {ID: pyarrow.string(), TEXT: pyarrow.string(), NUMBER: pyarrow.float64()}
        types = {name: kinds[kind] for name, kind in columns.items() if kind in kinds}
        # pyarrow finds types in the first block; numbers with a fraction and texts may come later.
        wider = {pyarrow.int64(): pyarrow.float64(), pyarrow.null(): pyarrow.string()}
        types |= {name: wider[t] for name, kind in columns.items() if kind == ANY and (t := self._types[name]) in wider}
        tabs = Path(str(self._source)).name.removesuffix(".gz").endswith(".tsv")
        return dataset.CsvFileFormat(
            parse_options=csv.ParseOptions(delimiter="\t" if tabs else ","),
            convert_options=csv.ConvertOptions(column_types=types),
        )


class TextTable:
    """Lines of words separated by blanks, tabs, commas or semicolons, without a header; columns are '0', '1' and so on.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.place = path, str(path)
        first: list[list[bytes]] = next((words for words, _ in self._lines()), [[]])
        self.columns = tuple(str(number) for number in range(len(first[0])))

    def parts(self, columns: Mapping[str, str]) -> Iterator[dict[str, Column]]:
        """Yield consecutive parts of some columns; see InputTable."""
        for words, first_line in self._lines():
            for number, line in enumerate(words):
                if len(line) != len(self.columns):
                    reason = f"has {len(line)} columns, not {len(self.columns)}: give every line the same"
                    comment = any(word.startswith((b"#", b"%")) for row in (line, *words[:1]) for word in row)
                    reason += ", and each comment a line of its own" if comment else ""
                    raise bad_line(self._path, first_line + number, b" ".join(line), reason)
            part = {}
            for name, kind in columns.items():
                with located(f"{self.place}: column '{name}'"):
                    texts = [decode(line[int(name)]) for line in words]
                part[name] = column_of(numbers_of_texts(texts) if kind in (NUMBER, LABEL, ANY) else texts)
            yield part

    def _lines(self) -> Iterator[tuple[list[list[bytes]], int]]:
        """Yield the words of nonempty lines in blocks, with the approximate number of a block's first line."""
        number = 1
        for text in read_text(self._path):
            lines = COMMENT.sub(b"", text).translate(SEPARATORS).split(b"\n")
            words = [line_words for line in lines if (line_words := line.split())]
            if words:
                yield words, number
            number += text.count(b"\n")


def open_table(source: Any, place: str) -> InputTable:
    """Return a table of any kind.

    Args:
        source: A path, a DataFrame, a pyarrow.Table, or arrays by name.
        place: Name in messages of a table that has no path.

    Raises:
        InputError: If it is no table.
    """
    if isinstance(source, str | Path):
        path = expand_user(source)
        if not path.exists():
            raise InputError(f"{path}: no such file or folder: check the path")
        for file in path.rglob("*") if path.is_dir() else [path]:
            if not file.is_dir():
                check_regular(file)
        if path.is_dir() or format_of(path):
            return ArrowTable(str(path), str(path))
        if path.name.removesuffix(".gz").endswith(".txt"):
            return TextTable(path)
        raise unknown("format of a table", path.suffix, SUFFIXES)
    if type(source).__module__.startswith("pyarrow"):
        return ArrowTable(source, place)
    if isinstance(source, Mapping) or hasattr(source, "columns"):
        return FrameTable(source, place)
    raise InputError(f"{place} is of type {type(source).__name__}: give a DataFrame, arrays by name, or a path")


def format_of(source: Any) -> str | None:
    """Return pyarrow's name of a file's format, by its suffix, or of the files in a folder; None for another format."""
    if not isinstance(source, str | Path):
        return None
    path = Path(source)
    names = (
        sorted(file.name for file in path.iterdir() if not file.name.startswith((".", "_"))) if path.is_dir() else ()
    )
    suffix = Path((names[0] if names else path.name).removesuffix(".gz")).suffix
    return ARROW_FORMATS.get(suffix, "parquet" if path.is_dir() else None)


def num_rows(table: InputTable) -> int:
    """Return the number of rows of a table."""
    column = table.columns[0]
    return sum(len(part[column].missing) for part in table.parts({column: TIME}))


def decode(text: bytes) -> str:
    """Return bytes as text. Raises InputError if they are not in UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{text!r} is no UTF-8: save text as UTF-8") from None


def column_of(values: Any) -> Column:
    """Convert some rows of a column: a NumPy array, which may be masked, a pandas series or a Python list."""
    if getattr(getattr(values, "dtype", None), "tz", None) is not None:
        values = values.dt.tz_convert("UTC").dt.tz_localize(None)
    if hasattr(values, "isna") and values.dtype.kind in "biu" and values.isna().any():  # pandas' Int64 and its like
        filled = values.fillna(False if values.dtype.kind == "b" else 0)
        return Column(filled.to_numpy(values.dtype.numpy_dtype), values.isna().to_numpy())
    array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    masked = any_of_row(np.ma.getmaskarray(values)) if isinstance(values, np.ma.MaskedArray) else False
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype.kind != "O":
        return Column(array, missing_in(array) | masked)
    missing = values.isna().to_numpy() if hasattr(values, "isna") else np.array([v is None for v in array], bool)
    missing = missing | masked
    present = [value for value, absent in zip(array.tolist(), missing, strict=True) if not absent]
    if all(isinstance(value, str | bytes) for value in present):
        texts = [decode(value) if isinstance(value, bytes) else value or "" for value in present]
        rows = iter(texts)
        return Column(Texts.of(["" if absent else next(rows) for absent in missing]), missing)
    if any(isinstance(value, str) for value in present):
        return Column(array, missing)
    try:
        if all(isinstance(value, Decimal) for value in present):
            present = [int(value) if value == value.to_integral_value() else float(value) for value in present]
        numbers = times_of(present) if isinstance(present[0], datetime.date) else np.array(present)
        filled = np.zeros((len(array), *numbers.shape[1:]), numbers.dtype)
    except (ValueError, TypeError):  # rows of different lengths, or times among other values
        return Column(array, missing)
    if numbers.dtype.kind not in "biufM":
        return Column(array, missing)
    filled[~missing] = numbers
    return Column(filled, missing | missing_in(filled))


def times_of(values: Sequence[Any]) -> NDArray[np.datetime64]:
    """Return dates or times of Python as points in time, in UTC if they have a time zone, [n].

    Raises:
        TypeError: If only some of them have a time zone, or some are no dates.
    """
    zones = {getattr(value, "tzinfo", None) is not None for value in values}
    if len(zones) > 1 or not all(isinstance(value, datetime.date) for value in values):
        raise TypeError("times with and without a time zone")
    if zones == {True}:
        values = [value.astimezone(datetime.UTC).replace(tzinfo=None) for value in values]
    return np.array(values, "datetime64[us]")


def missing_in(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values [n], or rows of values [n, K], are NaN or no point in time: [n]."""
    if values.dtype.kind not in "fM":
        return np.zeros(len(values), bool)
    return any_of_row(np.isnan(values) if values.dtype.kind == "f" else np.isnat(values))


def any_of_row(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows of flags [n] or [n, K] contain a True: [n]."""
    flagged: NDArray[np.bool_] = flags.reshape(len(flags), -1).max(axis=1, initial=False)
    return flagged


def column_from_arrow(array: pyarrow.Array) -> Column:
    """Convert some rows of a pyarrow column."""
    import pyarrow
    from pyarrow import compute, types

    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    missing = array.is_null().to_numpy(zero_copy_only=False)
    if types.is_null(array.type):
        return Column(np.zeros(len(array)), missing)
    if types.is_string(array.type) or types.is_large_string(array.type) or types.is_string_view(array.type):
        filled = compute.fill_null(array, "").cast(pyarrow.large_string())
        _, offsets, data = filled.buffers()
        places = np.frombuffer(offsets, np.int64, len(filled) + 1, 8 * filled.offset)
        return Column(Texts.within(places, np.frombuffer(data or b"", np.uint8)), missing)
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        return column_from_lists(array, missing)
    if types.is_date(array.type) or types.is_timestamp(array.type):
        times = array.cast(pyarrow.timestamp("us"), safe=False).to_numpy(zero_copy_only=False)
        return Column(times, missing)
    if types.is_decimal(array.type):
        try:
            array = array.cast(pyarrow.int64())
        except pyarrow.ArrowInvalid:  # a fraction, or a number that int64 cannot hold
            array = array.cast(pyarrow.float64())
    numeric = types.is_floating(array.type) or types.is_integer(array.type) or types.is_boolean(array.type)
    if array.null_count and numeric:
        array = array.fill_null(pyarrow.scalar(0).cast(array.type))
    values = array.to_numpy(zero_copy_only=False)
    return column_of(values) if values.dtype.kind == "O" else Column(values, missing | missing_in(values))


def column_from_lists(array: pyarrow.Array, missing: NDArray[np.bool_]) -> Column:
    """Return a column of lists of equal length as numbers [n, K].

    Args:
        array: Some rows of the column.
        missing: Rows without a list, [n].
    """
    from pyarrow import compute

    sizes = compute.list_value_length(array.drop_null()).unique()
    flat = column_from_arrow(array.drop_null().flatten())
    if len(sizes) > 1 or isinstance(flat.values, Texts) or flat.values.dtype.kind == "O":
        values = np.empty(len(array), object)
        values[:] = array.to_pylist()
        return Column(values, missing)
    width = sizes[0].as_py() if len(sizes) else 0
    values = np.zeros((len(array), width), flat.values.dtype)
    values[~missing] = flat.values.reshape(-1, width)
    missing_in_list = missing.copy()
    missing_in_list[~missing] = flat.missing.reshape(-1, width).any(1)
    return Column(values, missing_in_list)


def numbers_of_texts(texts: Sequence[str]) -> Any:
    """Return texts as int64 or float64 if all of them are such numbers, else unchanged."""
    if any("_" in text for text in texts):  # Python reads 1_000 as a number
        return texts
    for dtype in (np.int64, np.float64):
        with suppress(ValueError, OverflowError):
            return np.array(texts).astype(dtype)
    return texts


def ids_of(column: Column, place: str, first_row: int) -> Ids:
    """Return a column of ids: whole numbers, or texts.

    Args:
        column: Some rows of the column.
        place: Table and column, for errors.
        first_row: Number of the first row, for errors.

    Raises:
        InputError: At the first row without an id.
    """
    values, missing = column
    if isinstance(values, Texts):
        raise_at_first(missing | (np.diff(values.offsets) == 0), place, first_row, "is missing: every row needs an id")
        return values
    raise_at_first(missing, place, first_row, "is missing: every row needs an id")
    if values.dtype.kind == "f":
        raise_at_first(values != np.round(values), place, first_row, "has a fraction: ids are whole numbers or text")
        inexact = np.abs(values) > MAX_EXACT_FLOAT
        raise_at_first(inexact, place, first_row, "is above 2**53 in a column of floats, so it is not exact: give text")
    if values.dtype.kind not in "iuf" or values.ndim != 1:
        content = "lists" if values.ndim > 1 else str(values.dtype)
        if values.dtype.kind == "O":
            row, text = odd_value(column)
            raise InputError(f"{place}, row {first_row + row}: is {text}, but ids are all whole numbers, or all text")
        raise InputError(f"{place}: contains {content}: ids are whole numbers or text, give all as text")
    raise_at_first((values < -(2.0**63)) | (values >= 2.0**63), place, first_row, "is too large: give such ids as text")
    return np.ascontiguousarray(values, np.int64)


def numbers_in(part: ColumnPart) -> NDArray[np.float64]:
    """Return numbers as float64 [n, K]; K = 1 for single numbers. Missing numbers are arbitrary.

    Raises:
        InputError: At the first value that is no finite number.
    """
    remedy = "correct it, or leave the column out"
    values, missing = part.column
    if isinstance(values, Texts) or values.dtype.kind == "O":
        row, text = odd_value(part.column)
        length = "" if isinstance(values, Texts) else ", or a list of another length"
        raise InputError(f"{part.place}, row {part.first_row + row}: {text} is no number{length}: {remedy}")
    if values.dtype.kind not in "biuf":
        raise InputError(f"{part.place}: contains {values.dtype}, no numbers: {remedy}")
    numbers = values.reshape(len(values), -1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        too_large = any_of_row(np.abs(numbers) > np.finfo(np.float32).max) & ~missing
    part.refuse(too_large, f"is infinite or above 3e38: {remedy}")
    return numbers


def odd_value(column: Column) -> tuple[int, str]:
    """Return the row and the text of the first value that is no number, or is a list of another length than the first.

    Args:
        column: Some rows of a column that are not all numbers.
    """
    values, missing = column
    rows = np.flatnonzero(~missing).tolist()
    if not rows:
        return 0, "None"
    content = values.tolist() if isinstance(values, Texts) or values.dtype.kind != "O" else list(values)
    lengths = [len(content[row]) if isinstance(content[row], list | tuple | np.ndarray) else -1 for row in rows]
    for row, length in zip(rows, lengths, strict=True):
        text = NUMBER_TEXT.fullmatch(content[row].encode()) if isinstance(content[row], str) else None
        number = isinstance(content[row], Number) or text is not None
        if length != lengths[0] or (length < 0 and not number):
            break
    else:
        row = rows[0]
    shown = repr(content[row])
    return row, shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."


def raise_at_first(wrong: NDArray[np.bool_], place: str, first_row: int, reason: str) -> None:
    """Check that no row is flagged.

    Args:
        wrong: Flags, bool [n].
        place: Table and column, for the error.
        first_row: Number of the first row.
        reason: Problem and remedy, for the error.

    Raises:
        InputError: At the first flagged row.
    """
    if wrong.any():
        raise InputError(f"{place}, row {first_row + int(wrong.argmax())}: {reason}")


def require_columns(table: InputTable, columns: Sequence[str], flag: str) -> None:
    """Check that a table has some columns.

    Args:
        table: The table.
        columns: Names of the columns.
        flag: Flag that names them, for the error.

    Raises:
        InputError: If one is missing, or two columns have its name, or it is named twice.
    """
    for name in columns:
        if name not in table.columns and len(table.columns) == 1 and ";" in table.columns[0]:
            raise InputError(f"{table.place}: is separated by semicolons: save it with commas")
        if name not in table.columns:
            raise InputError(f"{table.place}: {unknown(f'column of {flag}', name, table.columns)}")
        if table.columns.count(name) > 1:
            raise InputError(f"{table.place}: {table.columns.count(name)} columns are named '{name}': rename them")
        if columns.count(name) > 1:
            raise InputError(f"{flag} names column '{name}' twice: name it once")
