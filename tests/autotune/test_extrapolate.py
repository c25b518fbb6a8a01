"""What numbers become on larger graphs and on more ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.autotune import RankEstimate, Samples, extrapolated
from weft.autotune.estimate_time import GraphBytes
from weft.autotune.extrapolate import growth, kinds_of, numbers_of, shrinkage, with_numbers
from weft.cost import Operation, Steps, Trace
from weft.runtime.kernel_call import KernelCall
from weft.strategies import MemoryUse


def work(rows: int, width: int = 64, *, ahead: int = 0) -> RankEstimate:
    """A rank that maps some rows, sends half of them, and adds up their edges, of some before they have come."""
    aggregate = KernelCall("Sum", (10 * rows, rows, 2 * rows, rows, width, 0))
    picked = KernelCall("gather", (rows, 4 * width))
    early = [Operation(kind="aggregate", edges=ahead, ahead=True, calls=(aggregate,))] * bool(ahead)
    operations = (
        Operation(kind="dense", flops=2 * rows * width, calls=(KernelCall("linear", (rows, width, 8), 2),)),
        Operation(kind="collective", tag="halo", bytes_sent=4 * rows, bytes_received=4 * rows, calls=(picked,)),
        *early,
        Operation(kind="aggregate", edges=10 * rows * width, calls=(aggregate,)),
    )
    return RankEstimate(
        steps=[Steps(Trace(operations=operations), 1)],
        untraced_calls=[KernelCall("update", (512,))],
        memory=MemoryUse(9 * rows, 0, 0),
        graph=GraphBytes(8 * rows, rows),
    )


def alike(one: RankEstimate) -> RankEstimate:
    """The same work, its calls in the order in which they are grown."""
    return with_numbers(one, numbers_of(one, kinds_of(one)), kinds_of(one))


def edges_of(one: RankEstimate) -> int:
    return one.steps[0].trace.edges


def test_growth() -> None:
    assert growth([10, 40], 100) == pytest.approx(100)
    assert growth([10, 40, 160], 100) == pytest.approx(100)
    assert growth([64, 64], 100) == 1
    assert growth([64, 65], 100) == 1
    assert growth([100, 200], 16) == pytest.approx(4)
    assert growth([30, 10], 100) == 1  # nothing shrinks as the graph grows
    assert growth([10, 80], 4096) == 4096  # nor does anything outgrow it: what does so on small graphs soon ends
    assert growth([5], 1) == 1
    assert growth([0, 0], 8) == 1


def test_what_ranks_do_to_a_share() -> None:
    """(P - 1) / P of a P-th: what each of P sends in an exchange of all with all."""
    share = [(ranks - 1) / ranks**2 for ranks in (4, 8, 16, 256)]
    assert share[2] * shrinkage(share[:3], 4) == pytest.approx(share[3], rel=0.1)
    assert shrinkage([1, 0.5, 0.25], 4) == pytest.approx(1 / 16)
    assert shrinkage([3, 3, 3], 4) == 1
    assert shrinkage([7], 0) == 1


def test_all_numbers_of_a_step_grow() -> None:
    samples = Samples(by_vertices=[[work(rows)] * 2 for rows in (100, 400)], by_ranks=[[work(400)] * 2])
    assert extrapolated(samples, 8, 2) == [alike(work(3200))] * 2


def test_ranks_differ_as_in_the_last_sample() -> None:
    by_vertices = [[work(rows), work(3 * rows)] for rows in (10, 40)]
    less, more = extrapolated(Samples(by_vertices=by_vertices, by_ranks=by_vertices[-1:]), 4, 2)
    assert [edges_of(one) for one in (less, more)] == [edges_of(work(rows)) for rows in (160, 480)]


def test_more_ranks_do_a_share_each() -> None:
    by_ranks = [[work(1600 // ranks)] * ranks for ranks in (4, 8, 16)]
    found = extrapolated(Samples(by_vertices=[by_ranks[-1]], by_ranks=by_ranks), 1, 64)
    assert len(found) == 64
    assert {edges_of(one) for one in found} == {edges_of(work(25))}


def test_a_chunk_that_exchanges_nothing_on_a_small_graph() -> None:
    """What comes behind grows as it does, whether the smaller graph has that exchange or not."""
    (made,) = (one.trace.operations for one in work(100).steps)
    without = replace(work(100), steps=[Steps(Trace(operations=(*made[:1], *made[2:])), 1)])
    by_vertices = [[without] * 2, [work(400)] * 2]
    assert extrapolated(Samples(by_vertices=by_vertices, by_ranks=by_vertices[-1:]), 8, 2) == [alike(work(3200))] * 2


def test_what_some_ranks_do_not_have_to_do() -> None:
    """An aggregate that begins before rows have come is not there where a rank has no own edges."""
    by_vertices = [[work(rows, ahead=rows), work(rows, ahead=rows * (rows > 100))] for rows in (100, 400)]
    first, second = extrapolated(Samples(by_vertices=by_vertices, by_ranks=by_vertices[-1:]), 8, 2)
    made, other, expected = (one.steps[0].trace.operations for one in (first, second, work(3200)))
    assert len(made) == len(other) == 4
    assert made[-1].edges == expected[-1].edges
