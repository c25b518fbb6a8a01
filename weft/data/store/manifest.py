"""Reading of a graph folder's manifest and arrays, with an error for every way in which they can be inconsistent."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from weft.data.store.digests import digest_of, note_digest
from weft.data.store.npy import BFLOAT16, map_array, tensor_of
from weft.utils.errors import InputError, readable
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_JSON_BYTES, read_text

FORMAT = "weft-graph"
MANIFEST = "manifest.json"
DTYPES = ("|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", BFLOAT16)
"""Dtypes of arrays in a graph folder; PyTorch could not map others without a copy."""
REMEDY = "import the graph again"
ASIDE = ".old"
"""Suffix of the temporary name of a graph folder that is being replaced."""

Value = TypeVar("Value", int, str, bool, list[Any], dict[str, Any])
Item = TypeVar("Item", int, str)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a graph folder, migrated to the current version.

    Raises:
        InputError: If there is none, or it was written by a later weft.
    """
    if not folder.exists():
        require_not_set_aside(folder)
        raise InputError(f"{folder}: no such folder: check the path, or write it with 'weft data import'")
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file, not a graph folder: load it as a data file, or give a graph folder")
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{path}: missing, so this is no graph folder: give one that 'weft data import' has written, or one of "
            "OGB's, with raw/ and split/"
        )
    manifest = read_json(path)
    if not isinstance(manifest, dict) or entry(manifest, "format", str, path) != FORMAT:
        raise InputError(f"{path}: field 'format' is not '{FORMAT}': give a folder written by 'weft data import'")
    entry(manifest, "version", int, path)  # present in every version of the format
    with readable(path, REMEDY):
        return migrate.graph(manifest, path)


def require_not_set_aside(folder: Path) -> None:
    """Check that no process was stopped while it replaced a graph folder.

    To replace a folder, weft renames the old one to a temporary name first. A folder that still has this name remains
    from such a process.

    Raises:
        InputError: There is a folder with the temporary name. The message has the command that restores it.
    """
    aside = next(folder.parent.glob(f".{glob.escape(folder.name)}.????????{ASIDE}"), None)
    if aside is not None:
        raise InputError(f"{folder}: a process was stopped while it replaced this graph: mv {aside} {folder}")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises InputError if it cannot be read."""
    with readable(path, REMEDY):
        return json.loads(read_text(path, MAX_JSON_BYTES))


def is_store(folder: Path) -> bool:
    """Return whether a folder is a graph folder, of any version and state; other programs write a manifest.json too."""
    try:
        manifest = read_json(folder / MANIFEST)
    except InputError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def entry(fields: dict[str, Any], name: str, kind: type[Value], path: Path) -> Value:
    """Return one field of a JSON object.

    Args:
        fields: The object.
        name: Name of the field.
        kind: Type of the field.
        path: The file, for errors.

    Raises:
        InputError: If it is missing or of another type.
    """
    if name not in fields:
        raise InputError(f"{path}: field '{name}' is missing: {REMEDY}")
    value = fields[name]
    if not isinstance(value, kind):
        raise InputError(f"{path}: field '{name}' is of type {type(value).__name__}, not {kind.__name__}: {REMEDY}")
    return value


def entries(fields: dict[str, Any], name: str, kind: type[Item], path: Path) -> tuple[Item, ...]:
    """Return one field of a JSON object that is a list.

    Args:
        fields: The object.
        name: Name of the field.
        kind: Type of the items.
        path: The file, for errors.

    Raises:
        InputError: If it is missing, or an item is of another type.
    """
    values = entry(fields, name, list, path)
    for value in values:
        if not isinstance(value, kind):
            raise InputError(f"{path}: field '{name}' lists a {type(value).__name__}, not {kind.__name__}: {REMEDY}")
    return tuple(values)


def array_files(folder: Path, manifest: dict[str, Any]) -> dict[str, Path]:
    """Return the files of the arrays that a manifest lists, by name.

    Args:
        folder: The graph folder.
        manifest: Its manifest.

    Raises:
        InputError: If a name is no plain file name.
    """
    path = folder / MANIFEST
    files = entry(manifest, "files", dict, path)
    for name in files:
        if not re.fullmatch(r"\w+", name):
            raise InputError(f"{path}: field 'files' lists '{name}', which is no name of an array: {REMEDY}")
    return {name: folder / f"{name}.npy" for name in files}


def read_array(path: Path, fields: dict[str, Any], verify: bool | None, *, checked: bool = False) -> Tensor:
    """Return a .npy file, memory-mapped copy-on-write.

    Args:
        path: The file.
        fields: Its entry in the manifest.
        verify: Whether to compute the checksum; None: only if the file was changed or copied after it was written.
        checked: True if an earlier opening has checked the file as it is.

    Raises:
        InputError: If header, size or checksum differ from the manifest.
    """
    if not path.is_file():
        raise InputError(f"{path}: missing, though the manifest lists it: {REMEDY}")
    manifest = path.with_name(MANIFEST)
    array = map_array(path, REMEDY)
    stated_dtype, stated_shape = entry(fields, "dtype", str, manifest), entry(fields, "shape", list, manifest)
    for field, stated, actual in (("dtype", stated_dtype, array.dtype.str), ("shape", stated_shape, list(array.shape))):
        if stated != actual:
            raise InputError(f"{path}: field '{field}' is {actual}, the manifest says {stated}: {REMEDY}")
    if array.dtype.str not in DTYPES or not array.ndim:
        raise InputError(
            f"{path}: contains {array.dtype} of shape {list(array.shape)}, which no graph folder has: {REMEDY}"
        )
    tensor, checksum = tensor_of(array), entry(fields, "sha256", str, manifest)
    unchanged = checked or file_state(path).items() <= fields.items()
    if verify or (verify is None and not unchanged):
        unchanged = digest_of(tensor) == checksum
        if not unchanged:
            raise InputError(f"{path}: field 'sha256' of the data is not the manifest's {checksum[:12]}...: {REMEDY}")
    if unchanged:
        note_digest(tensor, checksum)
    return tensor


def file_state(path: Path) -> dict[str, int]:
    """Return the fields of a manifest by which a reader detects that a file was written to since."""
    state = path.stat()
    return {"bytes": state.st_size, "modified": state.st_mtime_ns}
