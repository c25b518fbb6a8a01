"""`weft plan`, `--plan` and `--strategy auto`, with the prices of an imaginary machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.lib.graph_checks import assert_one_line
from tests.lib.pairwise import param
from tests.lib.profiles import profile
from tests.lib.running import train
from tests.training.test_edge_prediction import make
from weft.autotune import Cluster, epoch_time, estimate_ranks, plan_memory, steps_time, untraced_calls
from weft.cli.main import main
from weft.comm import Group
from weft.config.config import Config
from weft.cost import Steps
from weft.data import Graph
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies import Step, get_strategy
from weft.strategies.resident import ResidentPlan
from weft.strategies.split.plan import NUM_PROFILED_STEPS, MiniBatchPlan
from weft.training.flag_checks import make_options
from weft.training.planning import probe_command
from weft.training.planning.machine_list import clusters_of
from weft.training.planning.plan_subject import WholeSubject
from weft.training.planning.search import (
    QUICK_NOTE,
    TOLERANCE,
    StrategyEstimate,
    best,
    best_first,
    command,
    estimate_config,
    estimate_strategies,
)
from weft.training.run import prepared_workload
from weft.training.tasks.decoder_costs import DecoderCosts
from weft.training.tasks.task import make_task
from weft.utils.errors import InputError

FIELDS = {
    "strategy", "workers", "options", "epoch_seconds", "compute_seconds", "network_seconds", "disk_seconds",
    "waiting_seconds", "device_bytes", "host_bytes", "disk_bytes", "sent_bytes", "fits", "reason", "command",
    "machines",
}  # fmt: skip

ONE_RANK = ("--workers", "1")
"""Flag for plans of which only the messages are checked: those of several ranks take most of the time."""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a profile where the user's is searched for; return its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: {"processor": "none", "cores": 2})
    path = tmp_path / "cache" / "weft" / "machine.json"
    profile().save(path)
    return path


def estimates(**options: object) -> list[StrategyEstimate]:
    config = Config(graph="digits", **options)  # type: ignore[arg-type]
    return estimate_strategies(config, prepared_workload(config, None, None), clusters_of(config, profile()))


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [set(row) for row in output["plans"]] == [FIELDS] * len(output["plans"])
    assert {row["workers"] for row in output["plans"]} == {1, 2}
    seconds = [row["epoch_seconds"] for row in output["plans"] if row["fits"]]
    assert seconds == sorted(seconds)
    assert all(row["sent_bytes"] > 0 for row in output["plans"] if row["workers"] == 2 and row["fits"])
    # On one rank, communicated is equal to single.
    assert [row["strategy"] for row in output["plans"] if row["workers"] == 1][-1] != "communicated"


def test_memory_without_a_profile(machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory and traffic need no profile, and equal those of the same strategies with one; least memory comes first."""
    fields = ("strategy", "workers", "host_bytes", "sent_bytes")
    timed = {tuple(getattr(row, name) for name in fields) for row in weft.plan("digits", hidden=4)}
    machine.unlink()
    rows = weft.plan("digits", hidden=4, memory=True)
    assert timed <= {tuple(getattr(row, name) for name in fields) for row in rows}
    assert [row.host_bytes for row in rows] == sorted(row.host_bytes for row in rows)
    assert not any(row.epoch_seconds for row in rows)
    assert main(["plan", "digits", "--memory", *ONE_RANK]) == 0
    table = capsys.readouterr().out
    assert "host memory" in table
    assert "epoch" not in table
    assert main(["plan", "digits", "--memory", "--machine", str(machine)]) == 2
    assert main(["plan", "digits", "--memory", *ONE_RANK, "--json"]) == 0
    plan = tmp_path / "plan.json"
    plan.write_text(capsys.readouterr().out)
    with pytest.raises(InputError, match="estimates only memory, so it cannot choose: write it without --memory"):
        weft.train("digits", plan=plan, out=tmp_path / "run")


