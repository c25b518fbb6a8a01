"""A run's folder: a lock against other runs, records that match the checkpoint, and damaged files."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.lib.running import finish, losses, start, wait_for_epoch
from weft.config.config import Config
from weft.reporting.write import read_runs, report_page
from weft.training.artifacts import checkpoint
from weft.training.artifacts.folder_lock import FolderLock
from weft.training.artifacts.run_folder import RunFolder
from weft.training.artifacts.run_writer import replaced
from weft.utils.errors import InputError
from weft.utils.files import jsonl

DRAFT = ".weft-0123456789abcdef.tmp"
OPTIONS: dict[str, Any] = {"hidden": 8, "checkpoint_every": 2, "quiet": True}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six epochs, with checkpoints after four and six."""
    return weft.train("digits", out=tmp_path_factory.mktemp("runs") / "stopped", epochs=6, **OPTIONS).folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(weft.train("digits", out=tmp_path_factory.mktemp("runs") / "whole", epochs=8, **OPTIONS).folder)


def resume(folder: Path) -> weft.Run:
    return weft.train("digits", out=folder, epochs=8, resume=True, **OPTIONS)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def double(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def change_a_loss(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"loss": 2', b'"loss": 1'))


def drop_lines(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::2]))


def other_json(path: Path) -> None:
    path.write_bytes(b"[3]\n" + path.read_bytes())


RECORDS = [cut, double, change_a_loss, drop_lines, other_json, lambda path: path.write_bytes(b""), Path.unlink]


@pytest.mark.parametrize("damage", RECORDS, ids=["cut", "double", "change", "lines", "json", "empty", "delete"])
def test_a_damaged_record_is_repeated(
    damage: Callable[[Path], Any], folder: Path, whole: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder / "metrics.jsonl")
    run = resume(folder)
    assert losses(folder) == pytest.approx(whole, abs=0)
    assert run.summary["epochs"] == 8
    errors = capsys.readouterr().err
    if damage is double:  # the original record is complete, and the rest is dropped
        assert not errors
    else:
        assert errors.count("\n") == 1
        assert "metrics.jsonl is damaged: its epochs are restored from epochs.jsonl" in errors
        assert (folder / "metrics.damaged.jsonl").exists()


