"""A training pass captured as a CUDA graph gives the same bits as one that is not; graphs are emulated on the CPU.

`test_gpu.py` checks this with real CUDA graphs.
"""

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
from weft.config.optimisations import Optimisations
from weft.kernels import cpu
from weft.nn import GraphView, make_model
from weft.parallel.exchange import PlacedView
from weft.training import cuda_graph, loop
from weft.training.custom_functions import NO_FUNCTIONS
from weft.training.tasks.metrics import NodeTask

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
def test_a_captured_run_has_the_same_bits(model: str, labelled: float, tmp_path: Path) -> None:
    """Losses, scores and weights are equal, with new random numbers in each epoch, and with pruned steps."""
    graph = graph_with_labels(labelled)
    plain = run(tmp_path / "plain", graph, model, **MODELS[model])
    captured, passes = run_captured(tmp_path / "captured", graph, model, **MODELS[model])
    assert [captured_pass.recording is not None for captured_pass in passes] == [True]
    assert losses(captured.folder) == losses(plain.folder)
    assert captured.summary["val_accuracy"] == plain.summary["val_accuracy"]
    for values, expected in zip(captured.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(values, expected)
    assert len(set(losses(captured.folder))) == OPTIONS["epochs"]


@pytest.mark.parametrize("case", [*cases(), *typed_cases(), *dropping_cases()], ids=lambda case: case.id)
def test_passes_of_every_model(case: Case) -> None:
    """Losses and gradients are the same bits over several epochs."""
    plain, captured = (Session(case, "single", Group()) for _ in range(2))
    passes = (
        cuda_graph.TrainingPass(plain.strategy, plain.task),
        cuda_graph.CapturedPass(captured.strategy, captured.task),
    )
    with replaced(cuda_graph, "capture", fake.capture):
        for epoch in range(4):
            results = []
            for session, training_pass in zip((plain, captured), passes, strict=True):
                session.model.zero_grad()
                (step,) = session.strategy.steps(epoch)
                results.append((training_pass(step).item(), session.gradients()))
            assert results[0][0] == results[1][0], epoch
            assert results[0][1].keys() == results[1][1].keys()
            assert all(torch.equal(grad, results[1][1][name]) for name, grad in results[0][1].items()), epoch
    assert passes[1].recording is not None


def test_counts_every_replay(tmp_path: Path) -> None:
    edges = [counted(make(tmp_path / name)) for name, make in (("one", plain_gcn), ("two", captured_gcn))]
    assert edges[0] == edges[1]
    assert len(edges[0]) == OPTIONS["epochs"]


def test_frozen_dropout_masks_are_detected(tmp_path: Path) -> None:
    """Plant an error: dropout keys that are Python numbers, which a captured graph repeats."""
    with replaced(PlacedView, "_next_key", GraphView._next_key):
        frozen = captured_gcn(tmp_path / "frozen")
    expected = losses(plain_gcn(tmp_path / "plain").folder)
    assert losses(frozen.folder)[:2] == expected[:2]
    assert losses(frozen.folder)[2:] != expected[2:]


def test_a_step_that_cannot_be_captured_runs_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plant an error: the host reads the loss during the capture."""
    loss = cuda_graph.TrainingPass.__call__

    def waits(self: cuda_graph.TrainingPass, step: Any) -> Tensor:
        value = loss(self, step)
        value.item()
        return value

    with replaced(cuda_graph.TrainingPass, "__call__", waits):
        uncaptured = captured_gcn(tmp_path / "waits")
    assert losses(uncaptured.folder) == losses(plain_gcn(tmp_path / "plain").folder)
    assert (
        capsys.readouterr().err.count(
            "could not capture the step as a CUDA graph; it runs without (_local_scalar_dense"
        )
        == 1
    )


class CustomModule(nn.Module):
    """Custom module."""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"disable": "capture"}, False),
        ({"capturable": False}, False),
        ({"timeline": 3}, False),
        ({"sums": "torch_sparse"}, False),
        ({"triton": None}, False),
        ({"num_edges": cuda_graph.MAX_EDGES + 1}, False),
        ({"num_vertices": 1 << 22}, False),
        ({"model": nn.Sequential(CustomModule())}, False),
        ({"loss": lambda logits, y: logits[:, 0] + y}, False),
    ],
)
def test_captures_small_steps_of_kernels_alone(changed: dict[str, Any], expected: bool) -> None:
    settings: dict[str, Any] = {"device": "cuda", "disable": "", "num_edges": 10_000, "num_vertices": 2_708}
    settings |= {"model": make_model("gcn", 4, 7), "capturable": True, "timeline": 0, "loss": None}
    settings |= {"sums": "triton", "triton": cpu} | changed
    sizes = {"num_edges": settings["num_edges"], "num_vertices": settings["num_vertices"], "num_classes": 7}
    work = SimpleNamespace(optimisations=Optimisations.without(settings["disable"]), itemsize=4)
    group = SimpleNamespace(device=torch.device(settings["device"]))
    capturable, model = settings["capturable"], settings["model"]
    placed: Any = SimpleNamespace(
        work=work, graph=SimpleNamespace(**sizes), group=group, model=model, capturable=capturable
    )
    functions = replace(NO_FUNCTIONS, loss=settings["loss"])
    with (
        replaced(cuda_graph, "triton_backend", lambda: settings["triton"]),
        replaced(cuda_graph, "kernels_in_use", lambda _: {settings["sums"], "triton"}),
    ):
        task: Any = object.__new__(NodeTask)
        assert cuda_graph.is_captured(placed, task, functions, timeline=settings["timeline"]) is expected


def graph_with_labels(share: float) -> weft.Graph:
    graph = weft.load(GRAPH)
    assert graph.train_mask is not None
    few = graph.train_mask & (torch.arange(graph.num_vertices) < share * graph.num_vertices)
    return replace(graph, train_mask=few)


def run(folder: Path, graph: weft.Graph, model: str, **options: Any) -> weft.Run:
    return weft.train(graph, model, out=folder, **{**OPTIONS, **options})


def run_captured(
    folder: Path, graph: weft.Graph, model: str, **options: Any
) -> tuple[weft.Run, list[cuda_graph.CapturedPass]]:
    """Train with captured passes; return the run and these passes."""
    passes: list[cuda_graph.CapturedPass] = []

    def make(strategy: Any, task: Any, *_: Any, **__: Any) -> cuda_graph.CapturedPass:
        passes.append(cuda_graph.CapturedPass(strategy, task))
        return passes[-1]

    with replaced(loop, "make_pass", make), replaced(cuda_graph, "capture", fake.capture):
        return run(folder, graph, model, **options), passes


def plain_gcn(folder: Path) -> weft.Run:
    return run(folder, graph_with_labels(1.0), "gcn")


def captured_gcn(folder: Path) -> weft.Run:
    return run_captured(folder, graph_with_labels(1.0), "gcn")[0]


def counted(finished: weft.Run) -> list[Any]:
    return [line["edges"] for line in finished.records if line["kind"] == "rank" and line["phase"] == "train"]
