"""A device that is none: its streams, marks and buffers are noted, and what nothing has put in order is a RaceError.

Tensors are the CPU's, and everything is done at once, in the order of the program. But each stream and each thread of
the host has a vector clock: an access of some bytes must come behind every other one of them, unless both read. Which
bytes an operation reads and writes, PyTorch's dispatcher says; what is in the device's memory is known by its storage.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.planted import replaced
from weft.data import Adjacency
from weft.kernels import cpu, ops
from weft.nn import Workload
from weft.parallel.chunks.run import chunk_runtime
from weft.runtime import native as host_native
from weft.runtime.streams import COMPUTE, StreamMark

HOST, DEVICE = "host", "device"
DEVICE_NAME = torch.device("cpu", 0)
"""By which what is made on the device is told from what is made on the host."""
BY_ROWS = ("index_select", "index_copy_", "index_add_", "index_fill_", "index")
ON_HOST = ("gather_file_rows", "add_file_rows", "add_rows", "read_bytes", "write_bytes")
MAIN, LOADER = "main thread", "loader"


class RaceError(AssertionError):
    """Nothing orders two accesses of the same bytes."""


class Region(NamedTuple):
    """Some bytes of a storage: those of a tensor, or of some of its rows."""

    num_bytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    rows: tuple[int, ...] | None

    @classmethod
    def of(cls, tensor: Tensor, rows: Tensor | None) -> Region:
        chosen = None if rows is None else tuple(rows.unique().tolist())
        num_bytes = tensor.untyped_storage().nbytes()
        return cls(num_bytes, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.itemsize, chosen)


@cache
def bytes_of(region: Region) -> Tensor:
    """Which bytes of the storage these are: bool."""
    found, size = torch.zeros(region.num_bytes, dtype=torch.bool), region.itemsize
    strides = [size * stride for stride in region.stride]
    own = found.as_strided([*region.shape, size], [*strides, 1], size * region.offset)
    own[slice(None) if region.rows is None else list(region.rows)] = True
    return found


class Access(NamedTuple):
    """What an actor, at a tick of its clock, does to some bytes of a storage."""

    actor: str
    tick: int
    writes: bool
    region: Region
    what: str


@dataclass
class Buffer:
    """A storage that is known."""

    space: str
    maker: str
    """The stream whose memory it is, if it is the device's."""
    history: list[Access] = field(default_factory=list)
    lent: set[str] = field(default_factory=set)


