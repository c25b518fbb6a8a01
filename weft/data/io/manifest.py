"""Reading a store's manifest and the arrays it vouches for, with an error for every way in which they may disagree."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import InputError

FORMAT, VERSION = "weft-graph", 1
MANIFEST = "manifest.json"
REMEDY = "import the graph again"

# Hashed and written together: small enough to stay in the cache between the two.
CHUNK_BYTES = 1 << 22

Value = TypeVar("Value", int, str, bool, list[Any], dict[str, Any])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store folder. Raises InputError if there is none, or none that this version reads."""
    if not folder.exists():
        raise InputError(f"{folder}: no such folder: check the path, or write it with 'weft data import'")
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file, not a graph store: load it as a data file, or give the store's folder")
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{path}: missing, so this folder is no graph store: write one with 'weft data import'")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}): {REMEDY}") from None
    if not isinstance(manifest, dict) or entry(manifest, "format", str, path) != FORMAT:
        raise InputError(f"{path}: field 'format' is not '{FORMAT}': give a folder written by 'weft data import'")
    version = entry(manifest, "version", int, path)
    if version > VERSION:
        raise InputError(
            f"{path}: field 'version' is {version}, this weft reads up to {VERSION}: update weft, or {REMEDY}"
        )
    return manifest


def is_store(folder: Path) -> bool:
    """Whether a folder is a graph store, of any version and state: many programs write a manifest.json."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def entry(fields: dict[str, Any], name: str, kind: type[Value], path: Path) -> Value:
    """One field of a JSON object. Raises InputError if it is missing or of another kind."""
    if name not in fields:
        raise InputError(f"{path}: field '{name}' is missing: {REMEDY}")
    value = fields[name]
    if not isinstance(value, kind):
        raise InputError(f"{path}: field '{name}' is {value!r}, not of type {kind.__name__}: {REMEDY}")
    return value


def read_arrays(folder: Path, manifest: dict[str, Any], verify: bool) -> dict[str, Tensor]:
    """The arrays that a manifest lists, by name. Raises InputError for a name that is no plain file name."""
    path = folder / MANIFEST
    files = entry(manifest, "files", dict, path)
    for name in files:
        if not re.fullmatch(r"\w+", name):
            raise InputError(f"{path}: field 'files' lists '{name}', which is no array's name: {REMEDY}")
    return {name: read_array(folder / f"{name}.npy", entry(files, name, dict, path), verify) for name in files}


def read_array(path: Path, fields: dict[str, Any], verify: bool) -> Tensor:
    """A .npy file, memory-mapped, copy on write; InputError where header, size or checksum are not the manifest's."""
    if not path.is_file():
        raise InputError(f"{path}: missing, though the manifest lists it: {REMEDY}")
    manifest = path.with_name(MANIFEST)
    array = map_array(path)
    stated_dtype, stated_shape = entry(fields, "dtype", str, manifest), entry(fields, "shape", list, manifest)
    for field, stated, found in (("dtype", stated_dtype, array.dtype.str), ("shape", stated_shape, list(array.shape))):
        if stated != found:
            raise InputError(f"{path}: field '{field}' is {found}, the manifest says {stated}: {REMEDY}")
    if verify:
        checksum = entry(fields, "sha256", str, manifest)
        if sha256(array) != checksum:
            raise InputError(f"{path}: field 'sha256' of the data is not the manifest's {checksum[:12]}...: {REMEDY}")
    return torch.from_numpy(array)


def map_tensor(path: Path) -> Tensor:
    """A person's own .npy file as a memory-mapped tensor. Raises InputError if it holds no numbers that torch knows."""
    array = map_array(path)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        raise InputError(
            f"{path}: holds {array.dtype}, no numbers that torch knows: save it in another dtype"
        ) from None


def map_array(path: Path) -> NDArray[Any]:
    """A .npy file as a memory map, copy on write, which torch takes as writable. InputError if it is no whole one."""
    if not path.is_file():
        raise InputError(f"{path}: no such file: check the path")
    try:
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise InputError(f"{path}: is a .npy file of another version: save it with numpy.save")
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is no .npy file ({error}): {REMEDY}") from None
    if dtype.hasobject:
        raise InputError(f"{path}: holds Python objects, which weft never unpickles: save numbers")
    expected, found = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64)), path.stat().st_size
    if expected != found:
        raise InputError(f"{path}: has {found} bytes, its header asks for {expected}: truncated or damaged, {REMEDY}")
    order: Any = "F" if fortran_order else "C"
    return np.memmap(path, dtype=dtype, mode="c", offset=offset, shape=shape, order=order)


def sha256(array: NDArray[Any]) -> str:
    """The checksum of an array's data, 64 hex digits."""
    digest = hashlib.sha256()
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), CHUNK_BYTES):
        digest.update(data[start : start + CHUNK_BYTES])
    return digest.hexdigest()
