"""Reading a store's manifest and the arrays it vouches for, with an error for every way in which they may disagree."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.data.store.digests import digest_of, note_digest
from weft.data.store.npy import map_array
from weft.utils import migrate
from weft.utils.errors import InputError, readable

FORMAT = "weft-graph"
MANIFEST = "manifest.json"
DTYPES = ("|b1", "|u1", "<i2", "<i4", "<i8", "<f4", "<f8")  # others would be copied, and no longer be the file
REMEDY = "import the graph again"
ASIDE = ".old"
"""Suffix of the temporary name of a store that is being replaced."""

Value = TypeVar("Value", int, str, bool, list[Any], dict[str, Any])
Item = TypeVar("Item", int, str)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a store folder, in today's form. InputError if there is none, or of a later weft."""
    if not folder.exists():
        require_not_set_aside(folder)
        raise InputError(f"{folder}: no such folder: check the path, or write it with 'weft data import'")
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file, not a graph store: load it as a data file, or give the store's folder")
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{path}: missing, so this folder is no graph store: give one that 'weft data import' has written, or one "
            "of OGB's, with raw/ and split/"
        )
    manifest = read_json(path)
    if not isinstance(manifest, dict) or entry(manifest, "format", str, path) != FORMAT:
        raise InputError(f"{path}: field 'format' is not '{FORMAT}': give a folder written by 'weft data import'")
    entry(manifest, "version", int, path)  # which every store has had
    with readable(path, REMEDY):
        return migrate.graph(manifest, path)


def require_not_set_aside(folder: Path) -> None:
    """InputError where a process was stopped while it replaced a store, which still has its temporary name."""
    aside = next(folder.parent.glob(f".{glob.escape(folder.name)}.????????{ASIDE}"), None)
    if aside is not None:
        raise InputError(f"{folder}: a process was stopped while it replaced this graph: mv {aside} {folder}")


def read_json(path: Path) -> Any:
    """What a JSON file holds. InputError if it cannot be read."""
    with readable(path, REMEDY):
        return json.loads(path.read_text(encoding="utf-8"))


def is_store(folder: Path) -> bool:
    """Whether a folder is a graph store, of any version and state: many programs write a manifest.json."""
    try:
        manifest = read_json(folder / MANIFEST)
    except InputError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def entry(fields: dict[str, Any], name: str, kind: type[Value], path: Path) -> Value:
    """One field of a JSON object. Raises InputError if it is missing or of another kind."""
    if name not in fields:
        raise InputError(f"{path}: field '{name}' is missing: {REMEDY}")
    value = fields[name]
    if not isinstance(value, kind):
        raise InputError(f"{path}: field '{name}' is of type {type(value).__name__}, not {kind.__name__}: {REMEDY}")
    return value


def entries(fields: dict[str, Any], name: str, kind: type[Item], path: Path) -> tuple[Item, ...]:
    """One field of a JSON object that is a list. Raises InputError if anything in it is of another kind."""
    values = entry(fields, name, list, path)
    for value in values:
        if not isinstance(value, kind):
            raise InputError(f"{path}: field '{name}' lists a {type(value).__name__}, no {kind.__name__}: {REMEDY}")
    return tuple(values)


def read_arrays(folder: Path, manifest: dict[str, Any], verify: bool | None) -> dict[str, Tensor]:
    """The arrays that a manifest lists, by name. Raises InputError for a name that is no plain file name."""
    path = folder / MANIFEST
    files = entry(manifest, "files", dict, path)
    for name in files:
        if not re.fullmatch(r"\w+", name):
            raise InputError(f"{path}: field 'files' lists '{name}', which is no array's name: {REMEDY}")
    return {name: read_array(folder / f"{name}.npy", entry(files, name, dict, path), verify) for name in files}


def read_array(path: Path, fields: dict[str, Any], verify: bool | None) -> Tensor:
    """A .npy file, memory-mapped, copy on write; InputError where header, size or checksum are not the manifest's.

    verify: whether to compute the checksum; None: only where the file was changed, or copied, after it was written.
    """
    if not path.is_file():
        raise InputError(f"{path}: missing, though the manifest lists it: {REMEDY}")
    manifest = path.with_name(MANIFEST)
    array = map_array(path, REMEDY)
    stated_dtype, stated_shape = entry(fields, "dtype", str, manifest), entry(fields, "shape", list, manifest)
    for field, stated, found in (("dtype", stated_dtype, array.dtype.str), ("shape", stated_shape, list(array.shape))):
        if stated != found:
            raise InputError(f"{path}: field '{field}' is {found}, the manifest says {stated}: {REMEDY}")
    if array.dtype.str not in DTYPES or not array.ndim:
        raise InputError(f"{path}: holds {array.dtype} of shape {list(array.shape)}, which no store has: {REMEDY}")
    tensor, checksum = torch.from_numpy(array), entry(fields, "sha256", str, manifest)
    unchanged = file_state(path).items() <= fields.items()
    if verify or (verify is None and not unchanged):
        unchanged = digest_of(tensor) == checksum
        if not unchanged:
            raise InputError(f"{path}: field 'sha256' of the data is not the manifest's {checksum[:12]}...: {REMEDY}")
    if unchanged:
        note_digest(tensor, checksum)
    return tensor


def file_state(path: Path) -> dict[str, int]:
    """Return the fields of a manifest by which a reader sees that nobody has written to a file since."""
    state = path.stat()
    return {"bytes": state.st_size, "modified": state.st_mtime_ns}
