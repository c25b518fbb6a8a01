"""Counts what one rank does: bytes and seconds on the network, edges aggregated. Reads clocks, knows no network."""

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


@dataclass(kw_only=True)
class Counts:
    """What a rank did in one phase of one epoch. Counters are by tag: rows_to_cols, gradients, ..."""

    collectives: Counter[str] = field(default_factory=Counter)
    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_received: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    """Bytes that came from the host to the device: rows, sources of edges, gradients, edges."""
    to_host: Counter[str] = field(default_factory=Counter)
    """Bytes that went from the device to the host."""
    sampled: Counter[str] = field(default_factory=Counter)
    """Of mini-batches: edges drawn, vertices computed at all levels, rows of features loaded, cache hits and misses."""
    seconds: float = 0.0
    """Time in the phase, without the phases inside it."""
    edges: int = 0
    """Edges x width aggregated, forward and backward."""
    working_bytes: int = 0
    """The largest working set that the device had under --device-memory."""
    durations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds inside each collective, by a name that is the same on every rank that takes part."""
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by timer: negatives, encode, decode, loss, captured (encode and loss, as a CUDA graph), update, score."""

    def plain(self) -> dict[str, Any]:
        """The counts as values that JSON knows."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}


class Span(NamedTuple):
    """From one stamp of a clock to another."""

    start: Any
    stop: Any


class Meter:
    """The counters of one rank, by phase: 'setup' (once), 'train', 'eval' and 'record' (bookkeeping).

    Seconds are charged when counts are taken, so that a clock that is a GPU's is waited for then alone.
    """

    def __init__(self) -> None:
        self.clock: Clock = HostClock()
        self.phase = "setup"
        self.where = "setup"
        self.shown = self.where, time.monotonic()
        """What this rank does, as `show` was told, and since when."""
        self._counts: dict[str, Counts] = defaultdict(Counts)
        self._status: mmap.mmap | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._charges: list[tuple[dict[str, float], str, Span]] = []
        self._since = self.clock.now()
        self._timer, self._timer_since = "", self._since
        self._timeline: Timeline | None = None

    def use(self, clock: Clock) -> None:
        """From now on reads another clock; no timer runs."""
        assert not self._timer
        self._tick()
        self._settle()
        self.clock, self._since = clock, clock.now()

    @property
    def counts(self) -> Counts:
        """Those of the present phase."""
        return self._counts[self.phase]

    @contextmanager
    def during(self, phase: str, where: str | None = None) -> Iterator[None]:
        """Counts what happens inside under `phase`; `where` is what a person reads ('epoch 3, training')."""
        before, timer = (self.phase, self.where), self._timer
        self._enter("")  # what is done in another phase is no part of a stage of this one
        self._tick()
        self.phase, self.where = phase, where or self.where
        self.show(self.where)
        try:
            yield
        finally:
            self._enter("")
            self._tick()
            self.phase, self.where = before
            self._enter(timer)

    def _tick(self) -> None:
        """Charges the time since the last change of phase to the present one."""
        now = self.clock.now()
        self._charges.append((self._seconds, self.phase, Span(self._since, now)))
        self.note("compute", self.phase, Span(self._since, now))
        self._since = now

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Charges the time inside, without the timers inside it, to a name of the present phase."""
        before = self._timer
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, timer: str) -> None:
        if not (timer or self._timer):
            return
        now = self.clock.now()
        if self._timer:
            self._charges.append((self.counts.stages, self._timer, Span(self._timer_since, now)))
            self.note("compute", self._timer, Span(self._timer_since, now))
        self._timer, self._timer_since = timer, now

    def take(self, phase: str) -> Counts:
        """The counts of `phase` since the last call, which start again from zero."""
        self._settle()
        counts = self._counts.pop(phase, Counts())
        counts.seconds = self._seconds.pop(phase, 0.0)
        return counts

    def _settle(self) -> None:
        """Adds up the seconds charged since the last time."""
        if self._charges:
            self.clock.wait()
        for seconds, name, span in self._charges:
            seconds[name] += self.clock.seconds(*span)
        self._charges.clear()

    def collective(self, tag: str, sent: int, received: int, *, name: str, spans: Sequence[Span]) -> None:
        """Counts a collective: bytes to and from other ranks, and the time inside it.

        name: tells it from others, the same on every rank that takes part.
        """
        counts = self.counts
        counts.collectives[tag] += 1
        counts.bytes_sent[tag] += sent
        counts.bytes_received[tag] += received
        self._charges += [(counts.durations, name, span) for span in spans]
        for span in spans:
            self.note("compute", f"wait: {tag}", span)

    def add(self, counts: Counts) -> None:
        """Counts the exchanges and samples of another thread, whose time is none of this one's."""
        self.counts.sampled.update(counts.sampled)
        self.counts.collectives.update(counts.collectives)
        self.counts.bytes_sent.update(counts.bytes_sent)
        self.counts.bytes_received.update(counts.bytes_received)

    def aggregate(self, edges: int, width: int) -> None:
        """Counts an aggregate over `edges` edges on `width` columns."""
        self.counts.edges += edges * width

    def transfer(self, tag: str, to_device: int, to_host: int) -> None:
        """Counts bytes between host and device."""
        if to_device:
            self.counts.to_device[tag] += to_device
        if to_host:
            self.counts.to_host[tag] += to_host

    def record_working_set(self, num_bytes: int) -> None:
        """Keeps the largest working set that the device has had."""
        self.counts.working_bytes = max(self.counts.working_bytes, num_bytes)

    def begin_timeline(self) -> None:
        """From now on notes what this rank does when."""
        self._timeline = Timeline(self.clock)

    def take_timeline(self, *, last: bool) -> list[Slice]:
        """What was noted since the last time; last: nothing is from now on."""
        found = self._timeline.take() if self._timeline else []
        self._timeline = None if last else self._timeline
        return found

    def note(self, stream: str, name: str, span: Span, **about: Any) -> None:
        """Notes in the timeline, if there is one, what a stream did; see `Slice`."""
        if self._timeline is not None:
            self._timeline.add(stream, name, *span, **about)

    def stamp(self) -> Any:
        """When something begins that `ended` is to note; None where there is no timeline."""
        return None if self._timeline is None else self.clock.now()

    def ended(self, stream: str, name: str, since: Any, **about: Any) -> None:
        """Notes what has gone on since a stamp."""
        if since is not None:
            self.note(stream, name, Span(since, self.clock.now()), **about)

    @contextmanager
    def noted(self, stream: str, name: str, **about: Any) -> Iterator[None]:
        """Notes what is done inside."""
        since = self.stamp()
        yield
        self.ended(stream, name, since, **about)

    def show_in(self, path: Path, rank: int) -> None:
        """From now on keeps what this rank does in its slot of a shared file, where it outlives a killed process."""
        with path.open("r+b") as file:
            self._status = mmap.mmap(file.fileno(), 0)
        self._slot = rank * STATUS_BYTES

    def show(self, text: str) -> None:
        """Keeps what this rank does, also in its slot, if it has one."""
        self.shown = text, time.monotonic()
        if self._status is not None:
            line = text.encode()[: STATUS_BYTES - 1]
            self._status[self._slot : self._slot + STATUS_BYTES] = line.ljust(STATUS_BYTES, b"\0")


def read_status(path: Path, rank: int) -> str:
    """What `rank` was last doing, from the file its Meter was told to show it in."""
    return _shown(path, rank) or "starting"


def has_status(path: Path, rank: int) -> bool:
    """Whether `rank` has begun to show what it does; also once the file is gone."""
    try:
        return bool(_shown(path, rank))
    except OSError:
        return True


def _shown(path: Path, rank: int) -> str:
    slot = path.read_bytes()[rank * STATUS_BYTES : (rank + 1) * STATUS_BYTES]
    return slot.rstrip(b"\0").decode(errors="replace")
