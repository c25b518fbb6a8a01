"""The quick set contains every pair of properties that any case contains, without a list of models or options."""

from __future__ import annotations

from itertools import product

import pytest

from tests.lib.cases import EXACT, EXAMPLE_STRATEGIES
from tests.lib.matrix import PAGE, VALUES, full, page, quick, settings, universe
from tests.lib.pairwise import choose, pairs_of
from weft.nn import MODELS


def test_the_quick_set_contains_every_pair() -> None:
    every = {pair for point in universe().values() for pair in pairs_of(point.properties())}
    assert every == {pair for point in quick().values() for pair in pairs_of(point.properties())}
    assert full() <= quick().keys()


def test_every_model_runs_in_full_depth_under_every_strategy() -> None:
    """Every model of weft runs under every strategy, every other model under some strategy."""
    points = [quick()[name] for name in full()]
    pairs = {(point.strategy, point.case.model) for point in points}
    assert pairs >= set(product((*EXACT, "split"), (*MODELS, "rgcn"))) - set(product(EXAMPLE_STRATEGIES, ["rgcn"]))
    assert {point.case.family for point in points} == {point.case.family for point in quick().values()}


def test_a_pair_that_only_one_candidate_contains_is_chosen() -> None:
    candidates = {
        f"{strategy}-{model}": {"strategy": [strategy], "model": [model], "option": ["x"] if model == "m3" else []}
        for strategy in ("a", "b")
        for model in ("m1", "m2", "m3")
    }
    costs = dict.fromkeys(candidates, 1.0)
    assert set(choose(candidates, costs)) == set(candidates)


def test_of_two_that_contain_the_same_the_cheaper_is_chosen() -> None:
    same = {"cheap": {"strategy": ["a"], "model": ["m"]}, "dear": {"strategy": ["a"], "model": ["m"]}}
    assert choose(same, {"cheap": 1.0, "dear": 2.0}) == ["cheap"]


def test_an_option_without_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(VALUES, "chunks")
    with pytest.raises(AssertionError, match=r"VALUES lacks 'chunks'"):
        settings("offload")


def test_the_page_lists_todays_cases() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.lib.matrix`"
