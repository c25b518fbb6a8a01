"""Estimated and measured time of runs, the calibration of estimates by them, and the costs that hybrid uses."""

from __future__ import annotations

import fcntl
import json
import math
import os
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
from weft.reporting import run_facts, run_table
from weft.reporting.records import RunRecords
from weft.runtime.kernel_selection import DEFAULT
from weft.strategies.single import SinglePlan
from weft.training.flag_checks import predicting_config
from weft.training.machine_context import known_machine, local_cluster
from weft.training.planning import calibration, probe_command, run_estimate
from weft.training.planning.calibration import Correction, Epoch, Estimate
from weft.training.planning.probe_command import only_writer, update_calibration
from weft.training.run import prepared_workload

HARDWARE = {"processor": "none", "cores": 2}
NUM_EPOCHS = 6
"""Number of epochs from which on a run is estimated and measured in these tests."""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a profile where the user's is searched for, and let runs of few epochs calibrate it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: HARDWARE)
    monkeypatch.setattr("weft.training.run.MIN_EPOCHS", NUM_EPOCHS)
    path = tmp_path / "cache" / "weft" / "machine.json"
    profile().save(path)
    return path


def calibration_of(machine: Path) -> list[Mapping[str, float]]:
    return [*Profile.read(machine).calibration]


def calibrated(*ratios: float, kind: str = "compute") -> Profile:
    """Return a profile that runs with these ratios of measured to estimated seconds have calibrated."""
    calibrated_profile = profile()
    for ratio in ratios:
        calibrated_profile = calibrated_profile.with_calibration({kind: ratio})
    return calibrated_profile


def test_a_run_is_compared_with_its_estimate(tmp_path: Path, machine: Path) -> None:
    run = train("digits", out=tmp_path / "run", epochs=NUM_EPOCHS, quiet=True)
    estimated, measured = (run.summary["forecast"][side] for side in ("told", "seen"))
    cluster = local_cluster(run.config)
    assert cluster
    assert (
        estimated["epoch_seconds"] == epoch_time(SinglePlan(prepared_workload(run.config, None, None)), cluster).total
    )
    assert measured == {
        "epoch_seconds": run.summary["epoch_seconds"],
        "compute_seconds": run.summary["ranks"][0]["compute_seconds"],
        "network_seconds": 0.0,
        "waiting_seconds": 0.0,
        "host_bytes": run.summary["ranks"][0]["peak_memory_bytes"],
    }
    times = measured["epoch_seconds"] / estimated["epoch_seconds"]
    assert f"({times:.2f} x); estimated / measured: compute " in str(run_table(run.summary).title)
    assert "memory of all ranks (estimated, measured)" in run_facts(RunRecords.read(run.folder))
    assert calibration_of(machine) == [
        {"compute": pytest.approx(measured["compute_seconds"] / estimated["compute_seconds"])}
    ]


def test_runs_on_several_ranks_are_estimated(tmp_path: Path) -> None:
    """Ratios of a calibrated estimate are relative to the uncalibrated one."""
    run = weft.train("digits", out=tmp_path / "run", strategy="tensor", workers=2, epochs=NUM_EPOCHS, quiet=True)
    estimated, measured = (Epoch.of(run.summary["forecast"][side]) for side in ("told", "seen"))
    assert estimated.network_seconds > 0
    assert measured.network_seconds == run.summary["ranks"][1]["communication_seconds"]
    assert measured.host_bytes == sum(rank["peak_memory_bytes"] for rank in run.summary["ranks"])
    correction = Correction(digest="", threads=1, factors={"compute": 1.5, "network": 1.0}, choices=DEFAULT)
    ratios = Estimate(epoch=estimated, correction=correction).ratios(measured)
    assert ratios["compute"] == pytest.approx(1.5 * measured.compute_seconds / estimated.compute_seconds)


@pytest.mark.parametrize("options", [{"batch_size": "80"}, {}], ids=str)
def test_mini_batches_are_estimated(options: dict[str, Any], tmp_path: Path, machine: Path) -> None:
    """Mini-batches of a given and of the default size are estimated."""
    run = train("digits", out=tmp_path / "run", strategy="sampled", epochs=NUM_EPOCHS, quiet=True, **options)
    estimated = run.summary["forecast"]["told"]
    assert 0 < estimated["epoch_seconds"] == pytest.approx(estimated["compute_seconds"])
    assert calibration_of(machine)


NOT_ESTIMATED: dict[str, dict[str, Any]] = {
    "few epochs": {"epochs": NUM_EPOCHS - 1},
    "links": {"task": "link", "epochs": NUM_EPOCHS},
    "batches of links": {"task": "link", "strategy": "sampled", "epochs": NUM_EPOCHS},
}


@pytest.mark.parametrize("options", NOT_ESTIMATED.values(), ids=NOT_ESTIMATED)
def test_runs_that_cannot_be_estimated_have_no_estimate(tmp_path: Path, machine: Path, options: dict[str, Any]) -> None:
    run = train("digits", out=tmp_path / "run", quiet=True, **options)
    assert "forecast" not in run.summary
    assert not calibration_of(machine)


