"""Digests of arrays, by which a run recognizes whether its data are those that it was trained on."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from weft.data.checks.tensor_checks import LINKS, MASKS
from weft.data.fields import GraphFields
from weft.data.vertex_names import take_ids
from weft.storage.quantized_table import feature_arrays
from weft.storage.unnamed_files import release

CHUNK_BYTES = 1 << 22
"""Number of bytes hashed at once: few enough that a writer's data are still in the processor's cache."""
NAMES_AT_ONCE = 1 << 16
"""Number of names hashed at once."""
FIELDS = ("edge_type", "edge_features", "y", "ids", *MASKS, *LINKS)
"""Fields of a graph that are one array each. The edges have a fingerprint instead."""


class Noted(NamedTuple):
    """The digest of an array that was read from a file."""

    digest: str
    """sha256 of the data, 64 hex digits."""
    version: int
    """PyTorch's count of in-place changes at that time, by which a later change is detected."""


_noted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_digest(array: Tensor, digest: str) -> None:
    """Note the digest of an array whose file states it, so that `digest_of` need not read the array.

    Args:
        array: The array, unchanged since it was read.
        digest: Sha256 of its data, 64 hex digits.
    """
    _noted[array] = Noted(digest, version_of(array))


def version_of(array: Tensor) -> int:
    """Return PyTorch's count of in-place changes; tensors made under torch.inference_mode have none."""
    return 0 if array.is_inference() else array._version


def digest_of(array: Tensor) -> str:
    """Return the sha256 of an array's data, 64 hex digits: the noted one, unless the array has changed since."""
    noted: Noted | None = _noted.get(array)
    if noted is not None and noted.version == version_of(array):
        return noted.digest
    digest, flat = hashlib.sha256(), array.detach().cpu().contiguous().view(-1)
    for part in flat.view(torch.uint8).split(CHUNK_BYTES):
        digest.update(part.numpy().data)
        release(part)
    return digest.hexdigest()


def embedded_names(graph: GraphFields) -> str | None:
    """Return the digest of the names of the vertices without features, 64 hex digits; None if there are no such names.

    A model has a trained row for each of these vertices.
    """
    if graph.vertex_names is None or graph.x is not None:
        return None
    digest, names = hashlib.sha256(), graph.vertex_names.ids
    ranges = list(itertools.pairwise(graph.type_offsets)) or [(0, len(names))]
    for vertex_type, bounds in zip(graph.vertex_types or ("",), ranges, strict=True):
        if vertex_type not in graph.features:
            for first in range(*bounds, NAMES_AT_ONCE):
                part = take_ids(names, np.arange(first, min(first + NAMES_AT_ONCE, bounds[1])))
                digest.update(json.dumps([str(name) for name in part.tolist()]).encode())
    return digest.hexdigest()


def data_digests(graph: GraphFields) -> dict[str, str]:
    """Return the digests of everything in a graph except its edges, by name of the field.

    Reads every array that was not read from a graph folder.
    """
    arrays = {"edge weights": graph.in_edges.weight} | {name: getattr(graph, name) for name in FIELDS}
    arrays |= feature_arrays({"x": graph.x} | {f"features of {name}": table for name, table in graph.features.items()})
    if graph.vertex_names is not None:
        arrays |= graph.vertex_names.arrays()
    if graph.edge_labels is not None:
        arrays |= graph.edge_labels.arrays()
    digests = {name: digest_of(array) for name, array in arrays.items() if array is not None}
    types = [graph.relations, graph.vertex_types, graph.type_offsets]
    return digests | {"types": hashlib.sha256(json.dumps(types).encode()).hexdigest()}


def changed_data(graph: GraphFields, recorded: dict[str, str]) -> list[str]:
    """Return the names of the fields whose digests differ from recorded ones.

    Args:
        graph: The graph.
        recorded: Digests from `data_digests`.
    """
    digests = data_digests(graph)
    return sorted(name for name in digests.keys() | recorded.keys() if digests.get(name) != recorded.get(name))
