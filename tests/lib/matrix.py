"""The matrix of cases: strategy x case x number of ranks x settings, and a small subset that contains every pair.

The matrix is generated from the registries: strategies and their options and optimisations, models, partitioners. A
new entry is included automatically; only a new option of a strategy needs values to try, in `VALUES`.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from tests.lib.cases import (
    EXACT,
    MACHINE,
    Case,
    cases,
    converted_cases,
    custom_cases,
    labelled_cases,
    pyg_cases,
    typed_cases,
)
from tests.lib.environment import EVERY_CASE
from tests.lib.pairwise import PAIRS, Properties, choose, hash_of, param
from tests.lib.session import Given, part_by, workload
from weft.config.optimisations import Optimisations
from weft.nn import MODELS
from weft.partition import METHODS
from weft.strategies import STRATEGIES, get_strategy
from weft.strategies.tensor.plan import TensorPlan

MINIBATCH = ["split", "sampled"]
"""Strategies that are compared with `split` on one rank, see test_minibatches.py."""
WEFT_MODELS = (*MODELS, "rgcn")
"""Models of weft. The quick set combines only these with each optimisation of the model."""
FOREIGN = ("tensor", "hybrid", "offload", "pipeline", "split")
"""Strategies under which models of PyG and of users run. Their code contains the others': hybrid fetches some rows and
caches others, split samples and exchanges. The quick set runs each model under one of them, drawn by a hash."""
SIZES = (1, 2, 3, 4)
"""Numbers of ranks."""
VALUES: dict[str, tuple[Any, ...]] = {
    "chunks": (None, 1, 3, 8),  # on three ranks, eight chunks are about one for each row
    "device_memory": (*[None] * 15, "limit"),  # resolved when the test runs; a plan under a limit takes a second
    "intermediates": (None, "recompute", "keep"),
    "partition": (None, *sorted(METHODS)),
    "cache_ratio": (None, 0.25, 0.75),
    "cache_memory": (*[None] * 3, 2000),
}
"""Values to try for each option of a strategy. None: the default."""
BATCH_VALUES: dict[str, tuple[Any, ...]] = {"sampling": (None, "labor"), "partition": (None, "metis")}
"""Values of the options of mini-batches."""
IN_CHUNKS = {"offload": 3, "pipeline": 3}
"""Number of chunks for strategies whose default would run so small a graph in one chunk."""
FIXED = {"device", "scratch"}
"""Options that only change where rows and files are stored; tests/storage and tests/training/test_gpu.py vary them."""
WITHOUT_EFFECT = {"capture", "pages"}
"""Optimisations that these tests cannot observe: CUDA graphs, and which memory is reused."""
OF_ALL_STRATEGIES = [
    field.name
    for field in fields(Optimisations)
    if field.name not in WITHOUT_EFFECT and not any(field.name in plan.optimisations for plan in STRATEGIES.values())
]
"""Optimisations of the model, which every strategy has. The others are settings of their strategies."""
IN_FILES = 1 << 40
"""A limit of device memory that is never reached. With any limit, strategies in chunks keep rows in files."""


@dataclass(frozen=True)
class Point:
    """A case under a strategy, on `size` ranks, with option values other than the defaults."""

    strategy: str
    case: Case
    size: int
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Identifier of the test."""
        words = [f"{option}_{value}" for option, value in self.options]
        return "-".join([self.strategy, self.case.id, *words, f"P{self.size}"])

    def resolved(self) -> tuple[Case, Given]:
        """Return the case, without the disabled optimisation, and the options in the form that a plan takes."""
        options = dict(self.options)
        case = without(self.case, options.pop("without", None))
        if "partition" in options:
            options["partition"] = part_by(options["partition"], case, self.size)
        if "device_memory" in options:
            options["device_memory"] = 2 * least_limit(case, self.size) if self.strategy == "tensor" else IN_FILES
        return case, Given(machine=MACHINE, **options)

    @property
    def cost(self) -> float:
        """Estimated time of the case; 1 is a case on two ranks that share the work."""
        several = self.strategy in (*IN_CHUNKS, *MINIBATCH)
        search = 4.0 if self.strategy == "tensor" and ("device_memory", "limit") in self.options else 0.0
        return search + ((1.8, 2.0, 2.8, 3.6) if several else (0.8, 1.0, 1.2, 2.0))[self.size - 1]

    def properties(self) -> Properties:
        """Return the properties that `choose` combines. On one rank nothing is exchanged, so only the size matters."""
        if self.size == 1:
            return {"strategy": [self.strategy], "ranks": ["1"]}
        of_weft = self.case.model in WEFT_MODELS
        if not of_weft:
            first = hash_of(self.case.family, len(FOREIGN))
            if self.strategy != FOREIGN[first]:
                return {}
        option_values = [f"{option} {value}" for option, value in self.options]
        of_all = [f"without {name}" for name in OF_ALL_STRATEGIES if of_weft and ("without", name) in self.options]
        return {
            "strategy": [self.strategy],
            "model": [self.case.family],
            "option": [*self.case.options, *of_all],
            "setting": option_values,
            "ranks": [str(self.size)],
            "graph": self.case.graph_kinds,
        }


