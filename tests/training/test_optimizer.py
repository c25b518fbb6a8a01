"""Optimizers, learning-rate schedules and clipping equal PyTorch's, on all ranks, and resume bit for bit."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import weft
from tests.lib.graphs import make_typed_graph
from tests.lib.pairwise import param
from tests.lib.ranks import on_ranks
from tests.lib.running import run_on_ranks, train
from tests.training.test_typed_runs import OPTIONS, losses, weights
from weft.comm import Group
from weft.config.config import Config
from weft.data import Graph
from weft.training import optimizer
from weft.training.custom_functions import OwnFunctions
from weft.training.flag_checks import refuse_foreign_flags
from weft.training.optimizer import advance, check_scheduler, clip, require_plain, restore_types
from weft.utils.errors import InputError


def warm_then_steps(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return nested learning-rate schedules whose state has a mapping with numbers as keys."""
    schedules = [LinearLR(optimizer, 0.5, total_iters=2), MultiStepLR(optimizer, [1, 3])]
    return SequentialLR(optimizer, schedules, [2])


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, whose order of parameters is not the model's."""
    return torch.optim.NAdam([{"params": parameters[2:], "lr": 0.02}, {"params": parameters[:2]}], betas=(0.8, 0.99))


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "scheduler": "cosine", "scheduler_epochs": 9, "clip_norm": 0.5},
    "adamw": {"optimizer": "adamw", "scheduler": "step", "scheduler_epochs": 2, "warmup_epochs": 1},
    "rmsprop": {"optimizer": "rmsprop", "scheduler": "plateau", "scheduler_epochs": 1, "clip_norm": 0.01},
    "own": {"optimizer": two_groups, "scheduler": warm_then_steps, "clip_norm": 0.1},
    "cycle": {"optimizer": "adam", "scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=20)},
    "own plateau": {"scheduler": partial(ReduceLROnPlateau, mode="max", patience=0)},
}


def validated() -> Graph:
    """Return a small typed graph with embeddings."""
    return make_typed_graph(23, "some")


def rates(run: weft.Run) -> list[float]:
    return [line["lr"] for line in run.records if line["kind"] == "epoch"]


@pytest.mark.parametrize("setting", [param(setting, name=setting, quick=setting == "own") for setting in SETTINGS])
def test_a_resumed_run_is_the_uninterrupted_one(setting: str, tmp_path: Path) -> None:
    """A resumed run is the same bits, or equal to 1e-9 under another strategy on other ranks, embeddings included."""
    graph, options = validated(), {**OPTIONS, **SETTINGS[setting]}
    if "optimizer" in SETTINGS[setting] and callable(SETTINGS[setting]["optimizer"]):
        del options["lr"]
    whole = weft.train(graph, "rgcn", out=tmp_path / "whole", epochs=6, **options)
    assert len(set(rates(whole))) > 1
    weft.train(graph, "rgcn", out=tmp_path / "one", epochs=3, **options)
    again = weft.train(graph, "rgcn", out=tmp_path / "one", epochs=6, resume=True, **options)
    assert losses(again) == losses(whole)
    assert rates(again) == rates(whole)
    assert all(torch.equal(value, weights(tmp_path / "whole")[n]) for n, value in weights(tmp_path / "one").items())

    store = tmp_path / "graph"
    graph.save(store)
    placed = {"out": tmp_path / "many", **options}
    train(store, "rgcn", epochs=3, strategy="tensor", workers=3, **placed)
    many = train(store, "rgcn", epochs=6, strategy="cached", workers=2, resume=True, **placed)
    assert losses(many) == pytest.approx(losses(whole), rel=1e-9, abs=1e-9)
    assert rates(many) == pytest.approx(rates(whole), rel=1e-12)
    for name, value in weights(tmp_path / "many").items():
        torch.testing.assert_close(value, weights(tmp_path / "whole")[name], rtol=1e-8, atol=1e-8)


