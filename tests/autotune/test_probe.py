"""Measurements of the probe price every step; here with samples so small that they take a moment."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.lib.cases import Case
from tests.lib.pairwise import param
from tests.lib.profiles import profile
from tests.lib.ranks import on_ranks
from weft.autotune import Cluster, epoch_time, machine_of, measured_machine, probe
from weft.autotune.estimate_time import step_calls
from weft.autotune.probe import small_work
from weft.cli.main import main
from weft.comm import Group
from weft.cost import Machine, Prices, PriceTable, Processes, Profile
from weft.cost.prices import WORK, table_of
from weft.data import Adjacency
from weft.kernels import spmm
from weft.nn import Workload
from weft.nn.workload.flops import FlopCounter
from weft.runtime.kernel_call import KernelCall
from weft.strategies import VertexOptions, get_strategy
from weft.strategies.offload.options import OffloadOptions
from weft.strategies.offload.plan import OffloadPlan
from weft.training.planning import probe_command

SMALL_SAMPLES = {
    "ROWS": (64.0,),
    "COLUMNS": (8.0,),
    "WIDTHS": (4.0, 8.0),
    "SOURCES": (64.0,),
    "SHARES": (0.5, 1.0),
    "DEGREES": (2.0,),
    "SUM_WIDTHS": (4.0,),
    "ATTENTION_WIDTHS": (8.0,),
    "HEADS": (1.0, 2.0),
    "CLASS_COUNTS": (2.0,),
    "TARGETS": (16.0,),
    "FANOUTS": (2.0,),
    "SAMPLED_GRAPH": (64.0, 1.0, 8.0),
    "TILED_SOURCES": (64.0,),
    "MIN_TILED_EDGES": 64.0,
    "BYTES": (4096.0,),
    "ROW_BYTES": (256.0,),
    "MESSAGES": (256.0, 4096.0),
    "MIN_SECONDS": 1e-5,
    "ROUNDS": 1,
    "VARYING": {"min_seconds": 1e-5, "rounds": 1},
}


@cache
def machine() -> Profile:
    """Return the profile that two ranks measure."""
    result: Profile = on_ranks(2, measured)[0]
    return result


def measured(group: Group) -> Profile:
    """Return the profile that a rank measures with small samples."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_SAMPLES.items():
            patch.setattr(probe, name, value)
        result = Profile(host={"cores": 2}, prices=[probe.measure_kernels(group)])
        return replace(result, networks=[probe.measure_network(group, result)])


@pytest.mark.slow
def test_every_kernel_of_a_trace_is_measured() -> None:
    (prices,) = machine().prices
    assert set(prices.tables) == {table_of(kernel) for kernel in WORK}
    for table in prices.tables.values():
        assert len(table.seconds) == math.prod(map(len, table.axes))
        assert min(table.seconds) > 0
    assert prices.step_seconds >= 0
    assert prices.call_seconds >= 0


