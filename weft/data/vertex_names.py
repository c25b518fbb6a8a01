"""Names of vertices in the data that a graph came from: a whole number or a text for each, and look-up by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.utils.errors import InputError

MULTIPLIER = 0x9E3779B97F4A7C15
"""Base of the polynomial hash of texts; odd, with bits in all places."""
KEYS_AT_ONCE = 1 << 17
"""Number of texts that are hashed together."""
NUMBER_COLUMN, OFFSET_COLUMN, TEXT_COLUMN = "name_numbers", "name_offsets", "name_text"


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """n texts in UTF-8, concatenated."""

    offsets: NDArray[np.int64]
    """[n + 1]: position of each text's first byte, from 0, and the end of the last."""
    data: NDArray[np.uint8]
    """Bytes of all texts."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Return the texts of a list."""
        parts = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        return cls(offsets=piece_offsets(sizes), data=np.frombuffer(b"".join(parts), np.uint8))

    @classmethod
    def within(cls, offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> Texts:
        """Return the texts between offsets of a longer buffer.

        Args:
            offsets: Positions in `data`, [n + 1].
            data: Bytes that contain the texts.
        """
        return cls(offsets=offsets - offsets[0], data=data[offsets[0] : offsets[-1]])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tolist(self) -> list[str]:
        """Return the texts as a list of str."""
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return [data[start:end].decode() for start, end in itertools.pairwise(ends)]

    def keys(self) -> NDArray[np.uint64]:
        """Return a 64-bit hash of each text, uint64 [n]. Equal texts have equal hashes."""
        sizes = np.diff(self.offsets)
        if not self.data.size:
            return sizes.astype(np.uint64)
        # Polynomial hash of bytes b_0, b_1, ...: sum of (b_i + 1) MULTIPLIER^(i + 1) modulo 2^64, as a difference of
        # prefix sums over all bytes. The 1 distinguishes texts that end in zero bytes.
        powers = np.full(int(sizes.max()), MULTIPLIER, np.uint64)
        powers = np.multiply.accumulate(powers)
        position = np.arange(len(self.data)) - np.repeat(self.offsets[:-1], sizes)
        sums = np.zeros(len(self.data) + 1, np.uint64)
        np.cumsum((self.data.astype(np.uint64) + np.uint64(1)) * powers[position], out=sums[1:])
        return mix_bits(sums[self.offsets[1:]] - sums[self.offsets[:-1]])

    def take(self, positions: NDArray[np.int64]) -> Texts:
        """Return the texts at some positions [m]."""
        sizes = np.diff(self.offsets)[positions]
        offsets = piece_offsets(sizes)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return Texts(offsets=offsets, data=self.data[np.repeat(self.offsets[positions], sizes) + inside])

    def equal(self, others: Texts) -> NDArray[np.bool_]:
        """Return which texts are equal to the text at the same position of `others`, which has the same length: [n]."""
        sizes = np.diff(self.offsets)
        equal: NDArray[np.bool_] = sizes == np.diff(others.offsets)
        candidates = np.flatnonzero(equal)
        ours, theirs = self.take(candidates), others.take(candidates)
        wrong = np.repeat(np.arange(len(candidates)), sizes[candidates])[ours.data != theirs.data]
        equal[candidates[wrong]] = False
        return equal


Ids: TypeAlias = "NDArray[np.int64] | Texts"
"""Names of vertices: whole numbers, or texts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VertexNames:
    """Names of the vertices in the data that a graph came from, by original id; see GraphFields.vertex_names."""

    column: str
    """Name of the ids in the source, such as a table's column."""
    numbers: Tensor | None = None
    """int64 [N], if the names are whole numbers."""
    offsets: Tensor | None = None
    """int64 [N + 1]: position of each text's first byte, if the names are texts."""
    text: Tensor | None = None
    """uint8: bytes of all texts in UTF-8, if the names are texts."""

    @classmethod
    def of(cls, ids: Ids, column: str) -> VertexNames:
        """Return the names that are some ids.

        Args:
            ids: The names, [N].
            column: Name of the ids in the source.
        """
        if isinstance(ids, Texts):
            offsets, text = torch.from_numpy(ids.offsets), torch.from_numpy(np.array(ids.data))
            return cls(column=column, offsets=offsets, text=text)
        return cls(column=column, numbers=torch.from_numpy(ids))

    @property
    def ids(self) -> Ids:
        """The names as numbers or texts."""
        if self.numbers is not None:
            return self.numbers.numpy()
        assert self.offsets is not None
        assert self.text is not None
        return Texts(offsets=self.offsets.numpy(), data=self.text.numpy())

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, names: Sequence[Any], vertices: Tensor | None = None) -> list[int]:
        """Return the original ids of the vertices with some names.

        Args:
            names: The names.
            vertices: Original ids of the vertices to search, such as those of a type. Default: all.

        Raises:
            InputError: No vertex has one of the names, or two of the searched vertices have the same name.
        """
        ids = Texts.of([str(name) for name in names]) if self.numbers is None else np.array(names, np.int64)
        searched = self.ids if vertices is None else take_ids(self.ids, vertices.numpy())
        rows = NameIndex(searched, self.column).find(ids)
        if (rows < 0).any():
            raise InputError(
                f"{names[int((rows < 0).argmax())]!r} is no vertex's {self.column}: give the name of a vertex"
            )
        return list((rows if vertices is None else vertices.numpy()[rows]).tolist())

    def tolist(self) -> list[Any]:
        """Return the names as a list of int or str, [N]."""
        return list(self.ids.tolist())

    def take(self, vertices: Tensor) -> list[Any]:
        """Return the names of some vertices as a list of int or str.

        Args:
            vertices: Original ids of the vertices, int64 [n].
        """
        return list(take_ids(self.ids, vertices.numpy()).tolist())

    def slice(self, rows: slice) -> list[Any]:
        """Return the names of a range of vertices as a list of int or str."""
        ids = self.ids
        if isinstance(ids, Texts):
            return Texts.within(ids.offsets[rows.start : rows.stop + 1], ids.data).tolist()
        return list(ids[rows].tolist())

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays that a graph folder stores, by file name."""
        arrays = {NUMBER_COLUMN: self.numbers, OFFSET_COLUMN: self.offsets, TEXT_COLUMN: self.text}
        return {name: tensor for name, tensor in arrays.items() if tensor is not None}


class NameIndex:
    """Look-up of the positions of N distinct ids, by binary search over hashes. Needs 16 bytes per id.

    Args:
        ids: The ids, [N].
        field: Name of the ids in errors.

    Raises:
        InputError: If an id occurs twice.
    """

    def __init__(self, ids: Ids, field: str) -> None:
        self._ids = ids
        keys = keys_of(ids)
        self._order = keys.argsort(kind="stable")
        self._keys = keys[self._order]
        # Equal hashes are adjacent. An id whose look-up returns another position occurs twice.
        suspects = np.sort(self._order[1:][self._keys[1:] == self._keys[:-1]])
        first = self.find(take_ids(ids, suspects))
        if (first != suspects).any():
            duplicate = int((first != suspects).argmax())
            rows = f"in rows {first[duplicate]} and {suspects[duplicate]}"
            raise InputError(
                f"{field} is {id_text(ids, suspects[duplicate])} {rows}: give every vertex one row and one id"
            )

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """Return the positions [m] of some ids; -1 for ids that are not in the index."""
        ids = convert_ids_like(self._ids, ids)
        keys = keys_of(ids)
        at, last = np.searchsorted(self._keys, keys), len(self._keys) - 1
        result = np.full(len(keys), -1, np.int64)
        pending = np.arange(len(keys))
        while len(pending):  # repeats only if different texts have the same hash
            pending = pending[at[pending] <= last]
            pending = pending[self._keys[at[pending]] == keys[pending]]
            positions = self._order[at[pending]]
            equal = ids_equal(self._ids, positions, ids, pending)
            result[pending[equal]] = positions[equal]
            pending = pending[~equal]
            at[pending] += 1
        return result


class NameCollector:
    """Collects distinct ids in the order of their first occurrence, from ids that come in parts."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint64)
        self._parts: list[Ids] = []

    def add(self, ids: Ids) -> None:
        """Add ids, whether seen before or not. Raises InputError if some parts are numbers and others texts."""
        if self._parts:
            ids = convert_ids_like(self._parts[0], ids)
        keys, first = np.unique(keys_of(ids), return_index=True)
        new = np.ones(len(keys), bool)
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            new = self._keys[at] != keys
        self._parts.append(take_ids(ids, np.sort(first[new])))
        self._keys = np.sort(np.concatenate([self._keys, keys[new]]))

    @property
    def count(self) -> int:
        """Number of distinct ids so far."""
        return len(self._keys)

    def ids(self) -> Ids:
        """Return all distinct ids."""
        return concatenate_ids(self._parts)


