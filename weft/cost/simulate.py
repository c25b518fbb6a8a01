"""How long a step takes: what every rank does, priced, with ranks that share cores and wait for each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.cost.prices import Network, Prices
from weft.cost.profile import Disk
from weft.cost.trace import Operation, Trace
from weft.runtime.kernel_call import KernelCall


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step on all ranks, or of several."""

    total: float
    """From its begin to the end of the last rank."""
    compute: float
    """Of the rank that computes longest."""
    network: float
    """While rows cross and nobody computes."""
    waiting: float
    """Of the rank that waits longest for others to come."""
    disk: float = 0.0
    """Of the rank that waits longest for files."""

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(**{name: seconds + getattr(other, name) for name, seconds in vars(self).items()})

    def __rmul__(self, steps: int) -> StepTime:
        return StepTime(**{name: steps * seconds for name, seconds in vars(self).items()})


@dataclass(frozen=True)
class WorkSeconds:
    """Seconds of a rank's work."""

    alone: float = 0.0
    """While no other rank of its host is at work."""
    busy: float = 0.0
    """While all of the host's cores are."""
    disk: float = 0.0
    """For files, whoever is at work."""

    @classmethod
    def of(cls, calls: Sequence[KernelCall], alone: Prices, busy: Prices) -> WorkSeconds:
        """That of calls."""
        return cls(sum(map(alone.seconds, calls)), sum(map(busy.seconds, calls)))

    def __add__(self, other: WorkSeconds) -> WorkSeconds:
        return WorkSeconds(self.alone + other.alone, self.busy + other.busy, self.disk + other.disk)

    def at(self, busy: int, slots: int, ranks: int) -> float:
        """The seconds where so many of a host's `slots` for ranks are busy, this one with so many ranks at work."""
        share = (busy - 1) / (slots - 1) if slots > 1 else 1.0
        return (self.alone + share * (self.busy - self.alone)) * ranks + self.disk


class Stretch(NamedTuple):
    """What a rank does up to its next collective, and what that takes by itself; None: there is no more."""

    work: WorkSeconds
    beside: WorkSeconds
    """What it may do while rows cross."""
    crossing: float | None
    hidden: float = 1.0
    """See `Network.hidden`."""


