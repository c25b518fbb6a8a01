"""Gradient accumulation: K batches and one optimizer step equal a step on the batch that joins them, to 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import weft
from tests.lib.pairwise import param
from tests.lib.running import complaints, losses, run_on_ranks
from weft.cli.main import main
from weft.training.loop import Trainer

JOINED, ACCUMULATED = 3, {"batch_size": "24", "accumulate_grad_batches": 3}
"""Number of batches of an optimizer step, and flags. 200 training vertices: two steps of 72, and one of 24 + 24 + 8."""
FIXED: dict[str, Any] = {"dtype": "float64", "hidden": 16, "quiet": True, "epochs": 3}
CASES: dict[str, dict[str, Any]] = {
    "node": {"class_weights": "balanced", "clip_norm": 0.05, "scheduler": "cosine"},
    "whole neighbourhoods": {"model": "gcn", "fanout": "all", "input_dropout": 0.2, "norm": "layer"},
    "labor": {"sampling": "labor", "batch_dependency": 2, "prefetch_batches": 0},
    "attention": {"model": "gat", "attention_dropout": 0.3, "hidden": 40},
    "link": {"task": "link", "batch_size": "1000"},
    "bpr": {"task": "link", "batch_size": "1000", "loss": "bpr", "negatives": 2, "decoder": "distmult"},
}
QUICK = ("node", "labor", "bpr")


def run(out: Path, **options: Any) -> weft.Run:
    """Train on digits with sampled neighbourhoods and dropout."""
    defaults = {"model": "sage", "fanout": "4,3", "strategy": "split", **FIXED}
    return weft.train("digits", out=out, **defaults | options)


@pytest.mark.parametrize("case", [param(case, name=case, quick=case in QUICK) for case in CASES])
def test_equals_the_joined_batch(case: str, tmp_path: Path) -> None:
    options = ACCUMULATED | CASES[case]
    joined = run(tmp_path / "joined", **joined_batch(options))
    accumulated = run(tmp_path / "accumulated", **options)
    assert losses(accumulated.folder) == pytest.approx(losses(joined.folder), rel=1e-9)
    check_same_weights(accumulated, joined)
    assert losses(run(tmp_path / "no", **options | {"accumulate_grad_batches": 1}).folder)[1:] != pytest.approx(
        losses(joined.folder)[1:], rel=1e-3
    )


def joined_batch(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with one batch in place of the accumulated ones."""
    joined = {name: value for name, value in options.items() if name != "accumulate_grad_batches"}
    return joined | {"batch_size": str(JOINED * int(options["batch_size"]))}


def check_same_weights(actual: weft.Run, expected: weft.Run) -> None:
    for name, weight in expected.model.state_dict().items():
        torch.testing.assert_close(actual.model.state_dict()[name], weight, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        param(strategy, size, name=f"{strategy}-P{size}", quick=False)
        for strategy in ("split", "sampled")
        for size in (2, 3)
    ],
)
def test_equals_the_joined_batch_on_ranks(strategy: str, size: int, tmp_path: Path) -> None:
    options = ACCUMULATED | CASES["node"]
    expected = run(tmp_path / "joined", **joined_batch(options))
    run_on_ranks(size, run, tmp_path / "ranks", **options, strategy=strategy)
    assert losses(tmp_path / "ranks") == pytest.approx(losses(expected.folder), rel=1e-9)


def test_counts_optimizer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of 9 batches has 3 optimizer steps, and a resumed run equals one that never stopped."""
    updates: list[bool] = []
    train = Trainer._train

    def counted(trainer: Trainer, step: Any) -> float:
        updates.append(step.updates)
        return train(trainer, step)

    monkeypatch.setattr(Trainer, "_train", counted)
    whole = run(tmp_path / "whole", **ACCUMULATED)
    assert updates == [False, False, True] * 9
    run(tmp_path / "resumed", **ACCUMULATED | {"epochs": 2})
    resumed = run(tmp_path / "resumed", **ACCUMULATED, resume=True)
    assert losses(resumed.folder) == losses(whole.folder)


def test_a_custom_loop_accumulates(tmp_path: Path) -> None:
    trained = run(tmp_path / "run", **ACCUMULATED, weight_decay=0.0)
    options = {name: FIXED[name] for name in ("dtype", "hidden")}
    with weft.place("digits", "sage", strategy="split", fanout="4,3", **ACCUMULATED, **options) as placed:
        optimizer = torch.optim.Adam(placed.model.parameters(), lr=0.01)
        for epoch in range(FIXED["epochs"]):
            total = 0.0
            for batch in placed.batches(epoch):
                loss = cross_entropy(placed(batch)[batch.rows], batch.y, reduction="sum") / batch.size
                placed.backward(loss)
                total += loss.item()
                if batch.updates:
                    optimizer.step()
                    optimizer.zero_grad()
            assert total / 3 == pytest.approx(losses(trained.folder)[epoch], rel=1e-12)
        first, second, *_ = placed.batches(3)
        placed.backward(placed(first).square().sum())
        optimizer.zero_grad()
        with pytest.raises(weft.InputError, match=r"gradients of the previous batch are gone.*only if batch\.updates"):
            placed.backward(placed(second).square().sum())


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--strategy hybrid", "has no effect under strategy hybrid: leave it out, or give --strategy split or sampled"),
        ("--strategy split", "an epoch has 1 batch: leave it out, or give a smaller --batch-size"),
        ("--strategy split --batch-size 150", "--accumulate-grad-batches 3: an epoch has 2 batches: give at most"),
        ("--strategy split --batch-size 20 --norm batch", "would be those of each batch, not of all that"),
    ],
)
def test_no_effect_is_refused(flags: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "digits", "--accumulate-grad-batches", "3", "--out", str(out), *flags.split()]) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert error in line
    assert not out.exists()


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "grad_accum", "accumulate"])
def test_names_of_other_programs_give_a_hint(name: str) -> None:
    with pytest.raises(weft.InputError, match=f"unknown option '{name}': use accumulate_grad_batches"):
        weft.train("digits", **{name: 2})  # type: ignore[arg-type]
