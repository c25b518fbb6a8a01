"""Counters of one rank: bytes and seconds of communication, and edges aggregated. A meter does not communicate."""

from __future__ import annotations

import mmap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.runtime.clock import Clock, HostClock
from weft.runtime.timeline import Slice, Timeline

STATUS_BYTES = 128
"""Size of a rank's slot in the status file."""


@dataclass(kw_only=True)
class Counts:
    """Work of a rank in one phase of one epoch. Counters are by tag: rows_to_cols, gradients, ..."""

    collectives: Counter[str] = field(default_factory=Counter)
    """Number of collectives."""
    bytes_sent: Counter[str] = field(default_factory=Counter)
    """Bytes sent to other ranks."""
    bytes_received: Counter[str] = field(default_factory=Counter)
    """Bytes received from other ranks."""
    to_device: Counter[str] = field(default_factory=Counter)
    """Bytes copied from the host to the device: rows, sources of edges, gradients, edges."""
    to_host: Counter[str] = field(default_factory=Counter)
    """Bytes copied from the device to the host."""
    sampled: Counter[str] = field(default_factory=Counter)
    """Work of mini-batches: sampled edges, vertices computed at all layers, rows of features loaded, cache hits and
    misses.
    """
    seconds: float = 0.0
    """Time in this phase, without the phases inside it."""
    edges: int = 0
    """Sum of edges times columns over all aggregates, forward and backward."""
    working_bytes: int = 0
    """Largest working set on the device under --device-memory."""
    durations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds inside each collective, by a name that is the same on all participating ranks."""
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by timer: negatives, encode, decode, loss, captured (encode and loss as a CUDA graph), update, score."""

    def plain(self) -> dict[str, Any]:
        """Return the counts as values that JSON can represent."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}


class Span(NamedTuple):
    """Time between two stamps of a clock."""

    start: Any
    stop: Any


class Meter:
    """Counters of one rank by phase: 'plan' and 'setup' (once), 'train', 'eval' and 'record' (bookkeeping).

    Seconds are computed only when counts are taken, so that a GPU's clock blocks the host only then.
    """

    def __init__(self) -> None:
        self.clock: Clock = HostClock()
        self.phase = "setup"
        self.activity = "setup"
        self.status = self.activity, time.monotonic()
        """Current activity of this rank, and its start."""
        self._counts: dict[str, Counts] = defaultdict(Counts)
        self._status_file: mmap.mmap | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._charges: list[tuple[dict[str, float], str, Span]] = []
        self._since = self.clock.now()
        self._timer, self._timer_since = "", self._since
        self._timeline: Timeline | None = None

    def set_clock(self, clock: Clock) -> None:
        """Use another clock from now on. No timer may be running."""
        assert not self._timer
        self._tick()
        self._settle()
        self.clock, self._since = clock, clock.now()

    @property
    def counts(self) -> Counts:
        """Counts of the current phase."""
        return self._counts[self.phase]

    @contextmanager
    def during(self, phase: str, activity: str | None = None) -> Iterator[None]:
        """Count all work and time of the `with` block under a phase.

        Args:
            phase: Name of the phase.
            activity: Description for people, such as 'epoch 3, training'; None: the current one.
        """
        before, timer = (self.phase, self.activity), self._timer
        self._enter("")  # work in another phase does not count for the current timer
        self._tick()
        self.phase, self.activity = phase, activity or self.activity
        self.set_status(self.activity)
        try:
            yield
        finally:
            self._enter("")
            self._tick()
            self.phase, self.activity = before
            self._enter(timer)

    def _tick(self) -> None:
        """Charge the time since the last change of phase to the current phase."""
        now = self.clock.now()
        self._charges.append((self._seconds, self.phase, Span(self._since, now)))
        self.note("compute", self.phase, Span(self._since, now))
        self._since = now

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the duration of the `with` block, without that of nested timers, to `name` in the current phase."""
        before = self._timer
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, timer: str) -> None:
        """Charge the time of the current timer, and start another one; an empty name stops timing."""
        if not (timer or self._timer):
            return
        now = self.clock.now()
        if self._timer:
            self._charges.append((self.counts.stages, self._timer, Span(self._timer_since, now)))
            self.note("compute", self._timer, Span(self._timer_since, now))
        self._timer, self._timer_since = timer, now

    def take(self, phase: str) -> Counts:
        """Return the counts of `phase` since the last call, and reset them."""
        self._settle()
        counts = self._counts.pop(phase, Counts())
        counts.seconds = self._seconds.pop(phase, 0.0)
        return counts

    def _settle(self) -> None:
        """Add the seconds charged since the last call."""
        if self._charges:
            self.clock.wait()
        for seconds, name, span in self._charges:
            seconds[name] += self.clock.seconds(*span)
        self._charges.clear()

    def collective(self, tag: str, sent: int, received: int, *, name: str, spans: Sequence[Span]) -> None:
        """Count a collective.

        Args:
            tag: Name under which bytes are counted.
            sent: Bytes to other ranks.
            received: Bytes from other ranks.
            name: Name of this collective, the same on all participating ranks.
            spans: Times that this rank spent inside.
        """
        counts = self.counts
        counts.collectives[tag] += 1
        counts.bytes_sent[tag] += sent
        counts.bytes_received[tag] += received
        self._charges += [(counts.durations, name, span) for span in spans]
        for span in spans:
            self.note("compute", f"wait: {tag}", span)

    def add(self, counts: Counts) -> None:
        """Add the exchanges and samples that another thread counted. Its time does not count for this thread."""
        self.counts.sampled.update(counts.sampled)
        self.counts.collectives.update(counts.collectives)
        self.counts.bytes_sent.update(counts.bytes_sent)
        self.counts.bytes_received.update(counts.bytes_received)

    def aggregate(self, edges: int, width: int) -> None:
        """Count an aggregate.

        Args:
            edges: Number of edges.
            width: Number of columns.
        """
        self.counts.edges += edges * width

    def transfer(self, tag: str, to_device: int, to_host: int) -> None:
        """Count bytes between host and device.

        Args:
            tag: Name under which bytes are counted.
            to_device: Bytes copied to the device.
            to_host: Bytes copied to the host.
        """
        if to_device:
            self.counts.to_device[tag] += to_device
        if to_host:
            self.counts.to_host[tag] += to_host

    def record_working_set(self, num_bytes: int) -> None:
        """Record a working set of the device; the largest one counts."""
        self.counts.working_bytes = max(self.counts.working_bytes, num_bytes)

    def begin_timeline(self) -> None:
        """Record a timeline from now on."""
        self._timeline = Timeline(self.clock)

    def take_timeline(self, *, last: bool) -> list[Slice]:
        """Return the slices of the timeline since the last call. `last` ends the timeline."""
        slices = self._timeline.take() if self._timeline else []
        self._timeline = None if last else self._timeline
        return slices

    def note(self, stream: str, name: str, span: Span, **about: Any) -> None:
        """Add a slice to the timeline, if one is recorded.

        Args:
            stream: Stream of the timeline; see `Slice`.
            name: Name of the slice.
            span: Start and end of the slice.
            **about: Details of the slice.
        """
        if self._timeline is not None:
            self._timeline.add(stream, name, *span, **about)

    def stamp(self) -> Any:
        """Return a stamp for `note_since`, or None if no timeline is recorded."""
        return None if self._timeline is None else self.clock.now()

    def note_since(self, stream: str, name: str, since: Any, **about: Any) -> None:
        """Add a slice from a stamp until now to the timeline.

        Args:
            stream: Stream of the timeline; see `Slice`.
            name: Name of the slice.
            since: Start of the slice, as `stamp` returned it.
            **about: Details of the slice.
        """
        if since is not None:
            self.note(stream, name, Span(since, self.clock.now()), **about)

    @contextmanager
    def noted(self, stream: str, name: str, **about: Any) -> Iterator[None]:
        """Add a slice to the timeline that lasts as long as the `with` block.

        Args:
            stream: Stream of the timeline; see `Slice`.
            name: Name of the slice.
            **about: Details of the slice.
        """
        since = self.stamp()
        yield
        self.note_since(stream, name, since, **about)

    def write_status_to(self, path: Path, rank: int) -> None:
        """Write the status of this rank to its slot of a shared file, which survives if the process is killed.

        Args:
            path: The file, with `STATUS_BYTES` for each rank.
            rank: Number of this rank.
        """
        with path.open("r+b") as file:
            self._status_file = mmap.mmap(file.fileno(), 0)
        self._slot = rank * STATUS_BYTES

    def set_status(self, text: str) -> None:
        """Set the status of this rank, and write it to the rank's slot, if there is one."""
        self.status = text, time.monotonic()
        if self._status_file is not None:
            line = text.encode()[: STATUS_BYTES - 1]
            self._status_file[self._slot : self._slot + STATUS_BYTES] = line.ljust(STATUS_BYTES, b"\0")


def read_status(path: Path, rank: int) -> str:
    """Return the last status of a rank.

    Args:
        path: The status file.
        rank: Number of the rank.
    """
    return _slot_text(path, rank) or "starting"


def has_status(path: Path, rank: int) -> bool:
    """Return True if a rank has written a status, or if the file is gone.

    Args:
        path: The status file.
        rank: Number of the rank.
    """
    try:
        return bool(_slot_text(path, rank))
    except OSError:
        return True


def _slot_text(path: Path, rank: int) -> str:
    slot = path.read_bytes()[rank * STATUS_BYTES : (rank + 1) * STATUS_BYTES]
    return slot.rstrip(b"\0").decode(errors="replace")
