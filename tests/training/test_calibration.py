"""What was told of a run beside what it took, what forecasts learn of it, and what hybrid decides by."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.lib.profiles import profile
from tests.lib.ranks import on_ranks
from tests.lib.running import train
from weft.autotune import Cluster, epoch_time, machine_of
from weft.cli.main import main
from weft.comm import Group
from weft.config.config import Config
from weft.cost import Machine, Profile
from weft.cost.profile import MAX_FACTOR, MAX_RUNS, MIN_RUNS
from weft.prediction.prediction import predicting_config
from weft.reporting import run_facts, run_table
from weft.reporting.records import RunRecords
from weft.runtime.kernel_selection import DEFAULT
from weft.strategies.single import SinglePlan
from weft.training.machine_context import known_machine, local_cluster
from weft.training.planning import calibration, probe_command, run_estimate
from weft.training.planning.calibration import Correction, Epoch, Estimate
from weft.training.planning.probe_command import only_writer, update_calibration
from weft.training.run import prepared_workload

HARDWARE = {"processor": "none", "cores": 2}
FEW = 6
"""Epochs of a run that is told of here."""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile where the user's is looked for, of runs of a few epochs too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: HARDWARE)
    monkeypatch.setattr(run_estimate, "MIN_EPOCHS", FEW)
    path = tmp_path / "cache" / "weft" / "machine.json"
    profile().save(path)
    return path


def learned(machine: Path) -> list[Mapping[str, float]]:
    return [*Profile.read(machine).calibration]


def calibrated(*ratios: float, kind: str = "compute") -> Profile:
    """Return a profile that runs with these ratios of measured to estimated seconds have calibrated."""
    known = profile()
    for ratio in ratios:
        known = known.with_calibration({kind: ratio})
    return known


def test_a_run_beside_its_forecast(tmp_path: Path, machine: Path) -> None:
    run = train("digits", out=tmp_path / "run", epochs=FEW, quiet=True)
    told, seen = (run.summary["forecast"][side] for side in ("told", "seen"))
    cluster = local_cluster(run.config)
    assert cluster
    assert told["epoch_seconds"] == epoch_time(SinglePlan(prepared_workload(run.config, None, None)), cluster).total
    assert seen == {
        "epoch_seconds": run.summary["epoch_seconds"],
        "compute_seconds": run.summary["ranks"][0]["compute_seconds"],
        "network_seconds": 0.0,
        "waiting_seconds": 0.0,
        "host_bytes": run.summary["ranks"][0]["peak_memory_bytes"],
    }
    times = seen["epoch_seconds"] / told["epoch_seconds"]
    assert f"({times:.2f} x); estimated / measured: compute " in str(run_table(run.summary).title)
    assert "memory of all ranks (estimated, measured)" in run_facts(RunRecords.read(run.folder))
    assert learned(machine) == [{"compute": pytest.approx(seen["compute_seconds"] / told["compute_seconds"])}]


def test_several_ranks_are_told_of(tmp_path: Path) -> None:
    """By rank 0, whose threads are those that were probed; ratios have what was learned before in them."""
    run = weft.train("digits", out=tmp_path / "run", strategy="tensor", workers=2, epochs=FEW, quiet=True)
    told, seen = (Epoch.of(run.summary["forecast"][side]) for side in ("told", "seen"))
    assert told.network_seconds > 0
    assert seen.network_seconds == run.summary["ranks"][1]["communication_seconds"]
    assert seen.host_bytes == sum(rank["peak_memory_bytes"] for rank in run.summary["ranks"])
    lesson = Correction(digest="", threads=1, factors={"compute": 1.5, "network": 1.0}, choices=DEFAULT)
    ratios = Estimate(epoch=told, correction=lesson).ratios(seen)
    assert ratios["compute"] == pytest.approx(1.5 * seen.compute_seconds / told.compute_seconds)


@pytest.mark.parametrize("options", [{"batch_size": "80"}, {}], ids=str)
def test_mini_batches_are_told_of(options: dict[str, Any], tmp_path: Path, machine: Path) -> None:
    """Also those of the default size."""
    run = train("digits", out=tmp_path / "run", strategy="sampled", epochs=FEW, quiet=True, **options)
    told = run.summary["forecast"]["told"]
    assert 0 < told["epoch_seconds"] == pytest.approx(told["compute_seconds"])
    assert learned(machine)


NONE_TOLD: dict[str, dict[str, Any]] = {
    "few epochs": {"epochs": FEW - 1},
    "links": {"task": "link", "epochs": FEW},
    "batches of links": {"task": "link", "strategy": "sampled", "epochs": FEW},
}


@pytest.mark.parametrize("options", NONE_TOLD.values(), ids=NONE_TOLD)
def test_nothing_is_said_where_nothing_can_be(tmp_path: Path, machine: Path, options: dict[str, Any]) -> None:
    run = train("digits", out=tmp_path / "run", quiet=True, **options)
    assert "forecast" not in run.summary
    assert not learned(machine)


@pytest.mark.parametrize("hardware", [{"cores": 4}, {"processor": "another"}])
def test_other_hardware_tells_nothing(tmp_path: Path, machine: Path, hardware: dict[str, Any]) -> None:
    known = profile()
    replace(known, host={**known.host, **hardware}).save(machine)
    assert "forecast" not in train("digits", out=tmp_path / "run", epochs=FEW, quiet=True).summary


def test_several_hosts_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the emulated cluster, where each rank has a torchrun of its own."""
    assert local_cluster(Config(graph="digits", workers=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert local_cluster(Config(graph="digits", workers=2)) is None


def test_a_forecast_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("ranks take part in different collectives")

    monkeypatch.setattr(
        calibration, "update_calibration", lambda *_: (_ for _ in ()).throw(OSError("the disk is full"))
    )
    assert "forecast" in train("digits", out=tmp_path / "kept", epochs=FEW, quiet=True).summary
    monkeypatch.setattr(run_estimate, "epoch_time", broken)
    assert "forecast" not in train("digits", out=tmp_path / "run", epochs=FEW, quiet=True).summary


def test_other_threads_than_told_teach_nothing(tmp_path: Path, machine: Path) -> None:
    """The profile has one rank on both cores; tests have one thread."""
    run = train("digits", out=tmp_path / "run", strategy="auto", workers=1, epochs=FEW, quiet=True)
    assert run.summary["forecast"]["told"]["epoch_seconds"] > 0
    assert not learned(machine)


def test_a_plan_of_a_file_is_what_was_told(tmp_path: Path, machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    main(["plan", "digits", "--workers", "1", "--json"])
    path.write_text(capsys.readouterr().out)
    machine.unlink()
    run = train("digits", out=tmp_path / "run", plan=path, epochs=2, quiet=True)
    first = json.loads(path.read_text())["plans"][0]
    assert run.summary["forecast"]["told"] == {name: first[name] for name in run.summary["forecast"]["told"]}


def test_rank_zero_decides_for_all_ranks_of_torchrun(tmp_path: Path, machine: Path) -> None:
    """The others may have no profile, or one that other runs have taught."""
    found = on_ranks(2, auto_on_a_rank, machine.parent.parent, tmp_path / "run")
    assert found[0] == found[1]


def auto_on_a_rank(group: Group, cache: Path, out: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache if group.rank == 0 else out))
        patch.setattr(probe_command, "hardware", lambda: HARDWARE)
        run = weft.train("digits", strategy="auto", epochs=2, out=out, quiet=True)
        return str(run.config.strategy) if group.rank == 0 else str(Config.read(out / "config.toml").strategy)


def test_factors_are_medians_of_the_newest_runs() -> None:
    assert calibrated(*[1.5] * (MIN_RUNS - 1)).factor("compute") == 1
    assert calibrated(*[1.5] * MIN_RUNS).factor("compute") == pytest.approx(1.5)
    assert calibrated(1.2, 0.9, 100.0).factor("compute") == pytest.approx(1.2)  # one run beside other work
    assert calibrated(0.5, 0.8, 1.25, 2.0).factor("compute") == pytest.approx(1.0)  # ratios, not differences
    assert calibrated(*[9.0] * MIN_RUNS).factor("compute") == pytest.approx(MAX_FACTOR)
    assert calibrated(*[0.1] * MIN_RUNS).factor("compute") == pytest.approx(1 / MAX_FACTOR)
    assert calibrated(*[1.9] * MAX_RUNS, *[1.1] * MAX_RUNS).factor("compute") == pytest.approx(1.1)
    assert calibrated(*[1.5] * MIN_RUNS).factor("network") == 1


def test_forecasts_apply_what_runs_have_taught() -> None:
    def told(known: Profile, workers: int) -> Any:
        cluster = Cluster(profile=known, ranks=workers, hosts=1, threads=1, memory_bytes=1 << 40)
        work = prepared_workload(Config(graph="digits"), None, None)
        plan = SinglePlan if workers == 1 else weft.strategies.STRATEGIES["tensor"]
        return epoch_time(plan(work, workers), cluster)

    plain, slower = (told(one, 1) for one in (profile(), calibrated(1.5, 1.5, 1.5)))
    assert slower.total == pytest.approx(1.5 * plain.total, abs=1e-12)
    plain, slower = (told(one, 2) for one in (profile(), calibrated(1.5, 1.5, 1.5, kind="network")))
    assert slower.network == pytest.approx(1.5 * plain.network, rel=1e-6)
    assert slower.compute == pytest.approx(plain.compute, rel=1e-6)


def test_two_runs_that_end_at_once_both_teach(machine: Path) -> None:
    known = Profile.read(machine)
    with only_writer(machine):
        other = threading.Thread(target=update_calibration, args=(machine, known.digest, {"compute": 1.2}))
        other.start()
        other.join(0.3)
        assert other.is_alive(), "it does not wait"
        known.with_calibration({"compute": 1.1}).save(machine)
    other.join(60)
    assert learned(machine) == [{"compute": 1.1}, {"compute": 1.2}]
    assert [one.name for one in machine.parent.iterdir()] == [machine.name]


def test_a_probe_starts_anew(machine: Path) -> None:
    before = Profile.read(machine)
    profile(byte_seconds=2e-9).save(machine)  # while a run was under way
    update_calibration(machine, before.digest, {"compute": 1.2})
    assert not learned(machine)
    assert before.digest == before.with_calibration({"compute": 1.2}).digest


def test_ratios_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    calibrated(1.5, 0.7).save(path)
    assert Profile.read(path) == replace(calibrated(1.5, 0.7), prices=Profile.read(path).prices)
    for wrong in (0, -1, math.inf, "x"):
        path.write_text(json.dumps(profile().record() | {"learned": [{"compute": wrong}]}))
        with pytest.raises(weft.InputError, match="weft probe"):
            Profile.read(path)


def test_a_kind_of_few_seconds_teaches_nothing() -> None:
    whole = {"epoch_seconds": 1.0, "compute_seconds": 0.5, "waiting_seconds": 0.0, "host_bytes": 1}
    lesson = Correction(digest="", threads=1, factors={"compute": 1.0, "network": 1.0}, choices=DEFAULT)
    told = Estimate(epoch=Epoch(network_seconds=0.01, **whole), correction=lesson)  # type: ignore[arg-type]
    assert told.ratios(Epoch(network_seconds=0.3, **whole)) == {"compute": 1.0}  # type: ignore[arg-type]


def test_the_plan_says_of_how_many_runs(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(1.5, 1.5, 1.5).save(machine)
    assert main(["plan", "digits"]) == 0
    assert "calibrated by 3 runs: compute 1.50 x, network 1.00 x the seconds of the probe" in capsys.readouterr().out


def hybrid(**options: Any) -> Config:
    return Config(graph="digits", strategy="hybrid", workers=2, hidden=16, layers=3, partition="random", **options)


def factors_of(known: Profile) -> Machine:
    cluster = Cluster(profile=known, ranks=2, hosts=1, threads=1, memory_bytes=0)
    return machine_of(prepared_workload(hybrid(), None, None), cluster)


def test_factors_of_a_profile() -> None:
    plain, slower = factors_of(profile()), factors_of(profile(byte_seconds=8e-9, message_seconds=8e-4))
    assert slower == replace(plain, seconds_per_byte=pytest.approx(8 * plain.seconds_per_byte))  # type: ignore[arg-type]
    assert plain.seconds_per_edge == pytest.approx(8e-10, rel=0.5)  # both cores at work, and what calls cost
    assert factors_of(calibrated(1.5, 1.5, 1.5)) == plain, "runs change what seeded runs decide"


def test_hybrid_decides_by_the_profile(tmp_path: Path, machine: Path) -> None:
    work, here = prepared_workload(hybrid(), None, None), factors_of(profile())
    assert known_machine(hybrid(), work) == here
    assert known_machine(hybrid(measure=True), work) == here
    assert known_machine(replace(hybrid(), strategy="communicated"), work) is None
    given = str(shutil.copy(machine, tmp_path / "given.json"))
    machine.unlink()
    assert known_machine(hybrid(), work) is None
    assert known_machine(hybrid(machine=given), work) == here


def test_offload_decides_by_a_profile_that_is_named(machine: Path) -> None:
    """By default it caches nothing, which would take memory."""
    config = replace(hybrid(), strategy="offload")
    work = prepared_workload(config, None, None)
    assert known_machine(config, work) is None
    assert known_machine(replace(config, machine=str(machine)), work) == factors_of(profile())


def test_a_profile_of_other_threads_decides_nothing(machine: Path) -> None:
    """Refuse it where it is named, unless the ranks will measure what it lacks."""
    work = prepared_workload(hybrid(), None, None)
    profile(cores=8).save(machine)  # ranks of 8 threads and of 1
    known = Profile.read(machine)
    replace(known, prices=[one for one in known.prices if one.threads > 1]).save(machine)
    assert known_machine(hybrid(), work) is None
    with pytest.raises(weft.InputError, match="measured with 8 threads a rank, not 1"):
        known_machine(hybrid(machine=str(machine)), work)
    completed = hybrid(machine=str(machine), measure=True)
    assert known_machine(completed, work) is None
    assert known_machine(predicting_config(completed, {}), work) is None


BAD = {
    "no JSON": b"[" * 100_000,
    "no text": b"\xff\xfe\x00",
    "a list": b"[1, 2, 3]",
    "a former run's factors": b'{"seconds_per_flop": 1, "seconds_per_edge": 1, "seconds_per_byte": 1}',
}


@pytest.mark.parametrize("strategy", ["hybrid", "offload"])
@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_file_without_a_profile_is_refused(
    content: bytes, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    out = tmp_path / "run"
    flags = ["--strategy", strategy, "--machine", str(path), "--out", str(out), "--quiet"]
    assert main(["train", "digits", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"weft: error: {path}: cannot be read")
    assert line.endswith("weft probe")
    assert not out.exists()


def test_a_profile_is_not_of_gpus(machine: Path) -> None:
    work = prepared_workload(hybrid(), None, None)
    with pytest.raises(weft.InputError, match="--machine names a profile of CPUs"):
        known_machine(hybrid(machine=str(machine), device="cuda"), work)
