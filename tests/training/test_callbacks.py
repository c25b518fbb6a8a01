"""Callbacks get every epoch's record on rank 0, and can end the run on all ranks; an exception is a one-line error."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft
from tests.lib.running import losses, train
from weft.utils.errors import InputError, RunError

OPTIONS: dict[str, Any] = {"quiet": True, "hidden": 4, "lr": 0.05, "dtype": "float64"}


class Board:
    """Callback that writes to a file, which it opens at the first call as others open a connection to a service."""

    def __init__(self, path: Path, fail_at: int = -1) -> None:
        self.path, self.fail_at = path, fail_at
        self.file: Any = None

    def __call__(self, record: dict[str, Any]) -> None:
        if record["epoch"] == self.fail_at:
            raise ValueError("the board is full")
        if self.file is None:
            self.file = self.path.open("a")
        self.file.write(json.dumps(record) + "\n")
        record.clear()  # each callback has its own copy

    def close(self) -> None:
        self.file.write('"closed"\n')
        self.file.close()


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_record_once_and_closed(tmp_path: Path) -> None:
    """A resumed run records what an uninterrupted one does."""
    received: list[dict[str, Any]] = []
    options = {**OPTIONS, "scheduler": "step", "scheduler_epochs": 2, "clip_norm": 0.1, "metrics": "macro_f1"}
    run = weft.train(
        "digits", out=tmp_path / "a", epochs=6, callbacks=[Board(tmp_path / "a.txt"), received.append], **options
    )
    records = [line for line in run.records if line["kind"] == "epoch"]
    assert received == records
    assert lines_of(tmp_path / "a.txt") == [*records, "closed"]
    assert {"epoch", "loss", "lr", "seconds", "val_macro_f1"} <= received[0].keys()

    for epochs in (3, 6):
        out = weft.train(
            "digits",
            out=tmp_path / "b",
            epochs=epochs,
            resume=epochs == 6,
            callbacks=[Board(tmp_path / "b.txt")],
            **options,
        )
    assert losses(out.folder) == losses(run.folder)
    assert [line["epoch"] for line in lines_of(tmp_path / "b.txt") if line != "closed"] == list(range(6))


def test_on_one_of_several_ranks(tmp_path: Path) -> None:
    """A callback is sent to the process of rank 0, together with a custom loss and a custom optimizer."""
    import tests.training.test_losses as custom_losses
    import tests.training.test_optimizer as custom_optimizers

    options = {**OPTIONS, "epochs": 3, "loss": custom_losses.focal, "optimizer": custom_optimizers.two_groups}
    del options["lr"]
    run = weft.train(
        "digits", out=tmp_path / "a", strategy="tensor", workers=2, callbacks=[Board(tmp_path / "a.txt")], **options
    )
    assert lines_of(tmp_path / "a.txt") == [*(line for line in run.records if line["kind"] == "epoch"), "closed"]
    single = weft.train("digits", out=tmp_path / "b", **options)
    assert losses(run.folder) == pytest.approx(losses(single.folder), abs=1e-9)


def ends_after_three(record: dict[str, Any]) -> object:
    return record["epoch"] == 2 or "only True ends the run"


@pytest.mark.parametrize(("workers", "eval_every"), [(1, 1), (2, 1), (2, 5)])
def test_a_callback_ends_the_run(workers: int, eval_every: int, tmp_path: Path) -> None:
    """All ranks end after the same epoch, and the result is that of a run with so many epochs. It can be continued."""
    options = {**OPTIONS, "strategy": "tensor", "workers": workers, "eval_every": eval_every}
    run = train("digits", out=tmp_path / "a", epochs=6, callbacks=[ends_after_three], **options)
    short = train("digits", out=tmp_path / "b", epochs=3, **options)
    assert (run.summary["epochs"], len(run.history)) == (3, 3)
    assert run.summary["val_accuracy"] == short.summary["val_accuracy"]
    assert losses(run.folder) == losses(short.folder)
    whole = train("digits", out=tmp_path / "a", epochs=6, resume=True, **options)
    assert len(losses(whole.folder)) == 6


class Events:
    """Stands in for torch.utils.tensorboard.SummaryWriter, whose package may be missing."""

    written: list[tuple[str, float, int]] = []  # noqa: RUF012  # of all objects

    def __init__(self, folder: Path, purge_step: int) -> None:
        self.written.append((str(folder), 0.0, purge_step))

    def add_scalar(self, name: str, value: float, epoch: int) -> None:
        self.written.append((name, value, epoch))

    def close(self) -> None:
        self.written.append(("closed", 0.0, 0))


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers of each epoch are written to the run's folder. Without the package, the run does not begin."""
    with monkeypatch.context() as without:
        without.setattr("weft.utils.optional_packages.find_spec", lambda _: None)
        with pytest.raises(InputError, match=r"--tensorboard: needs tensorboard: pip install 'weft\[tensorboard\]'"):
            weft.train("digits", out=tmp_path / "run", tensorboard=True, **OPTIONS)
        assert not (tmp_path / "run").exists()
    module = ModuleType("torch.utils.tensorboard")
    monkeypatch.setattr(module, "SummaryWriter", Events, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("weft.utils.optional_packages.find_spec", lambda _: module)
    for epochs in (1, 2):
        out = tmp_path / "run"
        run = weft.train("digits", out=out, epochs=epochs, resume=epochs > 1, tensorboard=True, **OPTIONS)
    begun = [epoch for name, _, epoch in Events.written if name == str(tmp_path / "run" / "tensorboard")]
    assert begun == [0, 1]
    for record in run.history:
        written = {name: value for name, value, epoch in Events.written if epoch == record["epoch"] and value}
        assert written == {name: record[name] for name in record.keys() - {"kind", "version", "epoch"}}
    assert [name for name, _, _ in Events.written].count("closed") == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_callback_that_raises_ends_the_run(workers: int, tmp_path: Path) -> None:
    """The run ends at once with the callback's error, and can be resumed without the callback."""
    start, options = time.monotonic(), {**OPTIONS, "checkpoint_every": 1, "out": tmp_path / "run"}
    strategy = "tensor" if workers > 1 else "single"
    with pytest.raises(RunError, match=r"callback Board raised .*, the board is full\); continue with --resume"):
        weft.train(
            "digits",
            epochs=50,
            strategy=strategy,
            workers=workers,
            callbacks=[Board(tmp_path / "a.txt", fail_at=2)],
            **options,
        )
    assert time.monotonic() - start < 60
    assert [line["epoch"] for line in lines_of(tmp_path / "a.txt") if line != "closed"] == [0, 1]
    assert len(losses(weft.train("digits", epochs=4, resume=True, **options).folder)) == 4


@pytest.mark.usefixtures("in_a_script")
def test_mistakes(tmp_path: Path) -> None:
    for callbacks in (3, [3], print):
        with pytest.raises(InputError, match="callbacks: pass a list of functions"):
            weft.train("digits", out=tmp_path / "run", callbacks=callbacks)
    with pytest.raises(
        InputError, match=r"the callback 0 cannot be sent to local ranks .*: define it with def or class"
    ):
        weft.train(
            "digits", out=tmp_path / "run", strategy="tensor", workers=2, callbacks=[lambda record: print(record)]
        )
    assert not (tmp_path / "run").exists()
