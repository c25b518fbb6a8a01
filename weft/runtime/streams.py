"""Order of work on the host, copies, and kernels: a CPU does one thing after the other, a GPU has streams.

Code that gives work to a device states the mark after which the work may start. Nothing else orders two streams, or a
stream and the host.
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
"""Names of the streams: the default one, for kernels and exchanges, and two for copies."""
BUFFERS = 2
"""Number of staging buffers from which copies may be under way while the host fills another one."""


class StreamMark(NamedTuple):
    """Point in a stream: all work that the stream had been given when the mark was set."""

    stream: str
    """Name of the stream."""
    event: Any
    """CUDA event in the stream."""


class Streams(Protocol):
    """Streams of a device."""

    asynchronous: bool
    """True if the device has its own memory and works while the host continues."""

    def mark(self) -> StreamMark | None:
        """Return a mark after all work of the current stream; None: all work is done."""
        ...

    def join(self, mark: StreamMark | None) -> None:
        """Make later work of the current stream wait for a mark."""
        ...

    def finish(self, mark: StreamMark | None) -> None:
        """Make the host wait for a mark."""
        ...

    def on(self, stream: str, after: StreamMark | None) -> AbstractContextManager[None]:
        """Make a stream the current one of this thread in the `with` block.

        Args:
            stream: Name of the stream.
            after: Mark that the stream waits for first.
        """
        ...

    def lend(self, tensor: Tensor, stream: str) -> Tensor:
        """Return a tensor that another stream will use too.

        Its memory is not reused before that stream is done with it.

        Args:
            tensor: The tensor.
            stream: Name of the other stream.
        """
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in the device's own memory."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialized host memory that asynchronous copies can access; see `pinned_bytes`.

        Args:
            shape: Shape of the tensor.
            dtype: Its dtype.
        """
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the device.

        A pinned tensor must not change before the current stream has copied it.
        """
        ...


class InOrder:
    """Streams of a device that has finished all work before it gets more: the CPU, or data that stays on a GPU.

    Args:
        device: The device.
    """

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> None:
        """Return None, since all work of the device is done already."""

    def join(self, mark: StreamMark | None) -> None:
        del mark

    def finish(self, mark: StreamMark | None) -> None:
        del mark

    def on(self, stream: str, after: StreamMark | None) -> AbstractContextManager[None]:
        del stream, after
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
    """Streams of a GPU: kernels in the thread's current stream at construction, copies in two more. Not measured yet.

    Args:
        device: The GPU.
    """

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", number)  # with its number, since other threads have other current devices
        self._streams = {COMPUTE: torch.cuda.current_stream(self.device)}
        self._streams |= {name: torch.cuda.Stream(self.device) for name in (LOAD, STORE)}

    @property
    def _current(self) -> str:
        now = torch.cuda.current_stream(self.device)
        return next((name for name, stream in self._streams.items() if stream == now), COMPUTE)

    def mark(self) -> StreamMark:
        event = torch.cuda.Event(blocking=True)  # a host thread that waits for it sleeps
        event.record(torch.cuda.current_stream(self.device))
        return StreamMark(self._current, event)

    def join(self, mark: StreamMark | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)

    def finish(self, mark: StreamMark | None) -> None:
        if mark is not None:
            mark.event.synchronize()

    @contextmanager
    def on(self, stream: str, after: StreamMark | None) -> Iterator[None]:
        with torch.cuda.stream(self._streams[stream]):  # also sets the device, which another thread has not set
            self.join(after)
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
    """Return the streams of a device, with kernels in this thread's current stream."""
    return CudaStreams(device) if device.type == "cuda" else InOrder(device)


class Captured(Protocol):
    """Kernels of a CUDA graph, which can run again."""

    def replay(self) -> None:
        """Run the kernels in the current stream. They read and write the memory that they were captured with."""
        ...


def capture(work: Callable[[], T]) -> tuple[Captured, T]:
    """Capture the kernels of a function on the current GPU without running them, and return them and the result.

    Memory that the function allocates stays allocated as long as the captured kernels exist. Not run on a GPU yet.

    Raises:
        RuntimeError: The function waits for the GPU, or copies from memory that is not pinned.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            return graph, work()
    finally:
        torch.cuda.set_stream(current)  # a failed capture does not restore the stream


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that pinned memory of this size needs.

    PyTorch rounds up to a power of two, and keeps freed blocks.
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def to_host(streams: Streams, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host, and wait for it; return a tensor on the host itself.

    Args:
        streams: Streams of the device.
        tensor: The tensor.
    """
    if not streams.holds(tensor):
        return tensor
    copy = streams.pinned(tensor.shape, tensor.dtype)
    copy.copy_(tensor.detach(), non_blocking=True)
    streams.finish(streams.mark())
    return copy


class Guard:
    """Order of accesses to a host buffer by streams and by the host.

    A reader waits for the last writer; a writer also waits for the readers since. The buffer is treated as a whole.
    Each access must be announced to the guard. Marks are replaced and never removed: another thread may read while this
    one waits to write, and waiting again for a reached mark costs nothing.

    Args:
        streams: Streams of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._written: StreamMark | None = None
        self._read: dict[str, StreamMark] = {}
        """Last reading mark of each stream; it comes after the earlier ones."""

    def host_reads(self) -> None:
        """Wait until all writes to the buffer are done, so that the host can read it."""
        self._streams.finish(self._written)

    def host_writes(self) -> None:
        """Wait until all writes and reads of the buffer are done, so that the host can overwrite it."""
        for mark in (self._written, *self._read.values()):
            self._streams.finish(mark)

    @contextmanager
    def stream_reads(self) -> Iterator[None]:
        """Let the current stream copy from the buffer in the `with` block."""
        self._streams.join(self._written)
        yield
        if (mark := self._streams.mark()) is not None:
            self._read[mark.stream] = mark

    @contextmanager
    def stream_writes(self) -> Iterator[None]:
        """Let the current stream copy into the buffer in the `with` block."""
        for mark in (self._written, *self._read.values()):
            self._streams.join(mark)
        yield
        self._written = self._streams.mark()


class Staging:
    """Pinned buffers that the host fills for copies to the device. A buffer is reused when its copy is done.

    Args:
        streams: Streams of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._free: deque[tuple[Tensor, StreamMark | None]] = deque()

    @contextmanager
    def lend(self, num_rows: int, width: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield uninitialized rows, [num_rows, width].

        In the `with` block, the host fills them and the current stream copies them to the device.

        Args:
            num_rows: Number of rows.
            width: Number of columns.
            dtype: Dtype of the rows.
        """
        if not self.streams.asynchronous:
            yield torch.empty(num_rows, width, dtype=dtype)
            return
        num_bytes = num_rows * width * dtype.itemsize
        buffer = self._buffer(num_bytes)
        yield buffer[:num_bytes].view(dtype).view(num_rows, width)
        self._free.append((buffer, self.streams.mark()))

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return the buffer that has been free for longest, when its copy is done; or a new one if it is too small."""
        if len(self._free) >= BUFFERS:
            buffer, mark = self._free.popleft()
            self.streams.finish(mark)
            if len(buffer) >= num_bytes:
                return buffer
        return self.streams.pinned([num_bytes], torch.uint8)