@pytest.mark.parametrize("damage", RECORDS, ids=["cut", "double", "change", "lines", "json", "empty", "delete"])
def test_a_damaged_copy_of_the_record_is_repaired(
    damage: Callable[[Path], Any], folder: Path, whole: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = folder / "epochs.jsonl"
    damage(copy)
    resume(folder)
    assert losses(folder) == pytest.approx(whole, abs=0)
    epochs = [line for line in (folder / "metrics.jsonl").read_bytes().splitlines() if b'"kind": "epoch"' in line]
    assert copy.read_bytes().splitlines() == epochs
    assert not capsys.readouterr().err


def test_a_record_without_an_intact_copy_is_refused(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    change_a_loss(folder / "epochs.jsonl")
    files = contents(folder)
    with pytest.raises(InputError, match=r"metrics\.jsonl and its copy epochs\.jsonl are damaged or missing: restore"):
        resume(folder)
    assert contents(folder) == files


def test_a_checkpoint_does_not_grow_with_the_number_of_epochs(tmp_path: Path) -> None:
    sizes = []
    recorder = jsonl.Recorder(tmp_path / "metrics.jsonl")
    for epoch in range(300):
        recorder.write("epoch", epoch=epoch, loss=0.5, seconds=0.25)
        if epoch % 100 == 99:
            progress = checkpoint.Progress(epoch=epoch + 1)
            state = checkpoint.Checkpoint(
                config=Config(), fingerprint="", progress=progress, tensors={}, record=recorder.mark()
            )
            checkpoint.save(tmp_path / "checkpoints", state)
            sizes.append((tmp_path / "checkpoints" / f"epoch-{epoch + 1:08d}" / "state.json").stat().st_size)
    recorder.close()
    assert max(sizes) - min(sizes) < 10


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_swapped_checkpoints_are_not_taken(folder: Path) -> None:
    older, newer = sorted((folder / "checkpoints").iterdir())
    older.rename(folder / "between")
    newer.rename(older)
    (folder / "between").rename(newer)
    with pytest.raises(InputError, match="checkpoints: all checkpoints are damaged; give a new --out"):
        resume(folder)


def edit(change: dict[str, Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        state = json.loads((path / "state.json").read_text())
        state["state"]["progress"].update(change)
        (path / "state.json").write_text(json.dumps(state))

    return damage


CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "half an epoch": edit({"epoch": 2.5}),
    "another epoch": edit({"epoch": 7}),
    "another best": edit({"best_score": 1.0}),
    "shape": lambda path: (path / "state.json").write_text("[1]"),
    "nested": lambda path: (path / "state.json").write_text("[" * 100_000),
    "empty": lambda path: (path / "state.json").write_text("{}"),
    "tensors": lambda path: cut(path / "state.safetensors"),
    "a file": lambda path: (shutil.rmtree(path), path.write_text("")),
}


@pytest.mark.parametrize("damage", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_damaged_checkpoint_is_passed_over(damage: Callable[[Path], Any], folder: Path, whole: list[float]) -> None:
    damage(folder / "checkpoints" / "epoch-00000006")
    for foreign in ("epoch-abc", "epoch-", "epoch-\u0663", "notes.txt"):
        (folder / "checkpoints" / foreign).touch()
    resume(folder)
    assert losses(folder) == pytest.approx(whole, abs=0)
    assert checkpoint.newest(folder / "checkpoints") is not None


def manipulate(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> None:
    """Change state and tensors of a checkpoint, and write checksums that match."""
    state = json.loads((path / "state.json").read_text())["state"]
    tensors = load_file(path / "state.safetensors")
    change(state, tensors)
    save_file(tensors, path / "state.safetensors")
    state["tensors"] = hashlib.sha256((path / "state.safetensors").read_bytes()).hexdigest()
    text = json.dumps(state)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "state.json").write_text(f'{{"sha256": "{digest}", "state": {text}}}')


def first_group(state: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = state["updates"]["groups"][0]
    return group


def reshaped(name: str, *shape: int) -> Callable[[Any, dict[str, torch.Tensor]], object]:
    """Return a function that replaces the first tensor whose name begins so."""

    def change(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in sorted(tensors) if key.startswith(name))
        tensors[key] = torch.zeros(shape, dtype=tensors[key].dtype)

    return change


DAMAGED, MODEL, UPDATES = "all checkpoints are damaged", "another model", "optimizer or scheduler"
MANIPULATED: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], object]]] = {
    "list for state": (DAMAGED, lambda s, _: s.update(progress=[])),
    "best score": (DAMAGED, lambda s, _: s["progress"].update(best_score="x")),
    "best scores": (DAMAGED, lambda s, _: s["progress"].update(best_scores=[1])),
    "best details": (DAMAGED, lambda s, _: s["progress"].update(best_details={"val": 1})),
    "best epoch": (DAMAGED, lambda s, _: s["progress"].update(best_epoch=1.5)),
    "negative": (DAMAGED, lambda s, _: s["progress"].update(waited=-1)),
    "unknown progress": (DAMAGED, lambda s, _: s["progress"].update(more=1)),
    "fingerprint": (DAMAGED, lambda s, _: s.update(fingerprint=3)),
    "data": (DAMAGED, lambda s, _: s.update(data=["x"])),
    "record": (DAMAGED, lambda s, _: s.update(record={"size": "x"})),
    "negative record": (DAMAGED, lambda s, _: s["record"].update(size=-1)),
    "updates": (DAMAGED, lambda s, _: s.update(updates=None)),
    "groups": (DAMAGED, lambda s, _: s["updates"].update(groups={})),
    "group": (DAMAGED, lambda s, _: s["updates"].update(groups=[1])),
    "values": (DAMAGED, lambda s, _: s["updates"].update(values={"0": 1})),
    "no values": (UPDATES, lambda s, _: s["updates"].pop("values")),
    "number of groups": (UPDATES, lambda s, _: s["updates"]["groups"].append({})),
    "number of a parameter": (UPDATES, lambda s, _: s["updates"].update(values={"99": {"a": 1}})),
    "name of a parameter": (UPDATES, lambda s, _: s["updates"].update(values={"x": {}})),
    "rate": (UPDATES, lambda s, _: first_group(s).update(lr="x")),
    "betas": (UPDATES, lambda s, _: first_group(s).update(betas=[0.9])),
    "betas of another type": (UPDATES, lambda s, _: first_group(s).update(betas=3)),
    "no weight decay": (UPDATES, lambda s, _: first_group(s).pop("weight_decay")),
    "scheduler": (UPDATES, lambda s, _: s["updates"].pop("scheduler")),
    "epoch of the scheduler": (UPDATES, lambda s, _: s["updates"]["scheduler"].update(last_epoch="x")),
    "moments": (UPDATES, reshaped("optimizer.0.exp_avg", 3)),
    "steps": (UPDATES, reshaped("optimizer.0.step", 2)),
    "no moment": (UPDATES, lambda _, t: t.pop("optimizer.0.exp_avg")),
    "tensor of no parameter": (UPDATES, lambda _, t: t.update({"optimizer.99.exp_avg": torch.zeros(1)})),
    "tensor without a number": (UPDATES, lambda _, t: t.update({"optimizer.exp_avg": torch.zeros(1)})),
    "weights": (MODEL, reshaped("model.", 3)),
    "best weights": (MODEL, reshaped("best.", 3)),
    "no best weights": (MODEL, lambda _, t: [t.pop(name) for name in [*t] if name.startswith("best.")]),
    "weights of another type": (MODEL, lambda _, t: t.update({n: t[n].long() for n in t if n.startswith("best.")})),
    "more weights": (MODEL, lambda _, t: t.update({"model.more": torch.zeros(1)})),
    "foreign tensor": (MODEL, lambda _, t: t.update({"x": torch.zeros(1)})),
}


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a scheduler, with one checkpoint."""
    out = tmp_path_factory.mktemp("runs") / "scheduled"
    return weft.train("digits", out=out, epochs=2, scheduler="step", scheduler_epochs=1, **OPTIONS).folder


@pytest.mark.parametrize("change", MANIPULATED)
def test_a_manipulated_checkpoint_with_valid_checksums_is_refused(change: str, scheduled: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(scheduled, tmp_path / "run"))
    message, function = MANIPULATED[change]
    manipulate(folder / "checkpoints" / "epoch-00000002", function)
    files = contents(folder)
    with pytest.raises(InputError, match=message):
        weft.train("digits", out=folder, epochs=3, scheduler="step", scheduler_epochs=1, resume=True, **OPTIONS)
    assert contents(folder) == files


@pytest.mark.parametrize("hidden", ["epoch-00000006", "checkpoints"])
def test_a_checkpoint_that_may_not_be_read_is_not_skipped(
    hidden: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With permission, the run continues from it, so the files of the run stay as they are."""
    files, listdir, read = contents(folder), os.listdir, checkpoint._read

    def refuse(function: Callable[[Path], Any], path: Path) -> Any:
        if Path(path).name == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return function(path)

    monkeypatch.setattr(os, "listdir", partial(refuse, listdir))
    monkeypatch.setattr(checkpoint, "_read", partial(refuse, read))
    with pytest.raises(InputError, match=f"{hidden}: Permission denied"):
        resume(folder)
    monkeypatch.undo()
    assert contents(folder) == files


def report(folder: Path) -> str:
    return report_page(read_runs([folder]))


READERS: dict[str, tuple[Callable[[Path], object], bool]] = {
    "config.toml": (resume, True),
    "choices.json": (resume, False),
    "metrics.jsonl": (weft.load_model, True),
    "model.safetensors": (weft.load_model, True),
    "timeline.json": (report, True),
    "epochs.jsonl": (resume, False),
    "checkpoints/epoch-00000006/state.json": (resume, False),
    "checkpoints/epoch-00000006/state.safetensors": (resume, False),
}
"""Files of a run: a function that reads each, and whether it cannot do without the file."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", READERS)
def test_a_fifo_in_place_of_a_file_is_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    use, needed = READERS[name]
    if needed:
        with pytest.raises(InputError, match=f"{name}: is a FIFO, which weft does not read: give a regular file"):
            use(folder)
    else:
        with suppress(InputError):
            use(folder)


def hold(folder: Path, ready: Any, end: Any) -> None:
    lock = FolderLock(folder)
    ready.set()
    end.wait(60)
    lock.release()


@pytest.mark.parametrize("left", [["choices.json"], [DRAFT], ["choices.json", DRAFT]])
def test_a_run_killed_before_its_begin_leaves_the_folder_usable(left: list[str], tmp_path: Path) -> None:
    for name in left:
        (tmp_path / name).write_text("half of")
    RunFolder(tmp_path).require_empty()
    weft.train("digits", out=tmp_path, epochs=1, **OPTIONS)
    assert not (tmp_path / DRAFT).exists()
    with pytest.raises(InputError, match="contains another run"):
        RunFolder(tmp_path).require_empty()


def test_one_run_at_a_time(tmp_path: Path, folder: Path) -> None:
    alive = tmp_path / "alive"
    options = {"strategy": "tensor", "workers": 2, **OPTIONS}
    train = "train digits --hidden 8 --strategy tensor --workers 2 --epochs 100000 --out"
    run = start(*train.split(), alive)
    wait_for_epoch(run, alive, 2)
    for resumed in (False, True):
        with pytest.raises(
            InputError, match=r"alive: process \d+ on \S+ is using this folder: wait until it has ended"
        ):
            weft.train("digits", out=alive, resume=resumed, epochs=100_000, **options)
    os.kill(run.pid, signal.SIGTERM)
    assert finish(run)[0] == 128 + signal.SIGTERM
    with pytest.raises(InputError, match="contains another run"):
        weft.train("digits", out=alive, **options)
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=hold, args=(folder, ready, end))
    other.start()
    assert ready.wait(60)
    with pytest.raises(InputError, match=f"process {other.pid} on "):
        resume(folder)
    end.set()
    other.join()
    resume(folder)


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "checkpoints"])
def test_links_in_a_run_folder_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    """The target of a link stays as it is, also if another check refuses the run."""
    target = tmp_path / "target"
    if (folder / name).exists():
        shutil.move(folder / name, target)
    else:
        target.write_text("mine")
    (folder / name).symlink_to(target)
    files = contents(tmp_path)
    for resumed in (True, False):
        with pytest.raises(InputError, match=rf"{name}: it is a symbolic link|contains another run"):
            weft.train("digits", out=folder, epochs=8, resume=resumed, **OPTIONS)
    assert contents(tmp_path) == files
    assert (folder / name).is_symlink()


def test_links_in_a_run_folder_are_replaced(tmp_path: Path) -> None:
    """A run replaces links with the names of its files by files, and never writes to their targets."""
    target, out = tmp_path / "target", tmp_path / "run"
    target.write_text("mine")
    out.mkdir()
    for name in ("config.tmp", "choices.json", "card.tmp", "model.tmp", "timeline.tmp", DRAFT):
        (out / name).symlink_to(target)
    folder = RunFolder(out)
    folder.lock()
    folder.begin(Config())
    with replaced(folder.card, "the card") as draft:
        draft.write_text("card")
    folder.release()
    assert target.read_text() == "mine"
    assert not any(path.is_symlink() for path in (folder.config, folder.choices, folder.card, out / DRAFT))


def test_a_link_in_place_of_the_copy_of_the_records_is_replaced(folder: Path, tmp_path: Path) -> None:
    copy, target = folder / "epochs.jsonl", tmp_path / "target"
    content = copy.rename(target).read_bytes()
    copy.symlink_to(target)
    resume(folder)
    assert not copy.is_symlink()
    assert copy.stat().st_size > len(content)
    assert target.read_bytes() == content


def test_impossible_folders_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out, what in (
        (file / "x", "Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        (file, "contains"),
    ):
        with pytest.raises(InputError, match=rf"^--out .*{what}.*give a"):
            weft.train("digits", out=out, epochs=1, **OPTIONS)
    assert file.read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


def test_files_have_the_modes_that_the_umask_gives(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        run = weft.train("digits", out=tmp_path / "run", epochs=2, timeline=1, **OPTIONS)
    finally:
        os.umask(former)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (run.folder, *run.folder.rglob("*"))}
    assert modes == {(True, 0o750), (False, 0o640)}


def test_a_loss_that_is_not_finite_names_its_cause(tmp_path: Path) -> None:
    graph = weft.load("digits")
    assert graph.x is not None
    large = dataclasses.replace(graph, x=graph.x * 1e38)
    with pytest.raises(
        InputError, match=r"before the first step: features \(the largest feature is \S+e\+38\) or edge"
    ):
        weft.train(large, out=tmp_path / "data", **OPTIONS)
    assert not (tmp_path / "data").exists()
    with pytest.raises(InputError, match=r"^--lr 1e\+30: the loss became \S+ in epoch \d+; use a lower learning rate"):
        weft.train("digits", out=tmp_path / "rate", lr=1e30, **OPTIONS)
    assert losses(tmp_path / "rate")


def test_several_labels_are_scored_by_f1(tmp_path: Path) -> None:
    graph = weft.load("digits")
    assert graph.y is not None
    several = dataclasses.replace(graph, y=torch.nn.functional.one_hot(graph.y, 10).float())
    summary = weft.train(several, out=tmp_path / "run", epochs=2, **OPTIONS).summary
    assert {"train_micro_f1", "val_micro_f1", "test_micro_f1"} <= summary.keys()
    assert not any("accuracy" in name for name in summary)


def test_foreign_files_in_a_folder_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that appear between the check of the folder and the begin of the run stay too."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("mine")
    monkeypatch.setattr("weft.training.run._check_folder", lambda *_: None)
    with pytest.raises(InputError, match="contains another run"):
        weft.train("digits", out=out, epochs=1, **OPTIONS)
    assert {path.name for path in out.iterdir()} == {"metrics.jsonl"}
    assert (out / "metrics.jsonl").read_text() == "mine"