def test_a_state_missing_from_a_checkpoint_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant an error: a checkpoint without the scheduler's state, or without the optimizer's tensors."""
    graph, options = validated(), {**OPTIONS, **SETTINGS["sgd"]}
    whole = losses(weft.train(graph, "rgcn", out=tmp_path / "whole", epochs=6, **options))

    def resumed(name: str) -> list[float]:
        weft.train(graph, "rgcn", out=tmp_path / name, epochs=3, **options)
        return losses(weft.train(graph, "rgcn", out=tmp_path / name, epochs=6, resume=True, **options))

    with monkeypatch.context() as patched:
        patched.setattr("weft.training.loop.optimizer_tensors", lambda _: {})
        assert resumed("no tensors") != whole
    with monkeypatch.context() as patched:
        patched.setattr("weft.training.loop.plain_state", lambda *_: {})
        with pytest.raises(InputError, match="--resume: the checkpoint belongs to another optimizer or scheduler"):
            resumed("no plain state")


def norms(group: Group, sharded: bool) -> tuple[float, list[float]]:
    """Clip a replicated parameter and a shard of another one.

    Return the difference of the total norm to PyTorch's, and the largest differences of the two gradients. With
    `sharded=False`, the shard's norm is wrongly not summed over ranks.
    """
    random = torch.Generator().manual_seed(0)
    shared, whole = (nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(2))
    grads = [torch.randn(4, 3, dtype=torch.float64, generator=random) for _ in range(2)]
    part = nn.Parameter(whole.detach()[group.rank :: group.size].clone())
    shared.grad, part.grad = grads[0].clone(), grads[1][group.rank :: group.size].clone()
    norm = clip([shared, part], {part} if sharded else set(), group, 0.5)
    shared.grad, whole.grad = shared.grad, grads[1].clone()
    expected = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    expected.grad = grads[0].clone()
    total = torch.nn.utils.clip_grad_norm_([expected, whole], 0.5)
    differences = [
        (shared.grad - expected.grad).abs().max().item(),
        (part.grad - whole.grad[group.rank :: group.size]).abs().max().item(),
    ]
    return norm - total.item(), differences


@pytest.mark.parametrize("size", [1, 3])
def test_clipping_is_pytorchs(size: int) -> None:
    """The norm includes shards of other ranks; without them (a planted error), it differs."""
    for norm, differences in on_ranks(size, norms, True):
        assert norm == pytest.approx(0, abs=1e-12)
        assert all(difference < 1e-12 for difference in differences)
    if size > 1:
        assert all(abs(norm) > 1e-3 for norm, _ in on_ranks(size, norms, False))


def test_a_local_norm_is_detected(tmp_path: Path) -> None:
    """Plant an error in a run: the norm omits embeddings on other ranks."""
    options = {**OPTIONS, "strategy": "communicated", "clip_norm": 0.05}
    graph, store = validated(), tmp_path / "graph"
    graph.save(store)
    single = weft.train(graph, "rgcn", out=tmp_path / "one", epochs=4, **{**options, "strategy": "single"})
    right = train(store, "rgcn", out=tmp_path / "right", epochs=4, workers=3, **options)
    assert losses(right) == pytest.approx(losses(single), abs=1e-9)
    wrong = run_on_ranks(3, train_with_local_norms, store, tmp_path / "wrong", options).result
    assert losses(wrong) != pytest.approx(losses(single), abs=1e-9)


def train_with_local_norms(store: Path, out: Path, options: dict[str, Any]) -> weft.Run:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "weft.training.loop.clip", lambda parameters, _, group, max_norm: clip(parameters, set(), group, max_norm)
        )
        return weft.train(store, "rgcn", out=out, epochs=4, **options)


def test_rates_by_epoch(tmp_path: Path) -> None:
    def recorded(name: str, **options: Any) -> list[float]:
        run = weft.train("digits", out=tmp_path / name, quiet=True, hidden=4, lr=0.1, epochs=8, **options)
        return rates(run)

    assert recorded("none") == [0.1] * 8
    assert recorded("warm", warmup_epochs=3) == pytest.approx([0.025, 0.05, 0.075] + [0.1] * 5)
    steps = recorded("step", scheduler="step", scheduler_epochs=3, lr_factor=0.5)
    assert steps == pytest.approx([0.1] * 3 + [0.05] * 3 + [0.025] * 2)
    cosine = recorded("cosine", scheduler="cosine", warmup_epochs=1)
    assert cosine == pytest.approx([0.05] + [0.05 * (1 + math.cos(math.pi * epoch / 7)) for epoch in range(7)])
    assert 'scheduler = "cosine"\nscheduler_epochs = 8' in (tmp_path / "cosine" / "config.toml").read_text()


def test_a_plateau_follows_the_validation_score(tmp_path: Path) -> None:
    run = weft.train(
        "digits", out=tmp_path / "run", quiet=True, epochs=60, lr=0.05, scheduler="plateau", scheduler_epochs=3
    )
    epochs = [line for line in run.records if line["kind"] == "epoch"]
    best, waited, lr, expected = -1.0, 0, 0.05, []
    for line in epochs:
        expected.append(lr)
        better = line["val_accuracy"] > best
        best, waited = (line["val_accuracy"], 0) if better else (best, waited + 1)
        if waited == 3:
            lr, waited = lr * 0.1, 0
    assert rates(run) == pytest.approx(expected)
    assert len(set(expected)) > 1


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("lower_is_better", [False, True])
def test_a_custom_plateau_follows_what_its_mode_says(mode: Literal["min", "max"], lower_is_better: bool) -> None:
    """Steps with a falling loss, and a validation score that improves, never reduce the learning rate."""
    scheduler = ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), mode, patience=0)
    if mode == "max" and lower_is_better:
        functions = OwnFunctions(scheduler=partial(ReduceLROnPlateau, mode="max"))
        with pytest.raises(InputError, match='has mode="max", but a lower validation score is better: give mode="min"'):
            check_scheduler(
                Config(scheduler="mine"), scheduler.optimizer, functions, lower_is_better=True, has_validation=True
            )
        return
    for epoch in range(5):
        loss, score = (5.0, 5.0 - epoch) if lower_is_better else (5.0 - epoch, 5.0 + epoch)
        advance(scheduler, loss, score, lower_is_better=lower_is_better)
    assert scheduler.get_last_lr() == [1.0]
    advance(scheduler, 9.0, 9.0 if lower_is_better else 0.0, lower_is_better=lower_is_better)
    assert scheduler.get_last_lr() == [0.1]


def test_a_plateau_of_the_loss_needs_no_evaluation(tmp_path: Path) -> None:
    """With mode="min", every epoch's training loss counts, also without validation data."""
    graph = dataclasses.replace(weft.load("digits"), val_mask=None)
    scheduler = partial(ReduceLROnPlateau, mode="min", patience=0, threshold=2.0, threshold_mode="abs")
    run = weft.train(graph, out=tmp_path / "run", quiet=True, epochs=8, lr=0.1, eval_every=5, scheduler=scheduler)
    expected, lr, best = [], 0.1, math.inf
    for loss in losses(run):
        expected.append(lr)
        best, lr = (loss, lr) if loss < best - 2.0 else (best, lr * 0.1)
    assert rates(run) == pytest.approx(expected)


