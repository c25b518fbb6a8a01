"""Which implementations a run uses: as its machine's profile says, and again whenever it goes on or is repeated."""

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
from weft.utils import jsonl

HARDWARE = {"processor": "none", "cores": 2}
DAY = "weft probe, 2026-11-23"


def everywhere(by: str) -> KernelSelection:
    """Choices by which one implementation does all maps."""
    kinds = {"map": SizeClasses(floors=((0.0,),) * 4, names=(by,))}
    return KernelSelection(origin=DAY, kinds={**DEFAULT.kinds, **kinds})


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's profile is looked for; oneDNN's maps are no rounding of the others here, so that bits differ."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: HARDWARE)
    if linear_transform.has_onednn():
        ours = linear_transform._inner_product
        monkeypatch.setattr(linear_transform, "_inner_product", lambda *given: ours(*given) * 1.001)
    yield tmp_path / "cache" / "weft" / "machine.json"
    kernel_selection.select_kernels(DEFAULT)


def measure(machine: Path, by: str) -> None:
    """As `weft probe` leaves it."""
    replace(profile(), choices=everywhere(by)).save(machine)


def bits(folder: Path, **options: Any) -> list[float]:
    """The losses of a run, up to now."""
    return losses(train("digits", out=folder, quiet=True, checkpoint_every=2, **options).folder)


def said(folder: Path) -> list[Any]:
    return [line["choices"]["origin"] for line in jsonl.read(folder / "metrics.jsonl") if line["kind"] == "config"]


needs_onednn = pytest.mark.skipif(not linear_transform.has_onednn(), reason="this PyTorch has no oneDNN")


@needs_onednn
def test_a_loop_of_ones_own_has_the_choices_of_its_options(tmp_path: Path, machine: Path) -> None:
    """And not those of what ran before."""
    measure(machine, "onednn")
    for options, expected in (({}, "onednn"), ({"disable": "onednn"}, "torch"), ({"choices": "default"}, "torch")):
        kernel_selection.select_kernels(everywhere("mkl"))
        with weft.place("digits", **options):
            assert selected_kernel("map", 1, 1, 1, 1) == expected
    with pytest.raises(weft.InputError, match=r"nowhere\.json"):
        weft.place("digits", choices=str(tmp_path / "nowhere.json"))


@pytest.mark.slow
@needs_onednn
def test_kernels_that_were_not_priced_teach_nothing(tmp_path: Path, machine: Path) -> None:
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


def test_without_a_profile_it_is_the_default(tmp_path: Path) -> None:
    made = train("digits", out=tmp_path / "run", epochs=1, quiet=True)
    assert said(made.folder) == ["default"]
    assert KernelSelection.read(RunFolder(made.folder).choices) == kernels_for_run(Config(graph="digits"))
    assert "--choices choices.json" in (made.folder / "card.md").read_text()


@needs_onednn
def test_a_run_uses_what_the_profile_says(tmp_path: Path, machine: Path) -> None:
    measure(machine, "onednn")
    one = bits(tmp_path / "onednn", epochs=3)
    assert said(tmp_path / "onednn") == [DAY]
    measure(machine, "torch")
    other = bits(tmp_path / "torch", epochs=3)
    assert one != other
    assert bits(tmp_path / "again", epochs=3) == other


@needs_onednn
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_run_that_goes_on_keeps_its_choices(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch, *, forgetful: bool
) -> None:
    """Bit for bit, also where the machine has been measured anew; forgetful: an error that has to be seen."""
    measure(machine, "onednn")
    whole = bits(tmp_path / "whole", epochs=6)
    bits(tmp_path / "run", epochs=3)
    measure(machine, "torch")
    if forgetful:
        monkeypatch.setattr(run, "kernels_for_run", lambda config, _: kernels_for_run(config))
    assert (bits(tmp_path / "run", epochs=6, resume=True) == whole) != forgetful
    assert said(tmp_path / "run") == [DAY, DAY]


@needs_onednn
def test_a_recorded_run_is_repeated(tmp_path: Path, machine: Path) -> None:
    measure(machine, "onednn")
    first = bits(tmp_path / "first", epochs=3)
    measure(machine, "mkl")
    given = str(tmp_path / "first" / "choices.json")
    assert bits(tmp_path / "other", epochs=3) != first == bits(tmp_path / "again", epochs=3, choices=given)
    assert bits(tmp_path / "onward", epochs=2, choices=given) == first[:2]
    assert bits(tmp_path / "onward", epochs=3, resume=True) == first
    (tmp_path / "first").rename(tmp_path / "moved")
    assert main(["train", "--config", str(tmp_path / "moved" / "config.toml"), "--out", str(tmp_path / "told")]) == 0
    assert losses(tmp_path / "told") == first
    whole, told = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("moved", "told"))
    assert told == whole
    kept = machine.rename(tmp_path / "profile.json")
    default = bits(tmp_path / "default", epochs=3)
    measure(machine, "mkl")
    assert bits(tmp_path / "constants", epochs=3, choices="default") == default
    assert said(tmp_path / "constants") == ["default"]
    assert kernels_for_run(Config(graph="digits", choices=str(kept))) == everywhere("mkl")


