"""Extrapolation of the estimate of a rank to larger graphs and to more ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.lib.graphs import make_graph
from weft.autotune import RankEstimate, Samples, extrapolated
from weft.autotune.estimate_time import GraphBytes, store_bytes
from weft.autotune.extrapolate import growth, kinds_of, numbers_of, shrinkage, with_numbers
from weft.cost import MemoryUse, Operation, Steps, Trace
from weft.data import Graph
from weft.nn import Workload, make_model
from weft.runtime.kernel_call import KernelCall


def work(rows: int, width: int = 64, *, ahead: int = 0) -> RankEstimate:
    """Return the estimate of a rank that transforms rows, exchanges them and aggregates their edges.

    With `ahead`, the rank aggregates this number of edges before the exchanged rows arrive.
    """
    aggregate = KernelCall("Sum", (10 * rows, rows, 2 * rows, rows, width, 0))
    picked = KernelCall("gather", (rows, 4 * width))
    early = [Operation(kind="aggregate", edges=ahead, ahead=True, calls=(aggregate,))] * bool(ahead)
    operations = (
        Operation(kind="dense", flops=2 * rows * width, calls=(KernelCall("linear", (rows, width, 8), 2),)),
        Operation(kind="collective", tag="halo", bytes_sent=4 * rows, bytes_received=4 * rows, calls=(picked,)),
        *early,
        Operation(kind="aggregate", edges=10 * rows * width, calls=(aggregate,)),
    )
    return RankEstimate(
        steps=[Steps(Trace(operations=operations), 1)],
        untraced_calls=[KernelCall("update", (512,))],
        memory=MemoryUse(9 * rows, 0, 0),
        graph=GraphBytes(8 * rows, rows),
    )


def reordered(estimate: RankEstimate) -> RankEstimate:
    """Return the same estimate with its calls in the order in which extrapolation groups them."""
    return with_numbers(estimate, numbers_of(estimate, kinds_of(estimate)), kinds_of(estimate))


def edges_of(estimate: RankEstimate) -> int:
    return estimate.steps[0].trace.edges


def test_growth() -> None:
    assert growth([10, 40], 100) == pytest.approx(100)
    assert growth([10, 40, 160], 100) == pytest.approx(100)
    assert growth([64, 64], 100) == 1
    assert growth([64, 65], 100) == 1
    assert growth([100, 200], 16) == pytest.approx(4)
    assert growth([30, 10], 100) == 1  # Numbers do not shrink as the graph grows.
    assert growth([10, 80], 4096) == 4096  # faster growth than the graph's, on small graphs, does not last
    assert growth([5], 1) == 1
    assert growth([0, 0], 8) == 1


def test_shrinkage() -> None:
    """In an all-to-all exchange, each of P ranks sends (P - 1) / P of its P-th of the rows."""
    sent = [(ranks - 1) / ranks**2 for ranks in (4, 8, 16, 256)]
    assert sent[2] * shrinkage(sent[:3], 4) == pytest.approx(sent[3], rel=0.1)
    assert shrinkage([1, 0.5, 0.25], 4) == pytest.approx(1 / 16)
    assert shrinkage([3, 3, 3], 4) == 1
    assert shrinkage([7], 0) == 1


def test_all_numbers_of_a_step_grow() -> None:
    samples = Samples(by_vertices=[[work(rows)] * 2 for rows in (100, 400)], by_ranks=[[work(400)] * 2])
    assert extrapolated(samples, 8, 2) == [reordered(work(3200))] * 2


def test_ranks_differ_as_in_the_last_sample() -> None:
    by_vertices = [[work(rows), work(3 * rows)] for rows in (10, 40)]
    less, more = extrapolated(Samples(by_vertices=by_vertices, by_ranks=by_vertices[-1:]), 4, 2)
    assert [edges_of(estimate) for estimate in (less, more)] == [edges_of(work(rows)) for rows in (160, 480)]


def test_more_ranks_divide_the_work() -> None:
    by_ranks = [[work(1600 // ranks)] * ranks for ranks in (4, 8, 16)]
    estimates = extrapolated(Samples(by_vertices=[by_ranks[-1]], by_ranks=by_ranks), 1, 64)
    assert len(estimates) == 64
    assert {edges_of(estimate) for estimate in estimates} == {edges_of(work(25))}


def test_an_exchange_that_a_smaller_graph_lacks() -> None:
    """Operations after the exchange grow alike, whether the smaller graph has the exchange or not."""
    (operations,) = (step.trace.operations for step in work(100).steps)
    without = replace(work(100), steps=[Steps(Trace(operations=(*operations[:1], *operations[2:])), 1)])
    by_vertices = [[without] * 2, [work(400)] * 2]
    assert (
        extrapolated(Samples(by_vertices=by_vertices, by_ranks=by_vertices[-1:]), 8, 2) == [reordered(work(3200))] * 2
    )


def test_an_operation_that_one_rank_lacks() -> None:
    """A rank without edges between its local rows has no aggregate before the exchanged rows arrive."""
    by_vertices = [[work(rows, ahead=rows), work(rows, ahead=rows * (rows > 100))] for rows in (100, 400)]
    first, second = extrapolated(Samples(by_vertices=by_vertices, by_ranks=by_vertices[-1:]), 8, 2)
    first_operations, second_operations, expected = (
        estimate.steps[0].trace.operations for estimate in (first, second, work(3200))
    )
    assert len(first_operations) == len(second_operations) == 4
    assert first_operations[-1].edges == expected[-1].edges


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("undirected", [False, True])
def test_bytes_of_a_stored_graph(undirected: bool, weighted: bool, tmp_path: Path) -> None:
    """Local ranks read the graph from such a folder. Headers and the manifest take a few kilobytes."""
    graph = make_graph(3000)
    source, target = graph.in_edges.edges()
    weight = torch.ones(len(source)) if weighted else None
    graph = Graph.from_edges(source, target, weight=weight, x=graph.x, y=graph.y, undirected=undirected)
    estimated = store_bytes(Workload(make_model("gcn", graph.num_features, graph.num_classes), graph))
    graph.save(tmp_path / "graph")
    stored = sum(file.stat().st_size for file in (tmp_path / "graph").iterdir())
    assert estimated == pytest.approx(stored, abs=16_000)
