"""`weft probe`: measure kernels and exchanges while all ranks of a host compute at the same time."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import cycle, islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, elu

from weft.autotune.estimate_time import Cluster, epoch_time, step_calls
from weft.comm import Group
from weft.cost import MemoryUse, Network, Operation, Prices, PriceTable, Profile
from weft.cost.prices import MOVE_KERNELS, WORK, is_attention, table_of
from weft.data import Adjacency, Graph
from weft.kernels import attend, attend_edges, keyed_dropout, pair_logits, spmm, spmm_max
from weft.nn import Workload, make_model
from weft.nn.layers.linear_transform import linear
from weft.nn.messages.edges import SortedEdges
from weft.runtime.kernel_call import KernelCall
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies import Plan, VertexOptions
from weft.strategies.offload.options import OffloadOptions
from weft.strategies.offload.plan import OffloadPlan
from weft.strategies.pipeline.plan import PipelineOptions, PipelinePlan
from weft.strategies.single import SinglePlan
from weft.strategies.split.sampler import BatchSampler, exchange_requests_locally
from weft.strategies.vertex.plan import CommunicatedPlan

if TYPE_CHECKING:
    from weft.nn.messages.messages import MessageProgram

Work = Callable[[], object]
"""Function that does the work to be timed, and returns its result."""
MIN_SECONDS = 1e-3
"""Shortest timed interval: shorter calls are repeated."""
ROUNDS = 3
"""Number of timed intervals, of which the median counts."""
VARYING: dict[str, Any] = {"min_seconds": 2e-2, "rounds": 15}
"""Arguments of a `Stopwatch` for work whose time varies: ranks that wake each other, whole steps."""
MAX_SECONDS = 1.0
"""Time limit of the intervals after the first ROUNDS."""
STEP_ROUNDS = 5
"""Number of medians of a whole step of several ranks; their median counts, since other programs slow some."""
QUICK_SECONDS, QUICK_SHARE, QUICK_SIZES = 0.05, 0.2, {1: 3, 2: 3, 3: 3, 4: 2, 5: 2}
"""Savings of the quick probe.

QUICK_SECONDS: its MAX_SECONDS. QUICK_SHARE: its largest sample, as a share of MAX_WORK. QUICK_SIZES: most sizes of an
axis, by the number of axes.
"""
NO_MEMORY = MemoryUse(0, 0, 0)
"""Memory of a plan that is too small to matter."""
VERTICES, WIDTH, NEIGHBORHOOD, FAR_EDGE_INTERVAL = 4096, 64, 256, 256
"""Graph on which steps take milliseconds, so that their fixed costs are visible.

VERTICES and WIDTH: its rows and their columns. NEIGHBORHOOD: sources are within a range of this many vertices, except
for one edge in FAR_EDGE_INTERVAL, whose source is any vertex.
"""
LAYERS = 2, 4
"""Numbers of layers of the models that are measured on the graph of VERTICES."""
MAX_WORK = {
    "flops": 1.25e9,
    "numbers": 1.5e7,
    "bytes": 1.3e8,
    "aggregated": 1e7,
    "aggregated_backward": 2e7,
    "sampled": 6e5,
}
"""Most work of a sample, by unit. Larger samples are not measured: their seconds per unit are the same."""

ROWS, COLUMNS, WIDTHS = (
    (256.0, 4096.0, 65536.0),
    (2.0, 8.0, 16.0, 64.0, 100.0, 128.0, 512.0, 1024.0),
    (2.0, 8.0, 16.0, 40.0, 64.0, 128.0, 256.0, 512.0),
)
SHARES = (0.1, 1.0)
"""Shares of edges whose source row comes from memory, not from a cache."""
SOURCES, DEGREES = (2048.0, 8192.0, 32768.0, 524288.0), (2.0, 64.0)
SUM_WIDTHS, ATTENTION_WIDTHS, HEADS = (
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
    (8.0, 64.0, 256.0),
    (1.0, 8.0),
)
CLASS_COUNTS = (2.0, 8.0, 64.0)
TARGETS, FANOUTS, SAMPLED_GRAPH = (64.0, 2048.0, 32768.0), (2.0, 16.0), (131072.0, 1.0, 32.0)
"""Sampling of mini-batches: targets, fanouts, and the graph to sample from (arguments of `random_edges`)."""
TILED_SOURCES, TILED_RATIOS, GATE_RATIO = (2048.0, 16384.0, 131072.0), (4.0, 28.0), 12
"""Programs in tiles: sources; bytes in the cache for each byte of source rows outside of it, also those of a gate."""
TILED_DEGREE, MIN_TILED_EDGES, TILED_ROW = 32.0, 131072.0, (4, 16)
"""Programs in tiles: mean in-degree, smallest number of edges, and heads and columns of a row."""
PERIOD = 1 << 16
"""Number of random values after which a sample's tensors repeat."""
SOURCE_WINDOW = 64
"""Number of consecutive sources that nearby edges share."""
COPIES, COLD_BYTES = 3, 64 << 20
"""Number of copies of a sample's tensors, and the bytes that are enough even with fewer copies.

A step uses other tensors before it returns to the same ones. Cycling through copies avoids warm caches.
"""
BYTES = tuple(float(1 << power) for power in (12, 16, 20, 22, 24, 28))
ROW_BYTES = (4.0, 32.0, 256.0, 4096.0)
MESSAGES = tuple(float(1 << power) for power in (8, 13, 16, 19, 22, 25))
PASSES, CACHED = 100, 1 << 16
"""Work that overlaps with an exchange: number of passes to time one pass, and elements of each pass (cached)."""


