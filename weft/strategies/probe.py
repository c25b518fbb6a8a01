"""The probe of NeutronStar's algorithm 4, line 1: a test training on a small graph, and an exchange."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm import Group
from weft.cost import NOMINAL_RATES, Machine, Rates
from weft.nn import (
    SPREAD,
    Aggregate,
    ByRelation,
    GraphOperation,
    GraphView,
    ProbeModel,
    Rows,
    ViewTraits,
    Workload,
    random_topology,
    some_vertices,
)
from weft.nn.workload.flops import FlopCounter
from weft.runtime.streams import Staging
from weft.storage.host_rows import host_rows
from weft.strategies.vertex.costs import directions
from weft.utils.errors import InputError, RunError

MAX_VERTICES, MAX_EDGES, MAX_FEATURES = 1 << 12, 1 << 17, 1 << 22
EXCHANGED_BYTES = 1 << 18  # by a rank: more than what a network's buffers swallow at once
ROUNDS = 2
MOVED_ROWS, MOVED_WIDTH = 1 << 14, 64
LEAST = 1e-15  # seconds of anything, so that nothing is free


class ProbeView(GraphView):
    """The view of one device, with the order of map and aggregate that spread ranks have."""

    traits = SPREAD


class RowsOnly(ProbeView):
    """Leaves out every aggregate."""

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x, torch.empty(2, 0, dtype=torch.int64, device=x.device), len(x)

    @property
    def edge_features(self) -> Tensor | None:
        features = super().edge_features
        return None if features is None else features[:0]

    @property
    def edge_weight(self) -> Tensor | None:
        weight = super().edge_weight
        return None if weight is None else weight[:0]

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        del steps
        x = rows[op.first]
        if isinstance(op, ByRelation):
            return x.index_select(0, self.relation_rows.targets)
        for name, beside in rows.items():  # gradients flow to all
            x = x if name == op.first else x + 0 * beside.sum()
        return x


def probe(work: Workload, traits: ViewTraits, group: Group) -> Machine:
    """What this model costs on these ranks, all of which call it at the same time and get the same.

    traits: of the views that it is to run under.
    Rows of a small graph are timed without aggregates, aggregates as what a whole step takes more, and the network by
    an exchange in which every rank sends as much as it receives. InputError for a model that cannot run on it.
    """
    graph = work.graph
    degree = max(1, graph.num_edges // max(graph.num_vertices, 1))
    most = min(MAX_VERTICES, MAX_EDGES // degree, MAX_FEATURES // max(graph.num_features, 1))
    num_vertices = max(1, min(graph.num_vertices // group.size, most))
    topology = random_topology(graph, num_vertices, degree, work.dtype, group.device)
    sample = ProbeModel(work, topology, some_vertices(graph, num_vertices))

    def seconds_of(view_type: type[GraphView]) -> float:
        forward = sample.forward(view_type)
        return least_seconds(lambda: forward().sum().backward(), group)

    try:
        with FlopCounter() as counter:
            sample.forward(RowsOnly)()
        rows, whole = seconds_of(RowsOnly), seconds_of(ProbeView)
    except RunError:  # a lost peer, which is not the model's fault
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InputError(
            f"the probe cannot run the model on a small graph ({str(error).splitlines()[0]}): leave out --measure, or "
            "give --probe with the factors of another run"
        ) from error
    operations = work.outline(traits, training=True)
    flops = 3 * counter.total  # backward, by rows and by weights
    edges = topology.adjacency.num_edges * sum(_passes(work, operations))
    bytes_each_way, network = _exchange_seconds(group)
    found = {"flop": rows / max(flops, 1), "edge": (whole - rows) / max(edges, 1), "byte": network / bytes_each_way}
    shared = group.all_gather_object(found)
    factors = {f"seconds_per_{name}": max(LEAST, sum(one[name] for one in shared) / len(shared)) for name in found}
    return Machine(**factors, rates=measured_rates(group) if group.size > 1 else NOMINAL_RATES)


def _passes(work: Workload, operations: Sequence[GraphOperation]) -> list[int]:
    """Columns that an epoch aggregates, forward and backward, by operation."""
    return [asked.width * len(asked.hops) * directions(asked) for asked in operations if not work.is_cached(asked)]


def _exchange_seconds(group: Group) -> tuple[int, float]:
    """Bytes that each rank sends to others and receives, and the seconds of that."""
    if group.size == 1:
        return 1, 0.0
    each = EXCHANGED_BYTES // (group.size - 1)
    counts = [0 if rank == group.rank else each for rank in range(group.size)]
    message = torch.zeros(sum(counts), dtype=torch.uint8, device=group.device)
    return sum(counts), least_seconds(lambda: group.all_to_all(message, counts, counts, tag="probe"), group)


def least_seconds(work: Callable[[], object], group: Group) -> float:
    """The shortest of a few runs, after one that counts for nothing; all ranks start together."""
    seconds = []
    group.all_reduce(torch.zeros(1, device=group.device), tag="probe")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        group.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def measured_rates(group: Group) -> Rates:
    """How fast rows move from the host, between ranks and on the device, as the slowest rank has it.

    As ratios to the first, to powers of two: noise is not to decide the order of chunks, which two runs are to share.
    """
    rows = host_rows(MOVED_ROWS, MOVED_WIDTH, torch.float32, device=group.device, staging=Staging(group.streams))
    buffer = torch.zeros(MOVED_ROWS, MOVED_WIDTH, device=group.device)
    every = torch.arange(MOVED_ROWS)
    counts = [MOVED_ROWS * MOVED_WIDTH // group.size] * group.size
    some = buffer.view(-1)[: sum(counts)]
    moves = (
        lambda: rows.gather(every, buffer),
        lambda: group.all_to_all(some, counts, counts, tag="probe"),
        lambda: buffer.index_select(0, every.to(group.device)),
    )
    found = [MOVED_ROWS / least_seconds(move, group) for move in moves]
    rows.close()
    slowest = [
        min(each) for each in zip(*(one["rates"] for one in group.all_gather_object({"rates": found})), strict=True)
    ]
    return Rates(*(2.0 ** round(math.log2(rate / slowest[0])) for rate in slowest))
