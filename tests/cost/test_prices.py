"""Prices between the measured sizes, and profiles that are saved and read again, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.lib.graph_checks import assert_one_line
from tests.lib.profiles import flat, profile
from weft.cost import Prices, PriceTable, Profile
from weft.runtime.kernel_call import KernelCall, TileSizes
from weft.utils.errors import InputError

TABLE = PriceTable(axes=((10.0, 1000.0), (1.0, 4.0)), seconds=(1.0, 2.0, 100.0, 200.0))


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((10, 1), 1.0),
        ((1000, 4), 200.0),
        ((100, 1), (10 * 1 + 90 / 990 * (1000 * 100 - 10 * 1)) / 100),  # 1 / 11 of the way, in seconds of all units
        ((1000, 2), (100 + 1 / 3 * (4 * 200 - 100)) / 2),
        ((1, 1), 1.0),  # below the measured sizes, as the smallest
        ((10**6, 100), 200.0),
    ],
)
def test_between_sizes(sizes: tuple[float, float], seconds: float) -> None:
    assert TABLE.at(sizes) == pytest.approx(seconds)


def test_costs_linear_in_each_size_are_interpolated_exactly() -> None:
    """The cost is linear in sources and heads, in elements of edges, and in elements read from memory."""

    def seconds(sources: float, share: float, degree: float, width: float, heads: float) -> float:
        return sources * (3 * heads + degree * width * (0.1 + 0.2 * share))

    axes = ((10.0, 1000.0), (0.1, 1.0), (2.0, 64.0), (8.0, 64.0), (1.0, 8.0))
    unit_seconds = tuple(seconds(*sizes) / (sizes[0] * sizes[2] * sizes[3]) for sizes in product(*axes))
    prices = replace(
        profile().prices_of(1)[0], call_seconds=0.0, tables={"Attend": PriceTable(axes=axes, seconds=unit_seconds)}
    )
    for sources, fresh, degree, width, heads in product((10, 500), (0.1, 0.3), (3, 40), (8, 50), (1, 4, 8)):
        edges = sources * degree
        call = KernelCall("Attend", (edges, sources, sources, int(fresh * edges), width, heads))
        assert prices.seconds(call) == pytest.approx(seconds(sources, fresh, degree, width, heads))


def test_calls_have_a_cost_in_addition_to_their_work() -> None:
    """A pass costs `move_seconds` in addition, other kernels `call_seconds`, and attention `attention_seconds` more."""
    tables = {name: flat(0.0, name) for name in ("pass", "dropout", "Attend", "Attend_backward")}
    prices = Prices(
        ranks=1, threads=1, tables=tables, call_seconds=5.0, move_seconds=1.0, attention_seconds=3.0, factor=2.0
    )
    edges = (10, 2, 2, 10, 4, 1)
    calls = [("pass", (8,), 1.0), ("dropout", (8,), 5.0), ("Attend", edges, 8.0), ("Attend_backward", edges, 8.0)]
    for kernel, sizes, seconds in calls:
        assert prices.seconds(KernelCall(kernel, sizes, 3)) == 3 * 2 * seconds


def test_tiles_cost_the_bytes_in_the_cache_and_those_of_source_rows() -> None:
    """Both costs are interpolated exactly; that of source rows grows with the number of sources."""
    ratios = (4.0, 20.0)
    seconds = tuple(2.0 + source_seconds / ratio for source_seconds in (3.0, 9.0) for ratio in ratios)
    table = PriceTable(axes=((100.0, 1000.0), ratios), seconds=seconds)
    prices = Prices(ranks=1, threads=1, tables={"tiles": table})
    for num_bytes, source_bytes in ((400, 100), (1000, 100), (2000, 100)):
        for sources, source_seconds in ((10, 3.0), (100, 3.0), (5000, 9.0)):
            spent = prices.seconds(KernelCall("tiles", TileSizes(num_bytes, source_bytes, sources)))
            assert spent == pytest.approx(2.0 * num_bytes + source_seconds * source_bytes)
    assert prices.seconds(KernelCall("tiles", TileSizes(400, 0, 100))) == pytest.approx(400 * (2.0 + 3.0 / 20))


def test_the_backward_pass_of_a_block_is_priced_by_its_sources_too() -> None:
    """The gradient of a sum is a sum over the transposed edges; that of an attention reads edges in both directions."""
    axes, by_degree = ((1e3,), (1.0,), (2.0, 64.0), (8.0,)), (4.0, 1.0)
    tables = {"Sum": PriceTable(axes=axes, seconds=by_degree)}
    tables["Attend_backward"] = PriceTable(axes=(*axes, (1.0,)), seconds=by_degree)
    prices = replace(profile().prices_of(1)[0], call_seconds=0.0, tables=tables)

    def seconds(kernel: str, targets: int, sources: int) -> float:
        return prices.seconds(KernelCall(kernel, (6400, targets, sources, 6400, 8, 1)))

    assert seconds("Sum_backward", 100, 3200) == seconds("Sum", 3200, 100) > seconds("Sum", 100, 3200)
    assert seconds("Attend_backward", 100, 3200) == seconds("Attend_backward", 1650, 1650)


def test_a_call_costs_its_units_and_itself() -> None:
    prices = profile().prices_of(1)[0]
    once = prices.seconds(KernelCall("linear", (100, 20, 5)))
    assert once == pytest.approx(2 * 100 * 20 * 5 * 5e-11 + 1e-5)
    assert prices.seconds(KernelCall("linear", (100, 20, 5), 3)) == pytest.approx(3 * once)
    assert prices.seconds(KernelCall("linear", (0, 20, 5))) == 1e-5


def test_missing_measurements_are_named() -> None:
    machine = profile()
    with pytest.raises(InputError, match=r"measured with 1, 2 threads a rank, not 7: .*weft probe"):
        machine.prices_of(7)
    with pytest.raises(InputError, match=r"has not measured Spmm: .*weft probe"):
        machine.prices_of(1)[0].seconds(KernelCall("Spmm", (1,)))
    prices = machine.prices_of(1)[0]
    for tables in ({}, {"Sum": TABLE}):
        with pytest.raises(InputError, match=r"the profile has Sum from another version of weft's probe: .*weft probe"):
            replace(prices, tables=tables).seconds(KernelCall("Sum", (1000, 100, 50, 20, 8, 0)))
    with pytest.raises(InputError, match="several hosts: run weft probe under torchrun"):
        Profile(host={"cores": 2}, prices=machine.prices, networks=machine.networks[:1]).network_of(4, 2)


def test_a_profile_is_the_same_after_it_is_saved_and_read(tmp_path: Path) -> None:
    machine = profile()
    machine.save(tmp_path / "new" / "machine.json")
    loaded = Profile.read(tmp_path / "new" / "machine.json")
    assert loaded.record() == machine.record()
    call = KernelCall("Sum", (1000, 100, 50, 20, 8, 0))
    assert loaded.prices_of(1)[1].seconds(call) == machine.prices_of(1)[1].seconds(call)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda record: record.pop("networks"), "KeyError: 'networks'"),
        (lambda record: record["prices"][0].update(colour=1), "colour"),
        (lambda record: record["prices"][0]["tables"]["pass"].update(seconds=[0.0]), "a time above 0"),
        (lambda record: record["prices"][0]["tables"]["pass"].update(seconds=[1.0, 2.0]), "a time above 0"),
        (lambda record: record["prices"][0]["tables"]["pass"].update(axes=[[0.0]]), "not ascending numbers above 0"),
        (lambda record: record["prices"][0]["tables"]["pass"].update(axes=[[2, 1]], seconds=[1, 1]), "ascend"),
        (lambda record: record["prices"][0].update(call_seconds="x"), "TypeError"),
        (lambda record: record["prices"][0].update(round_seconds=-1.0), "round_seconds has -1.0"),
        (lambda record: record["networks"][0].update(ranks=0), "ranks is 0"),
        (lambda record: record["networks"][0]["tables"].pop("all_reduce"), "no table of all_reduce"),
        (lambda record: record["host"].pop("cores"), "KeyError: 'cores'"),
        (lambda record: record["host"].update(cores=0), "cores is 0"),
        (lambda record: record["host"].update(disk={"read": 1.0, "rate": 2.0}), "rate"),
        (
            lambda record: record["host"].update(processes={"alone": 1, "launcher": 2, "rank": float("nan")}),
            "processes",
        ),
    ],
)
def test_damaged_profiles_are_refused(tmp_path: Path, damage: Callable[[Any], object], reason: str) -> None:
    record = json.loads(json.dumps(profile().record()))
    damage(record)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(record))
    with pytest.raises(InputError) as error:
        Profile.read(path)
    assert_one_line(error, reason, "weft probe")