class FakeStreams(TorchDispatchMode):
    """Is entered while a device is faked; the first race is raised at the end, since other ranks may wait for this one.

    without: the place of a wait, or of a loan, that is taken out. late: what a loader is told is done when it is waited
    for, else at once: whatever is right is right both ways.
    """

    asynchronous = True

    def __init__(self, without: str = "", *, late: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.without, self.late = without, late
        self.places: Counter[str] = Counter()
        """Of waits and loans: how often each was there."""
        self.streams: Counter[str] = Counter()
        """How many operations each has had."""
        self._clocks: dict[str, Counter[str]] = {}
        self._buffers: dict[StorageWeakRef, Buffer] = {}
        self._present, self._thread = [COMPUTE], MAIN
        self._failed: list[str] = []
        self._patches = ExitStack()

    def __enter__(self) -> FakeStreams:
        kernels, features = Kernels(self), Workload.features

        def features_at(work: Workload, vertices: Any, device: torch.device) -> Tensor:
            found = features(work, vertices, device)
            return self.to_device(found) if device == DEVICE_NAME else found

        self._patches.enter_context(replaced(ops, "backend_of", lambda _: kernels))
        self._patches.enter_context(replaced(Workload, "features", features_at))
        self._patches.enter_context(replaced(chunk_runtime, "ThreadPoolExecutor", lambda *_, **__: Loader(self)))
        for name in ON_HOST:
            self._patches.enter_context(replaced(host_native, name, self._by_host(getattr(host_native, name))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()
        if self._failed and error[0] is None:
            raise RaceError(self._failed[0])

    # what weft.runtime.streams asks of a device

    def mark(self) -> StreamMark:
        return StreamMark(self._present[-1], self._behind(self._present[-1], self._thread))

    def join(self, mark: StreamMark | None) -> None:
        if mark is not None and self._stays("join"):
            self._clocks[self._present[-1]] = joined(self._clock(self._present[-1]), mark.event)

    def finish(self, mark: StreamMark | None) -> None:
        if mark is not None and self._stays("finish"):
            self._clocks[self._thread] = joined(self._clock(self._thread), mark.event)

    def on(self, stream: str, behind: StreamMark | None) -> AbstractContextManager[None]:
        return self._on(stream, behind if behind is not None and self._stays(f"on {stream}") else None)

    @contextmanager
    def _on(self, stream: str, behind: StreamMark | None) -> Iterator[None]:
        self._present.append(stream)
        if behind is not None:
            self._clocks[stream] = joined(self._clock(stream), behind.event)
        yield
        self._present.pop()

    def lend(self, tensor: Tensor, stream: str) -> Tensor:
        known = self._known(tensor)
        if known is not None and known.maker != stream and self._stays("lend"):
            known.lent.add(stream)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        known = self._known(tensor)
        return known is not None and known.space == DEVICE

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(*shape, dtype=dtype)
        self._know(made, HOST)
        return made

    def to_device(self, tensor: Tensor) -> Tensor:
        if self.holds(tensor):
            return tensor
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE_NAME)
        return made.copy_(tensor, non_blocking=True)

    # what it notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and any(map(self.holds, tensors((args, kwargs)))):
            self._failed.append(f"gloo's {func.overloadpacket.__name__} is given memory of the device")
        names = [one.name for one in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        made = func(*args, **kwargs)
        written = {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        known = {id(one.untyped_storage()) for one in tensors(given)}
        fresh = [one for one in tensors(made) if id(one.untyped_storage()) not in known]
        if not written and not fresh and tensors(made):
            return made  # a view
        rows = given.get("index", (given.get("indices") or [None])[0]) if given.get("dim", 0) == 0 else None
        by_rows = rows if func.overloadpacket.__name__ in BY_ROWS and isinstance(rows, Tensor) else None
        reads = [(one, by_rows if name == "self" else None) for name, value in given.items() if name not in written
                 for one in tensors(value)]  # fmt: skip
        writes = [(one, by_rows if name == "self" else None) for name in written for one in tensors(given[name])]
        what = func.overloadpacket.__name__
        copies = what == "copy_" and bool(given.get("non_blocking"))
        made_there = given.get("device") == DEVICE_NAME
        if what.startswith("new_") or what.endswith("_like"):  # as large as what it is given, which it does not read
            made_there, reads = made_there or self.holds(given["self"]), []
        self.note(what, reads, writes, fresh, copies=copies, made_there=made_there)
        if what == "_local_scalar_dense" and self.holds(given["self"]):  # the host waits for it
            self._clocks[self._thread] = joined(self._clock(self._thread), self._clock(self._present[-1]))
        return made

    def note(
        self,
        what: str,
        reads: Iterable[tuple[Tensor, Tensor | None]],
        writes: Iterable[tuple[Tensor, Tensor | None]],
        fresh: Sequence[Tensor] = (),
        *,
        copies: bool = False,
        made_there: bool = False,
    ) -> None:
        """An operation: what it reads and writes, and which rows of it, if not all; what it has made.

        copies: between host and device, for which the host does not wait. made_there: on the device.
        """
        reads, writes = list(reads), list(writes)
        spaces = {known.space for one, _ in (*reads, *writes) if (known := self._known(one)) is not None}
        if len(spaces) == 2 and what != "copy_":
            self._failed.append(f"{what} has operands of the host and of the device")
        by_device = made_there or DEVICE in spaces
        if not spaces and not by_device:
            return
        actor = self._present[-1] if by_device else self._thread
        clock = self._clocks[actor] = self._behind(actor, self._thread)
        clock[actor] += 1
        self.streams[actor] += 1
        for one in fresh if by_device else ():
            self._know(one, DEVICE, actor)
        accesses = [(False, reads), (True, [*writes, *((one, None) for one in fresh)])]
        for writing, ones in accesses:
            for one, rows in ones:
                if (known := self._known(one)) is not None:
                    self._access(known, Access(actor, clock[actor], writing, Region.of(one, rows), what), clock)
        if len(spaces) == 2 and not copies:  # the host waits for it
            self._clocks[self._thread] = joined(self._clock(self._thread), clock)

    def _access(self, known: Buffer, access: Access, clock: Counter[str]) -> None:
        kept = []
        for before in known.history:
            same = before.actor == access.actor
            at_once = not same and (before.writes or access.writes) and clock[before.actor] < before.tick
            if at_once and bool((bytes_of(before.region) & bytes_of(access.region)).any()):
                self._failed.append(
                    f"{access.what} on {access.actor} does not wait for {before.what} on {before.actor}, "
                    f"of a buffer of the {known.space}"
                )
            if not (same and before.writes == access.writes and before.region == access.region):
                kept.append(before)
        known.history = [*kept, access]

    def _freed(self, reference: StorageWeakRef) -> None:
        """The memory is its stream's again, which may use it behind all that it has been given."""
        known = self._buffers.pop(reference)
        clock = self._behind(known.maker, self._thread) if known.maker else Counter()
        for access in known.history if known.space == DEVICE else ():
            if access.actor not in (known.maker, *known.lent) and clock[access.actor] < access.tick:
                self._failed.append(
                    f"memory of {known.maker} is free while {access.what} on {access.actor} is under way: lend it"
                )

    def _know(self, tensor: Tensor, space: str, maker: str = "") -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._buffers:
            self._buffers[reference] = Buffer(space, maker)
            weakref.finalize(storage, self._freed, reference)

    def _known(self, tensor: Tensor) -> Buffer | None:
        return self._buffers.get(StorageWeakRef(tensor.untyped_storage()))

    def _clock(self, actor: str) -> Counter[str]:
        return self._clocks.setdefault(actor, Counter())

    def _behind(self, *actors: str) -> Counter[str]:
        """A clock behind all that some actors have been given."""
        return joined(*map(self._clock, actors))

    def _stays(self, what: str) -> bool:
        """Whether a wait is there, as it is unless it is the one that was taken out."""
        place = f"{what} in {sys._getframe(2).f_code.co_name}"
        self.places[place] += 1
        return place != self.without

    def _by_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the host, which is taken to write to whatever it is given."""

        def noted(*given: Any, **named: Any) -> Any:
            ones = tensors((given, named))
            if any(map(self.holds, ones)):
                self._failed.append(f"{function.__name__} of the host is given memory of the device")
            self.note(function.__name__, [], [(one, None) for one in ones])
            return function(*given, **named)

        return noted

    def run_as(self, thread: str, work: Callable[[], Any]) -> Any:
        """Work of another thread of the host, which has not done anything since it was told of the last."""
        before, self._thread, self._present = (self._thread, self._present), thread, [COMPUTE]
        try:
            return work()
        finally:
            self._thread, self._present = before

    def hand_over(self, giver: Counter[str], to: str) -> None:
        """A thread hears of what another has done."""
        self._clocks[to] = joined(self._clock(to), giver)

    def done_by(self, thread: str | None = None) -> Counter[str]:
        """What a thread has done, the present one if none is named."""
        return self._behind(thread or self._thread)


class Loader:
    """A thread that does one thing after the other."""

    def __init__(self, fake: FakeStreams) -> None:
        self.fake = fake

    def submit(self, function: Callable[..., Any], *given: Any) -> Any:
        return Submitted(self.fake, lambda: function(*given))


class Submitted(Future[Any]):
    """Done at once, or when it is waited for."""

    def __init__(self, fake: FakeStreams, work: Callable[[], Any]) -> None:
        super().__init__()
        self.fake, self._work, self._told = fake, work, fake.done_by()
        if not fake.late:
            self._do()

    def _do(self) -> None:
        self.fake.hand_over(self._told, LOADER)
        self.set_result(self.fake.run_as(LOADER, self._work))

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._do()
        self.fake.hand_over(self.fake.done_by(LOADER), MAIN)
        return super().result(timeout)


class Kernels:
    """The CPU's kernels as the device's. Of what a kernel reads by source, it reads the rows that edges name."""

    def __init__(self, fake: FakeStreams) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(cpu, name)

        def noted(*given: Any, **named: Any) -> Any:
            made = kernel(*given, **named)
            known = getattr(given[0], "adj", given[0])  # by itself, or with what is asked of an attention
            adjacency = known if isinstance(known, Adjacency) else None
            ones = tensors((given, named, adjacency_tensors(adjacency)))
            reads = [(one, sources(one, adjacency, name)) for one in ones]
            into = tensors(named.get("into", given[4] if name == "spmm_transposed" and len(given) > 4 else None))
            self._fake.note(name, reads, [(one, None) for one in into], tensors(made))
            return made

        return noted


def sources(one: Tensor, adjacency: Adjacency | None, kernel: str) -> Tensor | None:
    """The rows that a kernel reads of a tensor, if they are those of sources; None: all."""
    if adjacency is None or "transposed" in kernel or one.dim() != 2:
        return None
    return adjacency.indices.long() if len(one) == adjacency.num_sources else None


def adjacency_tensors(adjacency: Adjacency | None) -> list[Tensor]:
    known = () if adjacency is None else (adjacency.indptr, adjacency.indices, adjacency.weight)
    return [one for one in known if one is not None]


def tensors(value: Any) -> list[Tensor]:
    """Those in some value, in whatever lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [one for each in inside for one in tensors(each)]


def joined(*clocks: Counter[str]) -> Counter[str]:
    """A clock behind some others."""
    found: Counter[str] = Counter()
    for clock in clocks:
        found |= clock
    return found
