"""A citation-like graph of any size, `cites:`, generated part by part; see docs/decisions/0054.

Papers are numbered in the order of time. Each cites earlier papers: mostly of its own topic or class, partly recent
ones, partly those that many papers cite, so the number of citations has a heavy tail. An edge goes from the citing to
the cited paper. The features of a paper are the mean of its class plus noise; its label is its class, except for a
given share of labels that are flipped, so no model can be more accurate than one minus this share. As in
ogbn-papers100M (Hu et al., Open Graph Benchmark, 2020), few papers are labelled, more of the later ones; the last two
years validate and test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from weft.data.io.graph_parts import EdgesOfPart, GraphParts
from weft.data.splits import CITATIONS, Masks, random_matrix, stream
from weft.runtime.native import _native
from weft.utils.errors import InputError
from weft.utils.recipe import parse, whole_number

TOPIC_PAPERS = 256
"""Number of papers of a topic."""
CLASS_EXPONENT = 0.7
"""The number of topics of the c-th class is proportional to (c + 1)^-0.7, rounded."""
CLASS_DISTANCE = 3.0
"""Distance of two class means in units of the noise."""
PERIODS = (0.89, 0.945)
"""Papers up to the first share train, up to the second validate, and the others test: two years at today's growth."""
VALIDATION_RATIO, TEST_RATIO = 125_265 / 1_207_179, 214_338 / 1_207_179
"""Papers to validate and to test on, per paper to train on, in ogbn-papers100M."""
PART_EDGES = 1 << 22
"""Approximate number of edges of a part."""
PART_NUMBERS = 1 << 25
"""Number of features, or of papers whose labels are drawn, that are generated at once."""
LABELLED, FLIPPED, OTHER_CLASS = range(3)
"""Streams of random numbers: whether a paper is labelled, whether its label is flipped, and to which class."""


