"""Custom training loops with `weft.place` give the same bits as `weft.train`."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import weft
from tests.lib.graphs import make_typed_graph
from tests.lib.pairwise import param
from tests.lib.running import run_on_ranks
from weft.utils.errors import InputError

EPOCHS = 4
OPTIONS: dict[str, Any] = {"hidden": 16, "dtype": "float64", "seed": 3}
CASES: dict[str, dict[str, Any]] = {
    "single": {},
    "tensor": {"model": "gat"},
    "hybrid": {"model": "sage", "norm": "batch"},
    "offload": {"model": "gcn", "chunks": 3},
    "pipeline": {"model": "gcn"},
    "split": {"model": "sage", "batch_size": "200", "fanout": "4,3"},
    "sampled": {"model": "sage", "batch_size": "200", "fanout": "4,3"},
}
QUICK = ("tensor", "offload", "split")
"""Strategies of the quick tests."""


def loop(strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train in a custom loop; return scores and weights, and on rank 0 the logits."""
    with weft.place("digits", strategy=strategy, **OPTIONS, **options) as placed:
        optimizer = torch.optim.Adam(placed.model.parameters(), lr=0.01, weight_decay=5e-4)
        scores = []
        for epoch in range(EPOCHS):
            for batch in placed.batches(epoch):
                optimizer.zero_grad()
                logits = placed(batch)
                assert len(logits) == len(placed.vertices) or batch.step.vertices is not None
                loss = cross_entropy(logits[batch.rows], batch.y, reduction="none").sum() / batch.size
                placed.backward(loss)
                optimizer.step()
            scores.append(placed.evaluate())
        logits = placed.gather(placed.logits())
        assert (logits is None) == (placed.rank > 0)
        return {"scores": scores, "weights": placed.state_dict(), "logits": logits}


@pytest.mark.parametrize("strategy", ["single", "tensor", "hybrid", "offload", "pipeline", "split", "sampled"])
def test_few_labels_in_another_order(strategy: str) -> None:
    """Logits of all vertices are returned, in the order of the original ids, and batches name their vertices."""
    graph = weft.load("digits")
    train_mask, val_mask = torch.zeros(2, graph.num_vertices, dtype=torch.bool)
    train_mask[100:103], val_mask[200:202] = True, True
    few = replace(graph, train_mask=train_mask, val_mask=val_mask, test_mask=None)
    options = CASES[strategy] | OPTIONS | {"norm": "none"}
    if "batch_size" in options:
        options["batch_size"] = "3"
    with weft.place(few, strategy=strategy, order="bfs", **options) as placed:
        (batch,) = placed.batches(0)
        assert graph.y is not None
        assert torch.equal(graph.y[batch.vertices], batch.y)
        assert set(batch.vertices.tolist()) == {100, 101, 102}
        if batch.step.vertices is None:
            assert torch.equal(placed.vertices[batch.rows], batch.vertices)
            assert len(placed(batch)) == graph.num_vertices
        logits = placed.gather(placed.logits())
    with weft.place(graph, CASES[strategy].get("model", "gcn"), **OPTIONS) as whole:
        whole.load_state_dict(placed.state_dict())
        torch.testing.assert_close(logits, whole.logits(), rtol=1e-9, atol=1e-9)


def as_rank(strategy: str, options: dict[str, Any], path: Path) -> None:
    results = loop(strategy, options)
    if results["logits"] is not None:
        torch.save(results, path)


