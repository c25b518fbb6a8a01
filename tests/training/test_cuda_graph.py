"""A captured pass gives the bits of one that is not: by graphs that are faked; `test_gpu.py` has real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.lib import captured as fake
from tests.lib.cases import Case, cases, dropping_cases, typed_cases
from tests.lib.planted import replaced
from tests.lib.running import losses
from tests.lib.session import Session
from weft.comm import Group
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.kernels import cpu
from weft.nn import GraphView, make_model
from weft.strategies.placed_view import PlacedView
from weft.training import cuda_graph, loop
from weft.training.custom_functions import NO_FUNCTIONS

GRAPH = "sbm:vertices=120,degree=6,features=12,classes=3"
OPTIONS: dict[str, Any] = {
    "hidden": 8, "epochs": 6, "dropout": 0.4, "input_dropout": 0.2, "dtype": "float64", "quiet": True, "eval_every": 2,
    "disable": "onednn", "lr": 0.05,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"norm": "batch"},
    "sage": {"norm": "layer", "layers": 3},
    "gin": {},
    "gat": {"heads": 2, "attention_dropout": 0.3},
    "gatv2": {"heads": 2, "attention_dropout": 0.3},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("labelled", [1.0, 0.05])
def test_has_the_bits_of_one_that_is_not(model: str, labelled: float, tmp_path: Path) -> None:
    """Losses, scores and weights, with what is drawn anew in each epoch; also of steps that leave rows out."""
    graph = of_labelled(labelled)
    plain = run(tmp_path / "plain", graph, model, **MODELS[model])
    made, seen = run_captured(tmp_path / "captured", graph, model, **MODELS[model])
    assert [known.recording is not None for known in seen] == [True]
    assert losses(made.folder) == losses(plain.folder)
    assert made.summary["val_accuracy"] == plain.summary["val_accuracy"]
    for one, other in zip(made.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert len(set(losses(made.folder))) == OPTIONS["epochs"]


@pytest.mark.parametrize("case", [*cases(), *typed_cases(), *dropping_cases()], ids=lambda case: case.id)
def test_passes_of_every_model(case: Case) -> None:
    """Losses and gradients over some epochs."""
    plain, own = (Session(case, "single", Group()) for _ in range(2))
    passes = cuda_graph.TrainingPass(plain.strategy, plain.task), cuda_graph.CapturedPass(own.strategy, own.task)
    with replaced(cuda_graph, "capture", fake.capture):
        for epoch in range(4):
            found = []
            for session, one in zip((plain, own), passes, strict=True):
                session.model.zero_grad()
                (step,) = session.strategy.steps(epoch)
                found.append((one(step).item(), session.gradients()))
            assert found[0][0] == found[1][0], epoch
            assert found[0][1].keys() == found[1][1].keys()
            assert all(torch.equal(grad, found[1][1][name]) for name, grad in found[0][1].items()), epoch
    assert passes[1].recording is not None


def test_counts_every_replay(tmp_path: Path) -> None:
    found = [counted(make(tmp_path / name)) for name, make in (("one", plain_gcn), ("two", captured_gcn))]
    assert found[0] == found[1]
    assert len(found[0]) == OPTIONS["epochs"]


def test_masks_that_do_not_change_are_seen(tmp_path: Path) -> None:
    """Planted: keys that are numbers, which a graph keeps."""
    with replaced(PlacedView, "_next_key", GraphView._next_key):
        made = captured_gcn(tmp_path / "frozen")
    known = losses(plain_gcn(tmp_path / "plain").folder)
    assert losses(made.folder)[:2] == known[:2]
    assert losses(made.folder)[2:] != known[2:]


def test_what_cannot_be_captured_is_done_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted: a loss that the host reads on its way."""
    loss = cuda_graph.TrainingPass.__call__

    def waits(self: cuda_graph.TrainingPass, step: Any) -> Tensor:
        found = loss(self, step)
        found.item()
        return found

    with replaced(cuda_graph.TrainingPass, "__call__", waits):
        made = captured_gcn(tmp_path / "waits")
    assert losses(made.folder) == losses(plain_gcn(tmp_path / "plain").folder)
    assert capsys.readouterr().err.count("could not capture the step as a CUDA graph; it runs without (_local_scalar_dense") == 1


class Own(nn.Module):
    """Of somebody's own."""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"disable": "capture"}, False),
        ({"strategy": "tensor"}, False),
        ({"timeline": 3}, False),
        ({"sums": "torch_sparse"}, False),
        ({"triton": None}, False),
        ({"num_edges": cuda_graph.MOST_EDGES + 1}, False),
        ({"num_vertices": 1 << 22}, False),
        ({"model": nn.Sequential(Own())}, False),
        ({"loss": lambda logits, y: logits[:, 0] + y}, False),
    ],
)
def test_captures_small_steps_of_kernels_alone(changed: dict[str, Any], expected: bool) -> None:
    asked: dict[str, Any] = {"device": "cuda", "disable": "", "num_edges": 10_000, "num_vertices": 2_708}
    asked |= {"model": make_model("gcn", 4, 7), "strategy": "single", "timeline": 0, "loss": None}
    asked |= {"sums": "triton", "triton": cpu} | changed
    sizes = {"num_edges": asked["num_edges"], "num_vertices": asked["num_vertices"], "num_classes": 7}
    work = SimpleNamespace(optimisations=Optimisations.without(asked["disable"]), itemsize=4)
    group = SimpleNamespace(device=torch.device(asked["device"]))
    placed: Any = SimpleNamespace(work=work, graph=SimpleNamespace(**sizes), group=group, model=asked["model"])
    config = Config(strategy=asked["strategy"], timeline=asked["timeline"])
    own = replace(NO_FUNCTIONS, loss=asked["loss"])
    with (
        replaced(cuda_graph, "triton_backend", lambda: asked["triton"]),
        replaced(cuda_graph, "used", lambda _: {asked["sums"], "triton"}),
    ):
        assert cuda_graph.is_captured(config, placed, own) is expected


def of_labelled(share: float) -> weft.Graph:
    graph = weft.load(GRAPH)
    assert graph.train_mask is not None
    few = graph.train_mask & (torch.arange(graph.num_vertices) < share * graph.num_vertices)
    return replace(graph, train_mask=few)


def run(folder: Path, graph: weft.Graph, model: str, **options: Any) -> weft.Run:
    return weft.train(graph, model, out=folder, **{**OPTIONS, **options})


def run_captured(
    folder: Path, graph: weft.Graph, model: str, **options: Any
) -> tuple[weft.Run, list[cuda_graph.CapturedPass]]:
    """And its passes."""
    seen: list[cuda_graph.CapturedPass] = []

    def make(_: Config, strategy: Any, task: Any, *__: Any) -> cuda_graph.CapturedPass:
        seen.append(cuda_graph.CapturedPass(strategy, task))
        return seen[-1]

    with replaced(loop, "make_pass", make), replaced(cuda_graph, "capture", fake.capture):
        return run(folder, graph, model, **options), seen


def plain_gcn(folder: Path) -> weft.Run:
    return run(folder, of_labelled(1.0), "gcn")


def captured_gcn(folder: Path) -> weft.Run:
    return run_captured(folder, of_labelled(1.0), "gcn")[0]


def counted(made: weft.Run) -> list[Any]:
    return [line["edges"] for line in made.records if line["kind"] == "rank" and line["phase"] == "train"]