def citation_graph(text: str, seed: int) -> CitationGraph:
    """Return the citation-like graph of a recipe.

    Args:
        text: The recipe after `cites:`.
        seed: Seed if the recipe has none.

    Raises:
        InputError: The recipe is invalid.
    """
    defaults = {
        "vertices": None,
        "edges": None,
        "features": None,
        "classes": None,
        "labelled": 1_207_179 / 111_059_956,
        "flipped": 0.1,
        "seed": seed,
    }
    values = parse("cites", text, defaults)
    return CitationGraph(
        num_papers=whole_number("cites", values, "vertices"),
        num_references=whole_number("cites", values, "edges"),
        num_features=whole_number("cites", values, "features"),
        num_classes=whole_number("cites", values, "classes"),
        labelled=values["labelled"],
        flipped=values["flipped"],
        seed=whole_number("cites", values, "seed"),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class CitationGraph:
    """A citation-like graph, of which any part can be generated alone."""

    num_papers: int
    """Number of papers, N."""
    num_references: int
    """Expected number of references; duplicates that cannot be replaced leave fewer, by about one per cent."""
    num_features: int
    """Number of features, F; 0: none."""
    num_classes: int
    """Number of classes, C."""
    labelled: float
    """Share of all papers that are labelled and trained on."""
    flipped: float
    """Share of labels that name another class than the paper's."""
    seed: int
    """Seed of everything."""
    class_of_topic: Tensor = field(init=False)
    """int32 [topics]: class of each topic. Paper v has topic v modulo the number of topics."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_papers < 2**31:
            raise InputError(f"cites: vertices={self.num_papers}: give at least 2, and fewer than 2^31")
        if self.num_references < 1:
            raise InputError("cites: edges=0: give at least 1")
        if not 2 <= self.num_classes <= self.num_papers:
            raise InputError(f"cites: classes={self.num_classes}: give at least 2, and at most one per vertex")
        for name, share in (("labelled", self.labelled), ("flipped", self.flipped)):
            if share > 1:
                raise InputError(f"cites: {name}={share:g} is a share: give at most 1, or 100%")
        num_topics = max(self.num_classes, self.num_papers // TOPIC_PAPERS)
        weights = np.arange(1, self.num_classes + 1) ** -CLASS_EXPONENT
        bounds = np.cumsum(weights) / weights.sum() * (num_topics - self.num_classes)
        sizes = 1 + np.diff(np.rint(bounds).astype(np.int64), prepend=0)
        classes = np.repeat(np.arange(self.num_classes, dtype=np.int32), sizes)
        shuffled = stream(self.seed, CITATIONS).permutation(classes)
        object.__setattr__(self, "class_of_topic", torch.from_numpy(shuffled))

    def parts(self) -> GraphParts:
        """Return the graph in parts, to be gathered in memory or written to a folder."""
        y, masks = self.labels()
        return GraphParts(
            name=f"cites-{self.num_papers}-{self.num_references}",
            edges=self.edges,
            num_vertices=self.num_papers,
            generated=True,
            x=self.features if self.num_features else None,
            y=y,
            masks=masks,
        )

    def edges(self) -> Iterator[EdgesOfPart]:
        """Yield the references in parts, ordered by the citing paper."""
        topics = self.class_of_topic.argsort(stable=True).int()
        first_topics = torch.zeros(self.num_classes + 1, dtype=torch.int64)
        first_topics[1:] = self.class_of_topic.bincount(minlength=self.num_classes).cumsum(0)
        mean = self.num_references / self.num_papers
        at_once = max(1, round(PART_EDGES / mean))
        for first in range(0, self.num_papers, at_once):
            last = min(first + at_once, self.num_papers)
            model = self.seed, self.num_papers, mean, self.class_of_topic, first_topics, topics
            counts, cited = map(torch.from_numpy, _native.cite(*model, first, last, torch.get_num_threads()))
            citing = torch.arange(first, last, dtype=torch.int32).repeat_interleave(counts)
            yield EdgesOfPart(source=citing, target=cited)

    def features(self) -> Iterator[Tensor]:
        """Yield the features in parts, float32 [n, F] for the next n papers each."""
        means = random_matrix(self.num_classes, self.num_features, self.seed, part=1)
        means *= CLASS_DISTANCE / (2 * self.num_features) ** 0.5
        at_once = max(1, PART_NUMBERS // self.num_features)
        for first in range(0, self.num_papers, at_once):
            x = torch.empty(min(at_once, self.num_papers - first), self.num_features)
            _native.paper_features(self.seed, self.class_of_topic, means, first, x, torch.get_num_threads())
            yield x

    def labels(self) -> tuple[Tensor, Masks]:
        """Return the label of each labelled paper, int64 [N], -1 for the others, and the masks of labelled papers."""
        y = torch.full((self.num_papers,), -1, dtype=torch.int64)
        masks = torch.zeros(3, self.num_papers, dtype=torch.bool)
        for first in range(0, self.num_papers, PART_NUMBERS):
            last = min(first + PART_NUMBERS, self.num_papers)
            paper = torch.arange(first, last)
            age = paper.double() / self.num_papers
            period = torch.bucketize(age, torch.tensor(PERIODS, dtype=torch.float64), right=True)
            chosen = self._draws(LABELLED, first, last) < self._labelled_share(age, period)
            classes = self.class_of_topic[paper % len(self.class_of_topic)].long()
            others = (1 + self._draws(OTHER_CLASS, first, last) * (self.num_classes - 1)).long()
            flipped = self._draws(FLIPPED, first, last) < self.flipped
            classes = torch.where(flipped, (classes + others) % self.num_classes, classes)
            y[first:last] = classes.where(chosen, -1)
            for number, mask in enumerate(masks):
                mask[first:last] = chosen & (period == number)
        return y, Masks(*(mask.clone() for mask in masks))

    def _draws(self, stream: int, first: int, last: int) -> Tensor:
        """Return a random number in [0, 1) for each of some papers, float64 [last - first]."""
        uniform = torch.empty(last - first, dtype=torch.float64)
        _native.paper_draws(self.seed, stream, first, uniform, torch.get_num_threads())
        return uniform

    def _labelled_share(self, age: Tensor, period: Tensor) -> Tensor:
        """Return the probability that a paper is labelled.

        It grows linearly within the first period, from 0 to twice its mean if that is possible.

        Args:
            age: Share of papers before each paper, float64 [n].
            period: 0, 1 or 2: whether it would train, validate or test, int64 [n].
        """
        lengths = np.diff(PERIODS, prepend=0, append=1)
        means = [
            min(1.0, self.labelled * ratio / length)
            for ratio, length in zip((1, VALIDATION_RATIO, TEST_RATIO), lengths, strict=True)
        ]
        slope = min(1.0, (1 - means[0]) / means[0]) if means[0] else 0.0
        train = means[0] * (1 + slope * (2 * age / PERIODS[0] - 1))
        return torch.where(period == 0, train, torch.tensor(means, dtype=torch.float64)[period])