def all_cases() -> list[Case]:
    """Return every case that an exact strategy is compared on."""
    return [*cases(), *typed_cases(), *pyg_cases(), *converted_cases(), *custom_cases(), *labelled_cases()]


def settings(strategy: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each option of a strategy; None is the default. `without`: the disabled optimisation.

    Raises:
        AssertionError: an option has no values here; the message names it.
    """
    kind = get_strategy(strategy)
    values = BATCH_VALUES if strategy in MINIBATCH else VALUES
    varied = {}
    for field in fields(kind.options_type):
        if field.name in values:
            varied[field.name] = values[field.name]
        else:
            assert strategy in MINIBATCH or field.name in FIXED, f"tests/lib/matrix.py: VALUES lacks {field.name!r}"
    left_out = [name for name in kind.optimisations if name not in WITHOUT_EFFECT]
    return {**varied, "without": (None, *left_out, *OF_ALL_STRATEGIES)}


def points_of(strategy: str) -> Iterator[Point]:
    """Yield every case on every number of ranks: with default options, and with options drawn by a hash."""
    kind, varied = get_strategy(strategy), settings(strategy)
    for case, size in product(all_cases(), SIZES):
        if size > (kind.max_ranks or size) or (strategy in MINIBATCH and size == 1):
            continue
        usual = {"chunks": IN_CHUNKS[strategy]} if strategy in IN_CHUNKS else {}
        yield Point(strategy, case, size, tuple(usual.items()))
        key = f"{strategy}-{case.id}-P{size}"
        drawn = {option: values[hash_of(f"{key}-{option}", len(values))] for option, values in varied.items()}
        if size == 1:
            drawn.pop("partition", None)
        options = usual | {option: value for option, value in drawn.items() if value is not None}
        if options != usual:
            yield Point(strategy, case, size, tuple(options.items()))


@cache
def universe() -> dict[str, Point]:
    """Return all points by name: what `pytest -m ""` runs."""
    return {point.name: point for strategy in (*EXACT, *MINIBATCH) for point in points_of(strategy)}


@cache
def quick() -> dict[str, Point]:
    """Return the points of the quick set: each pair of properties occurs in at least one of them."""
    every = universe()
    properties = {name: point.properties() for name, point in every.items()}
    return {name: every[name] for name in choose(properties, {name: point.cost for name, point in every.items()})}


@cache
def full() -> set[str]:
    """Return the names of the points in full depth.

    One for each pair of a strategy and a model of weft, and one for each other model: a layer of PyG or a converted
    model consists of the same operations, so one strategy suffices for the checks that only full depth contains.
    """
    first: dict[tuple[str, str], str] = {}
    for name, point in sorted(quick().items(), key=lambda item: hash_of(item[0])):
        if point.size > 1 and point.strategy != "sampled":  # which is `split` without exchanges
            strategy = point.strategy if point.case.model in WEFT_MODELS else ""
            first.setdefault((strategy, point.case.family), name)
    return set(first.values())


def params(strategies: list[str]) -> list[Any]:
    """Return a test's parameters (point, full) for some strategies; points outside the quick set are marked slow.

    Slow points are left out if only quick tests run, since collecting thousands of cases takes seconds.
    """
    points = universe() if EVERY_CASE in os.environ else quick()
    return [
        param(point, name in full(), name=name, quick=name in quick())
        for name, point in points.items()
        if point.strategy in strategies
    ]


def without(case: Case, optimisation: str | None) -> Case:
    """Return the case without one more optimisation, if any."""
    return replace(case, without=",".join(filter(None, (case.without, optimisation))))


def least_limit(case: Case, size: int) -> int:
    """Return the smallest limit of device memory under which `tensor` can run a case in chunks."""
    return TensorPlan(workload(case), size).least_bytes()


def page() -> str:
    """Return a page that lists, for each strategy, the values of every property in the quick set."""
    lines = [
        "# Quick cases of the matrix",
        "",
        "Generated by `python -m tests.lib.matrix`; do not edit.",
        f"Of {len(universe()):,} combinations of strategy, case, number of ranks and settings, `make test` runs the",
        f"{len(quick()):,} that contain each pair of",
        "",
        *[f"- {first} and {second}," for first, second in PAIRS],
        "",
        f"at least once. {len(full())} run in full depth: one for each strategy and model, and for each layer of PyG.",
        "The number of cases stands behind each value.",
    ]
    for strategy in (*EXACT, *MINIBATCH):
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for point in quick().values():
            if point.strategy == strategy:
                for kind, values in point.properties().items():
                    counts[kind].update(values)
        lines += ["", f"## {strategy}", ""]
        for kind in ("model", "option", "setting", "ranks", "graph"):
            values = ", ".join(f"{value} {count}" for value, count in sorted(counts[kind].items()))
            lines.append(f"- {kind}: {values or 'none'}")
    return "\n".join(lines) + "\n"


PAGE = Path(__file__).parents[1] / "MATRIX.md"

if __name__ == "__main__":
    PAGE.write_text(page())