def trained(strategy: str, options: dict[str, Any], out: Path) -> None:
    fixed: dict[str, Any] = {"epochs": EPOCHS, "quiet": True}
    if strategy != "pipeline":  # which always computes all rows, as weft.place does
        fixed["disable"] = "reach"
    weft.train("digits", strategy=strategy, out=out, **fixed, **OPTIONS, **options)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        param(strategy, size, name=f"{strategy}-P{size}", quick=size == 2 and strategy in QUICK)
        for strategy, size in product(CASES, (1, 2, 3, 4))
    ],
)
def test_equals_train_bit_for_bit(strategy: str, size: int, tmp_path: Path) -> None:
    if strategy == "single" and size > 1:
        pytest.skip("single has one rank")
    options, path, out = CASES[strategy], tmp_path / "loop.pt", tmp_path / "run"
    run_on_ranks(size, as_rank, strategy, options, path)
    run_on_ranks(size, trained, strategy, options, out)
    results, run = torch.load(path, weights_only=True), weft.Run.open(out)
    for epoch, scores in zip(run.history, results["scores"], strict=True):
        assert {name: epoch[name] for name in scores} == scores
    last = weft.utils.files.jsonl.read(out / "metrics.jsonl")[-1]
    assert last["epochs"] == EPOCHS
    best = max(range(EPOCHS), key=lambda number: (results["scores"][number]["val_accuracy"] or 0, -number))
    if best == EPOCHS - 1:
        for name, value in run.model.state_dict().items():
            assert torch.equal(results["weights"][name], value), name


def test_a_loss_that_ignores_other_ranks_is_detected(tmp_path: Path) -> None:
    """A loss divided by the number of labels on one rank only gives other weights than `weft.train`."""
    path = tmp_path / "loop.pt"
    run_on_ranks(2, as_wrong_rank, path)
    run_on_ranks(2, as_rank, "hybrid", CASES["hybrid"], tmp_path / "right.pt")
    wrong, right = (torch.load(file, weights_only=True)["weights"] for file in (path, tmp_path / "right.pt"))
    assert any(not torch.allclose(wrong[name], right[name], rtol=1e-9, atol=1e-9) for name in right)


def as_wrong_rank(path: Path) -> None:
    with weft.place("digits", strategy="hybrid", **OPTIONS, **CASES["hybrid"]) as placed:
        optimizer = torch.optim.Adam(placed.model.parameters(), lr=0.01, weight_decay=5e-4)
        for epoch in range(EPOCHS):
            for batch in placed.batches(epoch):
                optimizer.zero_grad()
                placed.backward(cross_entropy(placed(batch)[batch.rows], batch.y))
                optimizer.step()
        weights = placed.state_dict()
        if placed.rank == 0:
            torch.save({"weights": weights}, path)


def embedded_state(path: Path) -> None:
    """Gather the state of a model with embeddings, and load it again after the parameters changed."""
    graph = make_typed_graph(20, "some")
    options: dict[str, Any] = {"strategy": "communicated", "model": "rgcn", "dtype": "float64"}
    with weft.place(graph, **options) as placed:
        state = placed.state_dict()
        sizes = [None if placed.rank else {name: list(value.shape) for name, value in state.items()}]
        if placed.group.size > 1:
            torch.distributed.broadcast_object_list(sizes, 0)
        whole = {name: value.clone() for name, value in state.items()}
        if placed.rank:
            whole = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in sizes[0].items()}
        for name in sorted(whole):
            placed.group.broadcast(whole[name], tag="test")
        before = {name: value.clone() for name, value in placed.model.state_dict().items()}
        with torch.no_grad():
            for parameter in placed.model.parameters():
                parameter += 1
        placed.load_state_dict(whole)
        for name, value in placed.model.state_dict().items():
            assert torch.equal(value, before[name]), name
        if placed.rank == 0:
            torch.save(whole, path)


def test_state_has_all_embedded_rows(tmp_path: Path) -> None:
    graph = make_typed_graph(20, "some")
    for size in (1, 2):
        run_on_ranks(size, embedded_state, tmp_path / f"{size}.pt")
    single, parallel = (torch.load(tmp_path / f"{size}.pt", weights_only=True) for size in (1, 2))
    assert any(len(value) == graph.typed.num_embedded for value in single.values())
    for name, value in single.items():
        assert torch.equal(value, parallel[name])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"epochs": 3}, "^epochs has no effect in weft.place"),
        ({"lr": 0.1}, "^lr has no effect"),
        ({"workers": 2}, "start the script with torchrun --nproc-per-node 2"),
        ({"task": "link"}, "weft.place supports only the node task"),
        ({"chunks": 3}, "--chunks has no effect under strategy single"),
        ({"loss": cross_entropy}, "uses no loss, optimizer, scheduler or callbacks"),
    ],
)
def test_options_of_the_training_loop_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=error):
        weft.place("digits", **options)