class Stopwatch:
    """Timer of work that all ranks of a group do at the same time.

    Args:
        group: The ranks.
        quick: Measure fewer sizes and smaller samples, in fewer intervals.
        min_seconds: Shortest timed interval: shorter work is repeated.
        rounds: Number of timed intervals.
    """

    def __init__(
        self, group: Group, *, quick: bool = False, min_seconds: float = MIN_SECONDS, rounds: int = ROUNDS
    ) -> None:
        self.group, self.min_seconds, self.rounds, self.quick = group, min_seconds, rounds, quick
        self.max_seconds = QUICK_SECONDS if quick else MAX_SECONDS
        self.max_share = QUICK_SHARE if quick else 1.0

    def sizes(self, axes: Sequence[tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
        """Return the sizes of each axis to measure; for a quick probe both ends and at most one between."""
        most = QUICK_SIZES[len(axes)]
        return tuple(
            tuple(axis[step * (len(axis) - 1) // (most - 1)] for step in range(most))
            if self.quick and len(axis) > most
            else axis
            for axis in axes
        )

    def seconds(self, *works: Work) -> float:
        """Return the seconds of a run, the median over intervals. Each function runs once before, untimed.

        Args:
            *works: Equivalent functions that run in turn; each interval continues where the one before stopped. The
                result of each is kept until its next turn, as a step keeps its activations.
        """
        return statistics.median(self._runs(works, self.rounds))

    def seconds_once(self, work: Work) -> float:
        """Return the seconds of a single run, after a warm-up run."""
        return self._runs([work], 1)[0]

    def _runs(self, works: Sequence[Work], rounds: int) -> list[float]:
        results: list[object] = [None] * len(works)
        turns = cycle(range(len(works)))

        def run(times: int) -> float:
            self._barrier()
            start = time.perf_counter()
            for number in islice(turns, times):
                results[number] = None
                results[number] = works[number]()
            self.group.synchronize()
            return (time.perf_counter() - start) / times

        # The warm-up run of each function also tells how many runs an interval needs; all ranks use that of rank 0.
        first = self.group.all_gather_object({"seconds": max(run(len(works)), 1e-9)})[0]["seconds"]
        repeats = max(1, int(self.min_seconds / first))
        affordable = int(self.max_seconds / (repeats * first))
        return [run(repeats) for _ in range(max(min(rounds, ROUNDS), min(rounds, affordable)))]

    def _barrier(self) -> None:
        if self.group.size > 1:
            self.group.all_reduce(torch.zeros(1, device=self.group.device), tag="probe")


def measure_kernels(group: Group, calls: Iterable[KernelCall] | None = None, *, quick: bool = False) -> Prices:
    """Measure kernels on the ranks of one host, which all call this at the same time.

    Args:
        group: The ranks, which measure on their devices.
        calls: Kernel calls whose prices are needed. Only the sizes next to theirs are measured, and no fixed costs.
            None: all kernels at all sizes, and the fixed costs.
        quick: Measure fewer sizes and smaller samples, in fewer intervals.
    """
    watch = Stopwatch(group, quick=quick)
    samples = kernel_samples(watch.max_share)
    if calls is not None:
        samples = samples_around(samples, calls)
    tables = {name: price_table(watch, axes, make) for name, (axes, make) in samples.items()}
    prices = Prices(ranks=group.size, threads=torch.get_num_threads(), tables=tables)
    return prices if calls is not None else with_fixed_costs(prices, Stopwatch(group, quick=quick, **VARYING))


def kernel_samples(max_share: float = 1.0) -> KernelSamples:
    """Return the sizes at which each kernel is measured, and the function that returns a sample, by kernel.

    Args:
        max_share: Largest aggregate in a forward pass, as a share of MAX_WORK.
    """
    samples: KernelSamples = {
        "linear": ((ROWS, COLUMNS, WIDTHS), linear_sample),
        "linear_weights": ((ROWS, COLUMNS, WIDTHS), linear_weights_sample),
        "pass": ((BYTES,), pass_sample),
        "gather": ((BYTES, ROW_BYTES), gather_sample),
        "exponential": ((BYTES,), exponential_sample),
        "dropout": ((BYTES,), dropout_sample),
        "update": ((BYTES,), update_sample),
        "loss": ((ROWS, CLASS_COUNTS), loss_sample),
        "draw": ((TARGETS, FANOUTS), draw_sample),
        "tiles": ((TILED_SOURCES, TILED_RATIOS), tile_sample),
        "Sum": ((SOURCES, SHARES, DEGREES, SUM_WIDTHS), partial(sum_sample, max_share=max_share)),
    }
    for name, kernel in (("Attend", attention_sample), ("AttendEdges", edge_attention_sample), ("Max", max_sample)):
        heads = () if name == "Max" else (HEADS,)
        for back in (False, True):
            axes = (SOURCES, SHARES, DEGREES, ATTENTION_WIDTHS, *heads)
            samples[name + "_backward" * back] = axes, partial(kernel, backward=back, max_share=max_share)
    return samples


def samples_around(samples: KernelSamples, calls: Iterable[KernelCall]) -> KernelSamples:
    """Return samples of the kernels that are called, at the sizes from which the prices of the calls are interpolated.

    A table of these sizes gives the calls the same prices as a table of all sizes.

    Args:
        samples: All sizes of every kernel.
        calls: Kernel calls whose prices are needed. Kernels without a table are left out.
    """
    needed: dict[str, list[set[float]]] = {}
    for call in calls:
        if call.kernel not in WORK:
            continue
        _, sizes = WORK[call.kernel](*call.sizes)
        axes, _ = samples[table_of(call.kernel)]
        for axis, size, subset in zip(
            axes, sizes, needed.setdefault(table_of(call.kernel), [set() for _ in axes]), strict=True
        ):
            after = bisect_right(axis, size)
            subset.update(axis[max(after - 1, 0) : after + (size not in axis)])
    return {
        name: (tuple(tuple(sorted(subset)) for subset in subsets), samples[name][1]) for name, subsets in needed.items()
    }


def measure_exchange(group: Group, num_bytes: int, *, hosts: int = 1) -> Network:
    """Measure an all-to-all exchange of one size between the ranks of a group; all ranks call it.

    Args:
        group: At least two ranks.
        num_bytes: Bytes that each rank sends, evenly to all others, and receives.
        hosts: Number of hosts.
    """
    watch = Stopwatch(group, **VARYING)
    table = price_table(watch, ((float(num_bytes),),), lambda size: exchange_sample(group, int(size)))
    return Network(ranks=group.size, hosts=hosts, tables={"all_to_all": table})


def measure_network(
    group: Group, profile: Profile, *, hosts: int = 1, emulated: bool = False, quick: bool = False
) -> Network:
    """Measure collectives between the ranks of a group; all ranks call it.

    1. Measure exchanges and sums by message size, alone.
    2. Measure exchanges while the ranks compute for as long as the exchange takes.
    3. Measure whole steps with many small collectives. The time that the profile does not explain, divided by the
       number of collectives, is the fixed cost of a collective.
    4. Do the same with steps that send message by message, for the fixed cost of a message.

    Args:
        group: The ranks.
        profile: Profile of the hosts, which gives the time of the kernels in a step.
        hosts: Number of hosts.
        emulated: True if one machine stands for all hosts; see `Cluster`.
        quick: Measure fewer sizes, in fewer intervals.
    """
    watch = Stopwatch(group, quick=quick, **VARYING)
    tables = {
        "all_to_all": price_table(watch, (MESSAGES,), lambda size: exchange_sample(group, int(size))),
        "all_reduce": price_table(watch, (MESSAGES,), lambda size: all_reduce_sample(group, int(size))),
    }
    alone = watch.seconds(passes(PASSES, group.device)) / PASSES
    pass_seconds = statistics.fmean(float(rank["seconds"]) for rank in group.all_gather_object({"seconds": alone}))

    def overlapped_sample(size: float) -> ProbeSample:
        exchange_seconds = size * tables["all_to_all"].at((size,))
        return exchange_sample(group, int(size), num_passes=max(1, round(exchange_seconds / pass_seconds)))

    tables["all_to_all_beside"] = price_table(watch, (MESSAGES[:-1],), overlapped_sample)
    bare = Network(ranks=group.size, hosts=hosts, tables=tables)

    cluster = Cluster(
        profile=profile,
        ranks=group.size,
        hosts=hosts,
        threads=torch.get_num_threads(),
        memory_bytes=memory_limit_bytes(),
        emulated=emulated,
    )

    def unexplained_seconds(network: Network, plan: Plan) -> float:
        """Return the measured minus the estimated seconds of a step, on the slowest rank."""
        estimate = epoch_time(plan, replace(cluster, profile=replace(profile, networks=[network])), NO_MEMORY).total
        step = train_step(plan, group)
        seconds = statistics.median(watch.seconds(step) for _ in range(1 if quick else STEP_ROUNDS)) - estimate
        return max(float(rank["seconds"]) for rank in group.all_gather_object({"seconds": seconds}))

    part = torch.arange(VERTICES, dtype=torch.int32) * group.size // VERTICES
    plans = [
        CommunicatedPlan(small_work("gcn", layers), group.size, VertexOptions(partition=part)) for layers in LAYERS
    ]
    each = sum(unexplained_seconds(bare, plan) for plan in plans) / sum(len(collectives(plan)) for plan in plans)
    network = replace(bare, collective_seconds=max(0.0, each) / cluster.ranks_on_core)
    pipeline = PipelinePlan(small_work("gcn", LAYERS[-1]), group.size, PipelineOptions(partition=part, chunks=4))
    messages = sum(collective.messages for collective in collectives(pipeline))
    message_seconds = max(0.0, unexplained_seconds(network, pipeline)) / messages / cluster.ranks_on_core
    return replace(network, message_seconds=message_seconds)


def collectives(plan: Plan) -> list[Operation]:
    """Return the collectives of a rank's training step."""
    return [operation for operation in plan.trace(training=True).operations if operation.kind == "collective"]


def with_fixed_costs(prices: Prices, watch: Stopwatch) -> Prices:
    """Return prices with the fixed costs of a kernel call, an attention call and a round of chunks.

    Measures steps on the graph of `small_work`. Each cost is the time that the prices so far do not explain, divided
    by the number of calls.

    Args:
        prices: Prices without fixed costs.
        watch: Timer.
    """

    def chunked(work: Workload, chunks: int) -> Plan:
        return OffloadPlan(work, 1, OffloadOptions(chunks=chunks))

    works, attention = [small_work("gcn", layers) for layers in LAYERS], small_work("gat", LAYERS[0])
    call_seconds = cost_of_each(prices, watch, map(SinglePlan, works), lambda call: call.kernel not in MOVE_KERNELS)
    prices = replace(prices, call_seconds=call_seconds)
    round_seconds = cost_of_each(
        prices, watch, [chunked(works[0], 4), chunked(works[0], 16)], lambda call: call.kernel == "round"
    )
    prices = replace(prices, round_seconds=round_seconds)
    attention_seconds = cost_of_each(prices, watch, [SinglePlan(attention), chunked(attention, 16)], is_attention)
    return replace(prices, attention_seconds=attention_seconds)


def cost_of_each(
    prices: Prices, watch: Stopwatch, plans: Iterable[Plan], counts: Callable[[KernelCall], bool]
) -> float:
    """Return the unexplained seconds of some steps, divided by the number of kernel calls that cause them; at least 0.

    Args:
        prices: Prices of the kernels.
        watch: Timer.
        plans: Plans whose training steps are measured.
        counts: True for the kernel calls to divide by.
    """
    number, seconds = 0, 0.0
    for plan in plans:
        calls = step_calls(plan, 0)
        number += sum(call.number for call in calls if counts(call))
        seconds += watch.seconds(train_step(plan, Group())) - sum(map(prices.seconds, calls))
    return max(0.0, seconds / number)


def small_work(model: str, layers: int) -> Workload:
    """Return a model on a small graph, whose parts of consecutive vertices exchange almost no rows.

    Args:
        model: Name of the model.
        layers: Number of its layers.
    """
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(VERTICES).repeat_interleave(4)
    source = target // NEIGHBORHOOD * NEIGHBORHOOD + torch.randint(NEIGHBORHOOD, target.shape, generator=generator)
    source[::FAR_EDGE_INTERVAL] = torch.randint(VERTICES, source[::FAR_EDGE_INTERVAL].shape, generator=generator)
    y = torch.arange(VERTICES) % WIDTH
    x = torch.rand(VERTICES, WIDTH, generator=generator)
    all_vertices = torch.ones(VERTICES, dtype=torch.bool)
    graph = Graph.from_edges(source, target, num_vertices=VERTICES, x=x, y=y, train_mask=all_vertices)
    return Workload(make_model(model, WIDTH, WIDTH, hidden=WIDTH, layers=layers), graph)


def train_step(plan: Plan, group: Group) -> Work:
    """Return a function that runs one training step with Adam.

    Args:
        plan: The plan of the step.
        group: The ranks.
    """
    placed = plan.place(group)
    optimizer = torch.optim.Adam(placed.model.parameters(), weight_decay=5e-4)
    assert plan.work.graph.y is not None
    y = plan.work.graph.y[placed.rows]

    def step() -> None:
        optimizer.zero_grad()
        (training_step,) = placed.steps(0)
        logits = placed.forward(training_step)
        leaf = logits.detach().requires_grad_()
        (grad,) = torch.autograd.grad(cross_entropy(leaf, y), leaf)
        placed.backward(logits, grad)
        optimizer.step()

    return step


ProbeSample = tuple[float, float, Callable[[], Work]]
"""Units of a sample's work, its work as a share of `MAX_WORK`, and a function that prepares its tensors."""
KernelSamples = dict[str, tuple[Sequence[tuple[float, ...]], Callable[..., ProbeSample]]]
"""Sizes of each axis, and the function that returns the sample of a combination of sizes, by kernel."""


def price_table(watch: Stopwatch, axes: Sequence[tuple[float, ...]], make: Callable[..., ProbeSample]) -> PriceTable:
    """Measure the seconds per unit of work at each combination of sizes.

    If a sample is too large, its first size is reduced until it has `MAX_WORK`. If that is no more than the size before
    on the first axis, the seconds of that size are used.

    Args:
        watch: Timer.
        axes: Sizes of each axis, ascending.
        make: Function that returns the sample of a combination of sizes.
    """
    axes = watch.sizes(axes)
    seconds: dict[tuple[float, ...], float] = {}
    for sizes in product(*axes):
        units, share, prepare = make(*sizes)
        share /= watch.max_share
        index = axes[0].index(sizes[0])
        if share > 1 and index:
            previous = axes[0][index - 1]
            if sizes[0] / share <= previous:
                seconds[sizes] = seconds[(previous, *sizes[1:])]
                continue
            units, _, prepare = make(sizes[0] // share, *sizes[1:])
        with default_device(watch.group.device):
            works = copies(prepare)
        seconds[sizes] = watch.seconds(*works) / units
        del works
    gathered = watch.group.all_gather_object({"seconds": list(seconds.values())}) if watch.group.size > 1 else None
    if gathered:
        means = tuple(statistics.fmean(each) for each in zip(*(rank["seconds"] for rank in gathered), strict=True))
    else:
        means = tuple(seconds.values())
    return PriceTable(axes=axes, seconds=means)


def default_device(device: torch.device) -> Any:
    """Return a context in which new tensors are created on `device`."""
    return nullcontext() if device.type == "cpu" else device


def copies(prepare: Callable[[], Work]) -> list[Work]:
    """Return several copies of a sample on different tensors, so that a run does not find its rows in a cache."""
    with TensorPeak() as peak:
        works = [prepare()]
        while len(works) < COPIES and peak.alive < COLD_BYTES:
            works.append(prepare())
    return works


def random_numbers(*size: int) -> Tensor:
    """Return random numbers in [0, 1), PERIOD of them repeated: drawing all would take longer than a kernel."""
    count = math.prod(size)
    return torch.rand(min(count, PERIOD)).repeat(-(-count // PERIOD))[:count].view(size)


def linear_sample(rows: float, columns: float, width: float) -> ProbeSample:
    flops = 2 * rows * columns * width

    def prepare() -> Work:
        x, weight = random_numbers(int(rows), int(columns)), random_numbers(int(columns), int(width))
        return lambda: linear(x, weight)

    return flops, flops / MAX_WORK["flops"], prepare


def linear_weights_sample(rows: float, columns: float, width: float) -> ProbeSample:
    flops = 2 * rows * columns * width

    def prepare() -> Work:
        x, weight = random_numbers(int(rows), int(columns)), random_numbers(int(columns), int(width)).requires_grad_()
        y = linear(x, weight)
        grad = random_numbers(*y.shape)
        return lambda: torch.autograd.grad(y, weight, grad, retain_graph=True)

    return flops, flops / MAX_WORK["flops"], prepare


def pass_sample(num_bytes: float) -> ProbeSample:
    def prepare() -> Work:
        x = random_numbers(int(num_bytes) // 8)
        return lambda: x + 1.0

    return num_bytes, num_bytes / MAX_WORK["bytes"], prepare


def gather_sample(num_bytes: float, row_bytes: float) -> ProbeSample:
    """Return a sample that gathers rows by index: of each two rows one at random.

    Args:
        num_bytes: Bytes that are gathered.
        row_bytes: Bytes of a row.
    """

    def prepare() -> Work:
        rows, width = max(int(num_bytes / row_bytes), 1), int(row_bytes) // 4
        table = random_numbers(2 * rows, width)
        indices = 2 * torch.arange(rows) + torch.randint(2, (rows,), generator=torch.Generator().manual_seed(0))
        return lambda: table.index_select(0, indices)

    return num_bytes, num_bytes / MAX_WORK["bytes"], prepare


def exponential_sample(numbers: float) -> ProbeSample:
    def prepare() -> Work:
        x = random_numbers(int(numbers)) - 0.5
        return lambda: elu(x)

    return numbers, numbers / MAX_WORK["numbers"], prepare


def dropout_sample(numbers: float) -> ProbeSample:
    def prepare() -> Work:
        x = random_numbers(max(int(numbers) // 64, 1), 64)
        rows = torch.arange(len(x))
        return lambda: keyed_dropout(x, rows, key=1, p=0.5)

    return numbers, numbers / MAX_WORK["numbers"], prepare


def update_sample(numbers: float) -> ProbeSample:
    def prepare() -> Work:
        weight = torch.nn.Parameter(random_numbers(int(numbers)))
        weight.grad = random_numbers(int(numbers))
        return torch.optim.Adam([weight], lr=1e-3, weight_decay=5e-4).step

    return numbers, numbers / MAX_WORK["numbers"], prepare


def loss_sample(rows: float, classes: float) -> ProbeSample:
    numbers = rows * classes

    def prepare() -> Work:
        logits = random_numbers(int(rows), int(classes)).requires_grad_()
        y = torch.arange(int(rows)) % int(classes)
        return lambda: torch.autograd.grad(cross_entropy(logits, y, reduction="none").sum(), logits)

    return numbers, numbers / MAX_WORK["numbers"], prepare


def draw_sample(targets: float, fanout: float) -> ProbeSample:
    """Return a sample of one hop of a mini-batch: sample edges, number their sources, transpose the block.

    Args:
        targets: Number of target vertices.
        fanout: Number of sampled in-edges of each target.
    """
    edges = targets * fanout

    def prepare() -> Work:
        in_edges = random_edges(*SAMPLED_GRAPH)
        all_vertices = torch.ones(in_edges.num_sources, dtype=torch.bool)
        graph = Graph(in_edges=in_edges, y=all_vertices.long(), train_mask=all_vertices)
        fanouts, batch = (int(fanout),), min(int(targets), graph.num_vertices)
        sampler = BatchSampler(
            graph=graph, size=1, part=None, fanouts=fanouts, batch_size=batch, method="uniform", seed=0
        )
        examples = torch.randperm(graph.num_vertices)[:batch]

        def run() -> object:
            (batch_blocks,) = exchange_requests_locally([sampler.sample(examples, 0, epoch=0, number=0)])
            return batch_blocks.hops[0].block.transpose

        return run

    return edges + targets, (edges + targets) / MAX_WORK["sampled"], prepare


def tile_sample(sources: float, ratio: float) -> ProbeSample:
    """Return a sample of a program in tiles of edges, forward and backward. On a GPU, PyTorch runs its operations.

    Args:
        sources: Number of sources. They have at least two edges each, since their gradients are also set to zero.
        ratio: Bytes that are read and written in the cache for each byte of source rows outside of it.
    """
    gates = int(ratio) // GATE_RATIO
    program, num_edges = gated_program(gates), max(2 * sources, MIN_TILED_EDGES)
    numbers = program.forward.numbers_per_edge + program.gradients((True, True)).numbers_per_edge

    def prepare() -> Work:
        with torch.device("cpu"):  # its generator draws the edges
            block = random_edges(sources, 1.0, TILED_DEGREE, num_edges / TILED_DEGREE)
            edge_index = torch.stack(block.edges())
            edges = SortedEdges.of(edge_index, block.num_targets)
        x, y = (random_numbers(rows, *TILED_ROW).requires_grad_() for rows in (block.num_sources, block.num_targets))
        grad = random_numbers(*y.shape)
        source, target = edge_index.to(x.device)

        def run() -> object:
            if x.device.type == "cpu":
                sums = program.run(edges, block.num_sources, [x, y], [])
            else:
                sums = gated_sums(x[source], y[target], target, num_targets=block.num_targets, gates=gates)
            return torch.autograd.grad(sums, (x, y), grad)

        return run

    return num_edges * numbers * 4, 0.0, prepare


@lru_cache
def gated_program(gates: int) -> MessageProgram:
    """Return the program of `gated_sums`.

    Args:
        gates: Number of gates.
    """
    from weft.nn.messages.messages import MessageProgram  # imports torch.fx, which most runs do not need
    from weft.nn.messages.trace import NUM_EDGES, NUM_TARGETS, trace_rows

    run = partial(gated_sums, num_targets=NUM_TARGETS, gates=gates)
    with torch.device("cpu"):
        rows = partial(torch.empty, NUM_EDGES, *TILED_ROW)
        return MessageProgram(trace_rows(run, lambda: [rows(), rows()], ["source", "target"]))


def gated_sums(x: Tensor, y: Tensor, target: Tensor, *, num_targets: int, gates: int) -> Tensor:
    """Return sums of messages whose operations are elementwise, by head and across columns, as those of attention.

    Args:
        x: Row of each edge's source.
        y: Row of each edge's target.
        target: Target of each edge.
        num_targets: Number of targets.
        gates: Number of gates of a message.
    """
    messages = x * y
    for _ in range(gates):
        messages = messages * (messages + x).sigmoid() * (messages * y).sum(-1, keepdim=True).sigmoid()
    return x.new_zeros(num_targets, *TILED_ROW).index_add(0, target, messages)


@lru_cache(maxsize=1)
def random_edges(sources: float, share: float, degree: float, targets: float | None = None) -> Adjacency:
    """Return random edges with skewed in-degrees: most vertices have few in-edges, and a few have many.

    Args:
        sources: Number of source vertices.
        share: Share of the edges whose source no recent edge has, so that its row comes from memory. Below 1, sources
            lie in a window that moves by `share` vertices with each edge.
        degree: Mean in-degree.
        targets: Number of target vertices. None: as many as sources.
    """
    count, rows, generator = int(sources), int(targets or sources), torch.Generator().manual_seed(0)
    weights = torch.arange(1, rows + 1).float().rsqrt()[torch.randperm(rows, generator=generator)]
    in_degree = (weights * (degree * rows / weights.sum())).round().long()
    target = torch.arange(rows).repeat_interleave(in_degree)
    source = torch.randint(count, (len(target),), generator=generator)
    if share < 1:
        source = ((torch.arange(len(target)) * share).long() + source % SOURCE_WINDOW) % count
    edges = Adjacency.from_edges(source, target, num_sources=count, num_targets=rows)
    edges.transpose  # noqa: B018  # computed here, so that no timed run does it
    return edges


def aggregate_sample(
    edges: tuple[float, float, float],
    width: float,
    make: Callable[[Adjacency], Callable[[Tensor], Tensor]],
    *,
    backward: bool = False,
    max_share: float = 1.0,
) -> ProbeSample:
    """Return a sample of an aggregate, or of its backward pass.

    If the forward pass has more than `MAX_WORK`, it is measured with fewer targets, but with all sources: fewer source
    rows would fit in a cache.

    Args:
        edges: Number of sources, share and mean degree; see `random_edges`.
        width: Columns of a row.
        make: Function that returns the aggregate over some edges.
        backward: Measure the backward pass.
        max_share: Largest forward pass, as a share of MAX_WORK.
    """
    numbers = edges[0] * edges[2] * width
    targets = None if backward else edges[0] * min(1.0, max_share * MAX_WORK["aggregated"] / numbers)

    def prepare() -> Work:
        with torch.device("cpu"):  # its generator draws the edges
            block = random_edges(*edges, targets)
        block = block.to(torch.get_default_device())
        run = make(block)
        x = random_numbers(block.num_sources, int(width)).requires_grad_(backward)
        if not backward:
            return lambda: run(x)
        y = run(x)
        grad = random_numbers(*y.shape)
        inputs = x
        return lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)

    if targets is not None:
        return targets * edges[2] * width, 0.0, prepare  # the targets limit it, so no sources are left out
    return numbers, numbers / MAX_WORK["aggregated_backward"], prepare


def sum_sample(sources: float, share: float, degree: float, width: float, **options: Any) -> ProbeSample:
    return aggregate_sample((sources, share, degree), width, lambda edges: lambda x: spmm(edges, x), **options)


def max_sample(sources: float, share: float, degree: float, width: float, **options: Any) -> ProbeSample:
    return aggregate_sample((sources, share, degree), width, lambda edges: lambda x: spmm_max(edges, x), **options)


def attention_sample(
    sources: float, share: float, degree: float, width: float, heads: float, **options: Any
) -> ProbeSample:
    def make(edges: Adjacency) -> Callable[[Tensor], Tensor]:
        bounds = [int(width) * head // int(heads) for head in range(int(heads) + 1)]
        sizes = edges.num_sources, edges.num_targets
        left, right = (random_numbers(size, int(heads)).requires_grad_() for size in sizes)
        return lambda x: attend(edges, x, left, right, bounds=bounds)

    return aggregate_sample((sources, share, degree), width, make, **options)


def edge_attention_sample(
    sources: float, share: float, degree: float, width: float, heads: float, **options: Any
) -> ProbeSample:
    def make(edges: Adjacency) -> Callable[[Tensor], Tensor]:
        bounds = [int(width) * head // int(heads) for head in range(int(heads) + 1)]
        right = random_numbers(edges.num_targets, int(width)).requires_grad_()
        attention = random_numbers(int(width)).requires_grad_()

        def run(x: Tensor) -> Tensor:
            logits = pair_logits(edges, x, right, attention, bounds=bounds)
            return attend_edges(edges, x, logits, bounds=bounds)

        return run

    return aggregate_sample((sources, share, degree), width, make, **options)


def passes(number: int, device: torch.device) -> Work:
    """Return work that passes several times over elements that stay in a core's cache.

    Args:
        number: Number of passes.
        device: Device of the elements.
    """
    numbers = torch.zeros(CACHED, device=device)

    def run() -> None:
        for _ in range(number):
            numbers.add_(1.0)

    return run


def exchange_sample(group: Group, num_bytes: int, *, num_passes: int = 0) -> ProbeSample:
    """Return a sample of an exchange in which every rank sends the same number of bytes to each other rank.

    Args:
        group: The ranks.
        num_bytes: Bytes that a rank sends in all.
        num_passes: Number of times that the rank passes over elements in its cache during the exchange; see `passes`.
    """

    def prepare() -> Work:
        each = num_bytes // (group.size - 1)
        counts = [0 if rank == group.rank else each for rank in range(group.size)]
        message = torch.zeros(sum(counts), dtype=torch.uint8, device=group.device)
        overlapped = passes(num_passes, group.device)

        def run() -> Tensor:
            pending = group.all_to_all_async(message, counts, counts, tag="probe")
            overlapped()
            return pending.wait()

        return run

    return float(num_bytes), 0.0, prepare


def all_reduce_sample(group: Group, num_bytes: int) -> ProbeSample:
    """Return a sample of a sum over the ranks.

    Args:
        group: The ranks.
        num_bytes: Bytes that a rank sends, if the sum goes around a ring.
    """

    def prepare() -> Work:
        numbers = torch.zeros(max(1, num_bytes * group.size // (group.size - 1) // 8), device=group.device)
        return lambda: group.all_reduce(numbers, tag="probe")

    return float(num_bytes), 0.0, prepare
