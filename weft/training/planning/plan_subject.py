"""Workloads to estimate: on a graph that exists, or on small graphs from which a larger one is extrapolated."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import NamedTuple

from weft.autotune import HALVINGS, RankEstimate
from weft.data import DescribedGraph, Graph
from weft.nn import Workload
from weft.partition import PartitionBook
from weft.training.flag_checks import open_book

MAX_VERTICES, MAX_EDGES = 1 << 15, 1 << 20
"""Sizes of the largest graph that is generated to extrapolate from."""
MIN_VERTICES_OF_RANK = 16
"""Fewest vertices of a rank on the smallest generated graph."""
MAX_RANKS = 16
"""Most ranks that plans are made for; the estimates of more ranks are extrapolated."""


class PlannedWorkload(NamedTuple):
    """Workload that plans are made for."""

    work: Workload
    find_book: Callable[[str, int, Graph], PartitionBook]
    """Function `open_book` that remembers the partitions of the graph."""


class Point(NamedTuple):
    """Workload and number of ranks of a plan from which a larger one is extrapolated."""

    planned: PlannedWorkload
    ranks: int


class WholeSubject:
    """Workload on a graph that exists: estimated as it is.

    Args:
        work: The model and the graph.
    """

    has_graph = True

    def __init__(self, work: Workload) -> None:
        self.planned = PlannedWorkload(work, cache(open_book))

    def explain(self, ranks: int) -> str:
        """Return an empty note: nothing is extrapolated."""
        del ranks
        return ""


class DescribedSubject:
    """Workload on a graph of which only the sizes are known: extrapolated from R-MAT graphs of the same mean degree.

    Args:
        described: Sizes of the graph.
        make_work: Function that returns the requested workload on a generated graph.
    """

    has_graph = False

    def __init__(self, described: DescribedGraph, make_work: Callable[[Graph], Workload]) -> None:
        self.described, self._make_work = described, make_work
        self._generated = dict[int, PlannedWorkload]()
        self._estimates = dict[Hashable, list[RankEstimate]]()

    def cached(self, key: Hashable, compute: Callable[[], list[RankEstimate]]) -> list[RankEstimate]:
        """Return the estimates that belong to a key. They are computed once, at the first call with this key.

        Args:
            key: Configuration, generated graph and machine of the estimates.
            compute: Function that computes them.
        """
        if key not in self._estimates:
            self._estimates[key] = compute()
        return self._estimates[key]

    def by_vertices(self, ranks: int) -> list[Point]:
        """Return a small and a larger generated graph, each for `ranks` ranks but at most `MAX_RANKS`."""
        return [Point(self._at(halvings), min(ranks, MAX_RANKS)) for halvings in self._halvings(ranks)]

    def fewer_ranks(self, ranks: int) -> list[Point]:
        """Return the larger generated graph on a quarter and half of `MAX_RANKS` ranks, to extrapolate to more.

        Empty if `ranks` is at most `MAX_RANKS`, which needs no extrapolation.
        """
        if ranks <= MAX_RANKS:
            return []
        largest = self._at(self._halvings(ranks)[-1])
        return [Point(largest, MAX_RANKS >> halvings) for halvings in (2, 1)]

    def size_ratio(self, ranks: int) -> float:
        """Return how many times as many vertices the graph has as the largest generated graph."""
        return self.described.num_vertices / (self.described.num_vertices >> self._halvings(ranks)[-1])

    def explain(self, ranks: int) -> str:
        """Return a note about what is extrapolated, from which sizes and how far."""
        sampled = [point.planned.work.stats.num_vertices for point in self.by_vertices(ranks)]
        about = f"on {ranks} rank{'s' if ranks > 1 else ''}, estimated from R-MAT graphs of the described sizes"
        beyond = []
        if self.size_ratio(ranks) > 1:
            sizes = " and ".join(f"{num_vertices:,}" for num_vertices in sampled)
            beyond.append(f"{self.size_ratio(ranks):,.0f} times from graphs of {sizes} vertices")
        if ranks > MAX_RANKS:
            fewer = ", ".join(str(point.ranks) for point in self.fewer_ranks(ranks))
            beyond.append(f"{ranks / MAX_RANKS:g} times from {fewer} and {MAX_RANKS} ranks")
        detail = f"; work, exchanged bytes and memory extrapolated {' and '.join(beyond)}" if beyond else ""
        return about + detail

    def _halvings(self, ranks: int) -> list[int]:
        """Return how often the graph is halved for each generated size, the smaller size first; [0] if it is small."""
        graph, last = self.described, 0
        least = max(MIN_VERTICES_OF_RANK * min(ranks, MAX_RANKS), graph.num_classes) << HALVINGS
        by_edges = MAX_EDGES * graph.num_vertices // max(graph.num_edges, 1)
        while graph.num_vertices >> last > max(min(MAX_VERTICES, by_edges), least):
            last += 1
        return [last + HALVINGS, last] if last else [0]

    def _at(self, halvings: int) -> PlannedWorkload:
        if halvings not in self._generated:
            work = self._make_work(self.described.generate(halvings))
            if self._generated:  # one model for all graphs, so that the memory of its chunks is measured only once
                model = next(iter(self._generated.values())).work.model
                work = Workload(model, work.graph, work.optimisations, num_classes=work.num_classes)
            self._generated[halvings] = PlannedWorkload(work, cache(open_book))
        return self._generated[halvings]


Subject = WholeSubject | DescribedSubject