def test_seconds_are_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for estimate in estimates(workers=2):
        assert (
            estimate.epoch_seconds
            <= estimate.compute_seconds + estimate.network_seconds + estimate.waiting_seconds + 1e-9
        ), estimate
        assert estimate.epoch_seconds >= max(estimate.compute_seconds, estimate.network_seconds)
    assert main(["plan", "digits", "--workers", "2"]) == 0
    out = capsys.readouterr().out
    assert "weft train digits --strategy" in out
    assert "host memory" in out


def test_sent_bytes_are_those_of_a_run(tmp_path: Path) -> None:
    by_strategy = {estimate.strategy: estimate for estimate in weft.plan("digits", workers=2)}
    for strategy in ("tensor", "communicated"):
        run = train("digits", out=tmp_path / strategy, strategy=strategy, workers=2, epochs=2, eval_every=2)
        assert sum(rank["bytes_sent"] for rank in run.summary["ranks"]) == by_strategy[strategy].sent_bytes


def test_the_reason_is_given_if_nothing_fits() -> None:
    config = Config(graph="digits")
    small = clusters_of(config, profile())
    tight = [type(cluster)(**{**vars(cluster), "memory_bytes": 1 << 20}) for cluster in small]
    plans = estimate_strategies(config, prepared_workload(config, None, None), tight)
    assert not any(estimate.fits for estimate in plans)
    assert {"of host memory, 1.0 MB available" in estimate.reason for estimate in plans if estimate.host_bytes} == {
        True
    }
    with pytest.raises(InputError, match=r"^no strategy fits: \w+: "):
        best(plans)


def test_the_simplest_of_equally_fast_strategies_is_best() -> None:
    def estimate(strategy: str, workers: int, seconds: float) -> StrategyEstimate:
        return StrategyEstimate(
            strategy=strategy, workers=workers, options={}, command="", fits=True, epoch_seconds=seconds
        )

    alike, slower = 1 + 0.9 * TOLERANCE, 1 + 1.1 * TOLERANCE
    assert best(best_first([estimate("tensor", 4, 1.0), estimate("communicated", 4, alike)]))[0].strategy == "tensor"
    assert best(best_first([estimate("hybrid", 4, 1.0), estimate("single", 1, alike)]))[0].strategy == "single"
    fastest, why = best(best_first([estimate("hybrid", 4, 1.0), estimate("single", 1, slower)]))
    assert fastest.strategy == "hybrid"
    assert "single 1.11 s" in why
    assert "within the error" in best(best_first([estimate("hybrid", 4, 1.0), estimate("single", 1, alike)]))[1]


def test_flags_choose_the_strategies() -> None:
    assert {estimate.strategy for estimate in estimates(workers=2, cache_ratio=0.5)} == {"hybrid", "offload"}
    assert "stale" not in {estimate.strategy for estimate in estimates(workers=2)}
    with pytest.raises(InputError, match="--refresh-every has no effect"):
        estimates(workers=2, refresh_every=8)