@pytest.mark.parametrize("patience", [0, 5])
def test_resuming_after_an_extra_evaluation(patience: int, tmp_path: Path) -> None:
    """The evaluation after the last epoch, for which --eval-every does not ask, has no effect on the resumed run."""
    options: dict[str, Any] = {"quiet": True, "hidden": 4, "lr": 0.3, "eval_every": 4, "patience": patience}
    options |= {"scheduler": "plateau", "scheduler_epochs": 1}
    whole = weft.train("digits", out=tmp_path / "whole", epochs=34, **options)
    part = weft.train("digits", out=tmp_path / "part", epochs=11, **options)
    best = max(line["val_accuracy"] for line in part.history if "val_accuracy" in line)
    assert part.summary["val_accuracy"] == best
    resumed = weft.train("digits", out=tmp_path / "part", epochs=34, resume=True, **options)
    assert losses(resumed) == losses(whole)
    assert rates(resumed) == rates(whole)
    for name in ("best_epoch", "epochs", "val_accuracy", "test_accuracy"):
        assert resumed.summary[name] == whole.summary[name]
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "part")[name])


def test_the_result_of_a_run_that_was_killed_after_its_last_checkpoint(tmp_path: Path) -> None:
    """Resuming repeats the evaluation after the last epoch, which the checkpoint does not contain."""
    options: dict[str, Any] = {"out": tmp_path / "run", "quiet": True, "hidden": 4, "epochs": 3, "eval_every": 5}
    run = weft.train("digits", **options)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # without the summary
    resumed = weft.train("digits", resume=True, **options)
    assert resumed.summary["best_epoch"] == 2
    assert resumed.summary["val_accuracy"] == run.summary["val_accuracy"]


