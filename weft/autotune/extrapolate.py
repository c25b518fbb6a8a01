"""What ranks do and hold on a graph that is too large to be drawn, from what they do and hold on small ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import fmean

from weft.autotune.estimate_time import GraphBytes, besides, graph_bytes
from weft.cost import Operation, Steps, Trace
from weft.runtime.kernel_call import KernelCall
from weft.strategies import MemoryUse, Plan

BACK = ("", "_backward")
AMOUNTS = ("flops", "edges", "bytes_sent", "bytes_received")
"""Of an operation, what may grow with the graph, beside the sizes of its calls."""
COLUMNS = {
    **dict.fromkeys(("linear", "linear_weights"), (1, 2)),
    **dict.fromkeys(("sparse", "sparse_backward"), (2, 3)),
    **dict.fromkeys(("gather", "loss"), (1,)),
    **{f"{name}{back}": (4, 5) for name in ("Sum", "Max", "ByRelation", "Attend", "AttendEdges") for back in BACK},
}
"""Which sizes of a kernel's calls are the model's, and the same on any graph."""
HALVINGS = 2
"""From the vertices of one small graph to those of the one before."""
NEAR = 0.03
"""To 0 or 1, for an exponent to be taken as that."""


OperationKey = tuple[int | str | bool, ...]
"""Of a number in a step: the same for every rank and graph, also where some have nothing to do for an operation."""
Kind = tuple[str, str, bool]
"""What an operation is, and whether it is done ahead."""
Order = Sequence[Sequence[Kind]]
"""By step, the operations by which those of other ranks and graphs are placed."""
LOOK = 8
"""So many operations of these may be missing in a row."""


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """What a rank does in the training steps of an epoch, and what it holds."""

    steps: Sequence[Steps]
    besides: Sequence[KernelCall]
    """Of each step, what its trace does not have."""
    held: MemoryUse
    graph: GraphBytes
    """Of the whole graph."""

    @property
    def sent_bytes(self) -> int:
        """To other ranks."""
        return sum(number * trace.bytes_sent.total() for trace, number in self.steps)


def growth(found: Sequence[float], times: float) -> float:
    """By how much a number is larger on a graph with so many times the vertices of the last of those it is known of.

    found: of graphs each HALVINGS doublings larger than the one before, of which the first and the last count. A power
    law of an exponent from 0 to 1: what outgrows small graphs, as rows that are no longer worth a place in a cache,
    ends by growing as they do. Near 0 and 1 it is that, as of most numbers, which small graphs show with noise.
    """
    first, last = found[0], found[-1]
    if times == 1 or last <= 0:
        return 1.0
    power = math.log2(last / first) / (HALVINGS * (len(found) - 1)) if first > 0 else 1.0
    if power < NEAR:
        return 1.0
    return float(times if power > 1 - NEAR else times**power)


def shrinkage(found: Sequence[float], doublings: float) -> float:
    """By how much a number of a rank is larger, or smaller, where the ranks are doubled so often.

    found: for three numbers of ranks, each twice the one before. The exponent between the first two and that between
    the last two differ, as with the share (P - 1) / P that goes to others; each doubling they differ by half as much.
    """
    if not doublings or min(found) <= 0:
        return 1.0
    first, last = (math.log2(after / before) for before, after in pairwise(found))
    settled = last + (last - first)
    whole, begun = divmod(doublings, 1)
    log = sum(settled - (last - first) * 2.0**-number for number in range(1, int(whole) + 1)) + begun * settled
    return float(2.0 ** min(max(log, -doublings), doublings))


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Of what ranks do, a few on small graphs, the last of both kinds the same."""

    by_vertices: Sequence[Sequence[RankEstimate]]
    """On graphs each HALVINGS doublings larger than the one before, what each of the same number of ranks does."""
    by_ranks: Sequence[Sequence[RankEstimate]]
    """On the largest of these, what each of some ranks does, twice as many as before; of one number alone: no more."""


