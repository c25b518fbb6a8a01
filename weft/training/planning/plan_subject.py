"""What plans are made of: a graph that is there, or small ones that tell of one which is only described."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor

from weft.autotune import HALVINGS, RankEstimate
from weft.config.config import Config
from weft.data import DescribedGraph, Graph
from weft.nn import Workload
from weft.strategies import Options, get_strategy
from weft.training.flag_checks import configured_options, make_options, open_book, with_partition

MOST_VERTICES, MOST_EDGES = 1 << 15, 1 << 20
"""Of the largest graph that is drawn."""
LEAST_OF_A_RANK = 16
"""Vertices, on the smallest graph."""
MOST_RANKS = 16
"""That plans are made for; what more do is extrapolated as well."""


class Parts:
    """The partitions of a graph that plans ask for, each found once."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.found = graph, dict[tuple[str, int], Tensor]()

    def options(self, config: Config) -> Options:
        """What a configuration says to its strategy, with its partition."""
        options, name = make_options(config), config.partition or get_strategy(config.strategy).partition
        if not name or "partition" not in configured_options(get_strategy(config.strategy)):
            return options
        if (name, config.workers) not in self.found:
            self.found[name, config.workers] = open_book(name, config.workers, self.graph).part
        return with_partition(options, self.found[name, config.workers])


class PlannedWorkload(NamedTuple):
    """A workload as a plan is made of it, and the partitions of its graph."""

    work: Workload
    parts: Parts


class Point(NamedTuple):
    """What a plan is made of to learn of a larger one."""

    known: PlannedWorkload
    ranks: int


class WholeSubject:
    """A workload of which is told what it takes."""

    is_there = True

    def __init__(self, work: Workload) -> None:
        self.whole = PlannedWorkload(work, Parts(work.graph))

    def explain(self, ranks: int) -> str:
        """What was extrapolated: nothing."""
        del ranks
        return ""


class DescribedSubject:
    """A workload on a graph that is only described: small R-MAT graphs of the same mean degree tell what it takes.

    work: the workload of a graph, as the configuration asks for it.
    """

    is_there = False

    def __init__(self, described: DescribedGraph, work: Callable[[Graph], Workload]) -> None:
        self.described, self._work = described, work
        self._drawn = dict[int, PlannedWorkload]()
        self._found = dict[Hashable, list[RankEstimate]]()

    def found(self, what: Hashable, find: Callable[[], list[RankEstimate]]) -> list[RankEstimate]:
        """What is found out on one of these graphs, once for all machines on which it is the same."""
        if what not in self._found:
            self._found[what] = find()
        return self._found[what]

    def by_vertices(self, ranks: int) -> list[Point]:
        """A graph and a larger one, for so many ranks or what stands for them."""
        return [Point(self._at(halvings), min(ranks, MOST_RANKS)) for halvings in self._halvings(ranks)]

    def fewer_ranks(self, ranks: int) -> list[Point]:
        """The largest of these for half as many ranks, and half of those, where there are too many; ascending."""
        if ranks <= MOST_RANKS:
            return []
        largest = self._at(self._halvings(ranks)[-1])
        return [Point(largest, MOST_RANKS >> halvings) for halvings in (2, 1)]

    def times(self, ranks: int) -> float:
        """How many times the vertices of the largest the graph has."""
        return self.described.num_vertices / (self.described.num_vertices >> self._halvings(ranks)[-1])

    def explain(self, ranks: int) -> str:
        """What was extrapolated, from which sizes and how far."""
        found = [point.known.work.stats.num_vertices for point in self.by_vertices(ranks)]
        about = f"on {ranks} rank{'s' if ranks > 1 else ''}, R-MAT graphs in place of the one described"
        beyond = []
        if self.times(ranks) > 1:
            sizes = " and ".join(f"{one:,}" for one in found)
            beyond.append(f"{self.times(ranks):,.0f} times from graphs of {sizes} vertices")
        if ranks > MOST_RANKS:
            fewer = ", ".join(str(point.ranks) for point in self.fewer_ranks(ranks))
            beyond.append(f"{ranks / MOST_RANKS:g} times from {fewer} and {MOST_RANKS} ranks")
        said = f"; work, rows that cross and memory extrapolated {' and '.join(beyond)}" if beyond else ""
        return about + said

    def _halvings(self, ranks: int) -> list[int]:
        """How often the graph is halved for each size; not at all where it is small enough itself."""
        graph, last = self.described, 0
        least = max(LEAST_OF_A_RANK * min(ranks, MOST_RANKS), graph.num_classes) << HALVINGS
        by_edges = MOST_EDGES * graph.num_vertices // max(graph.num_edges, 1)
        while graph.num_vertices >> last > max(min(MOST_VERTICES, by_edges), least):
            last += 1
        return [last + HALVINGS, last] if last else [0]

    def _at(self, halvings: int) -> PlannedWorkload:
        if halvings not in self._drawn:
            work = self._work(self.described.drawn(halvings))
            if self._drawn:  # of one model, plans for each of the graphs know what chunks take
                model = next(iter(self._drawn.values())).work.model
                work = Workload(model, work.graph, work.optimisations, num_classes=work.num_classes)
            self._drawn[halvings] = PlannedWorkload(work, Parts(work.graph))
        return self._drawn[halvings]


Subject = WholeSubject | DescribedSubject
