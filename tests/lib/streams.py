"""A fake device with streams, which detects races: two accesses that no wait puts in order raise a RaceError.

Tensors are CPU tensors, and operations run at once, in program order. Each stream and each host thread has a vector
clock: an access to some bytes must be ordered after every earlier access to them, unless both only read. PyTorch's
dispatcher tells which bytes an operation reads and writes; a table of storages tells which are in device memory.
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
"""Device of tensors created on the fake device, unlike those of the host, whose device is `cpu`."""
BY_ROWS = ("index_select", "index_copy_", "index_add_", "index_fill_", "index")
ON_HOST = ("gather_file_rows", "add_file_rows", "add_rows", "read_bytes", "write_bytes")
MAIN, LOADER = "main thread", "loader"


class RaceError(AssertionError):
    """Two accesses to the same bytes are not ordered, and one of them writes."""


class Region(NamedTuple):
    """Bytes of a storage that a tensor occupies, or some of its rows."""

    num_bytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    rows: tuple[int, ...] | None

    @classmethod
    def of(cls, tensor: Tensor, rows: Tensor | None) -> Region:
        row_ids = None if rows is None else tuple(rows.unique().tolist())
        num_bytes = tensor.untyped_storage().nbytes()
        return cls(num_bytes, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.itemsize, row_ids)


@cache
def bytes_of(region: Region) -> Tensor:
    """Return which bytes of the storage a region contains: bool [num_bytes]."""
    mask, size = torch.zeros(region.num_bytes, dtype=torch.bool), region.itemsize
    strides = [size * stride for stride in region.stride]
    region_mask = mask.as_strided([*region.shape, size], [*strides, 1], size * region.offset)
    region_mask[slice(None) if region.rows is None else list(region.rows)] = True
    return mask


class Access(NamedTuple):
    """A read or write of a region by an actor (a stream or a host thread), at a tick of its clock."""

    actor: str
    tick: int
    writes: bool
    region: Region
    what: str


@dataclass
class Buffer:
    """A storage, and the accesses to it."""

    space: str
    maker: str
    """Stream that allocated the storage, if it is device memory."""
    history: list[Access] = field(default_factory=list)
    lent: set[str] = field(default_factory=set)


class FakeStreams(TorchDispatchMode):
    """Context that fakes a device. The first race is raised on exit, since other ranks may wait for this one.

    without: name of a wait or loan to skip, as in `places`. late: run the work of a loader thread only when it is
    waited for, instead of at once; correct code has no race either way.
    """

    asynchronous = True

    def __init__(self, without: str = "", *, late: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.without, self.late = without, late
        self.places: Counter[str] = Counter()
        """Number of times that each wait or loan occurred, as 'join in function'."""
        self.streams: Counter[str] = Counter()
        """Number of operations of each stream and host thread."""
        self._clocks: dict[str, Counter[str]] = {}
        self._buffers: dict[StorageWeakRef, Buffer] = {}
        self._present, self._thread = [COMPUTE], MAIN
        self._failed: list[str] = []
        self._patches = ExitStack()

    def __enter__(self) -> FakeStreams:
        kernels, features = Kernels(self), Workload.features

        def features_at(work: Workload, vertices: Any, device: torch.device) -> Tensor:
            rows = features(work, vertices, device)
            return self.to_device(rows) if device == DEVICE_NAME else rows

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

    # the interface of weft.runtime.streams to a device

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
        buffer = self._known(tensor)
        if buffer is not None and buffer.maker != stream and self._stays("lend"):
            buffer.lent.add(stream)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        buffer = self._known(tensor)
        return buffer is not None and buffer.space == DEVICE

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(*shape, dtype=dtype)
        self._know(tensor, HOST)
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        if self.holds(tensor):
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE_NAME)
        return copy.copy_(tensor, non_blocking=True)

    # recording of operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and any(map(self.holds, tensors((args, kwargs)))):
            self._failed.append(f"gloo's {func.overloadpacket.__name__} is given memory of the device")
        names = [parameter.name for parameter in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        result = func(*args, **kwargs)
        written = {
            item.name for item in func._schema.arguments if item.alias_info is not None and item.alias_info.is_write
        }
        old_storages = {id(tensor.untyped_storage()) for tensor in tensors(values)}
        fresh = [tensor for tensor in tensors(result) if id(tensor.untyped_storage()) not in old_storages]
        if not written and not fresh and tensors(result):
            return result  # a view
        rows = values.get("index", (values.get("indices") or [None])[0]) if values.get("dim", 0) == 0 else None
        by_rows = rows if func.overloadpacket.__name__ in BY_ROWS and isinstance(rows, Tensor) else None
        reads = [(tensor, by_rows if name == "self" else None) for name, value in values.items() if name not in written
                 for tensor in tensors(value)]  # fmt: skip
        writes = [(tensor, by_rows if name == "self" else None) for name in written for tensor in tensors(values[name])]
        what = func.overloadpacket.__name__
        copies = what == "copy_" and bool(values.get("non_blocking"))
        created_on_device = values.get("device") == DEVICE_NAME
        if what.startswith("new_") or what.endswith("_like"):  # as large as their argument, which they do not read
            created_on_device, reads = created_on_device or self.holds(values["self"]), []
        self.record(what, reads, writes, fresh, copies=copies, created_on_device=created_on_device)
        if what == "_local_scalar_dense" and self.holds(values["self"]):  # the host waits for it
            self._clocks[self._thread] = joined(self._clock(self._thread), self._clock(self._present[-1]))
        return result

    def record(
        self,
        what: str,
        reads: Iterable[tuple[Tensor, Tensor | None]],
        writes: Iterable[tuple[Tensor, Tensor | None]],
        fresh: Sequence[Tensor] = (),
        *,
        copies: bool = False,
        created_on_device: bool = False,
    ) -> None:
        """Record an operation.

        reads, writes: tensors, each with the ids of the rows that are accessed (None: all). fresh: tensors that it
        creates. copies: whether it copies between host and device without blocking the host. created_on_device: whether
        it creates tensors on the device.
        """
        reads, writes = list(reads), list(writes)
        spaces = {buffer.space for tensor, _ in (*reads, *writes) if (buffer := self._known(tensor)) is not None}
        if len(spaces) == 2 and what != "copy_":
            self._failed.append(f"{what} has operands of the host and of the device")
        by_device = created_on_device or DEVICE in spaces
        if not spaces and not by_device:
            return
        actor = self._present[-1] if by_device else self._thread
        clock = self._clocks[actor] = self._behind(actor, self._thread)
        clock[actor] += 1
        self.streams[actor] += 1
        for tensor in fresh if by_device else ():
            self._know(tensor, DEVICE, actor)
        accesses = [(False, reads), (True, [*writes, *((tensor, None) for tensor in fresh)])]
        for writing, accessed in accesses:
            for tensor, rows in accessed:
                if (buffer := self._known(tensor)) is not None:
                    self._access(buffer, Access(actor, clock[actor], writing, Region.of(tensor, rows), what), clock)
        if len(spaces) == 2 and not copies:  # the host waits for it
            self._clocks[self._thread] = joined(self._clock(self._thread), clock)

    def _access(self, buffer: Buffer, access: Access, clock: Counter[str]) -> None:
        history = []
        for before in buffer.history:
            same = before.actor == access.actor
            at_once = not same and (before.writes or access.writes) and clock[before.actor] < before.tick
            if at_once and bool((bytes_of(before.region) & bytes_of(access.region)).any()):
                self._failed.append(
                    f"{access.what} on {access.actor} does not wait for {before.what} on {before.actor}, "
                    f"of a buffer of the {buffer.space}"
                )
            if not (same and before.writes == access.writes and before.region == access.region):
                history.append(before)
        buffer.history = [*history, access]

    def _freed(self, reference: StorageWeakRef) -> None:
        """Check that accesses have ended when memory is freed: its stream may reuse it for its next operations."""
        buffer = self._buffers.pop(reference)
        clock = self._behind(buffer.maker, self._thread) if buffer.maker else Counter()
        for access in buffer.history if buffer.space == DEVICE else ():
            if access.actor not in (buffer.maker, *buffer.lent) and clock[access.actor] < access.tick:
                self._failed.append(
                    f"memory of {buffer.maker} is free while {access.what} on {access.actor} is under way: lend it"
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
        """Return a clock after all operations so far of some actors."""
        return joined(*map(self._clock, actors))

    def _stays(self, what: str) -> bool:
        """Count a wait or loan, and return False if it is the one to skip."""
        place = f"{what} in {sys._getframe(2).f_code.co_name}"
        self.places[place] += 1
        return place != self.without

    def _by_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the host, which is assumed to write to all of its arguments."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            arguments = tensors((args, kwargs))
            if any(map(self.holds, arguments)):
                self._failed.append(f"{function.__name__} of the host is given memory of the device")
            self.record(function.__name__, [], [(tensor, None) for tensor in arguments])
            return function(*args, **kwargs)

        return recorded

    def run_as(self, thread: str, work: Callable[[], Any]) -> Any:
        """Run `work` as another thread of the host."""
        before, self._thread, self._present = (self._thread, self._present), thread, [COMPUTE]
        try:
            return work()
        finally:
            self._thread, self._present = before

    def hand_over(self, giver: Counter[str], to: str) -> None:
        """Order the next operations of the thread `to` after those in the clock `giver`."""
        self._clocks[to] = joined(self._clock(to), giver)

    def done_by(self, thread: str | None = None) -> Counter[str]:
        """Return the clock of a thread, by default of the current one."""
        return self._behind(thread or self._thread)


class Loader:
    """A fake ThreadPoolExecutor with one thread."""

    def __init__(self, fake: FakeStreams) -> None:
        self.fake = fake

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return Submitted(self.fake, lambda: function(*args))


class Submitted(Future[Any]):
    """A future whose work runs at once, or when its result is requested."""

    def __init__(self, fake: FakeStreams, work: Callable[[], Any]) -> None:
        super().__init__()
        self.fake, self._work, self._submitted_after = fake, work, fake.done_by()
        if not fake.late:
            self._do()

    def _do(self) -> None:
        self.fake.hand_over(self._submitted_after, LOADER)
        self.set_result(self.fake.run_as(LOADER, self._work))

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._do()
        self.fake.hand_over(self.fake.done_by(LOADER), MAIN)
        return super().result(timeout)


class Kernels:
    """The CPU's kernels as the device's. From source rows, a kernel reads only those that edges refer to."""

    def __init__(self, fake: FakeStreams) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(cpu, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            first = getattr(args[0], "adj", args[0])  # the adjacency itself, or an argument that contains it
            adjacency = first if isinstance(first, Adjacency) else None
            arguments = tensors((args, kwargs, adjacency_tensors(adjacency)))
            reads = [(tensor, sources(tensor, adjacency, name)) for tensor in arguments]
            into = tensors(kwargs.get("into", args[4] if name == "spmm_transposed" and len(args) > 4 else None))
            self._fake.record(name, reads, [(tensor, None) for tensor in into], tensors(result))
            return result

        return recorded


def sources(tensor: Tensor, adjacency: Adjacency | None, kernel: str) -> Tensor | None:
    """Return the rows of a tensor that a kernel reads, if they are source rows; None means all rows."""
    if adjacency is None or "transposed" in kernel or tensor.dim() != 2:
        return None
    return adjacency.indices.long() if len(tensor) == adjacency.num_sources else None


def adjacency_tensors(adjacency: Adjacency | None) -> list[Tensor]:
    arrays = () if adjacency is None else (adjacency.indptr, adjacency.indices, adjacency.weight)
    return [array for array in arrays if array is not None]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, at any depth of lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in inside for tensor in tensors(item)]


def joined(*clocks: Counter[str]) -> Counter[str]:
    """Return a clock that is after some others."""
    clock_after: Counter[str] = Counter()
    for clock in clocks:
        clock_after |= clock
    return clock_after
