"""Measurement of NeutronStar's cost factors (algorithm 4, line 1): training on a small graph, and an exchange."""

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
"""Largest numbers of vertices, edges and feature values of the small graph."""
EXCHANGED_BYTES = 1 << 18
"""Bytes that a rank sends: more than a network buffers at once."""
ROUNDS = 2
"""Timed repetitions after one that does not count."""
MOVED_ROWS, MOVED_WIDTH = 1 << 14, 64
"""Number and width of the rows that are moved to measure rates."""
MIN_SECONDS = 1e-15
"""Lower bound of every factor, so that nothing is free."""


class TimedView(GraphView):
    """View of one device with dense layers and aggregates in the order of several ranks."""

    traits = SPREAD


class RowsOnly(TimedView):
    """View that skips every aggregate, to time the dense layers alone."""

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
        for name, other in rows.items():  # gradients flow to all inputs
            x = x if name == op.first else x + 0 * other.sum()
        return x


def probe(work: Workload, traits: ViewTraits, group: Group) -> Machine:
    """Measure the cost factors of this model on these ranks; all ranks call it and get the same result.

    A step on a small graph without aggregates times the dense layers, the rest of a whole step the aggregates, and an
    exchange in which every rank sends as much as it receives the network.

    Args:
        work: The workload.
        traits: Properties of the views under which the model will run.
        group: The ranks.

    Raises:
        InputError: The model cannot run on the small graph.
    """
    graph = work.graph
    degree = max(1, graph.num_edges // max(graph.num_vertices, 1))
    limit = min(MAX_VERTICES, MAX_EDGES // degree, MAX_FEATURES // max(graph.num_features, 1))
    num_vertices = max(1, min(graph.num_vertices // group.size, limit))
    topology = random_topology(graph, num_vertices, degree, work.dtype, group.device)
    model = ProbeModel(work, topology, some_vertices(graph, num_vertices))

    def seconds_of(view_type: type[GraphView]) -> float:
        forward = model.forward(view_type)
        return least_seconds(lambda: forward().sum().backward(), group)

    try:
        with FlopCounter() as counter:
            model.forward(RowsOnly)()
        rows, step = seconds_of(RowsOnly), seconds_of(TimedView)
    except RunError:  # a lost rank, which is not the model's fault
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InputError(
            f"--measure: the model cannot run on a small graph ({str(error).splitlines()[0]}): leave out --measure, or "
            "give --probe with the factors of another run"
        ) from error
    operations = work.outline(traits, training=True)
    flops = 3 * counter.total  # forward, and backward to rows and to weights
    aggregated = topology.adjacency.num_edges * sum(_passes(work, operations))
    bytes_each_way, network = _exchange_seconds(group)
    seconds = {
        "flop": rows / max(flops, 1),
        "edge": (step - rows) / max(aggregated, 1),
        "byte": network / bytes_each_way,
    }
    shared = group.all_gather_object(seconds)
    factors = {
        f"seconds_per_{name}": max(MIN_SECONDS, sum(measured[name] for measured in shared) / len(shared))
        for name in seconds
    }
    return Machine(**factors, rates=measured_rates(group) if group.size > 1 else NOMINAL_RATES)


def _passes(work: Workload, operations: Sequence[GraphOperation]) -> list[int]:
    """Return the columns that each operation aggregates in an epoch, forward and backward."""
    return [op.width * len(op.hops) * directions(op) for op in operations if not work.is_cached(op)]


def _exchange_seconds(group: Group) -> tuple[int, float]:
    """Return the bytes that each rank sends and receives in an exchange, and its seconds."""
    if group.size == 1:
        return 1, 0.0
    num_bytes = EXCHANGED_BYTES // (group.size - 1)
    counts = [0 if rank == group.rank else num_bytes for rank in range(group.size)]
    message = torch.zeros(sum(counts), dtype=torch.uint8, device=group.device)
    return sum(counts), least_seconds(lambda: group.all_to_all(message, counts, counts, tag="probe"), group)


def least_seconds(work: Callable[[], object], group: Group) -> float:
    """Return the shortest time of a few runs after a warm-up; all ranks start together.

    Args:
        work: Function to time.
        group: The ranks.
    """
    seconds = []
    group.all_reduce(torch.zeros(1, device=group.device), tag="probe")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        group.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def measured_rates(group: Group) -> Rates:
    """Return the rates at which rows move from the host, between ranks and on the device, for the slowest rank.

    Ratios to the first, rounded to powers of two, so that noise does not change the order of chunks between two runs.
    """
    rows = host_rows(MOVED_ROWS, MOVED_WIDTH, torch.float32, device=group.device, staging=Staging(group.streams))
    buffer = torch.zeros(MOVED_ROWS, MOVED_WIDTH, device=group.device)
    row_ids = torch.arange(MOVED_ROWS)
    counts = [MOVED_ROWS * MOVED_WIDTH // group.size] * group.size
    message = buffer.view(-1)[: sum(counts)]
    moves = (
        lambda: rows.gather(row_ids, buffer),
        lambda: group.all_to_all(message, counts, counts, tag="probe"),
        lambda: buffer.index_select(0, row_ids.to(group.device)),
    )
    rates = [MOVED_ROWS / least_seconds(move, group) for move in moves]
    rows.close()
    slowest = [
        min(values)
        for values in zip(*(measured["rates"] for measured in group.all_gather_object({"rates": rates})), strict=True)
    ]
    return Rates(*(2.0 ** round(math.log2(rate / slowest[0])) for rate in slowest))