def test_a_loss_without_logits_is_refused() -> None:
    placed = weft.place("digits", **OPTIONS)
    with pytest.raises(InputError, match="no logits were computed since the last call"):
        placed.backward(torch.zeros((), requires_grad=True))
    (batch,) = placed.batches(0)
    placed(batch)
    with pytest.raises(InputError, match="does not depend on the logits"):
        placed.backward(torch.zeros(()))


def test_wrong_backward_calls_are_refused() -> None:
    placed = weft.place("digits", **OPTIONS)
    (batch,) = placed.batches(0)

    def loss() -> Tensor:
        return cross_entropy(placed(batch)[batch.rows], batch.y, reduction="sum") / batch.size

    with pytest.raises(InputError, match=r"call placed\.backward\(loss\) instead of loss\.backward\(\)"):
        loss().backward()
    two = loss() + loss()
    with pytest.raises(InputError, match=r"the logits of an earlier batch: call placed\.backward for each batch"):
        placed.backward(two)
    with pytest.raises(InputError, match=r"that term would count once for each rank: pass it as penalty"):
        placed.backward(loss() + penalty(placed))
    logits = placed(batch)
    with pytest.raises(InputError, match="the penalty depends on the logits: put that term into the loss"):
        placed.backward(logits.square().mean(), penalty=logits.sum())
    assert all(parameter.grad is None for parameter in placed.model.parameters())


def test_an_optimizer_of_another_model_is_detected() -> None:
    model = weft.nn.GCN(64, out_width=10).double()
    placed = weft.place("digits", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    (batch,) = placed.batches(0)
    placed.backward(cross_entropy(placed(batch)[batch.rows], batch.y, reduction="sum") / batch.size)
    optimizer.step()
    for epoch in (1, 2):
        list(placed.batches(epoch))
    with pytest.warns(UserWarning, match=r"no parameter of placed\.model has changed since the first placed\.backward"):
        list(placed.batches(3))


def penalty(placed: weft.PlacedModel) -> Tensor:
    return 0.1 * torch.stack([parameter.square().sum() for parameter in placed.model.parameters()]).sum()


def penalised_gradients(strategy: str, options: dict[str, Any], path: Path) -> None:
    """Save the gradients accumulated over two batches (or epochs), each with a penalty."""
    with weft.place("digits", strategy=strategy, **OPTIONS, **options) as placed:
        for batch in islice((batch for epoch in range(2) for batch in placed.batches(epoch)), 2):
            loss = cross_entropy(placed(batch)[batch.rows], batch.y, reduction="sum") / batch.size
            placed.backward(loss, penalty=penalty(placed))
        gradients = {
            name: parameter.grad for name, parameter in placed.model.named_parameters() if parameter.grad is not None
        }
        if placed.rank == 0:
            torch.save(gradients, path)


@pytest.mark.parametrize(
    "strategy",
    [
        param(strategy, name=strategy, quick=strategy in QUICK)
        for strategy in ("tensor", "hybrid", "offload", "pipeline", "split")
    ],
)
def test_gradients_add_up_and_a_penalty_counts_once(strategy: str, tmp_path: Path) -> None:
    """Accumulated gradients, with a penalty, are equal on any number of ranks."""
    options = {name: value for name, value in CASES[strategy].items() if name != "chunks"}
    if strategy in ("offload", "pipeline"):
        options["chunks"] = 3
    for size in (1, 2, 3):
        run_on_ranks(size, penalised_gradients, strategy, options, tmp_path / f"{size}.pt")
    single, *others = (torch.load(tmp_path / f"{size}.pt", weights_only=True) for size in (1, 2, 3))
    for other in others:
        assert single.keys() == other.keys()
        for name, gradient in single.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-9, atol=1e-9)
