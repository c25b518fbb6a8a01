"""Measures what kernels and exchanges take, all ranks of a host at work at the same time (`weft probe`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, elu

from weft.autotune.estimate_time import Cluster, epoch_time, step_calls
from weft.comm import Group
from weft.cost import Network, Operation, Prices, PriceTable, Profile
from weft.cost.prices import MOVES, is_attention
from weft.data import Adjacency, Graph
from weft.kernels import attend, attend_edges, keyed_dropout, pair_logits, spmm, spmm_max
from weft.nn import Workload, make_model
from weft.nn.layers.linear_transform import linear
from weft.runtime.kernel_call import KernelCall
from weft.runtime.memory import memory_limit_bytes
from weft.runtime.tensor_peak import TensorPeak
from weft.strategies import MemoryUse, Plan, VertexOptions
from weft.strategies.offload.options import OffloadOptions
from weft.strategies.offload.plan import OffloadPlan
from weft.strategies.pipeline.plan import PipelineOptions, PipelinePlan
from weft.strategies.single import SinglePlan
from weft.strategies.split.sampler import BatchSampler, ask_each_other
from weft.strategies.vertex.plan import CommunicatedPlan

Work = Callable[[], object]
LEAST_SECONDS = 1e-3
"""Short calls are repeated for so long."""
ROUNDS = 3
VARYING: dict[str, Any] = {"least_seconds": 2e-2, "rounds": 33}
"""Of what takes another time each time: ranks that wake each other, whole steps."""
MOST_SECONDS = 1.0
"""That more than ROUNDS take."""
TURNS = 5
"""Of whole steps of several ranks, which a neighbour on the machine slows for a second."""
NOWHERE = MemoryUse(0, 0, 0)
VERTICES, WIDTH, CLOSE, FAR = 4096, 64, 256, 256
"""Of a graph whose steps show their fixed costs, as those of some milliseconds have them: rows, and their columns.
Sources are among so many rows; of each so many edges, one comes from anywhere."""
LAYERS = 2, 4
"""Of models on it."""
MOST_WORK = {
    "flops": 2.5e9,
    "numbers": 1.5e7,
    "bytes": 1.3e8,
    "aggregated": 2e7,
    "aggregated_backward": 4e7,
    "drawn": 6e5,
}
"""Of a sample; larger ones take as long for a unit."""

ROWS, COLUMNS, WIDTHS = (
    (256.0, 4096.0, 65536.0),
    (2.0, 8.0, 16.0, 64.0, 100.0, 128.0, 512.0, 1024.0),
    (2.0, 8.0, 16.0, 40.0, 64.0, 128.0, 256.0, 512.0),
)
SHARES = (0.1, 1.0)
"""Of edges whose source has to be brought from memory."""
SOURCES, DEGREES = (2048.0, 8192.0, 32768.0, 524288.0), (2.0, 64.0)
SUM_WIDTHS, ATTENTION_WIDTHS, HEADS = (
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
    (8.0, 64.0, 256.0),
    (1.0, 8.0),
)
CLASS_COUNTS = (2.0, 8.0, 64.0)
TARGETS, FANOUTS, DRAWN_FROM = (64.0, 2048.0, 32768.0), (2.0, 16.0), (131072.0, 1.0, 32.0)
"""Of draws, and the graph that they are of; see random_edges."""
WINDOW = 64
COPIES, COLD_BYTES = 4, 64 << 20
"""How many times a sample's tensors are made: a step has worked on as many others before it comes back to some. Beyond
so many bytes, which no cache holds, one after the other is enough."""
BYTES = tuple(float(1 << power) for power in (12, 16, 20, 22, 24, 28))
ROW_BYTES = (4.0, 32.0, 256.0, 4096.0)
MESSAGES = tuple(float(1 << power) for power in (8, 13, 16, 19, 22, 25))
PASSES, CACHED = 100, 1 << 16
"""Beside an exchange: passes that are timed by themselves, and numbers that each passes over."""


class Stopwatch:
    """Times work that all ranks of a group do at the same time."""

    def __init__(self, group: Group, *, least_seconds: float = LEAST_SECONDS, rounds: int = ROUNDS) -> None:
        self.group, self.least_seconds, self.rounds = group, least_seconds, rounds

    def seconds(self, *works: Work) -> float:
        """The median of a few runs, after one that counts for nothing; short ones are repeated.

        works: alike, done in turn. What one makes is there until its next turn, as a step keeps it.
        """
        return statistics.median(self._runs(works, self.rounds))

    def seconds_once(self, work: Work) -> float:
        """Those of one of these runs."""
        return self._runs([work], 1)[0]

    def _runs(self, works: Sequence[Work], rounds: int) -> list[float]:
        self._meet()
        first = self.group.all_gather_object({"seconds": max(self._run(works, 1), 1e-9)})[0]["seconds"]
        again = max(1, int(self.least_seconds / first))
        found = []
        for _ in range(max(min(rounds, ROUNDS), min(rounds, int(MOST_SECONDS / (again * first))))):
            self._meet()
            found.append(self._run(works, -(-again // len(works))))
        return found

    def _meet(self) -> None:
        if self.group.size > 1:
            self.group.all_reduce(torch.zeros(1, device=self.group.device), tag="probe")

    def _run(self, works: Sequence[Work], times: int) -> float:
        made: list[object] = [None] * len(works)
        start = time.perf_counter()
        for _ in range(times):
            for place, work in enumerate(works):
                made[place] = None
                made[place] = work()
        self.group.synchronize()
        return (time.perf_counter() - start) / (times * len(works))


def measure_kernels(group: Group) -> Prices:
    """What one of the group's ranks, all of one host, takes for every kernel; all ranks call it."""
    watch = Stopwatch(group)
    tables = {
        "linear": table(watch, (ROWS, COLUMNS, WIDTHS), forward_map),
        "linear_weights": table(watch, (ROWS, COLUMNS, WIDTHS), weights_map),
        "pass": table(watch, (BYTES,), elementwise),
        "gather": table(watch, (BYTES, ROW_BYTES), gathered),
        "exponential": table(watch, (BYTES,), exponential),
        "dropout": table(watch, (BYTES,), dropped),
        "update": table(watch, (BYTES,), updated),
        "loss": table(watch, (ROWS, CLASS_COUNTS), scored),
        "draw": table(watch, (TARGETS, FANOUTS), drawn),
        "Sum": table(watch, (SOURCES, SHARES, DEGREES, SUM_WIDTHS), summed),
    }
    for name, kernel in (("Attend", attended), ("AttendEdges", attended_edges), ("Max", maximum)):
        heads = () if name == "Max" else (HEADS,)
        for back in (False, True):
            axes = (SOURCES, SHARES, DEGREES, ATTENTION_WIDTHS, *heads)
            tables[name + "_backward" * back] = table(watch, axes, kernel, backward=back)
    free = Prices(ranks=group.size, threads=torch.get_num_threads(), tables=tables)
    return with_fixed_costs(free, Stopwatch(group, **VARYING))


