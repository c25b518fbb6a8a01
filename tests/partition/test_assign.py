"""Partition methods equal plain Python implementations and keep their bounds; tracked counts equal a recount."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.graph_checks import CALM, assert_one_line, graphs
from weft.cli.main import main
from weft.config.config import Config
from weft.data import Adjacency, Graph, load
from weft.partition import METHODS, PartitionBook, PartitionOptions, Quality, make_book
from weft.partition.assign import metis, neighbours
from weft.runtime import native
from weft.training.flag_checks import make_options, partition_of
from weft.utils.errors import InputError, RunError, Stopped

RECIPE = "rmat:60,300"


def two_cliques() -> Graph:
    """Return two cliques, of the even and of the odd vertices up to 7, connected by the edge 6 -> 7."""
    edges = [(u, v) for u in range(8) for v in range(8) if u != v and u % 2 == v % 2] + [(6, 7)]
    source, target = torch.tensor(edges).T
    return Graph.from_edges(source, target)


@pytest.mark.parametrize("method", METHODS)
@CALM
@given(graph=graphs(), num_parts=st.integers(1, 4))
def test_every_vertex_has_a_part(method: str, graph: Graph, num_parts: int) -> None:
    assume(num_parts <= graph.num_vertices)
    book = make_book(graph, num_parts, method=method)
    assert book.part.dtype == torch.int32
    assert book.part.shape == (graph.num_vertices,)
    assert sum(book.quality.vertices) == graph.num_vertices
    assert torch.cat([book.members(p) for p in range(num_parts)]).sort().values.tolist() == list(
        range(graph.num_vertices)
    )


@pytest.mark.parametrize("method", METHODS)
def test_depends_only_on_the_seed(method: str) -> None:
    """Parts do not depend on threads or the global generator; another seed changes them if the method reads it."""
    graph, threads = load("rmat:700,5k"), torch.get_num_threads()
    options = RecordingOptions(seed=3, stream="random")
    first = make_book(graph, 4, method=method, options=options)
    options.read.clear()
    METHODS[method](graph, 4, options)
    reads_seed = "seed" in options.read
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        torch.rand(5)
        again = make_book(graph, 4, method=method, options=options)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(first.part, again.part)
    other = make_book(graph, 4, method=method, options=PartitionOptions(seed=4, stream="random"))
    assert torch.equal(first.part, other.part) != reads_seed


class RecordingOptions(PartitionOptions):
    """Options that record which of them a method reads."""

    read: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        RecordingOptions.read.append(name)
        return super().__getattribute__(name)


def test_a_method_is_added_by_one_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function in METHODS is enough to create books, in Python, on the command line and in strategies."""

    def in_stripes(graph: Graph, num_parts: int, _options: PartitionOptions) -> Tensor:
        return torch.arange(graph.num_vertices, dtype=torch.int32) % num_parts

    monkeypatch.setitem(METHODS, "stripes", in_stripes)
    book = tmp_path / "book.safetensors"
    assert main(["partition", RECIPE, "--parts", "3", "--method", "stripes", "--out", str(book)]) == 0
    graph = load(RECIPE)
    assert PartitionBook.open(book, graph).part.tolist() == [v % 3 for v in range(graph.num_vertices)]
    config = Config(strategy="hybrid", workers=3, partition="stripes")
    assert torch.equal(partition_of(make_options(config, graph)), PartitionBook.open(book, graph).part)


@pytest.mark.parametrize("method", ["metis", "balanced"])
def test_finds_cliques(method: str) -> None:
    part = make_book(two_cliques(), 2, method=method).part.tolist()
    assert part in ([0, 1] * 4, [1, 0] * 4)


def test_random_is_even() -> None:
    assert sorted(make_book(load("rmat:11,30"), 4, method="random").quality.vertices) == [2, 3, 3, 3]


def test_range_is_contiguous_and_weighs_vertices() -> None:
    """Ranges balance vertices and in-edges by weight: vertex 0 has six in-edges, the others have none."""
    graph = Graph.from_edges(torch.arange(1, 7), torch.zeros(6, dtype=torch.int64))
    for weight, part in {8: [0, 0, 0, 0, 1, 1, 1], 1: [0, 1, 1, 1, 1, 1, 1]}.items():
        options = PartitionOptions(vertex_weight=weight)
        assert make_book(graph, 2, method="range", options=options).part.tolist() == part