def extrapolated(samples: Samples, times: float, ranks: int) -> list[RankEstimate]:
    """The work of each of `ranks` ranks on a graph that has so many times the vertices of the largest sampled.

    Each number grows as its mean over the ranks does; how ranks differ is as in the last sample.
    """
    last = samples.by_vertices[-1]
    order = max((kinds_of(work) for work in last), key=lambda kinds: sum(map(len, kinds)))
    by_vertices, by_ranks = means_of(samples.by_vertices, order), means_of(samples.by_ranks, order)
    factors = {
        place: (growth([means.get(place, 0.0) for means in by_vertices], times) if may_grow(place) else 1.0)
        * shrinkage([means.get(place, 0.0) for means in by_ranks], math.log2(ranks / len(last)))
        for place in by_vertices[-1]
    }
    grown = [
        with_numbers(
            work,
            {place: enlarged(number, factors[place]) for place, number in numbers_of(work, order).items()},
            order,
        )
        for work in last
    ]
    return [grown[rank * len(last) // ranks] for rank in range(ranks)]


def may_grow(place: OperationKey) -> bool:
    """Whether a number may be another one on a larger graph."""
    *_, kernel, _, number = ("", "", *place)
    return number not in COLUMNS.get(str(kernel), ())


def means_of(samples: Sequence[Sequence[RankEstimate]], order: Order) -> list[dict[OperationKey, float]]:
    """The mean of each number over the ranks of each sample."""
    found = []
    for works in samples:
        listed = [numbers_of(work, order) for work in works]
        places = {place for numbers in listed for place in numbers}
        found.append({place: fmean(numbers.get(place, 0) for numbers in listed) for place in places})
    return found


def enlarged(number: int, factor: float) -> int:
    """So many times a number; of what is there, at least 1 remains."""
    return max(1, round(number * factor)) if number else 0


def numbers_of(work: RankEstimate, order: Order) -> dict[OperationKey, int]:
    """All that may grow with the graph."""
    found: dict[OperationKey, int] = {("held", name): number for name, number in work.held._asdict().items()}
    found |= {("graph", name): number for name, number in work.graph._asdict().items()}
    for place, one in placed(work, order):
        found |= {(*place, name): getattr(one, name) for name in AMOUNTS}
        found |= numbers_of_calls(place, one.calls)
    return found | numbers_of_calls((), work.besides)


def kinds_of(work: RankEstimate) -> Order:
    """The operations of a rank in their order."""
    return [[(one.kind, one.tag, one.ahead) for one in trace.operations] for trace, _ in work.steps]


def placed(work: RankEstimate, order: Order) -> Iterator[tuple[OperationKey, Operation]]:
    """Operations, each by its step and where it stands in an order, from which some may be missing; else behind that.

    A chunk exchanges nothing where those before it have had all that it reads, and a rank without own edges has none
    that it sums while others come.
    """
    for number, ((trace, _), kinds, here) in enumerate(zip(work.steps, order, kinds_of(work), strict=True)):
        seen, begin = Counter[OperationKey](), 0
        for kind, one in zip(here, trace.operations, strict=True):
            at = next((at for at in range(begin, min(begin + LOOK, len(kinds))) if kinds[at] == kind), None)
            place: OperationKey = (number, at) if at is not None else (number, begin, *kind)
            yield (*place, seen[place]), one
            seen[place] += 1
            begin = begin if at is None else at + 1


def numbers_of_calls(place: OperationKey, calls: Sequence[KernelCall]) -> dict[OperationKey, int]:
    """The sizes of the calls of an operation."""
    return {(*at, number): size for at, call in placed_calls(place, calls) for number, size in enumerate(call.sizes)}


def placed_calls(place: OperationKey, calls: Sequence[KernelCall]) -> Iterator[tuple[OperationKey, KernelCall]]:
    """The calls of an operation, one by one, by kernel and how many of it there were."""
    seen = Counter[str]()
    for call in each_apart(calls):
        yield (*place, call.kernel, seen[call.kernel]), call
        seen[call.kernel] += 1


def with_numbers(work: RankEstimate, numbers: Mapping[OperationKey, int], order: Order) -> RankEstimate:
    """The same work with others of these."""

    def grown(place: OperationKey, calls: Sequence[KernelCall]) -> tuple[KernelCall, ...]:
        return tuple(
            call._replace(sizes=tuple(numbers[*at, number] for number in range(len(call.sizes))))
            for at, call in placed_calls(place, calls)
        )

    operations = iter(
        replace(
            one,
            flops=numbers[*place, "flops"],
            edges=numbers[*place, "edges"],
            bytes_sent=numbers[*place, "bytes_sent"],
            bytes_received=numbers[*place, "bytes_received"],
            calls=grown(place, one.calls),
        )
        for place, one in placed(work, order)
    )
    steps = [Steps(Trace(operations=tuple(islice(operations, len(trace.operations)))), n) for trace, n in work.steps]
    held = MemoryUse(*(numbers["held", name] for name in MemoryUse._fields))
    graph = GraphBytes(*(numbers["graph", name] for name in GraphBytes._fields))
    return RankEstimate(steps=steps, besides=grown((), work.besides), held=held, graph=graph)


def each_apart(calls: Sequence[KernelCall]) -> list[KernelCall]:
    """Calls one by one, by their widths first: some that are alike on one graph are not on another."""
    apart = (call._replace(number=1) for call in calls for _ in range(call.number))
    return sorted(apart, key=lambda call: (call.kernel, call.sizes[::-1]), reverse=True)


def works_of(plan: Plan, *, exactly: bool = True) -> list[RankEstimate]:
    """What each rank of a plan does and holds; not exactly: each is said to hold what one does that does most."""
    steps = [plan.epoch_steps(rank) for rank in range(plan.size)]
    if exactly:
        held = [plan.held(rank) for rank in range(plan.size)]
    else:
        asked = [plan.held(rank) for rank in busiest([some[0].trace for some in steps])]
        held = [MemoryUse(*map(max, zip(*asked, strict=True)))] * plan.size
    beside, graph = besides(plan), graph_bytes(plan.work)
    return [
        RankEstimate(steps=some, besides=beside, held=one, graph=graph) for some, one in zip(steps, held, strict=True)
    ]


def busiest(traces: Sequence[Trace]) -> set[int]:
    """The ranks that map most, aggregate most, and receive most."""
    measures = [
        [(trace.flops, trace.edges, trace.bytes_received.total())[which] for trace in traces] for which in range(3)
    ]
    return {each.index(max(each)) for each in measures}
