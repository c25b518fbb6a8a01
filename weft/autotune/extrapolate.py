"""Estimate the work and memory of ranks on a large graph by extrapolation from plans for small graphs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import fmean

from weft.autotune.estimate_time import GraphBytes, graph_bytes, untraced_calls
from weft.cost import MemoryUse, Operation, Steps, Trace
from weft.runtime.kernel_call import KernelCall
from weft.strategies import Plan

PASSES = ("", "_backward")
AMOUNTS = ("flops", "edges", "bytes_sent", "bytes_received")
"""Fields of an operation that may grow with the graph; the sizes of its kernel calls may as well."""
COLUMNS = {
    **dict.fromkeys(("linear", "linear_weights"), (1, 2)),
    **dict.fromkeys(("sparse", "sparse_backward"), (2, 3)),
    **dict.fromkeys(("gather", "loss"), (1,)),
    **{
        f"{name}{back}": (4, 5)
        for name in ("Sum", "LaplacianSum", "Max", "ByRelation", "Attend", "AttendEdges")
        for back in PASSES
    },
}
"""For each kernel, positions of those sizes of a call that are widths of the model, so do not grow with the graph."""
HALVINGS = 2
"""Number of halvings from one small graph to the next smaller one."""
EXPONENT_TOLERANCE = 0.03
"""Largest distance from 0 or 1 at which an exponent is rounded to it."""


OperationKey = tuple[int | str | bool, ...]
"""Key that identifies corresponding operations, and their numbers, across ranks and graph sizes."""
Kind = tuple[str, str, bool]
"""Kind of an operation, its tag, and whether it overlaps with the operations before it."""
Order = Sequence[Sequence[Kind]]
"""Kinds of the operations of each step, by which the operations of other ranks and graphs are identified."""
SEARCH_WINDOW = 8
"""Number of operations after the previous match in which the next match is searched."""


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """Work of a rank in the training steps of an epoch, and its memory."""

    steps: Sequence[Steps]
    """Training steps of an epoch."""
    untraced_calls: Sequence[KernelCall]
    """Kernel calls of each step that are not in its trace."""
    memory: MemoryUse
    """Peak memory of the rank."""
    graph: GraphBytes
    """Bytes of the whole graph."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks per epoch."""
        return sum(number * trace.bytes_sent.total() for trace, number in self.steps)


def growth(values: Sequence[float], times: float) -> float:
    """Return the factor by which a number grows with the graph, by a power law.

    The exponent is limited to [0, 1]: a number that outgrows small graphs (such as rows that are no longer worth
    caching) must in the end grow like the graph. An exponent near 0 or 1 is rounded, since most numbers have exactly
    these, up to the noise of small graphs.

    Args:
        values: The number on graphs that are each HALVINGS doublings larger than the one before. Only the first and
            the last are used.
        times: Number of vertices of the large graph, divided by that of the last small one.
    """
    first, last = values[0], values[-1]
    if times == 1 or last <= 0:
        return 1.0
    # exponent = log2 of the growth / log2 of the growth of the graph
    power = math.log2(last / first) / (HALVINGS * (len(values) - 1)) if first > 0 else 1.0
    if power < EXPONENT_TOLERANCE:
        return 1.0
    return float(times if power > 1 - EXPONENT_TOLERANCE else times**power)