def test_auto_trains_the_best(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected, _ = best(estimates())
    run = train("digits", out=tmp_path / "run", strategy="auto", epochs=2)
    assert (run.config.strategy, run.config.workers) == (expected.strategy, expected.workers)
    assert f"auto: {expected.strategy}" in capfd.readouterr().err


def test_trains_by_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    main(["plan", "digits", "--workers", "2", "--json"])
    path.write_text(capsys.readouterr().out)
    first = json.loads(path.read_text())["plans"][0]
    assert (
        main(["train", "digits", "--plan", str(path), "--epochs", "2", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    )
    assert Config.read(tmp_path / "run" / "config.toml").strategy == first["strategy"]
    for arguments, error in {
        ("rmat:vertices=100,edges=300,features=4,classes=2",): "a plan for another graph",
        ("digits", "--workers", "3"): "--workers 3",
    }.items():
        assert main(["train", *arguments, "--plan", str(path)]) == 2
        assert error in capsys.readouterr().err


def test_a_plan_without_a_profile_probes_quickly(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.unlink()
    quick = profile()
    quick = replace(quick, host={**quick.host, "quick": True})
    commands = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command[1:])
        quick.save(machine)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    assert main(["plan", "digits", *ONE_RANK]) == 0
    printed = capsys.readouterr()
    assert commands == [["-m", "weft", "probe", "--quick"]]
    assert "measuring it quickly" in printed.err
    assert QUICK_NOTE in " ".join(printed.out.split())
    machine.unlink()
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=2, stderr="a\nno room\n"))
    assert main(["train", "digits", "--strategy", "auto"]) == 2
    assert "the quick probe failed: no room" in capsys.readouterr().err
    assert main(["probe", "--quick", "--workers", "2"]) == 2
    assert "--quick measures fixed numbers of ranks" in capsys.readouterr().err


def test_mistakes(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile(cores=4).save(machine)
    assert main(["plan", "digits"]) == 2
    assert "cores is 4 there and 2 here" in capsys.readouterr().err
    assert main(["plan", "digits", *ONE_RANK, "--machine", str(machine)]) == 0
    machine.write_text("{")
    assert main(["train", "digits", "--strategy", "auto"]) == 2
    assert "weft probe" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        param({"task": "edge"}, name="edge", quick=True),
        param({"task": "link"}, name="link", quick=False),
        param({"task": "link", "batch_size": "64", "decoder": "distmult"}, name="batches", quick=False),
    ],
)
def test_tasks_on_edges_are_estimated(options: dict[str, Any], tmp_path: Path) -> None:
    """Sent bytes are those of a run, and the decoder needs time and memory; `auto` chooses among these estimates.

    Negative samples, and so bytes of links, differ between the first epoch and the last one.
    """
    make().save(tmp_path / "graph")
    graph, run_options = str(tmp_path / "graph"), {"hidden": 16, "epochs": 2, **options}
    strategies = ("split", "sampled") if "batch_size" in options else ("tensor", "communicated")
    config = Config(graph=graph, workers=2, **run_options)
    subject = WholeSubject(prepared_workload(config, None, None))
    (cluster,) = clusters_of(config, profile())
    for strategy in strategies:
        run = train(graph, out=tmp_path / strategy, strategy=strategy, workers=2, eval_every=2, **run_options)
        estimate = estimate_config(replace(config, strategy=strategy), config, subject, cluster)
        assert estimate.fits, estimate.reason
        sent = sum(rank["bytes_sent"] for rank in run.summary["ranks"])
        assert sent == pytest.approx(estimate.sent_bytes, rel=0.1 if options["task"] == "link" else 0)
        plan = get_strategy(strategy)(subject.planned.work, 2, make_options(run.config, subject.planned.work.graph))
        assert estimate.epoch_seconds > epoch_time(plan, cluster).total
        assert estimate.host_bytes > plan_memory(plan, cluster).host
    assert "forecast" in train(graph, out=tmp_path / "auto", strategy="auto", **run_options).summary
    if options == {"task": "link"}:
        rows = weft.plan("stats:vertices=1m,edges=10m,features=8,classes=2", task="link", workers=2)
        assert rows[0].fits


@pytest.mark.parametrize("options", [{"task": "edge"}, {"task": "link"}, {"task": "link", "decoder": "distmult"}])
def test_memory_of_a_task_on_edges(options: dict[str, Any]) -> None:
    """The estimate is that of the tensors that the task and its steps create on one rank."""
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 500, (2, 20_000), generator=random)
    labels = {"edge_y": edges[0] % 2, "edge_features": torch.ones(20_000, 3)} if options["task"] == "edge" else {}
    config = Config(hidden=32, **options)
    work = prepared_workload(config, Graph.from_edges(*edges, x=torch.ones(500, 4), **labels), None)
    plan = get_strategy("single")(work)
    placed = plan.place(Group())
    step = Step(epoch=0, training=True)
    z = placed.forward(step).detach()
    with TensorPeak() as peak:
        task = make_task(config, placed)
        task.loss(z, step)
        task.counts(z, replace(step, training=False))
    assert 0.9 < DecoderCosts(config, config.seed, plan).memory(0) / peak.most < 1.2