def measure_network(group: Group, profile: Profile, *, hosts: int = 1, emulated: bool = False) -> Network:
    """What collectives take among the ranks of a group, which are on so many hosts; all ranks call it.

    profile: of the hosts, by which is known what else a step takes. emulated: see Cluster.
    """
    watch = Stopwatch(group, **VARYING)
    tables = {
        "all_to_all": table(watch, (MESSAGES,), lambda size: exchanged(group, int(size))),
        "all_reduce": table(watch, (MESSAGES,), lambda size: reduced(group, int(size))),
    }
    alone = watch.seconds(passes(PASSES, group.device)) / PASSES
    one_pass = statistics.fmean(float(one["seconds"]) for one in group.all_gather_object({"seconds": alone}))

    def beside(size: float) -> ProbeSample:
        takes = size * tables["all_to_all"].at((size,))
        return exchanged(group, int(size), num_passes=max(1, round(takes / one_pass)))

    tables["all_to_all_beside"] = table(watch, (MESSAGES[:-1],), beside)
    bare = Network(ranks=group.size, hosts=hosts, tables=tables)

    cluster = Cluster(
        profile=profile,
        ranks=group.size,
        hosts=hosts,
        threads=torch.get_num_threads(),
        memory_bytes=memory_limit_bytes(),
        emulated=emulated,
    )

    def beyond(network: Network, plan: Plan) -> float:
        """The seconds of a step on the slowest rank beyond those that are told of it."""
        told = epoch_time(plan, replace(cluster, profile=replace(profile, networks=[network])), NOWHERE).total
        step = train_step(plan, group)
        seconds = statistics.median(watch.seconds(step) for _ in range(TURNS)) - told
        return max(float(one["seconds"]) for one in group.all_gather_object({"seconds": seconds}))

    part = torch.arange(VERTICES, dtype=torch.int32) * group.size // VERTICES
    deep = [CommunicatedPlan(small_work("gcn", one), group.size, VertexOptions(partition=part)) for one in LAYERS]
    each = sum(beyond(bare, plan) for plan in deep) / sum(len(collectives(plan)) for plan in deep)
    met = replace(bare, collective_seconds=max(0.0, each) / cluster.ranks_on_core)
    piped = PipelinePlan(small_work("gcn", LAYERS[-1]), group.size, PipelineOptions(partition=part, chunks=4))
    messages = sum(one.messages for one in collectives(piped))
    return replace(met, message_seconds=max(0.0, beyond(met, piped)) / messages / cluster.ranks_on_core)


