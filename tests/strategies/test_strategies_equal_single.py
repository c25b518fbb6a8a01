"""The parity matrix: every exact strategy x every model x P, in one spawn per P."""

from __future__ import annotations

import pytest
from parity import EXACT, Case, Session, cases, check_case, planted_error, pyg_cases
from ranks import spawn

from weft.comm import Group
from weft.core.errors import InputError
from weft.strategies import STRATEGIES


def check_all(group: Group) -> int:
    checked = 0
    for name in EXACT:
        for case in cases():
            check_case(group, case, name)
            checked += 1
        for case in pyg_cases():
            if STRATEGIES[name].view_type.no_block:
                with pytest.raises(InputError, match=r"view\.block"):
                    Session(case, name, group).trace(group.rank, group.size, training=True)
            else:
                check_case(group, case, name)
            checked += 1
    for name in EXACT if group.size > 1 else ():
        with planted_error(name), pytest.raises(AssertionError, match=r"logits|gradient"):
            check_case(group, Case(model="gcn"), name)
    return checked


def test_single_equals_itself_in_another_order() -> None:
    reordered = [case for case in cases() if case.order != "none"]
    assert reordered
    for case in reordered:
        check_case(Group(), case, "single")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_single(size: int) -> None:
    assert spawn(size, check_all) == [len(EXACT) * len(cases() + pyg_cases())] * size
