"""Estimated time of a step, from the priced trace of every rank: ranks share cores and wait for each other."""

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
    """Seconds of a step on all ranks, or of several steps."""

    total: float = 0.0
    """Seconds from the begin of the step until the last rank ends."""
    compute: float = 0.0
    """Computing seconds of the rank that computes longest."""
    network: float = 0.0
    """Seconds in which rows cross the network and no rank computes."""
    waiting: float = 0.0
    """Seconds that a rank waits for other ranks to reach collectives, on the rank that waits longest."""
    disk: float = 0.0
    """Seconds that a rank waits for files, on the rank that waits longest."""

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(**{name: seconds + getattr(other, name) for name, seconds in vars(self).items()})

    def __rmul__(self, steps: int) -> StepTime:
        return StepTime(**{name: steps * seconds for name, seconds in vars(self).items()})


@dataclass(frozen=True)
class WorkSeconds:
    """Seconds of a piece of work of one rank."""

    alone: float = 0.0
    """Computing seconds while no other rank of the host computes."""
    busy: float = 0.0
    """Computing seconds while all cores of the host are busy."""
    disk: float = 0.0
    """Seconds of file access, which do not depend on other ranks."""

    @classmethod
    def of(cls, calls: Sequence[KernelCall], alone: Prices, busy: Prices) -> WorkSeconds:
        """Return the seconds of kernel calls.

        Args:
            calls: The calls.
            alone: Prices of a rank that is alone on its host.
            busy: Prices while all cores of the host are busy.
        """
        return cls(sum(map(alone.seconds, calls)), sum(map(busy.seconds, calls)))

    def __add__(self, other: WorkSeconds) -> WorkSeconds:
        return WorkSeconds(self.alone + other.alone, self.busy + other.busy, self.disk + other.disk)

    def at(self, busy: int, slots: int, ranks: int) -> float:
        """Return the seconds while other ranks of the host compute.

        The price is interpolated linearly between a rank alone and a busy host. Ranks that share a slot slow each
        other.

        Args:
            busy: Slots in which some rank computes.
            slots: Ranks that the host has cores for.
            ranks: Ranks that compute in this rank's slot, this one included.
        """
        share = (busy - 1) / (slots - 1) if slots > 1 else 1.0
        return (self.alone + share * (self.busy - self.alone)) * ranks + self.disk


class Stretch(NamedTuple):
    """Work of one rank up to and including its next collective."""

    work: WorkSeconds
    """Work before the collective."""
    overlapped: WorkSeconds
    """Work that overlaps with the collective."""
    exchange_seconds: float | None
    """Seconds of the collective by itself; None if no collective follows."""
    overlapped_share: float = 1.0
    """Share of the collective that overlaps with computation, see `Network.overlapped_share`."""


NO_WORK, IN_MEMORY = WorkSeconds(), Disk()


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Identical hosts of the ranks, with their prices and network. Each host runs `ranks_each` consecutive ranks."""

    ranks_each: int
    """Number of ranks on each host."""
    slots: int
    """Number of ranks that a host has cores for."""
    alone: Prices
    """Prices of a rank that is alone on its host."""
    busy: Prices
    """Prices while all cores of the host are busy."""
    network: Network | None = None
    """Network between the ranks; None: collectives of a single rank take no time."""
    disk: Disk = IN_MEMORY
    """Seconds per byte of transfers, if the host's rows are in files."""

    def without_steps(self) -> Hosts:
        """Return the same hosts with no fixed seconds per step."""
        alone, busy = (replace(prices, step_seconds=0.0) for prices in (self.alone, self.busy))
        return replace(self, alone=alone, busy=busy)

    def exchange_seconds(self, operation: Operation) -> float:
        """Return the seconds of a collective by itself."""
        if self.network is None:
            return 0.0
        num_bytes = max(operation.bytes_sent, operation.bytes_received)
        return self.network.seconds(operation.tag, num_bytes)

    def overlapped_share(self, operation: Operation) -> float:
        """Return the share of a collective that overlaps with computation, see `Network.overlapped_share`."""
        if self.network is None:
            return 1.0
        return self.network.overlapped_share(operation.tag, max(operation.bytes_sent, operation.bytes_received))


def simulate(traces: Sequence[Trace], other_calls: Sequence[Sequence[KernelCall]], hosts: Hosts) -> StepTime:
    """Estimate the time of a step whose ranks all take part in each collective, in the same order.

    Prefetched operations run during earlier steps if a host has cores for one rank more; else they take the time of the
    rank's own cores. A rank that waits for prefetched work counts as computing, as in the record of a run.

    Args:
        traces: Operations of each rank.
        other_calls: Kernel calls of each rank outside of its trace: the loss and the update of the parameters.
        hosts: Hosts of the ranks.
    """
    if not any(operation.prefetched for trace in traces for operation in trace.operations):
        return simulate_sequentially(traces, other_calls, hosts)
    prefetched, steps = ([trace.select(prefetched=ahead) for trace in traces] for ahead in (True, False))
    time = simulate_sequentially(steps, other_calls, hosts)
    # Prefetching takes a whole core: a spare one, so that only the longer of both counts, or one that steps need.
    ahead = simulate_sequentially(prefetched, [[]] * len(prefetched), hosts.without_steps()).total
    total = max(time.total, ahead) if hosts.slots > hosts.ranks_each else time.total + ahead
    return replace(time, total=total, compute=time.compute + total - time.total)


