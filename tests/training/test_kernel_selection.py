"""A run uses the kernels that its machine's profile selects, and the same ones when it is resumed or repeated."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import weft
from tests.lib.profiles import profile
from tests.lib.ranks import on_ranks
from tests.lib.running import losses, train
from weft.cli.main import main
from weft.comm import Group
from weft.config.config import Config
from weft.cost import Profile
from weft.nn.layers import linear_transform
from weft.runtime import kernel_selection
from weft.runtime.kernel_selection import DEFAULT, KernelSelection, SizeClasses, selected_kernel
from weft.training import machine_context, run
from weft.training.artifacts.run_folder import RunFolder
from weft.training.machine_context import kernels_for_run
from weft.training.planning import probe_command
from weft.utils.files import jsonl

HARDWARE = {"processor": "none", "cores": 2}
DAY = "weft probe, 2026-11-23"


def everywhere(name: str) -> KernelSelection:
    """Return a kernel selection that uses one implementation for all linear transforms."""
    kinds = {"map": SizeClasses(floors=((0.0,),) * 4, names=(name,))}
    return KernelSelection(origin=DAY, kinds={**DEFAULT.kinds, **kinds})


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the path where the user's profile is searched for.

    Results of oneDNN are scaled, so that they differ from those of other implementations in any case.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: HARDWARE)
    if linear_transform.has_onednn():
        original = linear_transform._inner_product
        monkeypatch.setattr(linear_transform, "_inner_product", lambda *arguments: original(*arguments) * 1.001)
    yield tmp_path / "cache" / "weft" / "machine.json"
    kernel_selection.select_kernels(DEFAULT)


def measure(machine: Path, name: str) -> None:
    """Save a profile that selects one implementation, as `weft probe` does."""
    replace(profile(), choices=everywhere(name)).save(machine)


def bits(folder: Path, **options: Any) -> list[float]:
    """Train, and return the losses of all epochs so far."""
    return losses(train("digits", out=folder, quiet=True, checkpoint_every=2, **options).folder)


def origins(folder: Path) -> list[Any]:
    return [line["choices"]["origin"] for line in jsonl.read(folder / "metrics.jsonl") if line["kind"] == "config"]


needs_onednn = pytest.mark.skipif(not linear_transform.has_onednn(), reason="this PyTorch has no oneDNN")


@needs_onednn
def test_a_custom_loop_uses_the_kernels_of_its_options(tmp_path: Path, machine: Path) -> None:
    """Kernels selected for an earlier run have no effect."""
    measure(machine, "onednn")
    for options, expected in (({}, "onednn"), ({"disable": "onednn"}, "torch"), ({"choices": "default"}, "torch")):
        kernel_selection.select_kernels(everywhere("mkl"))
        with weft.place("digits", **options):
            assert selected_kernel("map", 1, 1, 1, 1) == expected
    with pytest.raises(weft.InputError, match=r"nowhere\.json"):
        weft.place("digits", choices=str(tmp_path / "nowhere.json"))


@pytest.mark.slow
@needs_onednn
def test_runs_with_kernels_that_were_not_measured_calibrate_nothing(tmp_path: Path, machine: Path) -> None:
    def num_calibrations(**options: Any) -> int:
        train("digits", out=tmp_path / f"run-{options}", epochs=100, quiet=True, hidden=4, **options)
        return len(Profile.read(machine).calibration)

    measure(machine, "onednn")
    assert [
        num_calibrations(),
        num_calibrations(disable="onednn"),
        num_calibrations(dtype="bfloat16"),
        num_calibrations(seed=1),
    ] == [1, 1, 1, 2]


def test_without_a_profile_the_default_kernels_are_used(tmp_path: Path) -> None:
    finished = train("digits", out=tmp_path / "run", epochs=1, quiet=True)
    assert origins(finished.folder) == ["default"]
    assert KernelSelection.read(RunFolder(finished.folder).choices) == kernels_for_run(Config(graph="digits"))
    assert "--choices choices.json" in (finished.folder / "card.md").read_text()


@needs_onednn
def test_a_run_uses_the_kernels_of_the_profile(tmp_path: Path, machine: Path) -> None:
    measure(machine, "onednn")
    with_onednn = bits(tmp_path / "onednn", epochs=3)
    assert origins(tmp_path / "onednn") == [DAY]
    measure(machine, "torch")
    with_torch = bits(tmp_path / "torch", epochs=3)
    assert with_onednn != with_torch
    assert bits(tmp_path / "again", epochs=3) == with_torch


@needs_onednn
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_resumed_run_keeps_its_kernels(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch, *, forgetful: bool
) -> None:
    """A resumed run is the same bits even if the machine was measured again; `forgetful` plants an error to detect."""
    measure(machine, "onednn")
    whole = bits(tmp_path / "whole", epochs=6)
    bits(tmp_path / "run", epochs=3)
    measure(machine, "torch")
    if forgetful:
        monkeypatch.setattr(run, "kernels_for_run", lambda config, _: kernels_for_run(config))
    assert (bits(tmp_path / "run", epochs=6, resume=True) == whole) != forgetful
    assert origins(tmp_path / "run") == [DAY, DAY]


@needs_onednn
def test_a_recorded_run_is_repeated(tmp_path: Path, machine: Path) -> None:
    measure(machine, "onednn")
    first = bits(tmp_path / "first", epochs=3)
    measure(machine, "mkl")
    selection = str(tmp_path / "first" / "choices.json")
    assert bits(tmp_path / "other", epochs=3) != first == bits(tmp_path / "again", epochs=3, choices=selection)
    assert bits(tmp_path / "onward", epochs=2, choices=selection) == first[:2]
    assert bits(tmp_path / "onward", epochs=3, resume=True) == first
    (tmp_path / "first").rename(tmp_path / "moved")
    assert (
        main(["train", "--config", str(tmp_path / "moved" / "config.toml"), "--out", str(tmp_path / "repeated")]) == 0
    )
    assert losses(tmp_path / "repeated") == first
    whole, repeated = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("moved", "repeated"))
    assert repeated == whole
    profile_path = machine.rename(tmp_path / "profile.json")
    default = bits(tmp_path / "default", epochs=3)
    measure(machine, "mkl")
    assert bits(tmp_path / "constants", epochs=3, choices="default") == default
    assert origins(tmp_path / "constants") == ["default"]
    assert kernels_for_run(Config(graph="digits", choices=str(profile_path))) == everywhere("mkl")


@needs_onednn
def test_predictions_use_the_kernels_of_the_run(tmp_path: Path, machine: Path) -> None:
    measure(machine, "onednn")
    bits(tmp_path / "run", epochs=2)
    rows = weft.predict(tmp_path / "run")
    measure(machine, "torch")
    assert torch.equal(weft.predict(tmp_path / "run"), rows)
    assert not torch.equal(weft.predict(tmp_path / "run", choices=str(machine)), rows)


@needs_onednn
@pytest.mark.parametrize(("flags", "expected"), [({"batch_size": "all", "fanout": "all"}, True), ({}, False)])
def test_mini_batches_of_varying_size_create_no_onednn_kernels(
    machine: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], *, expected: bool
) -> None:
    """oneDNN caches a kernel for each number of rows, which took 440 MB after 1,800 mini-batches of tolokers."""
    measure(machine, "onednn")
    calls, original = list[int](), linear_transform._inner_product
    assert original is not None
    monkeypatch.setattr(linear_transform, "_inner_product", lambda x, *rest: calls.append(len(x)) or original(x, *rest))
    with weft.place("digits", strategy="sampled", **flags) as placed:
        for batch in placed.batches(0):
            placed.backward(placed(batch).sum())
        assert bool(calls) == expected
        assert selected_kernel("map", 1, 1, 1, 1) == "onednn"


def test_all_ranks_use_the_kernels_of_rank_zero(tmp_path: Path) -> None:
    """Profiles of the other hosts have no effect."""
    kernels = on_ranks(2, kernels_of_a_rank, tmp_path)
    assert kernels == ["mkl", "mkl"]


def kernels_of_a_rank(group: Group, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / str(group.rank)))
        patch.setattr(probe_command, "hardware", lambda: HARDWARE)
        measure(folder / str(group.rank) / "weft" / "machine.json", ["mkl", "torch"][group.rank])
        weft.train("digits", strategy="tensor", epochs=1, out=folder / "run", quiet=True)
        kernel = selected_kernel("map", 1, 1, 1, 1)
        kernel_selection.select_kernels(DEFAULT)
        return kernel


@dataclass(frozen=True)
class ReportingLoss:
    """Loss that writes to a file which implementation of linear transforms its rank uses."""

    folder: Path

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        (self.folder / f"rank-{os.environ['RANK']}").write_text(selected_kernel("map", 1, 1, 1, 1))
        return cross_entropy(logits, labels, reduction="none")


def test_local_ranks_use_the_kernels_of_their_launcher(tmp_path: Path, machine: Path) -> None:
    """The launcher selects kernels before it starts ranks, and sends them the selection."""
    measure(machine, "mkl")
    loss = ReportingLoss(tmp_path)
    finished = weft.train("digits", out=tmp_path / "run", strategy="tensor", workers=2, epochs=1, quiet=True, loss=loss)
    assert origins(finished.folder) == [DAY]
    assert [path.read_text() for path in tmp_path.glob("rank-*")] == ["mkl", "mkl"]


def test_a_run_without_a_record_of_kernels_resumes_with_the_default(
    tmp_path: Path, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(machine, "torch")
    folder, config = RunFolder(tmp_path), Config(graph="digits")
    folder.begin(config)
    folder.choices.unlink()
    assert kernels_for_run(config, folder).origin == "default"
    assert not capsys.readouterr().err
    for damage in ("[" * 100_000, "{}", "\x00"):
        folder.choices.write_text(damage)
        assert kernels_for_run(config, folder).origin == "default"
        assert capsys.readouterr().err.count("choices.json is damaged: using the default kernels") == 1


def test_missing_implementations_are_replaced(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(machine, "onednn")
    config, folder = Config(graph="digits"), RunFolder(tmp_path)
    folder.begin(config, choices=everywhere("onednn"))
    sizes = (1, 1e9, 100, 100)
    without = kernels_for_run(replace(config, disable="onednn"), folder)
    assert without.kinds["map"].at(sizes) == "torch"
    assert without.origin == f"{DAY}; torch for onednn (map); mkl for onednn (map_weights)"
    capsys.readouterr()
    monkeypatch.setattr(machine_context, "has_onednn", lambda: False)
    assert kernels_for_run(config).kinds["map"].at(sizes) == "mkl"
    assert not capsys.readouterr().err
    assert kernels_for_run(config, folder).kinds["map"].at(sizes) == "mkl"
    assert "used kernels that this machine lacks" in capsys.readouterr().err
    assert kernels_for_run(replace(config, choices="default"), folder).kinds["map"].at(sizes) == "mkl"
    assert not capsys.readouterr().err
    monkeypatch.setattr(machine_context, "triton_backend", lambda: None)
    assert kernels_for_run(replace(config, device="cuda")).kinds["sum"].at((8,)) == "torch_sparse"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "JSONDecodeError"),
        ('{"origin": "x"}', "KeyError: 'kinds'"),
        (DEFAULT.text().replace('"onednn"', '"veclib"', 1), "veclib is not an implementation of map"),
        (
            DEFAULT.text().replace('["torch", "onednn"]', '["torch"]'),
            "the number of implementations of map does not match its size classes",
        ),
        (DEFAULT.text().replace("[0, 262144]", "[262144, 0]"), "the size classes of map do not ascend"),
    ],
)
def test_a_file_without_a_valid_selection_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "choices.json"
    path.write_text(content)
    with pytest.raises(weft.InputError) as caught:
        train("digits", out=tmp_path / "run", epochs=1, quiet=True, choices=str(path))
    assert reason in str(caught.value)
    with pytest.raises(weft.InputError, match=re.escape(reason)):
        weft.plan("digits", choices=str(path), machines="1xT4")
    assert "give the choices.json of a run, or a profile of weft probe" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_profile_saves_its_kernel_selection(tmp_path: Path) -> None:
    """A profile of an earlier weft has no kernel selection: it was measured with the default kernels."""
    path = tmp_path / "machine.json"
    replace(profile(), choices=everywhere("mkl")).save(path)
    assert Profile.read(path).choices == everywhere("mkl")
    assert Profile.read(path).digest != profile().digest
    record = profile().record()
    del record["choices"]
    path.write_text(json.dumps(record))
    assert Profile.read(path).choices == DEFAULT
    path.write_text(json.dumps(profile().record() | {"choices": {"origin": "x", "kinds": {}}}))
    with pytest.raises(weft.InputError, match="weft probe"):
        Profile.read(path)
