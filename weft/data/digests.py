"""Digests of arrays, by which a run tells whether its data are those that it was trained on."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from weft.data.checks import LINKS, MASKS
from weft.data.fields import GraphFields
from weft.store.files import release

CHUNK_BYTES = 1 << 22
"""Bytes that are hashed at once: few enough to stay in the cache, where they are written as well."""
FIELDS = ("edge_type", "edge_features", "x", "y", "ids", *MASKS, *LINKS)
"""The fields of a graph that are an array each. The edges themselves have a fingerprint."""


class Known(NamedTuple):
    """The digest of a tensor."""

    digest: str
    version: int
    """How often the tensor had been changed in place."""


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_digest(array: Tensor, digest: str) -> None:
    """Note the digest of an array that was read from a file which states it, so that it is not computed again."""
    _known[array] = Known(digest, array._version)


def digest_of(array: Tensor) -> str:
    """Return the sha256 of an array's data, 64 hex digits. It is computed once, unless the array is changed."""
    known: Known | None = _known.get(array)
    if known is None or known.version != array._version:
        digest, flat = hashlib.sha256(), array.detach().cpu().contiguous().view(-1)
        for part in flat.split(max(1, CHUNK_BYTES // max(array.itemsize, 1))):
            digest.update(part.numpy().view(np.uint8).data)
            release(part)
        note_digest(array, digest.hexdigest())
    found: Known = _known[array]
    return found.digest


def data_digests(graph: GraphFields) -> dict[str, str]:
    """Return the digest of each array that a graph has beside its edges, by the name of its field.

    Reads every array of which none is noted.
    """
    arrays = {"edge weights": graph.in_edges.weight} | {name: getattr(graph, name) for name in FIELDS}
    arrays |= {f"features of {name}": x for name, x in graph.features.items()}
    return {name: digest_of(array) for name, array in arrays.items() if array is not None}


def changed_data(graph: GraphFields, recorded: dict[str, str]) -> list[str]:
    """Return the names of the arrays that are other ones than those of which the digests were recorded."""
    found = data_digests(graph)
    return sorted(name for name in found.keys() | recorded.keys() if found.get(name) != recorded.get(name))
