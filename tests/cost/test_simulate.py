"""Steps whose seconds can be told by hand: cores that are shared, ranks that wait, work while rows cross."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cost import Disk, Network, Operation, Prices, PriceTable, Trace
from weft.cost.profile import COLLECTIVES
from weft.cost.simulate import NO_WORK, Hosts, StepTime, WorkSeconds, finish_times, simulate
from weft.cost.trace import transfer
from weft.runtime.kernel_call import KernelCall

CROSSING = 0.5
NETWORK = Network(ranks=2, hosts=1, tables=dict.fromkeys(COLLECTIVES, PriceTable(axes=((1.0,),), seconds=(CROSSING,))))


def hosts(ranks_each: int, slots: int = 2) -> Hosts:
    """Kernels take 1 s a flop, 2 s where all cores are at work, messages half a second, files 3 and 4 s a byte."""
    alone, busy = (
        Prices(ranks=ranks, threads=1, tables={"linear": PriceTable(axes=((1.0,),) * 3, seconds=(seconds,))})
        for ranks, seconds in ((1, 1.0), (2, 2.0))
    )
    return Hosts(
        ranks_each=ranks_each,
        slots=slots,
        alone=alone,
        busy=busy,
        network=NETWORK,
        disk=Disk(read=3.0, write=4.0),
    )


def work(seconds: int, *, ahead: bool = False) -> Operation:
    return Operation(kind="dense", calls=(KernelCall("product", (seconds,)),), ahead=ahead)


MEETING = Operation(kind="collective", tag="halo", bytes_sent=1, bytes_received=1)


def step(*ranks: list[Operation], each: int, slots: int = 2) -> StepTime:
    traces = [Trace(operations=tuple(operations)) for operations in ranks]
    return simulate(traces, [[] for _ in ranks], hosts(each, slots))


def test_alone() -> None:
    found = step([work(3), work(4)], each=1)
    assert (found.total, found.compute, found.network, found.waiting) == (7, 7, 0, 0)


def test_the_slowest_is_waited_for() -> None:
    """On hosts of their own: 5 s until both are there, half a second of network, then 2 and 1."""
    found = step([work(5), MEETING, work(1)], [work(2), MEETING, work(2)], each=1)
    assert (found.total, found.network, found.waiting) == (7.5, 0.5, 3)
    assert found.compute == 6


def test_ranks_of_a_host_slow_each_other() -> None:
    """Two on two cores take twice as long until one is done; four on two cores four times."""
    assert step([work(3)], [work(3)], each=2).total == pytest.approx(6)
    assert step([work(3)], [work(1)], each=2).total == pytest.approx(2 + 2)
    assert step(*[[work(3)]] * 4, each=4).total == pytest.approx(12)


def test_ranks_keep_to_their_cores() -> None:
    """Of four on two cores that do not slow each other, the first two share one, whatever the others do."""
    alike = replace(hosts(4), busy=hosts(4).alone)
    one, two = WorkSeconds(1.0, 1.0), WorkSeconds(2.0, 2.0)
    assert finish_times([one, one, NO_WORK, NO_WORK], [0.0] * 4, alike) == [2, 2, 0, 0]
    assert finish_times([one, NO_WORK, one, NO_WORK], [0.0] * 4, alike) == [1, 0, 1, 0]
    assert finish_times([two, one, two, NO_WORK], [0.0] * 4, alike) == [3, 2, 2, 0]


def test_work_while_rows_cross() -> None:
    """What is longer than the crossing hides it; what is shorter leaves the rest of it."""
    long = step([work(1), MEETING, work(2, ahead=True), work(1)], [work(1), MEETING], each=1)
    assert (long.total, long.network) == (4, 0)
    bare = step([work(1), MEETING, work(2), work(1)], [work(1), MEETING], each=1)
    assert (bare.total, bare.network) == (4.5, 0.5)


def beside(seconds: float) -> Network:
    """Where an exchange of half a second, and half a second's work begun with it, take so long."""
    exchanges = {
        "all_to_all": PriceTable(axes=((1.0, 4.0, 8.0),), seconds=(CROSSING, CROSSING, 0.1)),
        "all_to_all_beside": PriceTable(axes=((1.0, 4.0),), seconds=(seconds, seconds)),
    }
    return replace(NETWORK, tables={**NETWORK.tables, **exchanges})


