"""Measurement of the memory of tensors while code runs, and of the heap that they need."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from weft.runtime.dispatch import DispatchMode


class Heap:
    """Model of the heap of csrc/heap.c: an array goes into the smallest hole that fits, or at the end."""

    def __init__(self) -> None:
        self.end = 0
        self._holes: dict[int, int] = {}
        """Bytes of each hole by its address, the newest last."""

    def take(self, num_bytes: int) -> int:
        """Allocate an array, and return its address."""
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
        """Free an array, and merge it with the holes on both sides.

        Args:
            first: Address of the array.
            num_bytes: Size of the array.
        """
        num_bytes += self._holes.pop(first + num_bytes, 0)
        before = next((hole for hole, size in self._holes.items() if hole + size == first), first)
        self._holes[before] = self._holes.pop(before, 0) + num_bytes


class TensorPeak(DispatchMode):
    """Mode that records the memory of tensors created in its `with` block: bytes alive, their peak, and their heap.

    `moments` has the bytes alive after each operation. Tensors that existed before, and those that map a file, do not
    count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.moments: list[int] = []
        self._known: dict[StorageWeakRef, int] = {}
        """Number of each storage that is alive."""
        self._changes: list[tuple[int, int]] = []
        """Number of each storage that was created, with its bytes; or freed, with its bytes negated."""

    @property
    def most(self) -> int:
        """Peak of the bytes alive."""
        return max(self.moments, default=0)

    @property
    def room(self) -> int:
        """Size in bytes, with holes, of the heap that the recorded allocations need when they run twice in a row.

        The second time, they find the holes that the first time left. Read it when all tensors are freed, as after a
        step. Small tensors are treated like large ones, although a process has another heap for them, so that results
        for small graphs scale to large ones.
        """
        heap, places = Heap(), dict[int, int]()
        for number, change in self._changes * 2:
            if change > 0:
                places[number] = heap.take(change)
            elif change:
                heap.give_back(places.pop(number), -change)
        return heap.end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.from_file.default:
            for storage in _storages(result):
                self._add(storage, id(storage) in before)
        self.moments.append(self.alive)
        return result

    def _add(self, storage: torch.UntypedStorage, is_input: bool) -> None:
        reference = StorageWeakRef(storage)
        if is_input or reference in self._known:
            return
        self._known[reference] = len(self._changes)
        self._change(len(self._changes), storage.nbytes())
        weakref.finalize(storage, self._drop, reference, storage.nbytes())

    def _drop(self, reference: StorageWeakRef, num_bytes: int) -> None:
        self._change(self._known.pop(reference), -num_bytes)

    def _change(self, number: int, num_bytes: int) -> None:
        self.alive += num_bytes
        self._changes.append((number, num_bytes))


def blank(num_bytes: int) -> Tensor:
    """Return a meta tensor of some bytes, which stands for an allocation; of none if the number is negative."""
    return torch.empty(max(num_bytes, 0), dtype=torch.uint8, device="meta")


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [tensor for tensor in tree_leaves(values) if isinstance(tensor, Tensor)]
    return [part.untyped_storage() for tensor in tensors for part in _parts(tensor)]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory: a sparse matrix has none of its own."""
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else (tensor,)
