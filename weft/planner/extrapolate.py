"""What ranks do and hold on a graph that is too large to be drawn, from what they do and hold on small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from weft.core.errors import InputError
from weft.core.kernel_call import KernelCall
from weft.cost import Operation, Trace
from weft.strategies import Held, Plan

LEAST_POWER = 0.05
"""A number that grows by less is taken to grow so, since it has to be divided by."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """What a rank does in a training step, and what it holds."""

    trace: Trace
    besides: Sequence[KernelCall]
    """What the trace does not have."""
    held: Held


class Growth(NamedTuple):
    """How a number grows, from what it is of graphs each of which has twice the vertices of the one before.

    As c + a n^p through the last three, with p of at most 1: nothing that a step does or holds grows faster than the
    graph. What has not grown stays.
    """

    last: float
    """Of the largest graph."""
    difference: float
    """From the one before; at least 0."""
    power: float

    @classmethod
    def of(cls, found: Sequence[float]) -> Growth:
        """From the numbers of some graphs, of which the last three count."""
        differences = [max(0.0, after - before) for before, after in zip(found, found[1:], strict=False)]
        before, difference = [0.0, 0.0, *differences][-2:]
        power = math.log2(difference / before) if before and difference else 1.0
        return cls(found[-1], difference, min(max(power, LEAST_POWER), 1.0))

    def at(self, times: float) -> float:
        """The number of a graph with so many times the vertices of the largest."""
        return self.last + self.difference * (times**self.power - 1) / (1 - 2**-self.power)


def extrapolated(found: Sequence[Sequence[RankWork]], times: float) -> list[RankWork]:
    """The work of some ranks on a graph that has so many times the vertices of the largest of those it was found on.

    found: by graph, ascending, each of twice the vertices of the one before, the work of these ranks.
    Each number grows as its mean over the ranks does; how ranks differ is as on the largest graph. InputError where a
    step does other things on one graph than on another.
    """
    listed = [[numbers_of(work) for work in works] for works in found]
    if len({len(numbers) for works in listed for numbers in works}) != 1:
        raise InputError("does other things on one graph than on another: what it takes cannot be told from statistics")
    means = [[fmean(each) for each in zip(*works, strict=True)] for works in listed]
    growths = [Growth.of(each) for each in zip(*means, strict=True)]
    factors = [one.at(times) / one.last if one.last else 0.0 for one in growths]
    return [
        with_numbers(work, [number * factor for number, factor in zip(numbers, factors, strict=True)])
        for work, numbers in zip(found[-1], listed[-1], strict=True)
    ]


def numbers_of(work: RankWork) -> list[int]:
    """All that may grow with the graph, in an order that is the same for every rank and graph."""
    found = [*work.held]
    for one in work.trace.operations:
        found += [one.flops, one.edges, one.bytes_sent, one.bytes_received]
    for call in calls_of(work):
        found += call.sizes
    return found


def with_numbers(work: RankWork, numbers: Sequence[float]) -> RankWork:
    """The same work with others of these."""
    left = iter(map(round, numbers))
    held = Held(*(next(left) for _ in work.held))
    amounts = [[next(left) for _ in range(4)] for _ in work.trace.operations]

    def grown(calls: Sequence[KernelCall]) -> tuple[KernelCall, ...]:
        return tuple(call._replace(sizes=tuple(next(left) for _ in call.sizes)) for call in each_apart(calls))

    operations: list[Operation] = []
    for one, (flops, edges, sent, received) in zip(work.trace.operations, amounts, strict=True):
        calls = grown(one.calls)
        operations.append(
            replace(one, flops=flops, edges=edges, bytes_sent=sent, bytes_received=received, calls=calls)
        )
    return RankWork(trace=Trace(operations=tuple(operations)), besides=grown(work.besides), held=held)


def calls_of(work: RankWork) -> list[KernelCall]:
    """The calls of a step, one by one."""
    found = [call for one in work.trace.operations for call in each_apart(one.calls)]
    return [*found, *each_apart(work.besides)]


def each_apart(calls: Sequence[KernelCall]) -> list[KernelCall]:
    """Calls one by one, by kernel and sizes: some that are alike on one graph are not on another."""
    return sorted(call._replace(number=1) for call in calls for _ in range(call.number))


def told_ranks(size: int, most: int) -> list[int]:
    """The ranks of which it is found out what they do, at most so many, among them the first and the last."""
    if size <= most:
        return [*range(size)]
    return [round(number * (size - 1) / (most - 1)) for number in range(most)]


def standing_for_all(works: Sequence[RankWork], size: int) -> list[RankWork]:
    """For every one of `size` ranks the work of the nearest that is told."""
    return [works[round(rank * (len(works) - 1) / max(size - 1, 1))] for rank in range(size)]


def works_of(plan: Plan, ranks: Sequence[int], besides: Sequence[KernelCall]) -> list[RankWork]:
    """What some ranks of a plan do and hold."""
    return [
        RankWork(trace=plan.trace(rank, training=True), besides=besides, held=plan.held(rank)) for rank in ranks
    ]