@pytest.mark.parametrize(("seconds", "share"), [(0.5, 1.0), (0.75, 0.5), (1.0, 0.0), (1.5, 0.0), (0.4, 1.0)])
def test_what_of_a_crossing_goes_on_beside_work(seconds: float, share: float) -> None:
    """All of it where both take no longer than one; nothing where they take as long as one after the other."""
    network = beside(seconds)
    assert [network.overlapped_share("halo", size) for size in (0, 1, 3, 100)] == pytest.approx([share] * 4)
    assert network.overlapped_share("gradients", 1) == 1.0
    assert NETWORK.overlapped_share("halo", 1) == 1.0


def test_work_takes_its_core_from_what_crosses() -> None:
    """Half of the shorter is not hidden: however long the work, a quarter of a second."""
    halved = replace(hosts(1), network=beside(0.75))

    def taken(*operations: Operation) -> StepTime:
        return simulate([Trace(operations=operations), Trace(operations=(MEETING,))], [[], []], halved)

    long = taken(MEETING, work(2, ahead=True), work(1))
    assert (long.total, long.network, long.compute) == (3.25, 0.25, 3)
    short = taken(MEETING, work(1, ahead=True))
    assert (short.total, short.network) == (1.25, 0.25)
    assert taken(MEETING, work(1)).total == 1.5


@pytest.mark.parametrize(("seconds", "left"), [(0.5, 0.1), (0.75, 0.25), (1.0, 0.5)])
def test_messages_that_leave_beside_work(seconds: float, left: float) -> None:
    """Of five messages the last one at least, and what of the others the work has not hidden."""
    sent = replace(MEETING, messages=5, ahead=True)
    trace = Trace(operations=(work(1), sent))
    assert simulate([trace] * 2, [[], []], replace(hosts(1), network=beside(seconds))).total == pytest.approx(1 + left)


def test_batches_that_are_made_ahead() -> None:
    """Beside the step where a core is free, in which the longer one counts; else one after the other."""
    made = replace(work(3), prefetched=True)
    assert (step([made, work(2)], each=1).total, step([made, work(4)], each=1).total) == (3, 4)
    alone = step([made, work(2)], each=1, slots=1)
    assert (alone.total, alone.compute, alone.network) == (10, 10, 0)  # a rank on all cores
    asking = replace(MEETING, prefetched=True)
    both = step(*[[made, asking, work(2)]] * 2, each=2)
    assert (both.total, both.compute, both.network) == pytest.approx((6 + CROSSING + 4, 6 + CROSSING + 4, 0))


def test_a_batch_costs_no_second_step() -> None:
    one = replace(hosts(1), alone=replace(hosts(1).alone, step_seconds=7.0))
    made = replace(work(3), prefetched=True)
    assert simulate([Trace(operations=(made,))], [[]], replace(one, slots=1, busy=one.alone)).total == 3 + 7


@pytest.mark.parametrize(
    ("before", "ahead", "total"),
    [
        (3, True, 3 + 5 * 0.25 + 0.1),  # the last of five
        (0, True, 5 * 0.25 + 0.5),  # nothing is worked on meanwhile
        (3, False, 3 + 5 * 0.25 + 0.5),  # all leave in the end
    ],
)
def test_messages_cross_beside_work_and_take_some(before: int, ahead: bool, total: float) -> None:
    """Each of five costs a quarter of a second, and ranks do not meet for them."""
    network = replace(NETWORK, collective_seconds=9.0, message_seconds=0.25)
    messages = replace(MEETING, messages=5, ahead=ahead)
    one = replace(hosts(1), network=network)
    assert simulate([Trace(operations=(work(before), messages))], [[]], one).total == pytest.approx(total)