def collectives(plan: Plan) -> list[Operation]:
    """Those of a rank's training step."""
    return [one for one in plan.trace(training=True).operations if one.kind == "collective"]


def with_fixed_costs(prices: Prices, watch: Stopwatch) -> Prices:
    """The same, with what steps on small_work's graph take beside: by call, by one of attention, by round of chunks."""

    def chunked(work: Workload, chunks: int) -> Plan:
        return OffloadPlan(work, 1, OffloadOptions(chunks=chunks))

    works, attention = [small_work("gcn", layers) for layers in LAYERS], small_work("gat", LAYERS[0])
    call = cost_of_each(prices, watch, map(SinglePlan, works), lambda one: one.kernel not in MOVES)
    prices = replace(prices, call_seconds=call)
    rounds = cost_of_each(
        prices, watch, [chunked(works[0], 4), chunked(works[0], 16)], lambda one: one.kernel == "round"
    )
    prices = replace(prices, round_seconds=rounds)
    more = cost_of_each(prices, watch, [SinglePlan(attention), chunked(attention, 16)], is_attention)
    return replace(prices, attention_seconds=more)


def cost_of_each(
    prices: Prices, watch: Stopwatch, plans: Iterable[Plan], counts: Callable[[KernelCall], bool]
) -> float:
    """What each of the calls that count costs, of the time that steps take beside their prices."""
    number, seconds = 0, 0.0
    for plan in plans:
        calls = step_calls(plan, 0)
        number += sum(one.number for one in calls if counts(one))
        seconds += watch.seconds(train_step(plan, Group())) - sum(map(prices.seconds, calls))
    return max(0.0, seconds / number)