NO_WORK, IN_MEMORY = WorkSeconds(), Disk()


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Where ranks are: the first so many on the first host, and so on."""

    ranks_each: int
    slots: int
    """How many ranks a host has cores for."""
    alone: Prices
    busy: Prices
    network: Network | None = None
    """Between the ranks; None: what a rank that is alone sends takes nothing."""
    disk: Disk = IN_MEMORY
    """Seconds of a byte that comes from the host or goes there, where that is in files."""

    def without_steps(self) -> Hosts:
        """The same where a step costs nothing beside its work."""
        alone, busy = (replace(one, step_seconds=0.0) for one in (self.alone, self.busy))
        return replace(self, alone=alone, busy=busy)

    def exchange_seconds(self, operation: Operation) -> float:
        """The seconds of a collective by itself."""
        if self.network is None:
            return 0.0
        num_bytes = max(operation.bytes_sent, operation.bytes_received)
        return self.network.seconds(operation.tag, num_bytes)

    def overlapped_share(self, operation: Operation) -> float:
        """See `Network.hidden`."""
        if self.network is None:
            return 1.0
        return self.network.overlapped_share(operation.tag, max(operation.bytes_sent, operation.bytes_received))


def simulate(traces: Sequence[Trace], besides: Sequence[Sequence[KernelCall]], hosts: Hosts) -> StepTime:
    """The time of a step whose ranks all take part in each collective, in the same order.

    besides: what each rank does in the step that no trace has: the loss, and the update of the parameters. What is
    prefetched goes on beside the steps before where a host has cores for one rank more, and else takes its time from
    them; a rank that waits for it is said to compute, as in the record of a run.
    """
    if not any(one.prefetched for trace in traces for one in trace.operations):
        return simulate_sequentially(traces, besides, hosts)
    made, step = ([trace.select(prefetched=prefetched) for trace in traces] for prefetched in (True, False))
    taken = simulate_sequentially(step, besides, hosts)
    ahead = simulate_sequentially(made, [[]] * len(made), hosts.without_steps()).total
    total = max(taken.total, ahead) if hosts.slots > hosts.ranks_each else taken.total + ahead
    return replace(taken, total=total, compute=taken.compute + total - taken.total)


def simulate_sequentially(traces: Sequence[Trace], besides: Sequence[Sequence[KernelCall]], hosts: Hosts) -> StepTime:
    """The same where a rank does one operation after the other."""
    rows = price_traces(traces, besides, hosts)
    if len({len(row) for row in rows}) != 1:
        raise ValueError("ranks take part in different collectives")
    clocks = [0.0] * len(rows)
    compute, waiting, network = [0.0] * len(rows), [0.0] * len(rows), 0.0
    for together in zip(*rows, strict=True):
        ends = finish_times([one.work for one in together], clocks, hosts)
        compute = [spent + end - clock for spent, end, clock in zip(compute, ends, clocks, strict=True)]
        crossings = [one.crossing for one in together if one.crossing is not None]
        if not crossings:
            clocks = ends
            break
        begin = max(ends)
        waiting = [waited + begin - end for waited, end in zip(waiting, ends, strict=True)]
        clocks = [begin] * len(rows)
        beside = finish_times([one.beside for one in together], clocks, hosts)
        compute = [spent + end - begin for spent, end in zip(compute, beside, strict=True)]
        crossing = max(crossings)
        clocks = [
            end + crossing - one.hidden * min(end - begin, crossing) for one, end in zip(together, beside, strict=True)
        ]
        network += max(clocks) - max(beside)
    disk = [sum(one.work.disk + one.beside.disk for one in row) for row in rows]
    computing = [spent - files for spent, files in zip(compute, disk, strict=True)]
    return StepTime(
        total=max(clocks),
        compute=max(computing),
        network=network,
        waiting=max(waiting),
        disk=max(disk),
    )


def price_traces(traces: Sequence[Trace], besides: Sequence[Sequence[KernelCall]], hosts: Hosts) -> list[list[Stretch]]:
    """What each rank does; ranks whose trace is one object are priced once."""
    found: dict[tuple[int, int], list[Stretch]] = {}
    rows = []
    for trace, calls in zip(traces, besides, strict=True):
        key = id(trace), id(calls)
        if key not in found:
            found[key] = split_at_collectives(trace, calls, hosts)
        rows.append(found[key])
    return rows


def finish_times(works: Sequence[WorkSeconds], begins: Sequence[float], hosts: Hosts) -> list[float]:
    """When each rank is done with a piece of work that it begins at some time; ranks of a host slow each other.

    Each keeps to its share of the cores, as weft.runtime.cores gives it.
    """
    if hosts.ranks_each == 1:
        return [begin + work.at(1, hosts.slots, 1) for work, begin in zip(works, begins, strict=True)]
    ends: list[float] = []
    for first in range(0, len(works), hosts.ranks_each):
        some = slice(first, first + hosts.ranks_each)
        ends += _finish_on_host(works[some], begins[some], hosts.slots)
    return ends


def _finish_on_host(works: Sequence[WorkSeconds], begins: Sequence[float], slots: int) -> list[float]:
    left, ends = [1.0 if work.alone + work.disk > 0 else 0.0 for work in works], list(begins)
    places = [i * slots // len(works) for i in range(len(works))]
    now = min(begins)
    while any(share > 0 for share in left):
        active = [i for i, share in enumerate(left) if share > 0 and begins[i] <= now]
        comes = min((begins[i] for i, share in enumerate(left) if share > 0 and begins[i] > now), default=math.inf)
        if not active:
            now = comes
            continue
        at_work = Counter(places[i] for i in active)
        takes = {i: works[i].at(len(at_work), slots, at_work[places[i]]) for i in active}
        done = {i: now + left[i] * takes[i] for i in active}
        then = min(comes, *done.values())
        for i in active:
            left[i] -= (then - now) / takes[i]
            if done[i] <= then or left[i] < 1e-12:  # what is left may be less than a clock of many seconds can tell
                left[i], ends[i] = 0.0, then
        now = then
    return ends


def work_seconds(operation: Operation, hosts: Hosts) -> WorkSeconds:
    """What an operation keeps a rank at work with: kernels, collectives, and files that a transfer reads and writes."""
    beside = NO_WORK
    if operation.kind == "transfer":
        beside = WorkSeconds(disk=hosts.disk.write * operation.bytes_sent + hosts.disk.read * operation.bytes_received)
    elif operation.kind == "collective" and hosts.network:
        network = hosts.network
        seconds = operation.messages * network.message_seconds if operation.messages else network.collective_seconds
        beside = WorkSeconds(seconds, seconds)
    return beside + WorkSeconds.of(operation.calls, hosts.alone, hosts.busy)


class Link:
    """A rank's link to its host, by which rows come to its device and go back beside its kernels, each way by itself.

    What comes ahead is under way from when the chunk before is begun, as there is room for two; all else begins behind
    the kernels before it. What goes back is waited for in the end. The rank's clock waits for no other rank.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Of a byte."""
        self.now = self.begun = self.loaded = self.stored = 0.0
        self.comes = False

    def move(self, operation: Operation) -> None:
        """A transfer begins."""
        if operation.bytes_received:
            free = self.begun if operation.ahead else self.now
            self.loaded = max(self.loaded, free) + self.seconds * operation.bytes_received
            self.comes = True
        if operation.bytes_sent:
            self.stored = max(self.stored, self.now) + self.seconds * operation.bytes_sent

    def work(self, seconds: float) -> float:
        """Kernels run, or rows cross, for so long; the seconds that these wait for what comes from the host."""
        waited = 0.0
        if self.comes:
            waited = max(0.0, self.loaded - self.now)
            self.begun = self.now + waited
            self.comes = False
        self.now += waited + seconds
        return waited

    def end(self) -> float:
        """The seconds until all has come and gone back."""
        return max(0.0, self.loaded - self.now, self.stored - self.now)