def keys_of(ids: Ids) -> NDArray[np.uint64]:
    """Return a 64-bit key of each id; equal ids have equal keys."""
    if not isinstance(ids, Texts):
        return ids.view(np.uint64)
    firsts = range(0, len(ids), KEYS_AT_ONCE)  # in blocks: hashing needs dozens of bytes per byte of text
    parts = (Texts.within(ids.offsets[first : first + KEYS_AT_ONCE + 1], ids.data).keys() for first in firsts)
    return np.concatenate([np.empty(0, np.uint64), *parts])


def take_ids(ids: Ids, positions: NDArray[np.int64]) -> Ids:
    """Return the ids at some positions.

    Args:
        ids: The ids.
        positions: int64 [m].
    """
    return ids.take(positions) if isinstance(ids, Texts) else ids[positions]


def concatenate_ids(parts: Sequence[Ids]) -> Ids:
    """Return the ids of all parts, which are all numbers or all texts."""
    texts = [part for part in parts if isinstance(part, Texts)]
    if not texts:
        return np.concatenate([np.empty(0, np.int64), *(part for part in parts if not isinstance(part, Texts))])
    sizes = np.concatenate([np.diff(part.offsets) for part in texts])
    data = np.concatenate([part.data for part in texts])
    return Texts(offsets=piece_offsets(sizes), data=data)