def small_work(model: str, layers: int) -> Workload:
    """A model of so many layers on few rows, of which parts of neighbours exchange next to none."""
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(VERTICES).repeat_interleave(4)
    source = target // CLOSE * CLOSE + torch.randint(CLOSE, target.shape, generator=generator)
    source[::FAR] = torch.randint(VERTICES, source[::FAR].shape, generator=generator)
    y = torch.arange(VERTICES) % WIDTH
    x = torch.rand(VERTICES, WIDTH, generator=generator)
    every = torch.ones(VERTICES, dtype=torch.bool)
    graph = Graph.from_edges(source, target, num_vertices=VERTICES, x=x, y=y, train_mask=every)
    return Workload(make_model(model, WIDTH, WIDTH, hidden=WIDTH, layers=layers), graph)


def train_step(plan: Plan, group: Group) -> Work:
    """A training step with Adam."""
    placed = plan.place(group)
    optimizer = torch.optim.Adam(placed.model.parameters(), weight_decay=5e-4)
    assert plan.work.graph.y is not None
    y = plan.work.graph.y[placed.rows]

    def step() -> None:
        optimizer.zero_grad()
        (one,) = placed.steps(0)
        logits = placed.forward(one)
        leaf = logits.detach().requires_grad_()
        (grad,) = torch.autograd.grad(cross_entropy(leaf, y), leaf)
        placed.backward(logits, grad)
        optimizer.step()

    return step


ProbeSample = tuple[float, float, Callable[[], Work]]
"""The units of a sample's work, the share of the most that a sample may do, and what makes it ready."""