@pytest.mark.parametrize("hardware", [{"cores": 4}, {"processor": "another"}])
def test_a_profile_of_other_hardware_is_not_used(tmp_path: Path, machine: Path, hardware: dict[str, Any]) -> None:
    measured = profile()
    replace(measured, host={**measured.host, **hardware}).save(machine)
    assert "forecast" not in train("digits", out=tmp_path / "run", epochs=NUM_EPOCHS, quiet=True).summary


def test_runs_on_several_hosts_are_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several torchruns of one rank each count as several hosts, as on the emulated cluster."""
    assert local_cluster(Config(graph="digits", workers=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert local_cluster(Config(graph="digits", workers=2)) is None


def test_an_estimate_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("ranks take part in different collectives")

    monkeypatch.setattr(
        calibration, "update_calibration", lambda *_: (_ for _ in ()).throw(OSError("the disk is full"))
    )
    assert "forecast" in train("digits", out=tmp_path / "kept", epochs=NUM_EPOCHS, quiet=True).summary
    monkeypatch.setattr(run_estimate, "epoch_time", broken)
    assert "forecast" not in train("digits", out=tmp_path / "run", epochs=NUM_EPOCHS, quiet=True).summary


def test_a_run_with_other_threads_calibrates_nothing(tmp_path: Path, machine: Path) -> None:
    """The profile was measured with two threads for one rank; tests have one thread."""
    run = train("digits", out=tmp_path / "run", strategy="auto", workers=1, epochs=NUM_EPOCHS, quiet=True)
    assert run.summary["forecast"]["told"]["epoch_seconds"] > 0
    assert not calibration_of(machine)


def test_the_estimate_of_a_run_is_that_of_its_plan_file(
    tmp_path: Path, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    main(["plan", "digits", "--workers", "1", "--json"])
    path.write_text(capsys.readouterr().out)
    machine.unlink()
    run = train("digits", out=tmp_path / "run", plan=path, epochs=2, quiet=True)
    first = json.loads(path.read_text())["plans"][0]
    assert run.summary["forecast"]["told"] == {name: first[name] for name in run.summary["forecast"]["told"]}


def test_rank_zero_decides_for_all_ranks_of_torchrun(tmp_path: Path, machine: Path) -> None:
    """All ranks use the strategy that rank 0 chose, even if they have no profile or another one."""
    strategies = on_ranks(2, auto_on_a_rank, machine.parent.parent, tmp_path / "run")
    assert strategies[0] == strategies[1]


def auto_on_a_rank(group: Group, cache: Path, out: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache if group.rank == 0 else out))
        patch.setattr(probe_command, "hardware", lambda: HARDWARE)
        run = weft.train("digits", strategy="auto", epochs=2, out=out, quiet=True)
        return str(run.config.strategy) if group.rank == 0 else str(Config.read(out / "config.toml").strategy)


def test_factors_are_medians_of_the_newest_runs() -> None:
    assert calibrated(*[1.5] * (MIN_RUNS - 1)).factor("compute") == 1
    assert calibrated(*[1.5] * MIN_RUNS).factor("compute") == pytest.approx(1.5)
    # The third run was slowed down by other processes.
    assert calibrated(1.2, 0.9, 100.0).factor("compute") == pytest.approx(1.2)
    assert calibrated(0.5, 0.8, 1.25, 2.0).factor("compute") == pytest.approx(1.0)  # ratios, not differences
    assert calibrated(*[9.0] * MIN_RUNS).factor("compute") == pytest.approx(MAX_FACTOR)
    assert calibrated(*[0.1] * MIN_RUNS).factor("compute") == pytest.approx(1 / MAX_FACTOR)
    assert calibrated(*[1.9] * MAX_RUNS, *[1.1] * MAX_RUNS).factor("compute") == pytest.approx(1.1)
    assert calibrated(*[1.5] * MIN_RUNS).factor("network") == 1


def test_estimates_apply_the_calibration() -> None:
    def estimate(prices: Profile, workers: int) -> Any:
        cluster = Cluster(profile=prices, ranks=workers, hosts=1, threads=1, memory_bytes=1 << 40)
        work = prepared_workload(Config(graph="digits"), None, None)
        plan = SinglePlan if workers == 1 else weft.strategies.STRATEGIES["tensor"]
        return epoch_time(plan(work, workers), cluster)

    plain, slower = (estimate(prices, 1) for prices in (profile(), calibrated(1.5, 1.5, 1.5)))
    assert slower.total == pytest.approx(1.5 * plain.total, abs=1e-12)
    plain, slower = (estimate(prices, 2) for prices in (profile(), calibrated(1.5, 1.5, 1.5, kind="network")))
    assert slower.network == pytest.approx(1.5 * plain.network, rel=1e-6)
    assert slower.compute == pytest.approx(plain.compute, rel=1e-6)


def test_two_runs_that_end_at_once_both_calibrate(machine: Path) -> None:
    before = Profile.read(machine)
    with only_writer(machine):
        other = threading.Thread(target=update_calibration, args=(machine, before.digest, {"compute": 1.2}))
        other.start()
        other.join(0.3)
        assert other.is_alive(), "the second writer does not wait"
        before.with_calibration({"compute": 1.1}).save(machine)
    other.join(60)
    assert calibration_of(machine) == [{"compute": 1.1}, {"compute": 1.2}]
    assert [path.name for path in machine.parent.iterdir()] == [machine.name]


def test_a_lock_of_another_user_does_not_delay_a_run(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_command, "LOCK_SECONDS", 0.1)
    folder = os.open(machine.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    writer = threading.Thread(target=update_calibration, args=(machine, Profile.read(machine).digest, {"compute": 1.1}))
    writer.start()
    writer.join(20)
    is_delayed = writer.is_alive()
    os.close(folder)
    assert not is_delayed
    assert calibration_of(machine) == [{"compute": 1.1}]


def test_a_new_probe_drops_the_calibration(machine: Path) -> None:
    before = Profile.read(machine)
    profile(byte_seconds=2e-9).save(machine)  # measured anew during a run
    update_calibration(machine, before.digest, {"compute": 1.2})
    assert not calibration_of(machine)
    assert before.digest == before.with_calibration({"compute": 1.2}).digest


def test_ratios_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    calibrated(1.5, 0.7).save(path)
    assert Profile.read(path) == replace(calibrated(1.5, 0.7), prices=Profile.read(path).prices)
    for wrong in (0, -1, math.inf, "x"):
        path.write_text(json.dumps(profile().record() | {"learned": [{"compute": wrong}]}))
        with pytest.raises(weft.InputError, match="weft probe"):
            Profile.read(path)


def test_a_kind_of_operations_that_takes_little_time_is_not_calibrated() -> None:
    whole = {"epoch_seconds": 1.0, "compute_seconds": 0.5, "waiting_seconds": 0.0, "host_bytes": 1}
    correction = Correction(digest="", threads=1, factors={"compute": 1.0, "network": 1.0}, choices=DEFAULT)
    estimate = Estimate(epoch=Epoch(network_seconds=0.01, **whole), correction=correction)  # type: ignore[arg-type]
    assert estimate.ratios(Epoch(network_seconds=0.3, **whole)) == {"compute": 1.0}  # type: ignore[arg-type]


def test_the_plan_prints_the_number_of_calibrating_runs(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(1.5, 1.5, 1.5).save(machine)
    assert main(["plan", "digits"]) == 0
    assert "calibrated by 3 runs: compute 1.50 x, network 1.00 x the seconds of the probe" in capsys.readouterr().out


def hybrid(**options: Any) -> Config:
    return Config(graph="digits", strategy="hybrid", workers=2, hidden=16, layers=3, partition="random", **options)


def costs_of(machine_profile: Profile) -> Machine:
    cluster = Cluster(profile=machine_profile, ranks=2, hosts=1, threads=1, memory_bytes=0)
    return machine_of(prepared_workload(hybrid(), None, None), cluster)


def test_factors_of_a_profile() -> None:
    plain, slower = costs_of(profile()), costs_of(profile(byte_seconds=8e-9, message_seconds=8e-4))
    assert slower == replace(plain, seconds_per_byte=pytest.approx(8 * plain.seconds_per_byte))  # type: ignore[arg-type]
    assert plain.seconds_per_edge == pytest.approx(8e-10, rel=0.5)  # both cores compute, and calls have fixed costs
    assert costs_of(calibrated(1.5, 1.5, 1.5)) == plain, "the calibration changes the decisions of seeded runs"


def test_hybrid_decides_by_the_profile(tmp_path: Path, machine: Path) -> None:
    work, expected = prepared_workload(hybrid(), None, None), costs_of(profile())
    assert known_machine(hybrid(), work) == expected
    assert known_machine(hybrid(measure=True), work) == expected
    assert known_machine(replace(hybrid(), strategy="communicated"), work) is None
    path = str(shutil.copy(machine, tmp_path / "copy.json"))
    machine.unlink()
    assert known_machine(hybrid(), work) is None
    assert known_machine(hybrid(machine=path), work) == expected


def test_offload_decides_by_a_profile_that_is_named(machine: Path) -> None:
    """Without a named profile, offload caches nothing, because a cache needs memory."""
    config = replace(hybrid(), strategy="offload")
    work = prepared_workload(config, None, None)
    assert known_machine(config, work) is None
    assert known_machine(replace(config, machine=str(machine)), work) == costs_of(profile())


def test_a_profile_of_other_threads_decides_nothing(machine: Path) -> None:
    """A named profile is refused, unless the ranks measure what it lacks."""
    work = prepared_workload(hybrid(), None, None)
    profile(cores=8).save(machine)  # prices for ranks with 8 threads and with 1
    measured = Profile.read(machine)
    replace(measured, prices=[prices for prices in measured.prices if prices.threads > 1]).save(machine)
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
