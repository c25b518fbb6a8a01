"""What people call their vertices: whole numbers or text, one for each, and where a name stands among them."""

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

MULTIPLIER = 0x9E3779B97F4A7C15  # of the polynomial that a text's key is; odd, with bits all over
KEYS_AT_ONCE = 1 << 17  # texts whose keys are made together
NUMBER_COLUMN, OFFSET_COLUMN, TEXT_COLUMN = "name_numbers", "name_offsets", "name_text"


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """n texts in UTF-8, one after the other."""

    offsets: NDArray[np.int64]
    """[n + 1]: where each begins, from 0 on."""
    data: NDArray[np.uint8]
    """Their bytes."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Those of a list."""
        parts = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        return cls(offsets=starts(sizes), data=np.frombuffer(b"".join(parts), np.uint8))

    @classmethod
    def within(cls, offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> Texts:
        """Those between some offsets [n + 1] of a longer text."""
        return cls(offsets=offsets - offsets[0], data=data[offsets[0] : offsets[-1]])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tolist(self) -> list[str]:
        """As Python's own."""
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return [data[start:end].decode() for start, end in itertools.pairwise(ends)]

    def keys(self) -> NDArray[np.uint64]:
        """A number for each that is the same for the same text, and hardly ever for another one: uint64 [n]."""
        sizes = np.diff(self.offsets)
        if not self.data.size:
            return sizes.astype(np.uint64)
        powers = np.full(int(sizes.max()), MULTIPLIER, np.uint64)
        powers = np.multiply.accumulate(powers)
        place = np.arange(len(self.data)) - np.repeat(self.offsets[:-1], sizes)
        sums = np.zeros(len(self.data) + 1, np.uint64)
        np.cumsum((self.data.astype(np.uint64) + np.uint64(1)) * powers[place], out=sums[1:])
        return mixed(sums[self.offsets[1:]] - sums[self.offsets[:-1]])

    def take(self, places: NDArray[np.int64]) -> Texts:
        """Those at some places [m]."""
        sizes = np.diff(self.offsets)[places]
        offsets = starts(sizes)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return Texts(offsets=offsets, data=self.data[np.repeat(self.offsets[places], sizes) + inside])

    def same(self, others: Texts) -> NDArray[np.bool_]:
        """Which are equal to the one at the same place of as many others: [n]."""
        sizes = np.diff(self.offsets)
        equal: NDArray[np.bool_] = sizes == np.diff(others.offsets)
        chosen = np.flatnonzero(equal)
        ours, theirs = self.take(chosen), others.take(chosen)
        wrong = np.repeat(np.arange(len(chosen)), sizes[chosen])[ours.data != theirs.data]
        equal[chosen[wrong]] = False
        return equal


Ids: TypeAlias = "NDArray[np.int64] | Texts"
"""Ids of a column: whole numbers, or texts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VertexNames:
    """The vertices' ids where their graph came from, by their numbers there; see GraphFields.vertex_names."""

    column: str
    """What the source calls them, such as the name of a table's column."""
    numbers: Tensor | None = None
    """int64 [N], where they are whole numbers."""
    offsets: Tensor | None = None
    """int64 [N + 1]: where each text begins, where they are texts."""
    text: Tensor | None = None
    """uint8: the texts' bytes in UTF-8."""

    @classmethod
    def of(cls, ids: Ids, column: str) -> VertexNames:
        """Those that are some ids [N]."""
        if isinstance(ids, Texts):
            offsets, text = torch.from_numpy(ids.offsets), torch.from_numpy(np.array(ids.data))
            return cls(column=column, offsets=offsets, text=text)
        return cls(column=column, numbers=torch.from_numpy(ids))

    @property
    def ids(self) -> Ids:
        """As ids."""
        if self.numbers is not None:
            return self.numbers.numpy()
        assert self.offsets is not None
        assert self.text is not None
        return Texts(offsets=self.offsets.numpy(), data=self.text.numpy())

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, names: Sequence[Any]) -> list[int]:
        """The vertices, by original id, that have some names; InputError for a name that none has."""
        ids = Texts.of([str(name) for name in names]) if self.numbers is None else np.array(names, np.int64)
        found = NameIndex(self.ids, self.column).find(ids)
        if (found < 0).any():
            raise InputError(
                f"{names[int((found < 0).argmax())]!r} is no vertex's {self.column}: give one that is there"
            )
        return list(found.tolist())

    def tolist(self) -> list[Any]:
        """As Python's own, int or str [N]."""
        return list(self.ids.tolist())

    def slice(self, rows: slice) -> list[Any]:
        """Those of some rows in one piece, as Python's own."""
        ids = self.ids
        if isinstance(ids, Texts):
            return Texts.within(ids.offsets[rows.start : rows.stop + 1], ids.data).tolist()
        return list(ids[rows].tolist())

    def arrays(self) -> dict[str, Tensor]:
        """What a store keeps."""
        found = {NUMBER_COLUMN: self.numbers, OFFSET_COLUMN: self.offsets, TEXT_COLUMN: self.text}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