class Drifting(torch.optim.SGD):
    """Optimizer with a set in its state, which JSON cannot store."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__([{"params": parameters, "notes": {1, 2}}])


class Weighed(LambdaLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.weights = torch.ones(3)
        super().__init__(optimizer, lambda _: 1.0)


def no_optimizer(parameters: list[nn.Parameter]) -> Tensor:
    return parameters[0]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optimizer": "adagrad"}, "unknown --optimizer 'adagrad'"),
        ({"scheduler": "cosin"}, "unknown --scheduler 'cosin': did you mean 'cosine'"),
        ({"optimizer": no_optimizer}, "optimizer no_optimizer returns a Parameter: return a torch.optim.Optimizer"),
        ({"optimizer": Drifting}, "the state_dict of the optimizer Drifting cannot be saved"),
        ({"scheduler": Weighed}, "the state_dict of the scheduler Weighed cannot be saved"),
        ({"optimizer": torch.optim.LBFGS}, r"optimizer LBFGS: LBFGS\.step needs a closure, .* such as Adam"),
        (
            {"scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=7), "epochs": 9},
            "--scheduler OneCycleLR fails at the end of epoch 8 .* make it for 9 steps",
        ),
        ({"optimizer": adam}, "optimizer: weft has a built-in named adam"),
        ({"optimizer": two_groups, "lr": 0.1}, "lr has no effect on a custom optimizer: leave it out"),
        ({"scheduler": warm_then_steps, "lr_factor": 0.5}, "lr_factor has no effect on a custom scheduler"),
        ({"momentum": 0.5}, "--momentum has no effect under optimizer adam: .* give --optimizer sgd or rmsprop"),
        ({"scheduler_epochs": 5}, "--scheduler-epochs has no effect under scheduler none"),
        ({"scheduler": "cosine", "lr_factor": 0.5}, "--lr-factor has no effect under scheduler cosine"),
        ({"scheduler": "plateau", "warmup_epochs": 5}, "--warmup-epochs has no effect under scheduler plateau"),
        ({"clip_norm": -1.0}, "--clip-norm -1.0: give at least 0"),
    ],
)
def test_mistakes(options: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        weft.train("digits", out=tmp_path / "run", quiet=True, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("in_a_script")
def test_a_scheduler_that_cannot_be_sent_to_ranks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the scheduler cannot be sent to local ranks .* define it with def or class"):
        weft.train(
            "digits",
            out=tmp_path / "run",
            strategy="tensor",
            workers=2,
            scheduler=lambda optimizer: MultiStepLR(optimizer, [2]),
        )


def test_a_cosine_keeps_its_length(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "quiet": True, "hidden": 4, "scheduler": "cosine"}
    weft.train("digits", epochs=3, **options)
    with pytest.raises(InputError, match="--scheduler-epochs differs from the run in"):
        weft.train("digits", epochs=6, resume=True, **options)
    more = weft.train("digits", epochs=6, resume=True, scheduler_epochs=3, **options)
    assert rates(more)[3:] == [0.0] * 3


def test_states_come_back_from_json() -> None:
    state = {"milestones": {3: 1, 5: 1}, "betas": (0.9, 0.99), "nested": [{"a": (1, 2)}]}
    require_plain("one", state)
    restored = restore_types(state, {"milestones": {"3": 1, "5": 1}, "betas": [0.9, 0.99], "nested": [{"a": [1, 2]}]})
    assert restored == state
    with pytest.raises(InputError, match="the state_dict of the one changes when it is saved"):
        require_plain("one", {"a": math.nan})


def test_flags_of_custom_names_pass() -> None:
    refuse_foreign_flags(Config(optimizer="mine", momentum=0.5))
    assert set(optimizer.SCHEDULERS) == {"none", "step", "cosine", "plateau"}
