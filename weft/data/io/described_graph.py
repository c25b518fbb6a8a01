"""Graphs that are described by their sizes in one line, and smaller generated graphs that resemble them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.data.graph import Graph
from weft.data.io.generate import QUADRANTS, rmat
from weft.data.splits import SHARES, Masks, balanced_classes
from weft.utils.errors import InputError
from weft.utils.recipe import parse, whole_number

KIND = "stats"
MIN_FIRST_QUADRANT = 0.1
"""Smallest R-MAT probability of the first quadrant; below, hardly any edge falls between the existing vertices."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Golden ratio: the fractional parts of its multiples are spread evenly, however many are taken."""
EXAMPLE = "stats:vertices=111m,edges=1.6b,features=128,classes=172"
"""Example of a description, for errors."""


@dataclass(frozen=True, kw_only=True)
class DescribedGraph:
    """Sizes that describe a graph which does not exist as data."""

    num_vertices: int
    """Number of vertices, N."""
    num_edges: int
    """Number of stored edges, E; an undirected edge counts twice."""
    num_features: int
    """Number of features per vertex."""
    num_classes: int
    """Number of classes."""
    train_share: float = SHARES[0]
    """Fraction of the vertices to train on. Validation and test each get a third of it, or less if few remain."""
    quadrants: tuple[float, float, float, float] = QUADRANTS
    """R-MAT probabilities; see `weft.data.io.generate.QUADRANTS`."""
    seed: int = 0
    """Seed of generated graphs."""

    @classmethod
    def parse(cls, spec: str, seed: int = 0) -> DescribedGraph:
        """Parse a description of a graph.

        `stats:vertices=111m,edges=1.6b,features=128,classes=172[,train=0.01][,rmat=0.57/0.19/0.19][,seed=0]`

        Args:
            spec: The description.
            seed: Seed if the description has none.

        Raises:
            InputError: If no graph can have these sizes.
        """
        items = spec.partition(":")[2].split(",")
        chances = [item.partition("=")[2] for item in items if item.partition("=")[0].strip() == "rmat"]
        text = ",".join(item for item in items if item.partition("=")[0].strip() != "rmat")
        needed: dict[str, float | None] = dict.fromkeys(("vertices", "edges", "features", "classes"))
        values = parse(KIND, text, {**needed, "train": SHARES[0], "seed": seed}, example=EXAMPLE)
        described = cls(
            num_vertices=whole_number(KIND, values, "vertices"),
            num_edges=whole_number(KIND, values, "edges"),
            num_features=whole_number(KIND, values, "features"),
            num_classes=whole_number(KIND, values, "classes"),
            train_share=values["train"],
            quadrants=_quadrants(chances[-1]) if chances else QUADRANTS,
            seed=whole_number(KIND, values, "seed"),
        )
        described._require_possible()
        return described

    def _require_possible(self) -> None:
        if self.num_vertices < 1 or self.num_features < 1 or self.num_classes < 1:
            raise InputError(f"{KIND}: vertices, features and classes are at least 1: for example '{EXAMPLE}'")
        if self.num_edges > self.num_vertices**2:
            limit = f"{self.num_vertices:,} vertices have at most {self.num_vertices**2:,}"
            raise InputError(f"{KIND}: edges={self.num_edges:,}, but {limit}: check both numbers")
        if not 0 < self.train_share <= 1:
            raise InputError(
                f"{KIND}: train={self.train_share:g} is a fraction of the vertices: give a number above 0, at most 1"
            )

    def generate(self, halvings: int) -> Graph:
        """Return an R-MAT graph with vertices and edges halved `halvings` times."""
        count = max(1, self.num_vertices >> halvings)
        edges = round(self.num_edges * count / self.num_vertices)
        fields = rmat(vertices=count, edges=edges, seed=self.seed, quadrants=self.quadrants)
        x = torch.ones(1, 1).expand(count, self.num_features)
        y = balanced_classes(count, self.num_classes, self.seed)
        masks = self._masks(fields.in_edges.degree)
        return Graph.of(replace(fields, x=x, y=y, name=KIND, **masks._asdict()))

    def _masks(self, degree: Tensor) -> Masks:
        """Return splits that are spread evenly over the in-degrees, int64 [N], with at least one vertex to train on.

        In a random split of a small graph, it would be chance whether a hub trains, and a step would read much more or
        less.
        """
        sequence = (torch.arange(len(degree), dtype=torch.float64) * GOLDEN).frac().argsort()
        spread = degree.argsort(stable=True)[sequence]
        eval_share = min(self.train_share * SHARES[1] / SHARES[0], (1 - self.train_share) / 2)
        counts = max(1, round(self.train_share * len(degree))), round(eval_share * len(degree))
        masks = torch.zeros(3, len(degree), dtype=torch.bool)
        first = 0
        for mask, count in zip(masks, (*counts, counts[1]), strict=True):
            mask[spread[first : first + count]] = True
            first += count
        return Masks(*masks)


def is_described(name: str) -> bool:
    """Return whether a graph's name is a description by sizes."""
    return name.partition(":")[0] == KIND and ":" in name


def _quadrants(text: str) -> tuple[float, float, float, float]:
    """Return the four R-MAT probabilities from 'a/b/c'; the fourth is the rest to 1."""
    try:
        first, second, third = map(float, text.split("/"))
    except ValueError:
        first = second = third = -1.0
    fourth = 1 - first - second - third
    if not (min(first - MIN_FIRST_QUADRANT, second, third) >= 0 and fourth >= -1e-9):
        raise InputError(
            f"{KIND}: rmat={text}: give three probabilities that add up to at most 1, the first at least "
            f"{MIN_FIRST_QUADRANT}, such as 0.57/0.19/0.19"
        )
    return first, second, third, max(fourth, 0.0)
