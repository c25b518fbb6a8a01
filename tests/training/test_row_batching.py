"""Tasks on rows in mapped files equal those on rows in memory, and keep little of the files resident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.training.test_link_prediction import Case
from weft.comm import Group
from weft.data import Graph, Links
from weft.storage.host_rows import HostRows
from weft.storage.unnamed_files import is_mapped, release
from weft.strategies import Step
from weft.training.tasks import link_prediction, row_batching
from weft.training.tasks.link_prediction import LinkTask
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.row_batching import add_rows, parts_in_memory, row_blocks, take_rows

STEP = Step(epoch=0, training=True)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_batching, "BLOCK_BYTES", 200)
    monkeypatch.setattr(link_prediction, "MAX_PAIRS", 7)


def poisoned(rows: Tensor) -> Tensor:
    """Return mapped memory of the shape of rows, filled with NaN."""
    return HostRows(*rows.shape, rows.dtype).tensor().fill_(torch.nan)


def mapped(rows: Tensor) -> Tensor:
    return HostRows(*rows.shape, rows.dtype).tensor().copy_(rows)


def plain_empty(rows: Tensor) -> Tensor:
    return torch.full_like(rows, torch.nan)


Make = Callable[[Tensor], Tensor]
KINDS: list[tuple[Make, Make]] = [(torch.clone, plain_empty), (mapped, poisoned)]


def labelled(num_vertices: int, *, multilabel: bool) -> Graph:
    random = torch.Generator().manual_seed(0)
    share = torch.rand(num_vertices, generator=random)
    share[20:60] = 2  # blocks without any row of a split
    endpoints = torch.randint(0, num_vertices, (2, 50), generator=random)
    y = torch.randint(-1, 5, (num_vertices,), generator=random)
    return Graph.from_edges(
        *endpoints,
        num_vertices=num_vertices,
        y=(torch.rand(num_vertices, 5, generator=random) > 0.6).float() if multilabel else y,
        train_mask=share < 0.4,
        val_mask=(share > 0.4) & (share < 0.7),
        test_mask=share > 3,
    )


def whole_loss(graph: Graph, logits: Tensor) -> Tensor:
    """Return the mean loss over the training rows that have a label."""
    assert graph.y is not None
    assert graph.train_mask is not None
    mask = graph.train_mask if graph.multilabel else graph.train_mask & (graph.y >= 0)
    selected, y = logits[mask], graph.y[mask]
    if graph.multilabel:
        return functional.binary_cross_entropy_with_logits(selected, y.to(selected.dtype))
    return functional.cross_entropy(selected, y)


@pytest.mark.parametrize(("like", "empty"), KINDS, ids=["memory", "mapped"])
@pytest.mark.parametrize("multilabel", [False, True], ids=["one label", "several"])
def test_node_classification(like: Make, empty: Make, multilabel: bool) -> None:
    graph = labelled(103, multilabel=multilabel)
    logits = torch.randn(103, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = whole_loss(graph, logits)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    task = NodeTask(graph, slice(0, 103), Group(), empty)
    rows = like(logits.detach())
    loss, grad = task.loss(rows, STEP)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)
    assert is_mapped(grad) == is_mapped(rows)
    scores = task.scores([task.counts(rows, STEP)])
    for split, mask in (("train", graph.train_mask), ("val", graph.val_mask), ("test", graph.test_mask)):
        assert mask is not None
        assert graph.y is not None
        if multilabel:
            predicted, true = logits[mask] > 0, graph.y[mask] > 0.5
            pair = (2 * int((predicted & true).sum()), int(predicted.sum()) + int(true.sum()))
        else:
            mask = mask & (graph.y >= 0)
            pair = (int((logits[mask].argmax(1) == graph.y[mask]).sum()), int(mask.sum()))
        assert scores[f"{split}_{'micro_f1' if multilabel else 'accuracy'}"] == (
            pair[0] / pair[1] if pair[1] else None
        ), split


@pytest.mark.parametrize("case", [Case(graph="directed", negatives=3), Case(graph="knowledge", decoder="distmult")])
def test_link_prediction(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, model = case.build()
    z = torch.randn(graph.num_vertices, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = getattr(model.decoder, "weight", None)

    def results(like: Make, empty: Make) -> tuple[float, Tensor, Tensor, dict[str, float | None]]:
        model.zero_grad()
        task = LinkTask(case.config, case.config.seed, Links.of(graph), model.decoder, slice(0, len(z)), Group(), empty)
        rows = like(z)
        loss, grad = task.loss(rows, Step(epoch=3, training=True))
        scores = task.scores([task.counts(rows, STEP)])
        return loss.item(), grad, torch.zeros(0) if weight is None else weight.grad.clone(), scores

    with monkeypatch.context() as whole:
        whole.setattr(link_prediction, "MAX_PAIRS", 1 << 16)
        expected = results(torch.clone, plain_empty)
    for like, empty in KINDS:
        result = results(like, empty)
        assert result[0] == pytest.approx(expected[0], abs=1e-12)
        for actual, wanted in zip(result[1:3], expected[1:3], strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
        assert result[3] == pytest.approx(expected[3], abs=1e-12)


def test_rows_of_a_table(tmp_path: Path) -> None:
    plain = torch.randn(61, 7)
    rows = HostRows(61, 7, torch.float32, tmp_path)
    rows.write(0, plain)
    table = rows.tensor()
    for ids in (torch.arange(61), torch.tensor([3, 4, 50, 60]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(take_rows(table, ids), plain[ids])
        added = torch.randn(len(ids), 7)
        add_rows(table, ids, added)
        plain[ids] += added
        assert torch.equal(table, plain)
        blocks = [ids[part] for _, (part,) in row_blocks([ids], table)]
        assert torch.equal(torch.cat(blocks), ids)
        assert len(blocks) == 9
    assert list(row_blocks([], torch.empty(0, 7))) == []


def resident_file_bytes() -> int:
    """Return the resident bytes of files that this process has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


def test_little_of_a_mapped_table_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 6 MiB of rows and gradient, which are 32 MiB each, are resident at once: a few blocks of 1 MiB."""
    monkeypatch.setattr(row_batching, "BLOCK_BYTES", 1 << 20)
    num_vertices = 1 << 17
    graph = Graph.from_edges(
        *torch.tensor([[0], [1]]),
        num_vertices=num_vertices,
        y=torch.arange(num_vertices) % 64,
        train_mask=torch.arange(num_vertices) % 3 > 0,
        val_mask=torch.arange(num_vertices) % 3 == 0,
    )
    grad = HostRows(num_vertices, 64, torch.float32).tensor()
    logits = HostRows(num_vertices, 64, torch.float32).tensor()
    for rows in parts_in_memory(logits):
        logits[rows] = 0
    task = NodeTask(graph, slice(0, num_vertices), Group(), lambda rows: grad[: len(rows)])
    sparse = torch.arange(0, num_vertices, 999)
    before, peak = resident_file_bytes(), 0

    def measured_release(table: Tensor) -> None:
        nonlocal peak
        peak = max(peak, resident_file_bytes())
        release(table)

    monkeypatch.setattr(row_batching, "release", measured_release)
    task.loss(logits, STEP)
    task.counts(logits, STEP)
    add_rows(grad, sparse, take_rows(logits, sparse))
    assert peak > 0
    assert peak - before < 6 << 20
