"""Padded rows: results do not change if dense layers and gradients pad all rows to whole cache lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
from torch import Tensor

from tests.lib.cases import MACHINE, Case
from tests.lib.pairwise import param
from tests.lib.ranks import on_ranks
from tests.lib.session import Given, check_case, reference
from weft.comm import Group
from weft.kernels import cpu
from weft.nn.layers import linear_transform
from weft.runtime.memory import alignment

CASES = [
    Case(model="gcn", weighted=True),
    Case(model="gcn", decoupled=True),
    Case(model="sage", norm="batch", residual=True),
    Case(model="gin"),
    Case(model="gat"),
]
STRATEGIES = ["single", "tensor", "communicated", "hybrid", "pipeline", "offload"]


def test_no_row_is_padded_without_alignment() -> None:
    case = replace(CASES[0], without="lines")
    reference(case)
    with padded_rows() as padded:
        check_case(Group(), case, "single")
    assert not padded


@contextmanager
def padded_rows() -> Iterator[list[Tensor]]:
    """Pad all rows to whole cache lines; yield the padded rows that sums over edges read."""
    padded: list[Tensor] = []
    readable = alignment.readable_width

    def recorded_width(x: Tensor) -> int:
        padded.extend([x] * (not x.is_contiguous()))
        return readable(x)

    def padded_width(width: int, itemsize: int) -> int:
        line = alignment.LINE_BYTES // itemsize
        return -(-width // line) * line

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(alignment, "row_stride", padded_width)
        patched.setattr(linear_transform, "row_stride", padded_width)
        patched.setattr(cpu, "readable_width", recorded_width)
        yield padded


@pytest.mark.parametrize(
    ("case", "name"),
    [
        param(case, name, name=f"{name}-{case.id}", quick=(first + second) % 2 == 0)
        for (first, case), (second, name) in product(enumerate(CASES), enumerate(STRATEGIES))
    ],
)
def test_equals_single(case: Case, name: str) -> None:
    reference(case)
    on_ranks(1 if name == "single" else 2, check_padded, case, name)


def check_padded(group: Group, case: Case, name: str) -> None:
    with padded_rows() as padded:
        check_case(group, case, name, Given(machine=MACHINE))
    if case.model == "gcn" and not case.decoupled and name in ("single", "hybrid"):
        assert padded
