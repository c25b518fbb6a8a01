"""A graph of which only numbers are known, from a short line, and smaller ones that are like it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.data.graph import Graph
from weft.data.io.generate import QUADRANTS, parse, rmat, whole_number
from weft.data.splits import SHARES, Masks, balanced_classes
from weft.utils.errors import InputError

KIND = "stats"
LEAST_FIRST = 0.1
"""Of R-MAT's chances: with less, hardly an edge falls between the vertices that there are."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Of whose multiples the fractions are spread evenly, however many are taken."""
EXAMPLE = "stats:vertices=111m,edges=1.6b,features=128,classes=172"


@dataclass(frozen=True, kw_only=True)
class DescribedGraph:
    """What is known of a graph that is not there."""

    num_vertices: int
    num_edges: int
    """Stored: of an undirected graph, both ways."""
    num_features: int
    num_classes: int
    train_share: float = SHARES[0]
    """Of the vertices, those that train; a third of them validate, and as many test, where there are so many."""
    quadrants: tuple[float, float, float, float] = QUADRANTS
    """Of R-MAT: see `weft.data.io.generate.QUADRANTS`."""
    seed: int = 0

    @classmethod
    def parse(cls, spec: str, seed: int = 0) -> DescribedGraph:
        """`stats:vertices=111m,edges=1.6b,features=128,classes=172[,train=0.01][,rmat=0.57/0.19/0.19][,seed=0]`.

        InputError, in one line, for what no graph has.
        """
        items = spec.partition(":")[2].split(",")
        chances = [item.partition("=")[2] for item in items if item.partition("=")[0].strip() == "rmat"]
        text = ",".join(item for item in items if item.partition("=")[0].strip() != "rmat")
        needed: dict[str, float | None] = dict.fromkeys(("vertices", "edges", "features", "classes"))
        values = parse(KIND, text, {**needed, "train": SHARES[0], "seed": seed}, example=EXAMPLE)
        found = cls(
            num_vertices=whole_number(KIND, values, "vertices"),
            num_edges=whole_number(KIND, values, "edges"),
            num_features=whole_number(KIND, values, "features"),
            num_classes=whole_number(KIND, values, "classes"),
            train_share=values["train"],
            quadrants=_quadrants(chances[-1]) if chances else QUADRANTS,
            seed=whole_number(KIND, values, "seed"),
        )
        found._require_possible()
        return found

    def _require_possible(self) -> None:
        if self.num_vertices < 1 or self.num_features < 1 or self.num_classes < 1:
            raise InputError(f"{KIND}: vertices, features and classes are at least 1: for example '{EXAMPLE}'")
        if self.num_edges > self.num_vertices**2:
            most = f"{self.num_vertices:,} vertices have at most {self.num_vertices**2:,}"
            raise InputError(f"{KIND}: edges={self.num_edges:,}, and {most}: check both numbers")
        if not 0 < self.train_share <= 1:
            raise InputError(f"{KIND}: train={self.train_share:g} is a share of the vertices: give it above 0, up to 1")

    def generate(self, halvings: int) -> Graph:
        """A graph with half as many vertices and edges, so many times, as R-MAT has them."""
        count = max(1, self.num_vertices >> halvings)
        edges = round(self.num_edges * count / self.num_vertices)
        fields = rmat(vertices=count, edges=edges, seed=self.seed, quadrants=self.quadrants)
        x = torch.ones(1, 1).expand(count, self.num_features)
        y = balanced_classes(count, self.num_classes, self.seed)
        masks = self._masks(fields.in_edges.degree)
        return Graph.of(replace(fields, x=x, y=y, name=KIND, **masks._asdict()))

    def _masks(self, degree: Tensor) -> Masks:
        """Splits that are spread evenly over the vertices' in-degrees, int64 [N], at least one vertex to train on.

        By chance, whether a hub is among the few that train would decide what a step of a small graph reads.
        """
        turn = (torch.arange(len(degree), dtype=torch.float64) * GOLDEN).frac().argsort()
        spread = degree.argsort(stable=True)[turn]
        beside = min(self.train_share * SHARES[1] / SHARES[0], (1 - self.train_share) / 2)
        counts = max(1, round(self.train_share * len(degree))), round(beside * len(degree))
        masks = torch.zeros(3, len(degree), dtype=torch.bool)
        first = 0
        for mask, count in zip(masks, (*counts, counts[1]), strict=True):
            mask[spread[first : first + count]] = True
            first += count
        return Masks(*masks)


def is_described(name: str) -> bool:
    """Whether a graph's name is a line of numbers."""
    return name.partition(":")[0] == KIND and ":" in name


def _quadrants(text: str) -> tuple[float, float, float, float]:
    """Those of 'a/b/c'."""
    try:
        first, second, third = map(float, text.split("/"))
    except ValueError:
        first = second = third = -1.0
    fourth = 1 - first - second - third
    if not (min(first - LEAST_FIRST, second, third) >= 0 and fourth >= -1e-9):
        raise InputError(
            f"{KIND}: rmat={text}: give three chances that add up to at most 1, the first of at least {LEAST_FIRST}, "
            "such as 0.57/0.19/0.19"
        )
    return first, second, third, max(fourth, 0.0)