def test_range_balances_the_weighted_sum() -> None:
    graph = load("rmat:2k,20k")
    quality = make_book(graph, 4, method="range", options=PartitionOptions(vertex_weight=5)).quality
    loads = [5 * v + e for v, e in zip(quality.vertices, quality.in_edges, strict=True)]
    assert max(loads) - min(loads) <= 2 * (5 + int(graph.in_edges.degree.max()))


def reference_fennel(graph: Graph, order: list[int], num_parts: int, max_size: int) -> list[int]:
    """Assign vertices by Fennel in plain Python."""
    edges = list(zip(*(ids.tolist() for ids in graph.in_edges.edges()), strict=True))
    part: dict[int, int] = {}
    weight = 1.5 * math.sqrt(num_parts) * len(edges) / (len(order) * math.sqrt(len(order)))
    for v in order:
        placed = [part.get(u) for u, w in edges if w == v] + [part.get(w) for u, w in edges if u == v]
        size = [list(part.values()).count(p) for p in range(num_parts)]
        free = [p for p in range(num_parts) if size[p] < max_size]
        part[v] = max(free, key=lambda p: (placed.count(p) - weight * math.sqrt(size[p]), -size[p], -p))
    return [part[v] for v in range(len(order))]


@CALM
@given(graph=graphs(), num_parts=st.integers(1, 4), slack=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 9))
def test_fennel_equals_plain_python(graph: Graph, num_parts: int, slack: float, seed: int) -> None:
    assume(num_parts <= graph.num_vertices)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(graph.num_vertices, generator=random)
    max_size = math.ceil(graph.num_vertices / num_parts * (1 + slack))
    options = PartitionOptions(slack=slack, seed=seed, stream="random")
    book = make_book(graph, num_parts, method="fennel", options=options)
    assert book.part.tolist() == reference_fennel(graph, order.tolist(), num_parts, max_size)
    assert max(book.quality.vertices) <= max_size


@CALM
@given(graph=graphs())
def test_neighbours(graph: Graph) -> None:
    """Neighbours are those of both directions, each once and sorted, without loops."""
    indptr, indices = neighbours(graph.in_edges)
    linked = torch.zeros(graph.num_vertices, graph.num_vertices, dtype=torch.bool)
    source, target = graph.in_edges.edges()
    linked[source, target] = linked[target, source] = True
    linked.fill_diagonal_(False)
    rows = [row.nonzero()[:, 0].tolist() for row in linked]
    assert [indices[indptr[v] : indptr[v + 1]].tolist() for v in range(graph.num_vertices)] == rows


def refined(in_edges: Adjacency, part: Tensor, num_parts: int, remote_slack: float) -> tuple[Tensor, Tensor, int]:
    return native.refine(
        in_edges.indptr,
        in_edges.indices,
        part,
        num_parts,
        torch.arange(len(part)).flip(0),
        vertex_slack=0.3,
        edge_slack=0.3,
        remote_slack=remote_slack,
        max_passes=4,
    )


@CALM
@given(graph=graphs(), num_parts=st.integers(1, 4), seed=st.integers(0, 99), remote_slack=st.sampled_from([0.1, 9.0]))
def test_tracked_counts_equal_a_recount(graph: Graph, num_parts: int, seed: int, remote_slack: float) -> None:
    random = torch.Generator().manual_seed(seed)
    start = torch.randint(0, num_parts, (graph.num_vertices,), generator=random, dtype=torch.int32)
    before = start.clone()
    part, counts, cut = refined(graph.in_edges, start, num_parts, remote_slack)
    again, cut_again = native.count_parts(graph.in_edges.indptr, graph.in_edges.indices, part, num_parts)
    assert torch.equal(counts, again)
    assert cut == cut_again
    assert torch.equal(start, before)