BATCHES = {"split", "sampled"}


@pytest.mark.parametrize(
    "flag",
    [
        {"batch_size": "60"},
        *(pytest.param(flag, marks=pytest.mark.slow) for flag in ({"fanout": "5"}, {"prefetch_batches": 1})),
    ],
    ids=str,
)
def test_mini_batch_strategies_are_estimated_only_on_request(flag: dict[str, Any]) -> None:
    assert {estimate.strategy for estimate in estimates(workers=2, **flag)} == BATCHES
    config = Config(graph="digits", workers=2)
    clusters = clusters_of(config, profile())
    approximate = estimate_strategies(config, prepared_workload(config, None, None), clusters, approximate=True)
    assert BATCHES.isdisjoint({estimate.strategy for estimate in approximate})
    # On one rank, the two strategies are equal, so that there is one estimate.
    (alone,) = (estimate for estimate in estimates(**flag) if estimate.workers == 1)
    assert alone.fits


def test_auto_trains_on_mini_batches(tmp_path: Path) -> None:
    flags = {"batch_size": "60", "fanout": "4"}
    expected, _ = best(estimates(**flags))
    run = train("digits", out=tmp_path / "run", strategy="auto", epochs=1, **flags)
    assert (run.config.strategy, run.config.workers) == (expected.strategy, expected.workers)
    assert run.config.strategy in BATCHES
    assert (run.config.batch_size, run.config.fanout) == ("60", "4")


@pytest.mark.parametrize("strategy", sorted(BATCHES))
def test_bytes_of_batches_are_those_of_a_run(strategy: str, tmp_path: Path) -> None:
    """Estimated bytes are exact for an epoch all of whose batches are profiled, including the shorter last one."""
    flags = {"batch_size": "80", "fanout": "3"}
    (estimate,) = (row for row in estimates(workers=2, **flags) if row.strategy == strategy)
    run = train("digits", out=tmp_path / "run", strategy=strategy, workers=2, epochs=1, **flags)
    assert sum(rank["bytes_sent"] for rank in run.summary["ranks"]) == estimate.sent_bytes > 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", sorted(BATCHES))
def test_a_few_profiled_batches_represent_all(strategy: str, workers: int) -> None:
    plan = batch_plan(strategy, workers, batch_size="30", fanout="3")
    assert plan.num_steps == len(plan.sampler.batches(0)) > 2 * NUM_PROFILED_STEPS
    assert sum(number for _, number in plan.profiled_steps) == plan.num_steps
    every = [
        [Steps(plan.trace(rank, training=True, number=number), 1) for number in range(plan.num_steps)]
        for rank in range(workers)
    ]
    untraced = [untraced_calls(plan)] * workers
    cluster = Cluster(profile=profile(), ranks=workers, hosts=1, threads=1, memory_bytes=0)
    assert epoch_time(plan, cluster).total == pytest.approx(
        steps_time(every, untraced, cluster, plan_memory(plan, cluster)).total, rel=0.1
    )
    sent = sum(trace.bytes_sent.total() for some in every for trace, _ in some)
    assert sum(part.sent_bytes for part in estimate_ranks(plan)) == pytest.approx(sent, rel=0.1)
    one_batch = batch_plan(strategy, workers, batch_size="all", fanout="all")
    assert [number for _, number in one_batch.epoch_steps()] == [1]
    assert not any(
        part.prefetched for part in one_batch.epoch_steps()[0].trace.operations
    )  # the one batch is sampled once


def batch_plan(strategy: str, workers: int, **flags: Any) -> MiniBatchPlan:
    config = Config(graph="digits", strategy=strategy, workers=workers, **flags)
    plan = get_strategy(strategy)(prepared_workload(config, None, None), workers, make_options(config))
    assert isinstance(plan, MiniBatchPlan)
    return plan


