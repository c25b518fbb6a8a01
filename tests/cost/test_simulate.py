"""Simulated steps whose time is known by hand: shared cores, waiting ranks, and work during exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cost import Disk, Network, Operation, Prices, PriceTable, Trace
from weft.cost.profile import COLLECTIVES
from weft.cost.simulate import NO_WORK, Hosts, StepTime, WorkSeconds, finish_times, simulate
from weft.cost.trace import transfer
from weft.runtime.kernel_call import KernelCall

EXCHANGE_SECONDS = 0.5
NETWORK = Network(
    ranks=2, hosts=1, tables=dict.fromkeys(COLLECTIVES, PriceTable(axes=((1.0,),), seconds=(EXCHANGE_SECONDS,)))
)


def hosts(ranks_each: int, slots: int = 2) -> Hosts:
    """Return hosts. A FLOP costs 1 s (2 s if all cores work), an exchange 0.5 s, a byte 3 s to read, 4 s to write."""
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


EXCHANGE = Operation(kind="collective", tag="halo", bytes_sent=1, bytes_received=1)


def step(*ranks: list[Operation], each: int, slots: int = 2) -> StepTime:
    traces = [Trace(operations=tuple(operations)) for operations in ranks]
    return simulate(traces, [[] for _ in ranks], hosts(each, slots))


def test_a_rank_without_exchanges() -> None:
    time = step([work(3), work(4)], each=1)
    assert (time.total, time.compute, time.network, time.waiting) == (7, 7, 0, 0)


def test_ranks_wait_for_the_slowest() -> None:
    """On two hosts: 5 s until both ranks reach the exchange, 0.5 s of network, then 2 s and 1 s."""
    time = step([work(5), EXCHANGE, work(1)], [work(2), EXCHANGE, work(2)], each=1)
    assert (time.total, time.network, time.waiting) == (7.5, 0.5, 3)
    assert time.compute == 6


def test_ranks_of_a_host_slow_each_other() -> None:
    """Two ranks on two cores need twice as long until one is done, four ranks four times as long."""
    assert step([work(3)], [work(3)], each=2).total == pytest.approx(6)
    assert step([work(3)], [work(1)], each=2).total == pytest.approx(2 + 2)
    assert step(*[[work(3)]] * 4, each=4).total == pytest.approx(12)


def test_ranks_keep_to_their_cores() -> None:
    """Four ranks on two cores: the first two share a core, whatever the others do."""
    equal_speed = replace(hosts(4), busy=hosts(4).alone)
    one_second, two_seconds = WorkSeconds(1.0, 1.0), WorkSeconds(2.0, 2.0)
    assert finish_times([one_second, one_second, NO_WORK, NO_WORK], [0.0] * 4, equal_speed) == [2, 2, 0, 0]
    assert finish_times([one_second, NO_WORK, one_second, NO_WORK], [0.0] * 4, equal_speed) == [1, 0, 1, 0]
    assert finish_times([two_seconds, one_second, two_seconds, NO_WORK], [0.0] * 4, equal_speed) == [3, 2, 2, 0]


def test_work_during_an_exchange() -> None:
    """Work that runs ahead, during the exchange, hides it; work that begins after it does not."""
    long = step([work(1), EXCHANGE, work(2, ahead=True), work(1)], [work(1), EXCHANGE], each=1)
    assert (long.total, long.network) == (4, 0)
    bare = step([work(1), EXCHANGE, work(2), work(1)], [work(1), EXCHANGE], each=1)
    assert (bare.total, bare.network) == (4.5, 0.5)


def overlap_network(seconds: float) -> Network:
    """Return a network where an exchange of 0.5 s, and 0.5 s of work begun with it, need `seconds` together."""
    exchanges = {
        "all_to_all": PriceTable(axes=((1.0, 4.0, 8.0),), seconds=(EXCHANGE_SECONDS, EXCHANGE_SECONDS, 0.1)),
        "all_to_all_beside": PriceTable(axes=((1.0, 4.0),), seconds=(seconds, seconds)),
    }
    return replace(NETWORK, tables={**NETWORK.tables, **exchanges})


@pytest.mark.parametrize(("seconds", "share"), [(0.5, 1.0), (0.75, 0.5), (1.0, 0.0), (1.5, 0.0), (0.4, 1.0)])
def test_share_of_an_exchange_that_overlaps_with_work(seconds: float, share: float) -> None:
    """The share is 1 if both need no longer than one alone, and 0 if they need as long as one after the other."""
    network = overlap_network(seconds)
    assert [network.overlapped_share("halo", size) for size in (0, 1, 3, 100)] == pytest.approx([share] * 4)
    assert network.overlapped_share("gradients", 1) == 1.0
    assert NETWORK.overlapped_share("halo", 1) == 1.0


def test_an_exchange_is_slower_during_work() -> None:
    """Half of the shorter one is not hidden: 0.25 s, however long the work is."""
    halved = replace(hosts(1), network=overlap_network(0.75))

    def step_time(*operations: Operation) -> StepTime:
        return simulate([Trace(operations=operations), Trace(operations=(EXCHANGE,))], [[], []], halved)

    long = step_time(EXCHANGE, work(2, ahead=True), work(1))
    assert (long.total, long.network, long.compute) == (3.25, 0.25, 3)
    short = step_time(EXCHANGE, work(1, ahead=True))
    assert (short.total, short.network) == (1.25, 0.25)
    assert step_time(EXCHANGE, work(1)).total == 1.5


@pytest.mark.parametrize(("seconds", "left"), [(0.5, 0.1), (0.75, 0.25), (1.0, 0.5)])
def test_messages_sent_during_work(seconds: float, left: float) -> None:
    """The last of five messages is never hidden, nor the part of the others that does not overlap with work."""
    sent = replace(EXCHANGE, messages=5, ahead=True)
    trace = Trace(operations=(work(1), sent))
    assert simulate([trace] * 2, [[], []], replace(hosts(1), network=overlap_network(seconds))).total == pytest.approx(
        1 + left
    )


def test_prefetched_batches() -> None:
    """With a free core, batch and step run concurrently and the longer one counts; otherwise one after the other."""
    batch = replace(work(3), prefetched=True)
    assert (step([batch, work(2)], each=1).total, step([batch, work(4)], each=1).total) == (3, 4)
    one_slot = step([batch, work(2)], each=1, slots=1)
    assert (one_slot.total, one_slot.compute, one_slot.network) == (10, 10, 0)  # the rank has all cores
    batch_exchange = replace(EXCHANGE, prefetched=True)
    both = step(*[[batch, batch_exchange, work(2)]] * 2, each=2)
    assert (both.total, both.compute, both.network) == pytest.approx(
        (6 + EXCHANGE_SECONDS + 4, 6 + EXCHANGE_SECONDS + 4, 0)
    )


def test_a_prefetched_batch_has_no_step_overhead() -> None:
    host = replace(hosts(1), alone=replace(hosts(1).alone, step_seconds=7.0))
    batch = replace(work(3), prefetched=True)
    assert simulate([Trace(operations=(batch,))], [[]], replace(host, slots=1, busy=host.alone)).total == 3 + 7


@pytest.mark.parametrize(
    ("before", "ahead", "total"),
    [
        (3, True, 3 + 5 * 0.25 + 0.1),  # only the last of five is not hidden
        (0, True, 5 * 0.25 + 0.5),  # no work during the exchange
        (3, False, 3 + 5 * 0.25 + 0.5),  # all are sent at the end
    ],
)
def test_messages_overlap_with_work_and_cost_time(before: int, ahead: bool, total: float) -> None:
    """Each of five messages costs 0.25 s, and ranks do not wait for each other."""
    network = replace(NETWORK, collective_seconds=9.0, message_seconds=0.25)
    messages = replace(EXCHANGE, messages=5, ahead=ahead)
    host = replace(hosts(1), network=network)
    assert simulate([Trace(operations=(work(before), messages))], [[]], host).total == pytest.approx(total)


def test_the_time_of_a_rank_for_a_collective_is_not_hidden() -> None:
    """Two seconds of work hide the exchange, but not the 0.25 s that the rank needs to begin it."""
    host = replace(hosts(1), network=replace(NETWORK, collective_seconds=0.25))
    time = simulate([Trace(operations=(work(1), EXCHANGE, work(2, ahead=True)))], [[]], host)
    assert (time.total, time.network) == (1 + 0.25 + 2, 0)


def test_start_times_count() -> None:
    """The second rank begins when the first has done half: 2 s alone, then both at half speed."""
    four_seconds = WorkSeconds(4.0, 8.0)
    assert finish_times([four_seconds, WorkSeconds(1.0, 2.0)], [0.0, 2.0], hosts(2)) == pytest.approx([5.0, 4.0])


def test_different_collectives_are_an_error() -> None:
    with pytest.raises(ValueError, match="different collectives"):
        step([EXCHANGE], [work(1)], each=1)


def test_work_shorter_than_the_resolution_of_the_clock_ends() -> None:
    """An earlier version never returned."""
    assert finish_times([WorkSeconds(1e-9, 1e-9), WorkSeconds(1.0, 1.0)], [1e9, 1e9], hosts(2)) == pytest.approx(
        [1e9, 1e9 + 1]
    )


def test_each_rank_waits_for_its_files() -> None:
    """Two bytes read and one written need 10 s on each of two ranks, whose kernels need 2 s."""
    transferred = Operation(kind="transfer", tag="rows", bytes_sent=1, bytes_received=2)
    time = step([transferred, work(1)], [transferred, work(1)], each=2)
    assert (time.total, time.disk, time.compute) == (12, 10, 2)
    link = Prices(ranks=1, threads=1, tables={}, link_seconds=1.0)
    linked = replace(hosts(1), alone=link, busy=link)
    time = simulate([Trace(operations=(transferred,))], [[]], linked)
    assert (time.total, time.disk) == (2, 0)  # both directions at the same time


@pytest.mark.parametrize(
    ("load", "kernels", "store", "ahead", "total"),
    [
        (2, 5, 1, False, 6 * (2 + 5) + 1),
        (2, 5, 1, True, 2 * (2 + 3 * 5) + 1),
        (5, 2, 1, True, 2 * (3 * 5 + 2) + 1),
        (1, 2, 6, True, 1 + 2 + 6 * 6),
    ],
)
def test_transfers_of_chunks_overlap_with_kernels(
    load: int, kernels: int, store: int, ahead: bool, total: float
) -> None:
    """Twice three chunks over a link of 1 s per byte: the slowest of load, kernels and store determines the time."""
    operations = [
        operation
        for chunk in (0, 1, 2) * 2
        for operation in (
            transfer("rows", to_device=load, ahead=ahead and chunk > 0),
            work(kernels),
            transfer("rows", to_host=store),
        )
    ]
    linked = hosts(1)
    linked = replace(
        linked, alone=replace(linked.alone, link_seconds=1.0), busy=replace(linked.alone, link_seconds=1.0)
    )
    time = simulate([Trace(operations=tuple(operations))], [[]], linked)
    assert (time.total, time.compute) == pytest.approx((total, total))


def test_a_chunk_is_loaded_during_an_exchange() -> None:
    """Two rounds of 1 s and an exchange of 0.5 s: the second loads 3 bytes during the 1.5 s of the first."""
    link = Prices(ranks=1, threads=1, tables=hosts(1).alone.tables, link_seconds=1.0)
    operations = [
        transfer("rows", to_device=1),
        EXCHANGE,
        work(1),
        transfer("rows", to_device=3, ahead=True),
        EXCHANGE,
        work(1),
    ]
    time = simulate([Trace(operations=tuple(operations))] * 2, [[]] * 2, replace(hosts(1), alone=link, busy=link))
    assert time.total == pytest.approx(1 + max(0.5 + 1, 3) + 0.5 + 1)