def split_at_collectives(trace: Trace, besides: Sequence[KernelCall], hosts: Hosts) -> list[Stretch]:
    """A rank's operations, divided by its collectives; behind the last one the rest of the step."""
    found = [Stretch(NO_WORK, NO_WORK, None)]
    link = Link(hosts.alone.link_seconds)
    for operation in trace.operations:
        if operation.kind == "transfer" and link.seconds:
            link.move(operation)
            continue
        calls = work_seconds(operation, hosts)
        crossing = None
        if operation.kind == "collective":
            crossing, hidden = hosts.exchange_seconds(operation), hosts.overlapped_share(operation)
            if operation.ahead:  # all but the last of its messages
                last = crossing / max(operation.messages, 1)
                crossing = max(last, crossing - hidden * min(found[-1].work.alone, crossing))
        waited = link.work(calls.alone + (crossing or 0.0))
        calls += WorkSeconds(waited, waited)
        if crossing is not None:
            found[-1] = found[-1]._replace(work=found[-1].work + calls, crossing=crossing, hidden=hidden)
            found.append(Stretch(NO_WORK, NO_WORK, None))
        elif operation.ahead and operation.kind != "transfer" and len(found) > 1:
            found[-2] = found[-2]._replace(beside=found[-2].beside + calls)
        else:
            found[-1] = found[-1]._replace(work=found[-1].work + calls)
    more = WorkSeconds.of(besides, hosts.alone, hosts.busy) + WorkSeconds(
        hosts.alone.step_seconds, hosts.busy.step_seconds
    )
    left = link.end()
    return [*found[:-1], found[-1]._replace(work=found[-1].work + more + WorkSeconds(left, left))]
