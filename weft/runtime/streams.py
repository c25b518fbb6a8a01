"""In which order host, copies and kernels work: a CPU does one thing after the other, a GPU has streams.

Whoever gives a device work says behind which mark it comes; nothing else orders two streams, or a stream and the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
COMPUTE, LOAD, STORE = "compute", "load", "store"
"""The streams: that of kernels and exchanges, in which everything is that says nothing else, and two of copies."""
BUFFERS = 2
"""Staging buffers that copies are under way from while the host fills another."""


class StreamMark(NamedTuple):
    """All that a stream had been given at a time."""

    stream: str
    event: Any


class Streams(Protocol):
    """How a device works."""

    asynchronous: bool
    """Whether it has a memory of its own, and works while the host goes on."""

    def mark(self) -> StreamMark | None:
        """All that the present stream has been given; None: it is done."""
        ...

    def join(self, mark: StreamMark | None) -> None:
        """What the present stream is given from now on comes behind a mark."""
        ...

    def finish(self, mark: StreamMark | None) -> None:
        """The host waits for a mark."""
        ...

    def on(self, stream: str, behind: StreamMark | None) -> AbstractContextManager[None]:
        """What this thread gives the device inside goes to a stream, behind a mark."""
        ...

    def lend(self, tensor: Tensor, stream: str) -> Tensor:
        """A tensor that another stream goes on to use: its memory is not used again before that has."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the device's own memory."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host, of any content, that copies reach while the host goes on; see `pinned_bytes`."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; one that is pinned is not to be changed before the present stream has copied it."""
        ...


class InOrder:
    """A device that has done everything when it is told of the next: the CPU, and what stays in a GPU's memory."""

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> None:
        """Everything is done."""

    def join(self, mark: StreamMark | None) -> None:
        del mark

    def finish(self, mark: StreamMark | None) -> None:
        del mark

    def on(self, stream: str, behind: StreamMark | None) -> AbstractContextManager[None]:
        del stream, behind
        return nullcontext()

    def lend(self, tensor: Tensor, stream: str) -> Tensor:
        del stream
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class CudaStreams:
    """A GPU's: kernels in the stream that is this thread's present one now, copies in two more. Not measured yet."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", number)  # in every thread
        self._streams = {COMPUTE: torch.cuda.current_stream(self.device)}
        self._streams |= {name: torch.cuda.Stream(self.device) for name in (LOAD, STORE)}

    @property
    def _present(self) -> str:
        now = torch.cuda.current_stream(self.device)
        return next((name for name, stream in self._streams.items() if stream == now), COMPUTE)

    def mark(self) -> StreamMark:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(torch.cuda.current_stream(self.device))
        return StreamMark(self._present, event)

    def join(self, mark: StreamMark | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)

    def finish(self, mark: StreamMark | None) -> None:
        if mark is not None:
            mark.event.synchronize()

    @contextmanager
    def on(self, stream: str, behind: StreamMark | None) -> Iterator[None]:
        with torch.cuda.stream(self._streams[stream]):  # and on its device, which another thread has not set
            self.join(behind)
            yield

    def lend(self, tensor: Tensor, stream: str) -> Tensor:
        tensor.record_stream(self._streams[stream])
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def streams_of(device: torch.device) -> Streams:
    """Those of a device, for work whose kernels are in this thread's present stream."""
    return CudaStreams(device) if device.type == "cuda" else InOrder(device)


class Captured(Protocol):
    """Kernels that were given to a device, and can be given again, at once."""

    def replay(self) -> None:
        """Gives them to the present stream: they read and write the memory that they were captured with."""
        ...


def capture(work: Callable[[], T]) -> tuple[Captured, T]:
    """The kernels of some work on the present GPU, none of which is run by that, and what it gives.

    The memory that the work allocates is kept as long as they are. RuntimeError where it waits for the GPU, or copies
    from memory that is not pinned. Not run on a GPU yet.
    """
    graph, present = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            return graph, work()
    finally:
        torch.cuda.set_stream(present)  # which a capture that fails leaves at its own


def pinned_bytes(num_bytes: int) -> int:
    """What pinned memory takes: PyTorch makes each block a power of two, and keeps it."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def to_host(streams: Streams, tensor: Tensor) -> Tensor:
    """A tensor on the host, which waits for it; itself where it is there."""
    if not streams.holds(tensor):
        return tensor
    found = streams.pinned(tensor.shape, tensor.dtype)
    found.copy_(tensor.detach(), non_blocking=True)
    streams.finish(streams.mark())
    return found


class Guard:
    """Keeps in order what streams and the host do to one buffer of the host, for whoever says it to the guard.

    A reader comes behind the last writer, a writer also behind the readers. The whole buffer is one. Marks are replaced
    and not removed, since another thread may read while this one waits to write; to wait again for what is done is
    nothing.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._written: StreamMark | None = None
        self._read: dict[str, StreamMark] = {}
        """By stream the last one, which the stream's others come before."""

    def host_reads(self) -> None:
        """The host is about to read."""
        self._streams.finish(self._written)

    def host_writes(self) -> None:
        """The host is about to write."""
        for mark in (self._written, *self._read.values()):
            self._streams.finish(mark)

    @contextmanager
    def stream_reads(self) -> Iterator[None]:
        """Inside, the present stream is given a copy from the buffer."""
        self._streams.join(self._written)
        yield
        if (mark := self._streams.mark()) is not None:
            self._read[mark.stream] = mark

    @contextmanager
    def stream_writes(self) -> Iterator[None]:
        """Inside, the present stream is given a copy into the buffer."""
        for mark in (self._written, *self._read.values()):
            self._streams.join(mark)
        yield
        self._written = self._streams.mark()


class Staging:
    """Pinned memory that the host fills for copies to the device; what one copies from is filled again behind it."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._free: deque[tuple[Tensor, StreamMark | None]] = deque()

    @contextmanager
    def lend(self, num_rows: int, width: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Rows [num_rows, width] of any content; inside, the host fills them, and the present stream copies them."""
        if not self.streams.asynchronous:
            yield torch.empty(num_rows, width, dtype=dtype)
            return
        num_bytes = num_rows * width * dtype.itemsize
        buffer = self._buffer(num_bytes)
        yield buffer[:num_bytes].view(dtype).view(num_rows, width)
        self._free.append((buffer, self.streams.mark()))

    def _buffer(self, num_bytes: int) -> Tensor:
        """The one that has been free for longest, once nothing copies from it; a new one where it is too small."""
        if len(self._free) >= BUFFERS:
            buffer, mark = self._free.popleft()
            self.streams.finish(mark)
            if len(buffer) >= num_bytes:
                return buffer
        return self.streams.pinned([num_bytes], torch.uint8)