@needs_onednn
def test_predictions_are_the_runs(tmp_path: Path, machine: Path) -> None:
    measure(machine, "onednn")
    bits(tmp_path / "run", epochs=2)
    rows = weft.predict(tmp_path / "run")
    measure(machine, "torch")
    assert torch.equal(weft.predict(tmp_path / "run"), rows)
    assert not torch.equal(weft.predict(tmp_path / "run", choices=str(machine)), rows)


@needs_onednn
@pytest.mark.parametrize(("flags", "expected"), [({"batch_size": "all", "fanout": "all"}, True), ({}, False)])
def test_batches_of_other_sizes_make_no_kernels(
    machine: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], *, expected: bool
) -> None:
    """oneDNN's of each number of rows would be kept: 440 MB after 1,800 batches of tolokers."""
    measure(machine, "onednn")
    made, ours = list[int](), linear_transform._inner_product
    assert ours is not None
    monkeypatch.setattr(linear_transform, "_inner_product", lambda x, *rest: made.append(len(x)) or ours(x, *rest))
    with weft.place("digits", strategy="sampled", **flags) as placed:
        for batch in placed.batches(0):
            placed.backward(placed(batch).sum())
        assert bool(made) == expected
        assert selected_kernel("map", 1, 1, 1, 1) == "onednn"


def test_all_ranks_use_what_rank_zero_says(tmp_path: Path) -> None:
    """Whatever the profiles of their hosts say."""
    found = on_ranks(2, maps_of_a_rank, tmp_path)
    assert found == ["mkl", "mkl"]


def maps_of_a_rank(group: Group, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / str(group.rank)))
        patch.setattr(probe_command, "hardware", lambda: HARDWARE)
        measure(folder / str(group.rank) / "weft" / "machine.json", ["mkl", "torch"][group.rank])
        weft.train("digits", strategy="tensor", epochs=1, out=folder / "run", quiet=True)
        found = selected_kernel("map", 1, 1, 1, 1)
        kernel_selection.select_kernels(DEFAULT)
        return found


@dataclass(frozen=True)
class Telling:
    """A loss that tells what does the maps of the rank which asks for it."""

    folder: Path

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        (self.folder / f"rank-{os.environ['RANK']}").write_text(selected_kernel("map", 1, 1, 1, 1))
        return cross_entropy(logits, labels, reduction="none")


def test_local_ranks_too(tmp_path: Path, machine: Path) -> None:
    """They are handed what was found before they start."""
    measure(machine, "mkl")
    loss = Telling(tmp_path)
    made = weft.train("digits", out=tmp_path / "run", strategy="tensor", workers=2, epochs=1, quiet=True, loss=loss)
    assert said(made.folder) == [DAY]
    assert [path.read_text() for path in tmp_path.glob("rank-*")] == ["mkl", "mkl"]


def test_a_run_of_before_goes_on_by_the_default(
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


def test_what_is_not_there_is_not_used(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(machine, "onednn")
    config, folder = Config(graph="digits"), RunFolder(tmp_path)
    folder.begin(config, choices=everywhere("onednn"))
    maps = (1, 1e9, 100, 100)
    without = kernels_for_run(replace(config, disable="onednn"), folder)
    assert without.kinds["map"].at(maps) == "torch"
    assert without.origin == f"{DAY}; torch for onednn (map); mkl for onednn (map_weights)"
    capsys.readouterr()
    monkeypatch.setattr(machine_context, "has_onednn", lambda: False)
    assert kernels_for_run(config).kinds["map"].at(maps) == "mkl"
    assert not capsys.readouterr().err
    assert kernels_for_run(config, folder).kinds["map"].at(maps) == "mkl"
    assert "used kernels that this machine lacks" in capsys.readouterr().err
    assert kernels_for_run(replace(config, choices="default"), folder).kinds["map"].at(maps) == "mkl"
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
def test_a_file_that_has_none_is_refused(tmp_path: Path, content: str, reason: str) -> None:
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


def test_choices_survive_their_files(tmp_path: Path) -> None:
    """A profile of an earlier weft has none: its prices are those of the default."""
    path = tmp_path / "machine.json"
    replace(profile(), choices=everywhere("mkl")).save(path)
    assert Profile.read(path).choices == everywhere("mkl")
    assert Profile.read(path).digest != profile().digest
    known = profile().record()
    del known["choices"]
    path.write_text(json.dumps(known))
    assert Profile.read(path).choices == DEFAULT
    path.write_text(json.dumps(profile().record() | {"choices": {"origin": "x", "kinds": {}}}))
    with pytest.raises(weft.InputError, match="weft probe"):
        Profile.read(path)
