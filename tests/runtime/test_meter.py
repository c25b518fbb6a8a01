"""The meter measures phases, timers and collectives; a GPU's clock is read only when counts are taken."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch

from tests.lib.ranks import spawn
from weft.comm import Group
from weft.runtime.clock import EventClock
from weft.runtime.meter import Meter, Span


class FakeEvent:
    """An event that is recorded one millisecond after the previous one, and logs its use."""

    def __init__(self, log: list[str], ticks: count[int]) -> None:
        self.log, self.ticks, self.at = log, ticks, -1

    def record(self, stream: str) -> None:
        assert stream == "present"
        self.log.append("record")
        self.at = next(self.ticks)

    def elapsed_time(self, other: FakeEvent) -> float:
        self.log.append("read")
        assert 0 <= self.at <= other.at, "events are read when both have happened"
        return other.at - self.at


def use_fake_events(meter: Meter) -> list[str]:
    """Give the meter a clock of fake events, and return the log of their use."""
    log: list[str] = []
    meter.set_clock(EventClock(partial(FakeEvent, log, count()), lambda: "present", lambda: log.append("wait")))
    return log


def test_seconds_by_events() -> None:
    meter = Meter()
    log = use_fake_events(meter)  # 0
    with meter.during("train"):  # 1
        with meter.timer("loss"), meter.timer("decode"):  # 2, 3
            start = meter.clock.now()  # 4
            meter.collective("halo", 8, 16, name="halo 1", spans=[Span(start, meter.clock.now())])  # 5
        # 6, 7: the timers end
        meter.collective("halo", 8, 16, name="halo 2", spans=[])
    # 8
    assert log == ["record"] * 9
    counts = meter.take("train")
    assert log[9:] == ["wait", *["read"] * 6]
    assert dict(counts.stages) == {"loss": pytest.approx(0.002), "decode": pytest.approx(0.003)}
    assert counts.seconds == pytest.approx(0.007)
    assert dict(counts.durations) == {"halo 1": pytest.approx(0.001)}
    assert counts.collectives["halo"] == 2
    assert meter.take("setup").seconds > 0.001, "that of the host's clock, and of the events since"
    assert meter.take("train").seconds == 0
    assert log.count("wait") == 1


def test_a_timer_excludes_other_phases() -> None:
    meter = Meter()
    use_fake_events(meter)  # 0
    with meter.during("train"), meter.timer("encode"), meter.during("setup"), meter.timer("encode"):
        pass
    setup, train = meter.take("setup"), meter.take("train")
    assert dict(train.stages) == {"encode": pytest.approx(0.002)}
    assert dict(setup.stages) == {"encode": pytest.approx(0.001)}
    assert train.seconds >= sum(train.stages.values())


def check_collectives(group: Group) -> None:
    group.synchronize = None  # type: ignore[assignment, method-assign]
    log = use_fake_events(group.meter)
    numbers = torch.arange(4.0)
    with group.meter.during("train"):
        group.all_reduce(numbers, tag="gradients")
        group.broadcast(numbers, tag="values")
        group.all_to_all(numbers, [2, 2], [2, 2], tag="halo")
        group.all_gather_object({"rank": group.rank})
    assert set(log) == {"record"}
    counts = group.meter.take("train")
    assert log.count("wait") == 1
    assert counts.durations.keys() == {"gradients 1", "values 1", "halo 1", "report 1", "report 2"}
    assert counts.durations["gradients 1"] == pytest.approx(0.001)


def test_collectives_do_not_synchronize_with_the_device() -> None:
    spawn(2, check_collectives)