def convert_ids_like(like: Ids, ids: Ids) -> Ids:
    """Return ids as texts or as numbers, like other ids, because text files do not distinguish the two.

    Args:
        like: Ids of the wanted kind.
        ids: The ids to convert.

    Raises:
        InputError: If a text is no whole number.
    """
    if isinstance(like, Texts) and not isinstance(ids, Texts):
        return Texts.of([str(number) for number in ids.tolist()])
    if isinstance(ids, Texts) and not isinstance(like, Texts):
        texts = ids.tolist()
        for text in texts:
            if not is_number(text):
                raise InputError(f"id '{text}' is text, and the other ids are whole numbers: give all of one kind")
        return np.array([int(text) for text in texts], np.int64)
    return ids


def is_number(text: str) -> bool:
    """Return whether a text is a whole number that int64 can hold."""
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= 18


def ids_equal(left: Ids, left_positions: NDArray[Any], right: Ids, right_positions: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare ids pair by pair: return which pairs are equal, [m]. The two ids of a pair must have equal keys.

    Args:
        left: Ids.
        left_positions: Position in `left` of the first id of each pair, int64 [m].
        right: Ids of the same kind.
        right_positions: Position in `right` of the second id of each pair, int64 [m].
    """
    if isinstance(left, Texts) and isinstance(right, Texts):
        return left.take(left_positions).equal(right.take(right_positions))
    return np.ones(len(left_positions), bool)


def id_text(ids: Ids, position: Any) -> str:
    """Return one id as part of an error.

    Args:
        ids: The ids.
        position: Position of the id.
    """
    return repr(take_ids(ids, np.array([position])).tolist()[0])


def piece_offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of several consecutive pieces begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def mix_bits(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit keys by a bijection, the finalizer of MurmurHash3."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        keys = (keys ^ (keys >> np.uint64(33))) * np.uint64(multiplier)
    return keys ^ (keys >> np.uint64(33))
