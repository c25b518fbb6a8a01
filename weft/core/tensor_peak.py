"""Follows the memory of tensors while something runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from weft.core.dispatch import DispatchMode


class TensorPeak(DispatchMode):
    """Follows the memory of tensors that are made inside: the bytes alive, the most at once, and of the largest one.

    moments: the bytes alive after each operation. Tensors that were there before, and those that map a file, do not
    count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.largest = 0
        self.moments: list[int] = []
        self._known: set[StorageWeakRef] = set()

    @property
    def most(self) -> int:
        """The most bytes alive at once."""
        return max(self.moments, default=0)

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
        self._known.add(reference)
        num_bytes = storage.nbytes()
        self.alive += num_bytes
        self.largest = max(self.largest, num_bytes)
        weakref.finalize(storage, self._drop, reference, num_bytes)

    def _drop(self, reference: StorageWeakRef, num_bytes: int) -> None:
        self._known.discard(reference)
        self.alive -= num_bytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [one.untyped_storage() for one in tree_leaves(values) if isinstance(one, Tensor)]