def shrinkage(values: Sequence[float], doublings: float) -> float:
    """Return the factor by which a number of one rank changes if the number of ranks is doubled several times.

    The exponent of a doubling converges: for a volume proportional to (P - 1) / P^2, for instance, it approaches -1.
    Its distance from the limit is assumed to halve with each doubling.

    Args:
        values: The number at three numbers of ranks, each twice the one before.
        doublings: How often the number of ranks is doubled after that; need not be whole.
    """
    if not doublings or min(values) <= 0:
        return 1.0
    # first, last: exponents of the two measured doublings. limit: the exponent to which they converge.
    first, last = (math.log2(after / before) for before, after in pairwise(values))
    limit = last + (last - first)
    whole, fraction = divmod(doublings, 1)
    # Sum of the exponents limit - (last - first) / 2^k of each further doubling k; a fraction of one has the limit.
    log = sum(limit - (last - first) * 2.0**-number for number in range(1, int(whole) + 1)) + fraction * limit
    return float(2.0 ** min(max(log, -doublings), doublings))


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Estimates for small graphs and few ranks. Both sequences end with the largest graph and number of ranks."""

    by_vertices: Sequence[Sequence[RankEstimate]]
    """Estimate of each rank, on graphs that are each HALVINGS doublings larger than the one before."""
    by_ranks: Sequence[Sequence[RankEstimate]]
    """Estimate of each rank on the largest of these graphs, for three numbers of ranks, each twice the one before.

    A single entry means that the number of ranks is not extrapolated.
    """


def extrapolated(samples: Samples, times: float, ranks: int) -> list[RankEstimate]:
    """Extrapolate the estimates of small graphs to a large graph and to more ranks.

    1. Identify corresponding operations of all ranks and graphs by the rank with the most operations.
    2. Take the mean of each number (FLOPs, bytes, size of a kernel call, memory) over the ranks of each sample.
    3. Multiply each number by the growth and shrinkage of its mean.
    4. Ranks differ as in the last sample.

    Args:
        samples: Estimates for small graphs and few ranks.
        times: Number of vertices of the large graph, divided by that of the largest small one.
        ranks: Number of ranks to estimate.
    """
    last = samples.by_vertices[-1]
    order = max((kinds_of(estimate) for estimate in last), key=lambda kinds: sum(map(len, kinds)))
    by_vertices, by_ranks = means_of(samples.by_vertices, order), means_of(samples.by_ranks, order)
    factors = {
        key: (growth([means.get(key, 0.0) for means in by_vertices], times) if may_grow(key) else 1.0)
        * shrinkage([means.get(key, 0.0) for means in by_ranks], math.log2(ranks / len(last)))
        for key in by_vertices[-1]
    }
    grown = [
        with_numbers(
            estimate,
            {key: scaled(number, factors[key]) for key, number in numbers_of(estimate, order).items()},
            order,
        )
        for estimate in last
    ]
    return [grown[rank * len(last) // ranks] for rank in range(ranks)]


def may_grow(key: OperationKey) -> bool:
    """Return True if a number may be different on a larger graph, False if it is a width of the model."""
    *_, kernel, _, number = ("", "", *key)
    return number not in COLUMNS.get(str(kernel), ())


def means_of(samples: Sequence[Sequence[RankEstimate]], order: Order) -> list[dict[OperationKey, float]]:
    """Return the mean of each number over the ranks of each sample.

    Args:
        samples: Estimate of each rank, for each sample.
        order: Operations by which corresponding operations are identified.
    """
    means = []
    for estimates in samples:
        rank_numbers = [numbers_of(estimate, order) for estimate in estimates]
        keys = {key for numbers in rank_numbers for key in numbers}
        means.append({key: fmean(numbers.get(key, 0) for numbers in rank_numbers) for key in keys})
    return means


def scaled(number: int, factor: float) -> int:
    """Return a number times a factor, at least 1 unless the number is 0.

    Args:
        number: The number.
        factor: The factor.
    """
    return max(1, round(number * factor)) if number else 0


def numbers_of(estimate: RankEstimate, order: Order) -> dict[OperationKey, int]:
    """Return all numbers of an estimate that may grow with the graph, by key.

    Args:
        estimate: The estimate of a rank.
        order: Operations by which corresponding operations are identified.
    """
    numbers: dict[OperationKey, int] = {("memory", name): value for name, value in estimate.memory._asdict().items()}
    numbers |= {("graph", name): value for name, value in estimate.graph._asdict().items()}
    for key, operation in keyed_operations(estimate, order):
        numbers |= {(*key, name): getattr(operation, name) for name in AMOUNTS}
        numbers |= numbers_of_calls(key, operation.calls)
    return numbers | numbers_of_calls((), estimate.untraced_calls)


def kinds_of(estimate: RankEstimate) -> Order:
    """Return the kinds of a rank's operations, in order, for each step."""
    return [
        [(operation.kind, operation.tag, operation.ahead) for operation in trace.operations]
        for trace, _ in estimate.steps
    ]


def keyed_operations(estimate: RankEstimate, order: Order) -> Iterator[tuple[OperationKey, Operation]]:
    """Yield each operation of a rank with a key that its counterparts on other ranks and graphs have as well.

    The key is the step and the position of the counterpart in `order`. Some operations of `order` may be missing: a
    chunk exchanges nothing if the device already has all rows that it reads, and a rank without edges between its own
    vertices has no aggregate to overlap with an exchange. An operation that is not found in `order` is identified by
    the position of the previous one, and its kind.

    Args:
        estimate: The estimate of a rank.
        order: Kinds of the operations of a rank that has most of them.
    """
    for step, ((trace, _), kinds, own_kinds) in enumerate(zip(estimate.steps, order, kinds_of(estimate), strict=True)):
        counts, begin = Counter[OperationKey](), 0
        for kind, operation in zip(own_kinds, trace.operations, strict=True):
            window = range(begin, min(begin + SEARCH_WINDOW, len(kinds)))
            match = next((position for position in window if kinds[position] == kind), None)
            key: OperationKey = (step, match) if match is not None else (step, begin, *kind)
            yield (*key, counts[key]), operation
            counts[key] += 1
            begin = begin if match is None else match + 1


