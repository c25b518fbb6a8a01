"""`weft plan`, `--plan` and `--strategy auto`, by the prices of a machine that was never measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.lib.graph_checks import assert_one_line
from tests.lib.profiles import profile
from tests.lib.running import train
from weft.autotune import Cluster, epoch_time, estimate_ranks, plan_memory, steps_time, untraced_calls
from weft.cli.main import main
from weft.config.config import Config
from weft.cost import Steps
from weft.strategies import get_strategy
from weft.strategies.resident import ResidentPlan
from weft.strategies.split.plan import NUM_PROFILED_STEPS, MiniBatchPlan
from weft.training.flag_checks import make_options
from weft.training.planning import probe_command
from weft.training.planning.machine_list import clusters_of
from weft.training.planning.search import TOLERANCE, StrategyEstimate, best, command, estimate_strategies
from weft.training.run import prepared_workload
from weft.utils.errors import InputError

FIELDS = {
    "strategy", "workers", "options", "epoch_seconds", "compute_seconds", "network_seconds", "disk_seconds",
    "waiting_seconds", "device_bytes", "host_bytes", "disk_bytes", "sent_bytes", "fits", "reason", "command",
    "machines",
}  # fmt: skip


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile where the user's is looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: {"processor": "none", "cores": 2})
    path = tmp_path / "cache" / "weft" / "machine.json"
    profile().save(path)
    return path


def foreseen(**options: object) -> list[StrategyEstimate]:
    config = Config(graph="digits", **options)  # type: ignore[arg-type]
    return estimate_strategies(config, prepared_workload(config, None, None), clusters_of(config, profile()))


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [set(one) for one in told["plans"]] == [FIELDS] * len(told["plans"])
    assert {one["workers"] for one in told["plans"]} == {1, 2}
    seconds = [one["epoch_seconds"] for one in told["plans"] if one["fits"]]
    assert seconds == sorted(seconds)
    assert all(one["sent_bytes"] > 0 for one in told["plans"] if one["workers"] == 2 and one["fits"])
    assert [one["strategy"] for one in told["plans"] if one["workers"] == 1][-1] != "communicated"  # as single


def test_seconds_are_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for one in foreseen(workers=2):
        assert one.epoch_seconds <= one.compute_seconds + one.network_seconds + one.waiting_seconds + 1e-9, one
        assert one.epoch_seconds >= max(one.compute_seconds, one.network_seconds)
    assert main(["plan", "digits", "--workers", "2"]) == 0
    out = capsys.readouterr().out
    assert "weft train digits --strategy" in out
    assert "host memory" in out


def test_sent_bytes_are_those_of_a_run(tmp_path: Path) -> None:
    told = {one.strategy: one for one in weft.plan("digits", workers=2)}
    for strategy in ("tensor", "communicated"):
        run = train("digits", out=tmp_path / strategy, strategy=strategy, workers=2, epochs=2, eval_every=2)
        assert sum(rank["bytes_sent"] for rank in run.summary["ranks"]) == told[strategy].sent_bytes


def test_what_does_not_fit_is_said() -> None:
    config = Config(graph="digits")
    small = clusters_of(config, profile())
    tight = [type(one)(**{**vars(one), "memory_bytes": 1 << 20}) for one in small]
    found = estimate_strategies(config, prepared_workload(config, None, None), tight)
    assert not any(one.fits for one in found)
    assert {"of host memory, 1.0 MB available" in one.reason for one in found if one.host_bytes} == {True}
    with pytest.raises(InputError, match=r"^no strategy fits: \w+: "):
        best(found)


def test_the_simpler_of_those_that_are_alike() -> None:
    def one(strategy: str, workers: int, seconds: float) -> StrategyEstimate:
        return StrategyEstimate(
            strategy=strategy, workers=workers, options={}, command="", fits=True, epoch_seconds=seconds
        )

    alike, slower = 1 + 0.9 * TOLERANCE, 1 + 1.1 * TOLERANCE
    assert best([one("tensor", 4, 1.0), one("communicated", 4, alike)])[0].strategy == "tensor"
    assert best([one("hybrid", 4, 1.0), one("single", 1, alike)])[0].strategy == "single"
    taken, why = best([one("hybrid", 4, 1.0), one("single", 1, slower)])
    assert taken.strategy == "hybrid"
    assert "single 1.11 s" in why
    assert "within the error" in best([one("hybrid", 4, 1.0), one("single", 1, alike)])[1]


def test_flags_choose_the_strategies() -> None:
    assert {one.strategy for one in foreseen(workers=2, cache_ratio=0.5)} == {"hybrid", "offload"}
    assert "stale" not in {one.strategy for one in foreseen(workers=2)}
    with pytest.raises(InputError, match="--refresh-every has no effect"):
        foreseen(workers=2, refresh_every=8)


def test_auto_trains_the_best(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    taken, _ = best(foreseen())
    run = train("digits", out=tmp_path / "run", strategy="auto", epochs=2)
    assert (run.config.strategy, run.config.workers) == (taken.strategy, taken.workers)
    assert f"auto: {taken.strategy}" in capfd.readouterr().err


def test_trains_by_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    main(["plan", "digits", "--workers", "2", "--json"])
    path.write_text(capsys.readouterr().out)
    best_one = json.loads(path.read_text())["plans"][0]
    assert (
        main(["train", "digits", "--plan", str(path), "--epochs", "2", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    )
    assert Config.read(tmp_path / "run" / "config.toml").strategy == best_one["strategy"]
    for arguments, said in {
        ("rmat:vertices=100,edges=300,features=4,classes=2",): "a plan for another graph",
        ("digits", "--workers", "3"): "--workers 3",
    }.items():
        assert main(["train", *arguments, "--plan", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_mistakes(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.unlink()
    assert main(["plan", "digits"]) == 2
    assert "weft plan needs a profile of this machine" in capsys.readouterr().err
    profile(cores=4).save(machine)
    assert main(["plan", "digits"]) == 2
    assert "cores is 4 there and 2 here" in capsys.readouterr().err
    assert main(["plan", "digits", "--machine", str(machine)]) == 0
    machine.write_text("{")
    assert main(["train", "digits", "--strategy", "auto"]) == 2
    assert "weft probe" in capsys.readouterr().err


def test_what_cannot_be_told_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--task", "link"]) == 2
    assert "--task link" in capsys.readouterr().err
    assert main(["train", "digits", "--strategy", "auto", "--task", "link", "--batch-size", "64"]) == 2
    assert "--task link cannot be estimated yet" in capsys.readouterr().err


BATCHES = {"split", "sampled"}


@pytest.mark.parametrize(
    "flag",
    [
        {"batch_size": "60"},
        *(pytest.param(flag, marks=pytest.mark.slow) for flag in ({"fanout": "5"}, {"prefetch_batches": 1})),
    ],
    ids=str,
)
def test_mini_batches_come_when_asked_for(flag: dict[str, Any]) -> None:
    assert {one.strategy for one in foreseen(workers=2, **flag)} == BATCHES
    config = Config(graph="digits", workers=2)
    clusters = clusters_of(config, profile())
    found = estimate_strategies(config, prepared_workload(config, None, None), clusters, approximate=True)
    assert BATCHES.isdisjoint({one.strategy for one in found})
    (alone,) = (one for one in foreseen(**flag) if one.workers == 1)  # which both do alike
    assert alone.fits


def test_auto_trains_on_mini_batches(tmp_path: Path) -> None:
    flags = {"batch_size": "60", "fanout": "4"}
    taken, _ = best(foreseen(**flags))
    run = train("digits", out=tmp_path / "run", strategy="auto", epochs=1, **flags)
    assert (run.config.strategy, run.config.workers) == (taken.strategy, taken.workers)
    assert run.config.strategy in BATCHES
    assert (run.config.batch_size, run.config.fanout) == ("60", "4")


@pytest.mark.parametrize("strategy", sorted(BATCHES))
def test_bytes_of_batches_are_those_of_a_run(strategy: str, tmp_path: Path) -> None:
    """Of an epoch all of whose batches are looked at, the last of which is shorter."""
    flags = {"batch_size": "80", "fanout": "3"}
    (told,) = (one for one in foreseen(workers=2, **flags) if one.strategy == strategy)
    run = train("digits", out=tmp_path / "run", strategy=strategy, workers=2, epochs=1, **flags)
    assert sum(rank["bytes_sent"] for rank in run.summary["ranks"]) == told.sent_bytes > 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", sorted(BATCHES))
def test_a_few_batches_tell_of_all(strategy: str, workers: int) -> None:
    plan = batch_plan(strategy, workers, batch_size="30", fanout="3")
    assert plan.num_steps == len(plan.sampler.batches(0)) > 2 * NUM_PROFILED_STEPS
    assert sum(number for _, number in plan.profiled_steps) == plan.num_steps
    every = [
        [Steps(plan.trace(rank, training=True, number=number), 1) for number in range(plan.num_steps)]
        for rank in range(workers)
    ]
    beside = [untraced_calls(plan)] * workers
    cluster = Cluster(profile=profile(), ranks=workers, hosts=1, threads=1, memory_bytes=0)
    assert epoch_time(plan, cluster).total == pytest.approx(
        steps_time(every, beside, cluster, plan_memory(plan, cluster)).total, rel=0.1
    )
    sent = sum(trace.bytes_sent.total() for some in every for trace, _ in some)
    assert sum(one.sent_bytes for one in estimate_ranks(plan)) == pytest.approx(sent, rel=0.1)
    one_batch = batch_plan(strategy, workers, batch_size="all", fanout="all")
    assert [number for _, number in one_batch.epoch_steps()] == [1]
    assert not any(one.prefetched for one in one_batch.epoch_steps()[0].trace.operations)  # it is drawn once


def batch_plan(strategy: str, workers: int, **flags: Any) -> MiniBatchPlan:
    config = Config(graph="digits", strategy=strategy, workers=workers, **flags)
    plan = get_strategy(strategy)(prepared_workload(config, None, None), workers, make_options(config))
    assert isinstance(plan, MiniBatchPlan)
    return plan


def test_batches_take_memory() -> None:
    """As many as are made ahead, of their size; and a cache."""

    def told(**flags: Any) -> MiniBatchPlan:
        return batch_plan("sampled", 1, **{"batch_size": "30", "fanout": "3", **flags})

    assert told().temporary_memory(0)[:2] == ResidentPlan.temporary_memory(told(), 0)
    few, more, larger = (
        max(plan.temporary_memory(0)[2:])
        for plan in (told(prefetch_batches=0), told(prefetch_batches=1), told(prefetch_batches=1, batch_size="60"))
    )
    inputs = min(len(batch.rank_batches[0].rows) for batch, _ in told().profiled_steps) * 64 * 4
    assert few + inputs < more < larger
    held, without = told(cache_memory="20KB").peak_memory().device, told().peak_memory().device
    assert held - without == 20_000 // 256 * 256 + 4 * 1797


def test_what_mini_batches_cannot_be_told_of(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch-size", "64"]
    assert main(["plan", "stats:vertices=1k,edges=9k,features=4,classes=2", *flags]) == 2
    assert "mini-batches cannot be estimated for stats:..." in capsys.readouterr().err
    assert main(["plan", "digits", "--machines", "2xT4", *flags]) == 2
    assert "mini-batches on GPUs" in capsys.readouterr().err
    assert main(["plan", "digits", "--cache-ratio", "0.5", *flags]) == 2
    assert "--cache-ratio has no effect under strategy split and sampled" in capsys.readouterr().err
    assert main(["train", "digits", "--strategy", "auto", "--batch-size", "5000"]) == 2
    assert "training vertices: give all" in capsys.readouterr().err
    known = profile()
    tables = [{name: table for name, table in one.tables.items() if name != "draw"} for one in known.prices]
    prices = [replace(one, tables=some) for one, some in zip(known.prices, tables, strict=True)]
    replace(known, prices=prices).save(machine)
    assert main(["plan", "digits"]) == 0
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


@pytest.mark.parametrize("name", ["chonks", "graph"])
def test_a_plan_decides_what_plans_do(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    told["plans"][0]["options"][name] = "x"
    (tmp_path / "plan.json").write_text(json.dumps(told))
    with pytest.raises(InputError) as error:
        train("digits", out=tmp_path / "run", plan=tmp_path / "plan.json")
    assert_one_line(error, f"a plan cannot set the option '{name}'")


def test_several_hosts() -> None:
    """Each with its own cores and memory, and a network that was measured between such."""
    here, there = (weft.plan("digits", workers=2, hosts=hosts)[0] for hosts in (1, 2))
    assert there.compute_seconds < here.compute_seconds  # nobody else is at work on their hosts
    assert there.command.startswith("torchrun --nnodes 2 --nproc-per-node 1 -m weft train digits --strategy ")
    assert "--workers" not in there.command
    with pytest.raises(InputError, match="--hosts 3: give a number of at least 1 that divides --workers 2"):
        weft.plan("digits", workers=2, hosts=3)


def test_commands_say_all_that_was_asked() -> None:
    config = Config(graph="a b", model="gat", strategy="tensor", workers=4, normalize_features=True, lr=0.5)
    assert command(config) == "weft train 'a b' --normalize-features --model gat --lr 0.5 --strategy tensor --workers 4"
