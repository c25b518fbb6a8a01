"""What plans are made of: a graph that is there, or small ones that tell of one which is only described."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from weft.core.config import Config
from weft.data import DescribedGraph, Graph
from weft.engine.options import configured_options, make_options, open_book, with_partition
from weft.nn import Workload
from weft.strategies import Options, get_strategy

SIZES = 3
"""Graphs, each half of the next, from which one grows."""
MOST_VERTICES, MOST_EDGES = 1 << 15, 1 << 20
"""Of the largest graph that is drawn."""
MOST_BLOCKS = 1 << 21
"""Vertices times ranks: what planning takes grows with it."""
LEAST_OF_A_RANK = 4
"""Vertices, on the smallest graph."""
MOST_TOLD = 8
"""Ranks of which it is found out what they do; the others do what the nearest of these does."""


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


class Known(NamedTuple):
    """A workload as a plan is made of it, and the partitions of its graph."""

    work: Workload
    parts: Parts


class Subject:
    """A workload of which is told what it takes: itself, which is known, or what small ones tell of it."""

    described: DescribedGraph | None = None

    def __init__(self, work: Workload) -> None:
        self._known = [Known(work, Parts(work.graph))]

    def known(self, ranks: int) -> list[Known]:
        """The workloads of which plans are made for so many ranks, ascending, each of twice the one before."""
        del ranks
        return self._known

    def times(self, ranks: int) -> float:
        """How many times the vertices of the last of these the workload's graph has."""
        del ranks
        return 1.0

    def most_told(self, ranks: int) -> int:
        """Of how many ranks it is found out what they do."""
        return ranks

    def explain(self, ranks: int) -> str:
        """What was extrapolated, from which sizes and how far; '': nothing."""
        del ranks
        return ""


class DescribedSubject(Subject):
    """What small R-MAT graphs of the same mean degree tell of a described one.

    work: the workload of a graph, as the configuration asks for it.
    """

    described: DescribedGraph

    def __init__(self, described: DescribedGraph, work: Callable[[Graph], Workload]) -> None:
        self.described, self._work = described, work
        self._drawn = dict[int, Known]()

    def known(self, ranks: int) -> list[Known]:
        return [self._at(halvings) for halvings in self._halvings(ranks)]

    def times(self, ranks: int) -> float:
        return self.described.num_vertices / (self.described.num_vertices >> self._halvings(ranks)[-1])

    def most_told(self, ranks: int) -> int:
        return MOST_TOLD if self.times(ranks) > 1 else ranks

    def explain(self, ranks: int) -> str:
        if self.times(ranks) == 1:
            return ""
        sizes = [f"{one.work.stats.num_vertices:,}" for one in self.known(ranks)]
        ranks_told = f", {self.most_told(ranks)} ranks of {ranks} looked at" if ranks > self.most_told(ranks) else ""
        return (
            f"{ranks} ranks: work, halos and memory extrapolated from R-MAT graphs of {', '.join(sizes)} vertices, "
            f"{self.times(ranks):,.0f} times smaller at least{ranks_told}"
        )

    def _halvings(self, ranks: int) -> list[int]:
        """How often the graph is halved for each size; once and not at all where that is small enough itself."""
        graph, last = self.described, 0
        least = max(LEAST_OF_A_RANK * ranks, graph.num_classes) << (SIZES - 1)
        by_edges = MOST_EDGES * graph.num_vertices // max(graph.num_edges, 1)
        most = max(min(MOST_VERTICES, MOST_BLOCKS // ranks, by_edges), least)
        while graph.num_vertices >> last > most:
            last += 1
        return [last + more for more in reversed(range(SIZES))] if last else [0]

    def _at(self, halvings: int) -> Known:
        if halvings not in self._drawn:
            graph = self.described.drawn(halvings)
            self._drawn[halvings] = Known(self._work(graph), Parts(graph))
        return self._drawn[halvings]