def numbers_of_calls(key: OperationKey, calls: Sequence[KernelCall]) -> dict[OperationKey, int]:
    """Return the sizes of the kernel calls of an operation, by key.

    Args:
        key: Key of the operation.
        calls: Its kernel calls.
    """
    return {
        (*call_key, number): size
        for call_key, call in keyed_calls(key, calls)
        for number, size in enumerate(call.sizes)
    }


def keyed_calls(key: OperationKey, calls: Sequence[KernelCall]) -> Iterator[tuple[OperationKey, KernelCall]]:
    """Yield the kernel calls of an operation one by one, each with its kernel and number as the key.

    Args:
        key: Key of the operation.
        calls: Its kernel calls.
    """
    counts = Counter[str]()
    for call in single_calls(calls):
        yield (*key, call.kernel, counts[call.kernel]), call
        counts[call.kernel] += 1


def with_numbers(estimate: RankEstimate, numbers: Mapping[OperationKey, int], order: Order) -> RankEstimate:
    """Return an estimate with its numbers replaced.

    Args:
        estimate: The estimate of a rank.
        numbers: New value of each number that `numbers_of` returns.
        order: Operations by which corresponding operations are identified.
    """

    def grown(key: OperationKey, calls: Sequence[KernelCall]) -> tuple[KernelCall, ...]:
        return tuple(
            call._replace(sizes=tuple(numbers[*call_key, number] for number in range(len(call.sizes))))
            for call_key, call in keyed_calls(key, calls)
        )

    operations = iter(
        replace(
            operation,
            flops=numbers[*key, "flops"],
            edges=numbers[*key, "edges"],
            bytes_sent=numbers[*key, "bytes_sent"],
            bytes_received=numbers[*key, "bytes_received"],
            calls=grown(key, operation.calls),
        )
        for key, operation in keyed_operations(estimate, order)
    )
    steps = [
        Steps(Trace(operations=tuple(islice(operations, len(trace.operations)))), number)
        for trace, number in estimate.steps
    ]
    memory = MemoryUse(*(numbers["memory", name] for name in MemoryUse._fields))
    graph = GraphBytes(*(numbers["graph", name] for name in GraphBytes._fields))
    return RankEstimate(steps=steps, untraced_calls=grown((), estimate.untraced_calls), memory=memory, graph=graph)


def single_calls(calls: Sequence[KernelCall]) -> list[KernelCall]:
    """Return kernel calls one by one, sorted by kernel and then by widths.

    Calls of equal sizes on one graph may differ on another. Widths come first since they are the same on all graphs.
    """
    single = (call._replace(number=1) for call in calls for _ in range(call.number))
    return sorted(single, key=lambda call: (call.kernel, call.sizes[::-1]), reverse=True)


def estimate_ranks(plan: Plan, *, exactly: bool = True) -> list[RankEstimate]:
    """Estimate the work and memory of each rank of a plan.

    Args:
        plan: The plan.
        exactly: Compute the memory of each rank. False: compute it for the busiest ranks only, and use their maximum
            for all ranks, which is faster.
    """
    steps = [plan.epoch_steps(rank) for rank in range(plan.size)]
    if exactly:
        memory = [plan.peak_memory(rank) for rank in range(plan.size)]
    else:
        of_busiest = [plan.peak_memory(rank) for rank in busiest([rank_steps[0].trace for rank_steps in steps])]
        memory = [MemoryUse(*map(max, zip(*of_busiest, strict=True)))] * plan.size
    calls, graph = untraced_calls(plan), graph_bytes(plan.work)
    return [
        RankEstimate(steps=rank_steps, untraced_calls=calls, memory=rank_memory, graph=graph)
        for rank_steps, rank_memory in zip(steps, memory, strict=True)
    ]


def busiest(traces: Sequence[Trace]) -> set[int]:
    """Return the ranks with the most FLOPs, the most aggregated edges, and the most received bytes."""
    measures = [
        [(trace.flops, trace.edges, trace.bytes_received.total())[which] for trace in traces] for which in range(3)
    ]
    return {values.index(max(values)) for values in measures}
