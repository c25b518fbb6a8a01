"""Where rounds run: their rows and edges, in memory or in files, and what is loaded ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from weft.chunks.slots import PlacedRound
from weft.chunks.tables import Rows
from weft.comm import Group
from weft.core.meter import Meter
from weft.nn import Workload
from weft.store.files import ArrayFile, ArrayMemory
from weft.store.rows import host_rows

Item = TypeVar("Item")
Brought = TypeVar("Brought")


class RowPool:
    """Memory of the host for rows, in files of a folder, plain or pinned; what is freed is used again."""

    def __init__(self, dtype: torch.dtype, device: torch.device, folder: Path | None, *, in_memory: bool) -> None:
        self.dtype, self.device, self.folder, self.in_memory = dtype, device, folder, in_memory
        self._free: dict[tuple[int, int], list[Rows]] = defaultdict(list)

    def alloc(self, num_rows: int, width: int) -> Rows:
        """Rows [num_rows, width] of any content."""
        free = self._free[num_rows, width]
        if free:
            return free.pop()
        return host_rows(num_rows, width, self.dtype, device=self.device, folder=self.folder, in_memory=self.in_memory)

    def free(self, *rows: Rows | None) -> None:
        """Frees rows."""
        for one in rows:
            if one is not None:
                self._free[one.num_rows, one.width].append(one)


class Home(ABC):
    """What aggregates are made with, round by round.

    device: of the aggregates. folder: of the files; None: that for temporary ones. in_memory: rows and rounds are in
    the device's memory, not on the host in files. prefetch: the next round is loaded while one is worked on.
    transfers: counts the bytes that move between host and device.
    """

    def __init__(
        self,
        work: Workload,
        group: Group,
        device: torch.device,
        *,
        folder: Path | None,
        in_memory: bool,
        prefetch: bool,
        transfers: Meter,
    ) -> None:
        self.graph, self.optimisations, self.dtype = work.graph, work.optimisations, work.dtype
        self.group, self.device, self.transfers = group, device, transfers
        self.in_memory, self.prefetch = in_memory, prefetch
        self.pool = RowPool(work.dtype, device, folder, in_memory=in_memory)
        self.array_file = ArrayMemory() if in_memory else ArrayFile(folder)

    @abstractmethod
    def rounds(self, hop: int) -> Sequence[PlacedRound]:
        """The rounds of an aggregate, in their order."""

    def rounds_back(self, hop: int) -> Sequence[PlacedRound]:
        """Those of its backward pass."""
        return self.rounds(hop)

    def ahead(
        self, items: Iterable[Item], load: Callable[[Item], Brought], ready: Callable[[int], bool] | None = None
    ) -> Iterator[tuple[Item, Brought]]:
        """Each item with what is loaded for it, the next one's while the caller works on this one's.

        ready: whether what the item of a number reads is there; the next one is loaded early only if it is.
        """
        items = list(items)

        def bring(number: int) -> Brought:
            with self.group.meter.noted("load", "chunk", chunk=number):
                return load(items[number])

        if not self.prefetch:
            yield from ((item, bring(number)) for number, item in enumerate(items))
            return  # the caller lets go of what it got before it asks for the next
        coming: Future[Brought] | None = None
        for number, item in enumerate(items):
            loaded = bring(number) if coming is None else self._waited_for(coming)
            early = number + 1 < len(items) and (ready is None or ready(number + 1))
            coming = self._loader.submit(bring, number + 1) if early else None
            yield item, loaded
            del loaded

    def _waited_for(self, coming: Future[Brought]) -> Brought:
        with self.group.meter.noted("compute", "wait: load"):
            return coming.result()

    @cached_property
    def _loader(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="weft-loader")