def simulate_sequentially(
    traces: Sequence[Trace], other_calls: Sequence[Sequence[KernelCall]], hosts: Hosts
) -> StepTime:
    """Estimate the time of a step in which a rank runs one operation after the other.

    Args:
        traces: Operations of each rank.
        other_calls: Kernel calls of each rank outside of its trace.
        hosts: Hosts of the ranks.

    Raises:
        ValueError: The ranks take part in different collectives.
    """
    stretches = price_traces(traces, other_calls, hosts)
    if len({len(rank_stretches) for rank_stretches in stretches}) != 1:
        raise ValueError("ranks take part in different collectives")
    # For each collective, in the order of execution:
    # 1. Every rank does its work before the collective; then it waits for the last rank.
    # 2. All ranks begin the collective, together with the work that may overlap with it.
    # 3. A rank's clock advances by work + collective - overlap.
    clocks = [0.0] * len(stretches)
    compute, waiting, network = [0.0] * len(stretches), [0.0] * len(stretches), 0.0
    for current in zip(*stretches, strict=True):
        ends = finish_times([stretch.work for stretch in current], clocks, hosts)
        compute = [seconds + end - clock for seconds, end, clock in zip(compute, ends, clocks, strict=True)]
        exchanges = [stretch.exchange_seconds for stretch in current if stretch.exchange_seconds is not None]
        if not exchanges:
            clocks = ends
            break
        begin = max(ends)
        waiting = [seconds + begin - end for seconds, end in zip(waiting, ends, strict=True)]
        clocks = [begin] * len(stretches)
        overlapped_ends = finish_times([stretch.overlapped for stretch in current], clocks, hosts)
        compute = [seconds + end - begin for seconds, end in zip(compute, overlapped_ends, strict=True)]
        exchange = max(exchanges)
        clocks = [
            end + exchange - stretch.overlapped_share * min(end - begin, exchange)
            for stretch, end in zip(current, overlapped_ends, strict=True)
        ]
        network += max(clocks) - max(overlapped_ends)
    disk = [
        sum(stretch.work.disk + stretch.overlapped.disk for stretch in rank_stretches) for rank_stretches in stretches
    ]
    computing = [seconds - disk_seconds for seconds, disk_seconds in zip(compute, disk, strict=True)]
    return StepTime(
        total=max(clocks),
        compute=max(computing),
        network=network,
        waiting=max(waiting),
        disk=max(disk),
    )


def price_traces(
    traces: Sequence[Trace], other_calls: Sequence[Sequence[KernelCall]], hosts: Hosts
) -> list[list[Stretch]]:
    """Return the priced work of each rank, divided at its collectives; a trace that ranks share is priced once.

    Args:
        traces: Operations of each rank.
        other_calls: Kernel calls of each rank outside of its trace.
        hosts: Hosts of the ranks.
    """
    priced: dict[tuple[int, int], list[Stretch]] = {}
    stretches = []
    for trace, calls in zip(traces, other_calls, strict=True):
        key = id(trace), id(calls)
        if key not in priced:
            priced[key] = split_at_collectives(trace, calls, hosts)
        stretches.append(priced[key])
    return stretches


def finish_times(works: Sequence[WorkSeconds], begins: Sequence[float], hosts: Hosts) -> list[float]:
    """Return the time at which each rank finishes a piece of work; ranks of a host slow each other down.

    Each rank keeps to its share of the cores, as weft.runtime.processes.cores assigns them.

    Args:
        works: Work of each rank.
        begins: Time at which each rank begins, in seconds.
        hosts: Hosts of the ranks.
    """
    if hosts.ranks_each == 1:
        return [begin + work.at(1, hosts.slots, 1) for work, begin in zip(works, begins, strict=True)]
    ends: list[float] = []
    for first in range(0, len(works), hosts.ranks_each):
        on_host = slice(first, first + hosts.ranks_each)
        ends += _finish_on_host(works[on_host], begins[on_host], hosts.slots)
    return ends