class NameIndex:
    """Where ids stand among N known ones, all different. It takes 16 bytes for each beside themselves.

    Raises InputError, which calls them `field`, where an id is known twice.
    """

    def __init__(self, ids: Ids, field: str) -> None:
        self._ids = ids
        keys = keys_of(ids)
        self._order = keys.argsort(kind="stable")
        self._keys = keys[self._order]
        again = np.sort(self._order[1:][self._keys[1:] == self._keys[:-1]])
        first = self.find(taken(ids, again))
        if (first != again).any():
            place = int((first != again).argmax())
            rows = f"in rows {first[place]} and {again[place]}"
            raise InputError(f"{field} is {shown(ids, again[place])} {rows}: give every vertex one row and one id")

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """The places [m] of some ids; -1 for those that are not known. Texts are compared with texts."""
        ids = like(self._ids, ids)
        keys = keys_of(ids)
        at, last = np.searchsorted(self._keys, keys), len(self._keys) - 1
        found = np.full(len(keys), -1, np.int64)
        waiting = np.arange(len(keys))
        while len(waiting):  # more than once only where different texts have one key
            waiting = waiting[at[waiting] <= last]
            waiting = waiting[self._keys[at[waiting]] == keys[waiting]]
            places = self._order[at[waiting]]
            right = same(self._ids, places, ids, waiting)
            found[waiting[right]] = places[right]
            waiting = waiting[~right]
            at[waiting] += 1
        return found


class NameCollector:
    """Ids in the order in which they first appear, part by part."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint64)
        self._parts: list[Ids] = []

    def add(self, ids: Ids) -> None:
        """Some more, known or not. InputError where some columns hold numbers and others texts."""
        if self._parts:
            ids = like(self._parts[0], ids)
        keys, first = np.unique(keys_of(ids), return_index=True)
        new = np.ones(len(keys), bool)
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            new = self._keys[at] != keys
        self._parts.append(taken(ids, np.sort(first[new])))
        self._keys = np.sort(np.concatenate([self._keys, keys[new]]))

    def ids(self) -> Ids:
        """All of them."""
        return joined(self._parts)


def keys_of(ids: Ids) -> NDArray[np.uint64]:
    """A number for each, the same for the same id."""
    if not isinstance(ids, Texts):
        return ids.view(np.uint64)
    firsts = range(0, len(ids), KEYS_AT_ONCE)  # each takes some dozens of bytes for each of its own
    parts = (Texts.within(ids.offsets[first : first + KEYS_AT_ONCE + 1], ids.data).keys() for first in firsts)
    return np.concatenate([np.empty(0, np.uint64), *parts])


def taken(ids: Ids, places: NDArray[np.int64]) -> Ids:
    """The ids at some places."""
    return ids.take(places) if isinstance(ids, Texts) else ids[places]


def joined(parts: Sequence[Ids]) -> Ids:
    """The ids of all parts, which are of one kind."""
    texts = [part for part in parts if isinstance(part, Texts)]
    if not texts:
        return np.concatenate([np.empty(0, np.int64), *(part for part in parts if not isinstance(part, Texts))])
    sizes = np.concatenate([np.diff(part.offsets) for part in texts])
    data = np.concatenate([part.data for part in texts])
    return Texts(offsets=starts(sizes), data=data)


def like(known: Ids, ids: Ids) -> Ids:
    """Ids as texts or as numbers, as known ones are, since files of text have no numbers. InputError for other text."""
    if isinstance(known, Texts) and not isinstance(ids, Texts):
        return Texts.of([str(number) for number in ids.tolist()])
    if isinstance(ids, Texts) and not isinstance(known, Texts):
        texts = ids.tolist()
        for text in texts:
            if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 18:
                raise InputError(f"id '{text}' is text, and the other ids are whole numbers: give all of one kind")
        return np.array([int(text) for text in texts], np.int64)
    return ids


def same(left: Ids, left_places: NDArray[Any], right: Ids, right_places: NDArray[Any]) -> NDArray[np.bool_]:
    """Which ids at some places are those at as many other places, where their keys are the same."""
    if isinstance(left, Texts) and isinstance(right, Texts):
        return left.take(left_places).same(right.take(right_places))
    return np.ones(len(left_places), bool)


def shown(ids: Ids, place: Any) -> str:
    """One id, as part of a line."""
    return repr(taken(ids, np.array([place])).tolist()[0])


def starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of some pieces begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Keys whose bits all depend on each other, one to one (the finalizer of MurmurHash3)."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        keys = (keys ^ (keys >> np.uint64(33))) * np.uint64(multiplier)
    return keys ^ (keys >> np.uint64(33))