def test_what_a_rank_does_for_a_collective_is_not_hidden() -> None:
    """The crossing is, by the two seconds of work that go on meanwhile; before that, a quarter is its own."""
    one = replace(hosts(1), network=replace(NETWORK, collective_seconds=0.25))
    found = simulate([Trace(operations=(work(1), MEETING, work(2, ahead=True)))], [[]], one)
    assert (found.total, found.network) == (1 + 0.25 + 2, 0)


def test_begins_count() -> None:
    """The second begins when the first has done half: 2 s alone, then both at half speed."""
    one = WorkSeconds(4.0, 8.0)
    assert finish_times([one, WorkSeconds(1.0, 2.0)], [0.0, 2.0], hosts(2)) == pytest.approx([5.0, 4.0])


def test_different_collectives_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="different collectives"):
        step([MEETING], [work(1)], each=1)


def test_work_that_a_late_clock_cannot_tell() -> None:
    """Once, this went on for ever."""
    assert finish_times([WorkSeconds(1e-9, 1e-9), WorkSeconds(1.0, 1.0)], [1e9, 1e9], hosts(2)) == pytest.approx(
        [1e9, 1e9 + 1]
    )


def test_files_are_waited_for_by_each_rank() -> None:
    """Two bytes read and one written: 10 s, however many are at work, beside 2 s of kernels where two are."""
    moved = Operation(kind="transfer", tag="rows", bytes_sent=1, bytes_received=2)
    found = step([moved, work(1)], [moved, work(1)], each=2)
    assert (found.total, found.disk, found.compute) == (12, 10, 2)
    link = Prices(ranks=1, threads=1, tables={}, link_seconds=1.0)
    there = replace(hosts(1), alone=link, busy=link)
    found = simulate([Trace(operations=(moved,))], [[]], there)
    assert (found.total, found.disk) == (2, 0)  # each way by itself


@pytest.mark.parametrize(
    ("load", "kernels", "store", "ahead", "total"),
    [
        (2, 5, 1, False, 6 * (2 + 5) + 1),
        (2, 5, 1, True, 2 * (2 + 3 * 5) + 1),
        (5, 2, 1, True, 2 * (3 * 5 + 2) + 1),
        (1, 2, 6, True, 1 + 2 + 6 * 6),
    ],
)
def test_chunks_come_and_go_beside_kernels(load: int, kernels: int, store: int, ahead: bool, total: float) -> None:
    """Three chunks and again three, over a link that takes 1 s for a byte: what takes longest takes all."""
    made = [
        one
        for chunk in (0, 1, 2) * 2
        for one in (
            transfer("rows", to_device=load, ahead=ahead and chunk > 0),
            work(kernels),
            transfer("rows", to_host=store),
        )
    ]
    there = hosts(1)
    there = replace(there, alone=replace(there.alone, link_seconds=1.0), busy=replace(there.alone, link_seconds=1.0))
    found = simulate([Trace(operations=tuple(made))], [[]], there)
    assert (found.total, found.compute) == pytest.approx((total, total))


def test_a_chunk_comes_while_rows_cross() -> None:
    """Of two rounds of 1 s of rows that cross half a second, the second's 3 bytes come beside the first's 1.5 s."""
    link = Prices(ranks=1, threads=1, tables=hosts(1).alone.tables, link_seconds=1.0)
    made = [
        transfer("rows", to_device=1),
        MEETING,
        work(1),
        transfer("rows", to_device=3, ahead=True),
        MEETING,
        work(1),
    ]
    found = simulate([Trace(operations=tuple(made))] * 2, [[]] * 2, replace(hosts(1), alone=link, busy=link))
    assert found.total == pytest.approx(1 + max(0.5 + 1, 3) + 0.5 + 1)