def test_tracked_counts_equal_a_recount_after_many_moves() -> None:
    in_edges = load("rmat:400,6k").in_edges
    start = torch.randint(0, 7, (400,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    part, counts, cut = refined(in_edges, start, 7, 0.1)
    again, cut_again = native.count_parts(in_edges.indptr, in_edges.indices, part, 7)
    assert (part != start).sum() > 100
    assert torch.equal(counts, again)
    assert cut == cut_again


def imbalance(loads: tuple[int, ...]) -> float:
    """Return the largest deviation of a load from the mean, as a fraction of the mean."""
    mean = sum(loads) / len(loads)
    return max(abs(load - mean) for load in loads) / mean


@pytest.mark.parametrize("num_parts", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_balanced_on_a_power_law_graph(num_parts: int) -> None:
    """R-MAT graphs have a dense core. `balanced` splits it, with a cut near that of METIS weighted by in-edges."""
    graph = load("rmat:20k,300k")
    quality = make_book(graph, num_parts, method="balanced").quality
    even_edges = Quality.measure(graph, metis(graph, num_parts, 0, graph.in_edges.degree), num_parts, seconds=0.0)
    assert min(quality.remote) / max(quality.remote) > 0.95 > min(even_edges.remote) / max(even_edges.remote)
    assert imbalance(even_edges.vertices) > 0.5
    assert imbalance(quality.vertices) <= 0.05
    assert imbalance(quality.in_edges) <= 0.05
    assert quality.cut <= 1.1 * even_edges.cut
    assert sum(quality.remote) <= sum(even_edges.remote)


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [4, 8])
def test_balanced_against_metis_on_a_social_network(weft_data: Callable[[str], Path], num_parts: int) -> None:
    graph = load(weft_data("topo_soc-Slashdot0902"))
    by_metis = make_book(graph, num_parts, method="metis").quality
    quality = make_book(graph, num_parts, method="balanced").quality
    assert min(quality.remote) / max(quality.remote) > 0.95 > min(by_metis.remote) / max(by_metis.remote)
    assert imbalance(quality.vertices) <= 0.05 < imbalance(by_metis.in_edges)
    assert imbalance(quality.in_edges) <= 0.05
    assert quality.cut <= 1.1 * by_metis.cut


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = two_cliques()
    for num_parts in (0, -1, 9):
        with pytest.raises(InputError) as error:
            make_book(graph, num_parts)
        assert_one_line(error, f"--parts {num_parts}", "8 vertices", "give 1 to 8")
    with pytest.raises(InputError, match="unknown method 'mettis': did you mean 'metis'"):
        make_book(graph, 2, method="mettis")
    with pytest.raises(InputError, match=r"--slack -0\.1: give at least 0"):
        PartitionOptions(slack=-0.1)
    with pytest.raises(InputError, match="unknown --stream 'ids': did you mean 'id'"):
        PartitionOptions(stream="ids")
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(InputError) as error:
        make_book(graph, 2, method="balanced")
    assert_one_line(error, "pymetis is missing", "pip install pymetis", "fennel")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("by_thread", [False, True], ids=["main-thread", "another-thread"])
def test_a_signal_ends_metis(by_thread: bool, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """METIS handles SIGTERM itself and no other signal, so it runs in a fork, which is killed.

    The system may deliver a signal to any thread, and only one in the main thread interrupts a wait of that thread.
    """

    def handle(number: int, _frame: Any) -> None:
        raise Stopped("stopped", number)

    def part_graph(*_: object, **__: object) -> None:
        if not by_thread:
            os.kill(os.getppid(), number)
        time.sleep(20)

    sender = threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), number))
    former = signal.signal(number, handle)
    monkeypatch.setattr("pymetis.part_graph", part_graph)
    start = time.monotonic()
    try:
        if by_thread:
            sender.start()
        with pytest.raises(Stopped):
            metis(load("rmat:60,300"), 8, 0)
    finally:
        sender.cancel()
        signal.signal(number, former)
    assert time.monotonic() - start < 10


def test_a_failure_of_metis_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymetis.part_graph", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(
        RunError, match=r"^METIS was killed by SIGKILL \(out of memory\? choose fennel, range or random\)$"
    ):
        metis(load("rmat:60,300"), 8, 0)
