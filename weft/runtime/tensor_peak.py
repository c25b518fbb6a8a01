"""Follows the memory of tensors while something runs, and the room that a heap needs for them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from weft.runtime.dispatch import DispatchMode


class Heap:
    """Where csrc/heap.c places arrays: in the smallest hole that has room, or at the end, which moves on."""

    def __init__(self) -> None:
        self.end = 0
        self._holes: dict[int, int] = {}
        """Bytes of each, by where it begins, the newest last."""

    def take(self, num_bytes: int) -> int:
        """Where an array comes to lie."""
        fitting = [first for first in reversed(self._holes) if self._holes[first] >= num_bytes]
        if fitting:
            first = min(fitting, key=self._holes.__getitem__)
            size = self._holes.pop(first)
            if size > num_bytes:
                self._holes[first + num_bytes] = size - num_bytes
            return first
        last = next((first for first, size in self._holes.items() if first + size == self.end), self.end)
        self._holes.pop(last, None)
        self.end = last + num_bytes
        return last

    def give_back(self, first: int, num_bytes: int) -> None:
        """An array is no more: its place and the holes on both sides become one."""
        num_bytes += self._holes.pop(first + num_bytes, 0)
        before = next((one for one, size in self._holes.items() if one + size == first), first)
        self._holes[before] = self._holes.pop(before, 0) + num_bytes


class TensorPeak(DispatchMode):
    """Follows the memory of tensors that are made inside: the bytes alive, the most at once, and the room for them.

    moments: the bytes alive after each operation. Tensors that were there before, and those that map a file, do not
    count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.moments: list[int] = []
        self._known: dict[StorageWeakRef, int] = {}
        """The number of each that is alive."""
        self._changes: list[tuple[int, int]] = []
        """The number of one that was made, and its bytes; or that is gone, and its bytes less than 0."""

    @property
    def most(self) -> int:
        """The most bytes alive at once."""
        return max(self.moments, default=0)

    @property
    def room(self) -> int:
        """The bytes of a heap that has had them all more than once, with the holes that come to be between them.

        To be asked when all of them are gone, as behind a step. Small ones count as large ones do, though a process has
        another heap for them, so that what is told of a small graph is in proportion.
        """
        heap, places = Heap(), dict[int, int]()
        for number, change in self._changes * 2:
            if change > 0:
                places[number] = heap.take(change)
            elif change:
                heap.give_back(places.pop(number), -change)
        return heap.end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(one) for one in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.from_file.default:
            for storage in _storages(made):
                self._add(storage, id(storage) in before)
        self.moments.append(self.alive)
        return made

    def _add(self, storage: torch.UntypedStorage, given: bool) -> None:
        reference = StorageWeakRef(storage)
        if given or reference in self._known:
            return
        self._known[reference] = len(self._changes)
        self._change(len(self._changes), storage.nbytes())
        weakref.finalize(storage, self._drop, reference, storage.nbytes())

    def _drop(self, reference: StorageWeakRef, num_bytes: int) -> None:
        self._change(self._known.pop(reference), -num_bytes)

    def _change(self, number: int, num_bytes: int) -> None:
        self.alive += num_bytes
        self._changes.append((number, num_bytes))


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [one.untyped_storage() for one in tree_leaves(values) if isinstance(one, Tensor)]