def test_a_quick_probe_measures_few_sizes_and_small_samples() -> None:
    measured: list[float] = []

    def sample(size: float, width: float) -> probe.ProbeSample:
        measured.append(size)
        return size * width, size / 64, lambda: lambda: None

    axes = ((1.0, 2.0, 4.0, 8.0, 64.0), (1.0, 2.0))
    quick, full = (probe.Stopwatch(Group(), quick=quick, min_seconds=0.0) for quick in (True, False))
    assert probe.price_table(quick, axes, sample).axes == ((1.0, 4.0, 64.0), (1.0, 2.0))
    assert measured == [1.0, 1.0, 4.0, 4.0, 64.0, 64.0 // 5, 64.0, 64.0 // 5]
    assert quick.sizes(axes[:1] * 5) == ((1.0, 64.0),) * 5
    assert probe.price_table(full, axes, sample).axes == axes
    assert quick.max_seconds < full.max_seconds == probe.MAX_SECONDS


def test_a_round_of_chunks_has_a_price() -> None:
    def rounds(chunks: int) -> int:
        plan = OffloadPlan(small_work("gcn", 2), 1, OffloadOptions(chunks=chunks))
        return sum(call.number for call in step_calls(plan, 0) if call.kernel == "round")

    assert rounds(8) == 2 * rounds(4) > 0
    prices = Prices(ranks=1, threads=1, tables={}, call_seconds=5.0, round_seconds=2.0, factor=1.5)
    assert prices.seconds(KernelCall("round", (), 4)) == 12.0


@pytest.mark.slow
def test_exchanges_are_measured_during_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange starts first, then the work runs, and only then the rank waits for the exchange."""
    (network,) = machine().networks
    assert network.tables["all_to_all_beside"].axes == (SMALL_SAMPLES["MESSAGES"][:-1],)
    group = Mock(size=2, rank=0, device="cpu")
    monkeypatch.setattr(probe, "passes", lambda number, device: lambda: group.passed(number, device))
    _, _, ready = probe.exchange_sample(group, 256, num_passes=3)
    work = ready()
    assert not group.mock_calls
    work()
    assert [name for name, *_ in group.mock_calls] == ["all_to_all_async", "passed", "all_to_all_async().wait"]
    group.passed.assert_called_once_with(3, "cpu")


def test_samples_do_not_profit_from_warm_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a sample take turns on separate tensors, and results stay alive; large tensors get fewer copies."""
    results: list[Tensor] = []

    def ready() -> probe.Work:
        x = torch.zeros(1000)
        return lambda: x

    def work(number: int) -> probe.Work:
        def run() -> Tensor:
            results.append(torch.full((10,), number))
            return results[-1]

        return run

    works = probe.copies(ready)
    assert len({work_copy().data_ptr() for work_copy in works}) == len(works) == probe.COPIES  # type: ignore[attr-defined]
    monkeypatch.setattr(probe, "COLD_BYTES", 2 * 4000)
    assert len(probe.copies(ready)) == 2
    probe.Stopwatch(Group(), min_seconds=0.0).seconds(work(0), work(1), work(2))
    assert [int(result[0]) for result in results] == [number % 3 for number in range(3 + probe.ROUNDS)]


def test_a_sample_of_few_targets_has_all_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sources keep the rows out of the cache; the backward sample has fewer sources and fewer targets."""
    monkeypatch.setattr(probe, "MAX_WORK", {"aggregated": 3200, "aggregated_backward": 3200})
    graphs: list[Adjacency] = []

    def make(edges: Adjacency) -> Callable[[Tensor], Tensor]:
        graphs.append(edges)
        return lambda x: spmm(edges, x)

    units, share, ready = probe.aggregate_sample((1000.0, 1.0, 4.0), 8.0, make)
    ready()
    assert (units, share) == (3200, 0.0)
    assert (graphs[0].num_sources, graphs[0].num_targets) == (1000, 100)
    assert graphs[0].num_edges * 8 == pytest.approx(units, rel=0.1)
    assert probe.aggregate_sample((1000.0, 1.0, 4.0), 8.0, make, backward=True)[:2] == (32000.0, 10.0)


@pytest.mark.parametrize("ratio", probe.TILED_RATIOS)
def test_a_sample_in_tiles_has_the_bytes_of_its_size(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program counts as many bytes in the cache as the sample, `ratio` times those of source rows."""
    monkeypatch.setattr(probe, "MIN_TILED_EDGES", 2048.0)
    units, _, prepare = probe.tile_sample(1000.0, ratio)
    run = prepare()
    with FlopCounter() as counter:
        run()
    assert counter.tiles.num_bytes == pytest.approx(units, rel=0.02)
    assert counter.tiles.num_bytes / counter.tiles.source_bytes == pytest.approx(ratio, rel=0.05)
    assert counter.tiles.sources == 2 * 1000  # forward and backward


def test_samples_are_on_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the edges are generated on the CPU; the meta device stands for a GPU."""
    devices: list[str] = []
    monkeypatch.setattr(probe, "linear", lambda *tensors: devices.extend(tensor.device.type for tensor in tensors))
    monkeypatch.setattr(probe, "spmm", lambda edges, x: devices.extend((edges.device.type, x.device.type)))
    with probe.default_device(torch.device("meta")):
        works = [probe.linear_sample(4.0, 2.0, 2.0)[2](), probe.sum_sample(64.0, 1.0, 2.0, 4.0)[2]()]
        in_tiles = probe.tile_sample(64.0, 16.0)[2]()
    for work in works:
        work()
    assert devices == ["meta"] * 4
    assert [grad.device.type for grad in in_tiles()] == ["meta"] * 2  # type: ignore[attr-defined]


def test_sizes_around_calls_give_equal_prices() -> None:
    """Prices agree between, at and beyond the sizes of a table; kernels that are not called are not measured."""
    whole = {"Sum": probe.kernel_samples()["Sum"], "linear": probe.kernel_samples()["linear"]}
    calls = [KernelCall("Sum", (edges, 3000, 5000, edges, width, 0)) for edges in (6000, 10**6) for width in (7, 300)]
    calls += [KernelCall("Sum_backward", (9000, 8192, 100, 900, 64, 0)), KernelCall("WholeLayer", (1,))]
    around = probe.samples_around(whole, calls)
    assert around.keys() == {"Sum"}

    def prices(samples: probe.KernelSamples) -> Prices:
        """Return prices that differ for every size."""
        tables = {
            name: PriceTable(axes=tuple(axes), seconds=tuple(math.prod(sizes) ** 0.7 for sizes in product(*axes)))
            for name, (axes, _) in samples.items()
        }
        return Prices(ranks=1, threads=1, tables=tables)

    few, all_sizes = prices(around), prices(whole)
    assert math.prod(map(len, around["Sum"][0])) < math.prod(map(len, whole["Sum"][0])) / 2
    for call in calls:
        assert few.seconds(call) == pytest.approx(all_sizes.seconds(call))


def completed(group: Group, profiles: list[Profile], hosts: int) -> tuple[Machine, tuple[str, ...], list[str]]:
    """Return `measured_machine` of a rank, given a profile for each rank, and the names of the measured samples."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_SAMPLES.items():
            patch.setattr(probe, name, value)
        tables: list[str] = []
        make_table = probe.price_table

        def recorded(watch: probe.Stopwatch, axes: Any, make: Any) -> PriceTable:
            tables.append(getattr(make, "func", make).__name__)  # some are partial functions
            return make_table(watch, axes, make)

        patch.setattr(probe, "price_table", recorded)
        return *measured_machine(workload(), group, profiles[group.rank], hosts=hosts), tables


def workload() -> Workload:
    graph, model = Case(model="gcn").build()
    return Workload(model, graph)


@pytest.mark.slow
def test_ranks_measure_missing_parts_of_a_profile() -> None:
    """All ranks use the machine of rank 0, whose profile decides what is measured."""
    nothing = Profile(host={"cores": 2}, prices=[])
    (first, measured, tables), second = on_ranks(2, completed, [nothing, profile()], 1)
    assert (first, measured, tables) == second
    assert measured == ("kernels", "network")
    assert {"linear_sample", "sum_sample"} <= {*tables}
    assert not {"attention_sample", "draw_sample", "update_sample"} & {*tables}
    assert min(first.seconds_per_flop, first.seconds_per_edge, first.seconds_per_byte) > 1e-13


@pytest.mark.parametrize(
    ("hosts", "lacks", "expected"),
    [
        (1, {}, ()),
        (2, {}, ()),
        (1, {"networks": []}, ("network",)),
        (2, {"networks": profile().networks[:1]}, ("network",)),
        (1, {"prices": profile().prices[:1]}, ("kernels",)),
    ],
    ids=["nothing", "nothing-2-hosts", "network", "network-2-hosts", "kernels"],
)
def test_existing_parts_of_a_profile_are_not_measured(
    hosts: int, lacks: dict[str, Any], expected: tuple[str, ...]
) -> None:
    host_profile = replace(profile(), **lacks)
    cluster = Cluster(profile=profile(), ranks=2, hosts=hosts, threads=1, memory_bytes=0)
    whole = machine_of(workload(), cluster)
    (completed_machine, measured, tables), _ = on_ranks(2, completed, [host_profile, host_profile], hosts)
    assert measured == expected
    assert bool(tables) == bool(expected)
    assert (completed_machine.seconds_per_byte == whole.seconds_per_byte) == ("network" not in expected)
    assert (completed_machine.seconds_per_flop == whole.seconds_per_flop) == ("kernels" not in expected)


PRICED = ("single", "tensor", "hybrid", "offload", "pipeline", "split")
PRICED_MODELS = ("gcn", "sage", "gat", "gatv2", "pyg-sage-max", "rgcn", "PNAConv")


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        param(strategy, model, name=f"{strategy}-{model}", quick=(first + second) % 6 == 0)
        for (first, strategy), (second, model) in product(enumerate(PRICED), enumerate(PRICED_MODELS))
    ],
)
def test_every_step_has_a_price(strategy: str, model: str) -> None:
    if (strategy, model) == ("tensor", "PNAConv"):
        pytest.skip("tensor does not support PNAConv")
    graph, module = Case(model=model, typed="x" if model == "rgcn" else "").build()
    kind = get_strategy(strategy)
    size = kind.max_ranks or 2
    options = kind.options_type()
    if isinstance(options, VertexOptions):
        options = type(options)(partition=(graph.in_edges.degree > 2).int())
    plan = kind(Workload(module, graph), size, options)
    threads = machine().prices[0].threads
    estimate = epoch_time(plan, Cluster(profile=machine(), ranks=size, hosts=1, threads=threads, memory_bytes=1 << 40))
    assert 0 < estimate.total < 60
    assert (estimate.network > 0) == (size > 1)