def table(
    watch: Stopwatch, axes: Sequence[tuple[float, ...]], make: Callable[..., ProbeSample], **said: Any
) -> PriceTable:
    """The seconds of a unit at all sizes; where a sample is too large, those of one that is as large as may be.

    Nor does that have less on the first axis than the sample before has, whose seconds then count.
    """
    found: dict[tuple[float, ...], float] = {}
    for sizes in product(*axes):
        units, share, ready = make(*sizes, **said)
        at = axes[0].index(sizes[0])
        if share > 1 and at:
            before = axes[0][at - 1]
            if sizes[0] / share <= before:
                found[sizes] = found[(before, *sizes[1:])]
                continue
            units, _, ready = make(sizes[0] // share, *sizes[1:], **said)
        works = copies(ready)
        found[sizes] = watch.seconds(*works) / units
        del works
    shared = watch.group.all_gather_object({"seconds": list(found.values())}) if watch.group.size > 1 else None
    if shared:
        seconds = tuple(statistics.fmean(each) for each in zip(*(one["seconds"] for one in shared), strict=True))
    else:
        seconds = tuple(found.values())
    return PriceTable(axes=tuple(axes), seconds=seconds)


def copies(ready: Callable[[], Work]) -> list[Work]:
    """A sample several times, each on tensors of its own, that none finds in the cache what a step would not."""
    with TensorPeak() as peak:
        works = [ready()]
        while len(works) < COPIES and peak.alive < COLD_BYTES:
            works.append(ready())
    return works


def forward_map(rows: float, columns: float, width: float) -> ProbeSample:
    flops = 2 * rows * columns * width

    def ready() -> Work:
        x, weight = torch.rand(int(rows), int(columns)), torch.rand(int(columns), int(width))
        return lambda: linear(x, weight)

    return flops, flops / MOST_WORK["flops"], ready


def weights_map(rows: float, columns: float, width: float) -> ProbeSample:
    flops = 2 * rows * columns * width

    def ready() -> Work:
        x, weight = torch.rand(int(rows), int(columns)), torch.rand(int(columns), int(width), requires_grad=True)
        y = linear(x, weight)
        grad = torch.rand_like(y)
        return lambda: torch.autograd.grad(y, weight, grad, retain_graph=True)

    return flops, flops / MOST_WORK["flops"], ready


def elementwise(num_bytes: float) -> ProbeSample:
    def ready() -> Work:
        x = torch.rand(int(num_bytes) // 8)
        return lambda: x + 1.0

    return num_bytes, num_bytes / MOST_WORK["bytes"], ready


def gathered(num_bytes: float, row_bytes: float) -> ProbeSample:
    """One row of each two, either at random."""

    def ready() -> Work:
        rows, width = max(int(num_bytes / row_bytes), 1), int(row_bytes) // 4
        table = torch.rand(2 * rows, width)
        chosen = 2 * torch.arange(rows) + torch.randint(2, (rows,), generator=torch.Generator().manual_seed(0))
        return lambda: table.index_select(0, chosen)

    return num_bytes, num_bytes / MOST_WORK["bytes"], ready


def exponential(numbers: float) -> ProbeSample:
    def ready() -> Work:
        x = torch.rand(int(numbers)) - 0.5
        return lambda: elu(x)

    return numbers, numbers / MOST_WORK["numbers"], ready


def dropped(numbers: float) -> ProbeSample:
    def ready() -> Work:
        x = torch.rand(max(int(numbers) // 64, 1), 64)
        rows = torch.arange(len(x))
        return lambda: keyed_dropout(x, rows, key=1, p=0.5)

    return numbers, numbers / MOST_WORK["numbers"], ready


def updated(numbers: float) -> ProbeSample:
    def ready() -> Work:
        weight = torch.nn.Parameter(torch.rand(int(numbers)))
        weight.grad = torch.rand(int(numbers))
        return torch.optim.Adam([weight], lr=1e-3, weight_decay=5e-4).step

    return numbers, numbers / MOST_WORK["numbers"], ready


def scored(rows: float, classes: float) -> ProbeSample:
    numbers = rows * classes

    def ready() -> Work:
        logits = torch.rand(int(rows), int(classes), requires_grad=True)
        y = torch.arange(int(rows)) % int(classes)
        return lambda: torch.autograd.grad(cross_entropy(logits, y, reduction="none").sum(), logits)

    return numbers, numbers / MOST_WORK["numbers"], ready


def drawn(targets: float, fanout: float) -> ProbeSample:
    """One hop of a mini-batch as a rank makes it: edges drawn, their sources numbered, and the edges both ways."""
    edges = targets * fanout

    def ready() -> Work:
        in_edges = random_edges(*DRAWN_FROM)
        every = torch.ones(in_edges.num_sources, dtype=torch.bool)
        graph = Graph(in_edges=in_edges, y=every.long(), train_mask=every)
        fanouts, batch = (int(fanout),), min(int(targets), graph.num_vertices)
        sampler = BatchSampler(
            graph=graph, size=1, part=None, fanouts=fanouts, batch_size=batch, method="uniform", seed=0
        )
        examples = sampler.batches(0)[0]

        def run() -> object:
            (found,) = ask_each_other([sampler.draw(examples, 0, epoch=0, number=0)])
            return found.hops[0].block.transpose

        return run

    return edges + targets, (edges + targets) / MOST_WORK["drawn"], ready


@lru_cache(maxsize=1)
def random_edges(sources: float, share: float, degree: float, targets: float | None = None) -> Adjacency:
    """A graph of so many vertices with so many in-edges on the mean, few of most and many of a few.

    share: of the edges, those whose source no edge shortly before has, where rows do not fit into the cache. targets:
    only the edges to so many, from all; None: to all.
    """
    count, rows, generator = int(sources), int(targets or sources), torch.Generator().manual_seed(0)
    weights = torch.arange(1, rows + 1).float().rsqrt()[torch.randperm(rows, generator=generator)]
    in_degree = (weights * (degree * rows / weights.sum())).round().long()
    target = torch.arange(rows).repeat_interleave(in_degree)
    source = torch.randint(count, (len(target),), generator=generator)
    if share < 1:  # a window that moves on by so many sources an edge
        source = ((torch.arange(len(target)) * share).long() + source % WINDOW) % count
    made = Adjacency.from_edges(source, target, num_sources=count, num_targets=rows)
    made.transpose  # noqa: B018
    return made


def aggregate(
    edges: tuple[float, float, float],
    width: float,
    make: Callable[[Adjacency], Callable[[Tensor], Tensor]],
    *,
    backward: bool = False,
) -> ProbeSample:
    """A sample of an aggregate, or of its backward pass, over rows of some width; edges: see random_edges.

    Where the whole is too large, forward it is of fewer targets, whose sources are as many as were asked for: rows of
    fewer would be in the cache.
    """
    numbers = edges[0] * edges[2] * width
    targets = None if backward else edges[0] * min(1.0, MOST_WORK["aggregated"] / numbers)

    def ready() -> Work:
        made = random_edges(*edges, targets)
        run = make(made)
        x = torch.rand(made.num_sources, int(width), requires_grad=backward)
        if not backward:
            return lambda: run(x)
        y = run(x)
        grad = torch.rand_like(y)
        wanted = x
        return lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True)

    if targets is not None:
        return targets * edges[2] * width, 1.0, ready
    return numbers, numbers / MOST_WORK["aggregated_backward"], ready


def summed(sources: float, share: float, degree: float, width: float) -> ProbeSample:
    return aggregate((sources, share, degree), width, lambda edges: lambda x: spmm(edges, x))


def maximum(sources: float, share: float, degree: float, width: float, *, backward: bool) -> ProbeSample:
    return aggregate((sources, share, degree), width, lambda edges: lambda x: spmm_max(edges, x), backward=backward)


def attended(sources: float, share: float, degree: float, width: float, heads: float, *, backward: bool) -> ProbeSample:
    def make(edges: Adjacency) -> Callable[[Tensor], Tensor]:
        bounds = [int(width) * head // int(heads) for head in range(int(heads) + 1)]
        sizes = edges.num_sources, edges.num_targets
        left, right = (torch.rand(size, int(heads), requires_grad=True) for size in sizes)
        return lambda x: attend(edges, x, left, right, bounds=bounds)

    return aggregate((sources, share, degree), width, make, backward=backward)


def attended_edges(
    sources: float, share: float, degree: float, width: float, heads: float, *, backward: bool
) -> ProbeSample:
    def make(edges: Adjacency) -> Callable[[Tensor], Tensor]:
        bounds = [int(width) * head // int(heads) for head in range(int(heads) + 1)]
        right = torch.rand(edges.num_targets, int(width), requires_grad=True)
        attention = torch.rand(int(width), requires_grad=True)

        def run(x: Tensor) -> Tensor:
            logits = pair_logits(edges, x, right, attention, bounds=bounds)
            return attend_edges(edges, x, logits, bounds=bounds)

        return run

    return aggregate((sources, share, degree), width, make, backward=backward)


def passes(number: int, device: torch.device) -> Work:
    """So many passes over numbers that stay in a core's cache."""
    numbers = torch.zeros(CACHED, device=device)

    def run() -> None:
        for _ in range(number):
            numbers.add_(1.0)

    return run


def exchanged(group: Group, num_bytes: int, *, num_passes: int = 0) -> ProbeSample:
    """Every rank sends so many bytes, evenly to all others, and receives as many; beside so many `passes`."""

    def ready() -> Work:
        each = num_bytes // (group.size - 1)
        counts = [0 if rank == group.rank else each for rank in range(group.size)]
        message = torch.zeros(sum(counts), dtype=torch.uint8, device=group.device)
        beside = passes(num_passes, group.device)

        def run() -> Tensor:
            pending = group.all_to_all_async(message, counts, counts, tag="probe")
            beside()
            return pending.wait()

        return run

    return float(num_bytes), 0.0, ready


def reduced(group: Group, num_bytes: int) -> ProbeSample:
    """A sum over the ranks in which each sends so many bytes, as a ring moves it."""

    def ready() -> Work:
        numbers = torch.zeros(max(1, num_bytes * group.size // (group.size - 1) // 8), device=group.device)
        return lambda: group.all_reduce(numbers, tag="probe")

    return float(num_bytes), 0.0, ready