def test_batches_take_memory() -> None:
    """Memory grows with the number and size of prefetched batches, and with the cache."""

    def planned(**flags: Any) -> MiniBatchPlan:
        return batch_plan("sampled", 1, **{"batch_size": "30", "fanout": "3", **flags})

    assert planned().temporary_memory(0)[:2] == ResidentPlan.temporary_memory(planned(), 0)
    few, more, larger = (
        max(plan.temporary_memory(0)[2:])
        for plan in (
            planned(prefetch_batches=0),
            planned(prefetch_batches=1),
            planned(prefetch_batches=1, batch_size="60"),
        )
    )
    inputs = min(len(batch.rank_batches[0].rows) for batch, _ in planned().profiled_steps) * 64 * 4
    assert few + inputs < more < larger
    cached, without = planned(cache_memory="20KB").peak_memory().device, planned().peak_memory().device
    assert cached - without == 20_000 // 256 * 256 + 4 * 1797


def test_mini_batches_that_cannot_be_estimated(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch-size", "64"]
    assert main(["plan", "stats:vertices=1k,edges=9k,features=4,classes=2", *flags]) == 2
    assert "mini-batches cannot be estimated for stats:..." in capsys.readouterr().err
    assert main(["plan", "digits", "--machines", "2xT4", *flags]) == 2
    assert "mini-batches on GPUs" in capsys.readouterr().err
    assert main(["plan", "digits", "--cache-ratio", "0.5", *flags]) == 2
    assert "--cache-ratio has no effect under strategy split and sampled" in capsys.readouterr().err
    assert main(["train", "digits", "--strategy", "auto", "--batch-size", "5000"]) == 2
    assert "training vertices: give all" in capsys.readouterr().err
    measured = profile()
    tables = [{name: table for name, table in entry.tables.items() if name != "draw"} for entry in measured.prices]
    prices = [replace(entry, tables=some) for entry, some in zip(measured.prices, tables, strict=True)]
    replace(measured, prices=prices).save(machine)
    assert main(["plan", "digits", *ONE_RANK]) == 0
    capsys.readouterr()
    assert main(["train", "digits", "--strategy", "auto", *flags]) == 2
    assert (
        "has draw from another version of weft's probe: measure the machine again with: weft probe"
        in capsys.readouterr().err
    )


def test_a_damaged_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"plans": []}')
    with pytest.raises(InputError) as error:
        train("digits", out=tmp_path / "run", plan=path)
    assert_one_line(error, "weft plan")


def test_a_plan_decides_what_plans_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan sets neither unknown options nor the graph or the model, which could name code."""
    assert main(["plan", "digits", *ONE_RANK, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for name in ("chonks", "graph", "model"):
        plan["plans"][0]["options"] = {name: "module:Class"}
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        with pytest.raises(InputError) as error:
            train("digits", out=tmp_path / "run", plan=tmp_path / "plan.json")
        assert_one_line(error, f"a plan cannot set the option '{name}'")


def test_several_hosts() -> None:
    """Every host has its cores and memory, and the network between hosts is used."""
    one_host, two_hosts = (weft.plan("digits", workers=2, hosts=hosts)[0] for hosts in (1, 2))
    assert two_hosts.compute_seconds < one_host.compute_seconds  # no other rank runs on their hosts
    assert two_hosts.command.startswith("torchrun --nnodes 2 --nproc-per-node 1 -m weft train digits --strategy ")
    assert "--workers" not in two_hosts.command
    with pytest.raises(InputError, match="--hosts 3: give a number of at least 1 that divides --workers 2"):
        weft.plan("digits", workers=2, hosts=3)


def test_commands_contain_all_requested_options() -> None:
    config = Config(graph="a b", model="gat", strategy="tensor", workers=4, normalize_features=True, lr=0.5)
    assert command(config) == "weft train 'a b' --normalize-features --model gat --lr 0.5 --strategy tensor --workers 4"
