"""Dataclasses from JSON: the types of all values are checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.utils.files.json_types import from_json, has_type


@dataclass(frozen=True, kw_only=True)
class Example:
    count: int
    score: float | None = None
    names: list[dict[str, Any]] = field(default_factory=list)


def test_valid_values() -> None:
    assert from_json(Example, {"count": 1, "score": 2, "names": [{"a": [1]}]}) == Example(
        count=1, score=2, names=[{"a": [1]}]
    )
    assert from_json(Example, {"count": 1, "score": None}).score is None


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"count": True},
        {"count": 1.0},
        {"count": 1, "score": "x"},
        {"count": 1, "names": [1]},
        {"count": 1, "more": 1},
    ],
)
def test_other_values_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"its count|its score|its names|Example"):
        from_json(Example, values)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [({"a": 1}, dict[str, int], True), ({"a": "b"}, dict[str, int], False), (False, float, False), (1, float, True)],
)
def test_types(value: Any, kind: Any, expected: bool) -> None:
    assert has_type(value, kind) is expected