def test_the_command_measures_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks are measured with their share of the threads, one rank also with all threads."""
    launches: list[tuple[int, int, bool]] = []

    def record(base: Profile, ranks: int, threads: int, *, kernels: bool) -> Profile:
        launches.append((ranks, threads, kernels))
        return replace(base, prices=machine().prices, networks=machine().networks)

    monkeypatch.setattr(probe_command, "measure_on_ranks", record)
    monkeypatch.setattr(probe_command, "watch_tiny", {1: 300, 2: 500, 4: 560}.__getitem__)
    monkeypatch.setattr(probe_command, "num_cores", lambda: 2)
    assert main(["probe", "--out", str(tmp_path / "machine.json")]) == 0
    assert "machine.json" in capsys.readouterr().out
    assert launches == [(1, 1, True), (1, 2, True), (2, 1, True), (4, 1, False)]
    host = Profile.read(tmp_path / "machine.json").host
    assert Profile.read(tmp_path / "machine.json").processes == Processes(alone=300, launcher=440, rank=30)
    assert host["cores"] == 2
    assert {"host", "processor", "memory_bytes", "torch", "weft", "date"} <= host.keys()
    assert main(["probe", "--workers", "3,x"]) == 2
    assert "'x' is not a whole number" in capsys.readouterr().err


def test_a_stopped_probe_writes_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks receive the signal as well, so the profile would lack what they had not measured yet."""
    monkeypatch.setattr(probe_command, "launch", lambda *_, **__: int(signal.SIGTERM))
    monkeypatch.setattr(probe_command, "watch_tiny", lambda _: 0)
    assert main(["probe", "--out", str(tmp_path / "machine.json")]) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