def _finish_on_host(works: Sequence[WorkSeconds], begins: Sequence[float], slots: int) -> list[float]:
    """Return the time at which each rank of one host finishes its work."""
    # Event by event: a rank begins or ends, which changes how many ranks compute, and so the speed of all others.
    remaining, ends = [1.0 if work.alone + work.disk > 0 else 0.0 for work in works], list(begins)
    slot_of_rank = [i * slots // len(works) for i in range(len(works))]
    now = min(begins)
    while any(share > 0 for share in remaining):
        active = [i for i, share in enumerate(remaining) if share > 0 and begins[i] <= now]
        next_begin = min(
            (begins[i] for i, share in enumerate(remaining) if share > 0 and begins[i] > now), default=math.inf
        )
        if not active:
            now = next_begin
            continue
        ranks_in_slot = Counter(slot_of_rank[i] for i in active)
        seconds = {i: works[i].at(len(ranks_in_slot), slots, ranks_in_slot[slot_of_rank[i]]) for i in active}
        ends_at = {i: now + remaining[i] * seconds[i] for i in active}
        next_event = min(next_begin, *ends_at.values())
        for i in active:
            remaining[i] -= (next_event - now) / seconds[i]
            # Adding a tiny remainder to a clock of many seconds may not change it: treat it as done.
            if ends_at[i] <= next_event or remaining[i] < 1e-12:
                remaining[i], ends[i] = 0.0, next_event
        now = next_event
    return ends


def work_seconds(operation: Operation, hosts: Hosts) -> WorkSeconds:
    """Return the seconds in which an operation occupies a rank: kernels, file access, and its part of a collective.

    Args:
        operation: The operation.
        hosts: Hosts of the ranks.
    """
    other = NO_WORK
    if operation.kind == "transfer":
        other = WorkSeconds(disk=hosts.disk.write * operation.bytes_sent + hosts.disk.read * operation.bytes_received)
    elif operation.kind == "collective" and hosts.network:
        network = hosts.network
        seconds = operation.messages * network.message_seconds if operation.messages else network.collective_seconds
        other = WorkSeconds(seconds, seconds)
    return other + WorkSeconds.of(operation.calls, hosts.alone, hosts.busy)


class Link:
    """Link between a rank's device and its host, whose two directions work independently and overlap with kernels.

    A transfer that runs ahead begins with the kernels of the previous chunk, since the device has room for two chunks.
    All others begin after the kernels before them. The step waits at its end for rows that go to the host. Time on this
    clock excludes waiting for other ranks.

    Args:
        seconds: Seconds per byte.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Seconds per byte."""
        self.now = self.begun = self.loaded = self.stored = 0.0
        """Seconds: now; begin of the current chunk's kernels; end of the last load; end of the last store."""
        self.is_loading = False
        """True if the next kernels wait for a load."""

    def move(self, operation: Operation) -> None:
        """Simulate the start of a transfer."""
        if operation.bytes_received:
            free = self.begun if operation.ahead else self.now
            self.loaded = max(self.loaded, free) + self.seconds * operation.bytes_received
            self.is_loading = True
        if operation.bytes_sent:
            self.stored = max(self.stored, self.now) + self.seconds * operation.bytes_sent

    def work(self, seconds: float) -> float:
        """Simulate kernels or an exchange of some seconds; return the seconds that they wait for rows from the host."""
        wait = 0.0
        if self.is_loading:
            wait = max(0.0, self.loaded - self.now)
            self.begun = self.now + wait
            self.is_loading = False
        self.now += wait + seconds
        return wait

    def end(self) -> float:
        """Return the seconds until all transfers are done."""
        return max(0.0, self.loaded - self.now, self.stored - self.now)


def split_at_collectives(trace: Trace, other_calls: Sequence[KernelCall], hosts: Hosts) -> list[Stretch]:
    """Return the priced work of one rank, divided at its collectives; the last entry is the rest of the step.

    Args:
        trace: Operations of the rank.
        other_calls: Kernel calls of the rank outside of its trace.
        hosts: Hosts of the ranks.
    """
    pieces = [Stretch(NO_WORK, NO_WORK, None)]
    link = Link(hosts.alone.link_seconds)
    for operation in trace.operations:
        if operation.kind == "transfer" and link.seconds:
            link.move(operation)
            continue
        work = work_seconds(operation, hosts)
        exchange = None
        if operation.kind == "collective":
            exchange, share = hosts.exchange_seconds(operation), hosts.overlapped_share(operation)
            if operation.ahead:  # all messages but the last overlap with the work before the collective
                last = exchange / max(operation.messages, 1)
                exchange = max(last, exchange - share * min(pieces[-1].work.alone, exchange))
        wait = link.work(work.alone + (exchange or 0.0))
        work += WorkSeconds(wait, wait)
        if exchange is not None:
            pieces[-1] = pieces[-1]._replace(
                work=pieces[-1].work + work, exchange_seconds=exchange, overlapped_share=share
            )
            pieces.append(Stretch(NO_WORK, NO_WORK, None))
        elif operation.ahead and operation.kind != "transfer" and len(pieces) > 1:
            pieces[-2] = pieces[-2]._replace(overlapped=pieces[-2].overlapped + work)
        else:
            pieces[-1] = pieces[-1]._replace(work=pieces[-1].work + work)
    rest = WorkSeconds.of(other_calls, hosts.alone, hosts.busy) + WorkSeconds(
        hosts.alone.step_seconds, hosts.busy.step_seconds
    )
    remaining = link.end()  # transfers that are not done yet
    return [*pieces[:-1], pieces[-1]._replace(work=pieces[-1].work + rest + WorkSeconds(remaining, remaining))]
