"""Link prediction under every exact strategy equals that on one rank, and exchanges as many bytes as its traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.data.test_links import make
from tests.lib.cases import EXACT, EXAMPLE_STRATEGIES, MACHINE
from tests.lib.pairwise import hash_of, param
from tests.lib.planted import replaced, too_large
from tests.lib.ranks import on_ranks
from tests.lib.running import complaints, train
from tests.lib.session import Flops, Given, check_close
from weft.cli.main import main
from weft.comm import Group, halo
from weft.config.config import Config
from weft.cost import Trace
from weft.data import Graph, GraphShape, Links, reorder, with_inverse_relations
from weft.data.inverse_relations import inverse_of
from weft.experiments.compare import compare_as
from weft.nn import LinkModel, Workload, embeddings
from weft.reporting import stage_table
from weft.strategies import Step
from weft.training.tasks.decoder_costs import DecoderCosts
from weft.training.tasks.link_prediction import LinkTask
from weft.training.tasks.task import graph_for_task, make_task, task_model
from weft.utils.errors import InputError

WIDTH = 6
PLACEMENT = Given(machine=MACHINE)
IN_CHUNKS = Given(chunks=3)
METRICS = ("auc", "mrr", "hits@3", "ndcg@4")
SCORES = [f"{split}_{metric}" for split in ("val", "test") for metric in METRICS] + ["val_loss"]


@dataclass(frozen=True, kw_only=True)
class Case:
    graph: str
    decoder: str = "dot"
    model: str = "gcn"
    negatives: int = 1
    loss: str = ""
    eval_negatives: int = 0
    order: str = "none"

    @property
    def id(self) -> str:
        return f"{self.model}-{self.decoder}-{self.graph}"

    @property
    def config(self) -> Config:
        return Config(
            task="link",
            decoder=self.decoder,
            negatives=self.negatives,
            loss=self.loss,
            eval_negatives=self.eval_negatives,
            metrics=",".join(METRICS),
            model=self.model,
            hidden=WIDTH,
            heads=2,
            dropout=0.5 if self.model == "lightgcn" else 0.3,
            inverse_relations=self.model == "lightgcn",
            dtype="float64",
            seed=3,
        )

    def build(self) -> tuple[Graph, LinkModel]:
        graph = make(self.graph)
        if self.model != "lightgcn":
            graph = replace(graph, x=torch.randn(60, 7, generator=torch.Generator().manual_seed(1)))
        graph = graph_for_task(reorder(graph, self.order), self.config)
        model = task_model(None, GraphShape.of(graph), self.config, strategy=self.config.strategy)
        assert isinstance(model, LinkModel)
        return graph, model


CASES = [
    Case(graph="symmetric", order="bfs", eval_negatives=5),
    Case(graph="directed", model="gat", negatives=3),
    Case(graph="knowledge", decoder="distmult", negatives=2),
    Case(graph="bipartite", decoder="distmult", model="sage"),
    Case(graph="bipartite", model="lightgcn", loss="bpr", negatives=3),
]


class Session:
    """Case placed by a strategy, with methods that train, score and check it."""

    def __init__(self, case: Case, name: str, group: Group, placement: Given = PLACEMENT) -> None:
        self.graph, model = case.build()
        self.case, self.group = case, group
        self.plan = placement.plan(name, Workload(model, self.graph), group.size)
        self.strategy = self.plan.place(group, seed=3)
        self.model = self.strategy.model
        task = make_task(case.config, self.strategy)
        assert isinstance(task, LinkTask)
        self.task = task

    def step(self, epoch: int) -> float:
        self.model.zero_grad()
        with self.group.meter.during("train"), Flops() as flops:
            step = Step(epoch=epoch, training=True)
            z = self.strategy.forward(step)
            loss, grad = self.task.loss(z, step)
            self.strategy.backward(z, grad)
        self.flops = flops.total
        return loss.item()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def losses(self) -> Tensor:
        """Return the losses of 4 steps of Adam, summed over all ranks."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        losses = []
        for epoch in range(4):
            losses.append(self.step(epoch))
            optimizer.step()
        parts = [report["losses"] for report in self.group.all_gather_object({"losses": losses})]
        return torch.tensor(parts, dtype=torch.float64).sum(0)

    def scores(self) -> dict[str, float | None]:
        with self.group.meter.during("eval"):
            step = Step(epoch=0, training=False)
            return self.task.scores([self.task.counts(self.strategy.forward(step), step)])

    def check_counts(self, phase: str, *, epoch: int | None) -> None:
        """Check that this rank counted what the traces of its strategy and its task contain."""
        rank = self.group.rank
        strategy_trace = self.plan.trace(rank, training=epoch is not None)
        if epoch is None:
            of_task = self.task.assignment.trace(rank, WIDTH, 8, epoch=epoch, ranked=True, top=4).operations
        else:
            of_task = DecoderCosts(self.case.config, 3, self.plan).operations(rank, epoch=epoch)
        both = Trace(operations=(*strategy_trace.operations, *of_task))
        counts = self.group.meter.take(phase)
        assert counts.edges == both.edges
        assert epoch is None or self.flops == both.flops
        for kind in ("collectives", "bytes_sent", "bytes_received", "to_device", "to_host"):
            assert getattr(counts, kind) == getattr(both, kind), kind


class Reference:
    """Results on one rank, with vertices in their original order."""

    def __init__(self, case: Case) -> None:
        whole = Session(replace(case, order="none"), "single", Group())
        whole.step(2)
        self.gradients = whole.gradients()
        self.losses, self.scores = whole.losses(), whole.scores()


@cache
def reference(case: Case) -> Reference:
    """Compute the reference of a case once per process."""
    return Reference(case)


def check(group: Group, case: Case, name: str, expected: Reference) -> None:
    placed = Session(case, name, group, IN_CHUNKS if name == "offload" else PLACEMENT)
    placed.group.meter.take("train")
    placed.step(2)
    placed.check_counts("train", epoch=2)
    gradients = placed.gradients()
    assert gradients.keys() == expected.gradients.keys()
    sharded = embeddings(placed.model)
    for parameter, gradient in expected.gradients.items():
        gradient = gradient[placed.strategy.embedded] if parameter in sharded else gradient
        check_close(gradients[parameter], gradient, f"gradient of {parameter}")
    check_close(placed.losses(), expected.losses, "losses")
    placed.group.meter.take("eval")
    scores = placed.scores()
    placed.check_counts("eval", epoch=None)
    for score in SCORES:
        assert scores.get(score) == pytest.approx(expected.scores.get(score), abs=1e-12), score


def matrix() -> list[Any]:
    """Return every case under every strategy and number of ranks.

    One number of ranks is quick; of the example strategies, which tests define, only the first case is.
    """
    points = []
    for case, name in product(CASES, EXACT):
        sizes = (1, 2, 3) if name in ("tensor", "hybrid", "pipeline") else (1, 2)
        quick = (
            sizes[hash_of(f"{name}-{case.id}", len(sizes))]
            if name not in EXAMPLE_STRATEGIES or case is CASES[0]
            else None
        )
        points += [param(name, case, size, name=f"{name}-{case.id}-P{size}", quick=size == quick) for size in sizes]
    return points


@pytest.mark.parametrize(("name", "case", "size"), matrix())
def test_equals_single(name: str, case: Case, size: int) -> None:
    expected = reference(case)
    assert set(SCORES) <= expected.scores.keys()
    on_ranks(size, check, case, name, expected)


def test_sampled_candidates() -> None:
    """Each test link is compared with the same five non-edges of its source, in every evaluation."""
    session = Session(CASES[0], "single", Group())
    links, task = session.task.links, session.task
    z = session.strategy.forward(Step(epoch=0, training=False)).detach()
    sampled = task.assignment.held_out()[2 * (len(links.val) + len(links.test)) :]
    of_val = 5 * len(links.queries(links.val))
    samples: dict[int, list[float]] = {}
    for source, target, _ in sampled[of_val:].tolist():
        assert not torch.isin(links.codes(torch.tensor([[source, target, 0]])), links.true_codes).any()
        assert source != target
        samples.setdefault(source, []).append(float(z[source] @ z[target]))
    assert {len(scores) for scores in samples.values()} == {5}
    ranks = [1 + sum(other > float(z[u] @ z[v]) for other in samples[u]) for u, v, _ in links.test.tolist()]
    assert session.scores()["test_mrr"] == pytest.approx(sum(1 / rank for rank in ranks) / len(ranks), abs=1e-12)


def test_bpr() -> None:
    """The loss is the mean of -log sigmoid(s - s') over negative samples, which have the source of their link."""
    session = Session(CASES[-1], "single", Group())
    z = session.strategy.forward(Step(epoch=2, training=True)).detach()
    pairs = session.task.assignment.train(0, 2)
    scores = (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1).view(4, -1)
    assert session.step(2) == pytest.approx(float(-(scores[0] - scores[1:]).sigmoid().log().mean()), abs=1e-12)
    source, target, relation = pairs.view(4, -1, 3).unbind(2)
    assert (source == source[0]).all()
    assert (relation == relation[0]).all()
    assert (target[1:] != target[0]).double().mean() > 0.8


def check_idle_ranks(group: Group, case: Case, expected: Reference) -> None:
    part = (torch.arange(60) == 59).int()
    placed = Session(case, "communicated", group, Given(partition=part))
    check_close(placed.losses(), expected.losses, "losses")
    assert placed.scores() == pytest.approx(expected.scores, abs=1e-12)


def test_a_rank_without_links_and_one_without_vertices() -> None:
    """Results are exact if one rank has a vertex without links only, and another rank has no vertex."""
    on_ranks(3, check_idle_ranks, CASES[2], reference(CASES[2]))


def check_planted(group: Group, case: Case, expected: Reference) -> None:
    wrong = replaced(halo.RowsInTransit, "wait", too_large(halo.RowsInTransit.wait))
    with wrong, pytest.raises(AssertionError, match=r"gradient|loss"):
        check(group, case, "tensor", expected)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_planted_error_is_detected(size: int) -> None:
    on_ranks(size, check_planted, CASES[0], reference(CASES[0]))


OPTIONS: dict[str, Any] = {"task": "link", "dtype": "float64", "hidden": 16, "metrics": "mrr", "quiet": True}


def curve(run: weft.Run) -> list[list[float]]:
    epochs = [line for line in run.records if line["kind"] == "epoch"]
    return [[line["loss"], line["val_auc"], line["test_auc"], line["test_mrr"]] for line in epochs]


def test_runs_and_resumes(tmp_path: Path) -> None:
    """A resumed run is the same bits on one rank, and equal to 1e-9 on two; checkpoints include the decoder."""
    data = tmp_path / "graph"
    graph, _ = Case(graph="knowledge").build()
    replace(graph, val_links=None, test_links=None).save(data)
    options = {**OPTIONS, "decoder": "distmult"}
    whole = weft.train(data, out=tmp_path / "whole", epochs=6, **options)
    assert whole.summary["test_mrr"] > 0
    assert set(whole.summary["ranks"][0]["stages"]) == {"encode", "loss", "negatives", "decode", "update"}
    for strategy, workers in (("single", 1), ("tensor", 2)):
        out = tmp_path / strategy
        weft.train(data, out=out, epochs=3, **options)
        resumed = train(data, out=out, epochs=6, resume=True, strategy=strategy, workers=workers, **options)
        if workers == 1:
            assert curve(resumed) == curve(whole)
        torch.testing.assert_close(curve(resumed), curve(whole), rtol=1e-9, atol=1e-9)
    with pytest.raises(InputError, match="--decoder differs from the run"):
        weft.train(data, out=tmp_path / "single", epochs=9, resume=True, **{**options, "decoder": "dot"})


def test_a_citation_graph(weft_data: Callable[[str], Path], tmp_path: Path) -> None:
    """GCN with dot products has an area under the curve of more than 0.9 on held-out citations of Cora."""
    run = weft.train(weft_data("cora"), out=tmp_path / "cora", task="link", epochs=60, eval_every=10, quiet=True)
    assert run.summary["test_auc"] > 0.9


def test_a_custom_model(tmp_path: Path) -> None:
    graph, _ = Case(graph="symmetric").build()
    model = weft.nn.GCN(7, out_width=5)
    before = [parameter.clone() for parameter in model.parameters()]
    weft.train(graph, model, out=tmp_path / "own", task="link", epochs=2, quiet=True)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(InputError, match="the model returns 5 columns, but its decoder needs 64: use --hidden 5"):
        weft.train(graph, model, out=tmp_path / "two", task="link", decoder="distmult", quiet=True)
    with pytest.raises(InputError, match="the model has no num_stages"):
        weft.train(graph, nn.Linear(7, 5), out=tmp_path / "two", task="link", quiet=True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--decoder", "distmul"], "unknown --decoder 'distmul': did you mean 'distmult'?"),
        (["--loss", "mse", "--random-features", "4"], "unknown --loss 'mse': choose one of bce, bpr"),
        (["--eval-negatives", "5", "--random-features", "4"], "--eval-negatives 5 needs --metrics mrr or hits@K"),
        (["--negatives", "0"], "--negatives 0: give at least 1"),
        (["--metrics", "hits", "--random-features", "4"], "unknown --metrics 'hits'"),
        (["--metrics", "recall@0", "--random-features", "4"], "unknown --metrics 'recall@0'"),
        (
            ["--metrics", "recall@5", "--until", "val_recall@5=2", "--random-features", "4"],
            "--until val_recall@5=2: recall@5 is at most 1",
        ),
        (["--task", "edges"], "unknown --task 'edges'"),
        ([], "graph has no features: add some, or --random-features 256"),
    ],
)
def test_mistakes(arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("directed").save(tmp_path / "graph")
    command = ["train", str(tmp_path / "graph"), "--task", "link", *arguments, "--out", str(tmp_path / "out")]
    assert main(command) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert error in line
    assert not (tmp_path / "out").exists()


def test_graphs_that_cannot_be_trained_on_are_refused(tmp_path: Path) -> None:
    graph, _ = Case(graph="directed").build()
    options = {"task": "link", "quiet": True, "out": tmp_path / "out"}
    none = torch.empty(0, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="graph has no test_links"):
        weft.train(replace(graph, test_links=none), **options)
    with pytest.raises(InputError, match="--patience 3: graph has no validation links"):
        weft.train(replace(graph, val_links=none), patience=3, **options)
    tiny = Graph.from_edges(torch.tensor([0]), torch.tensor([1]), x=torch.ones(2, 1))
    with pytest.raises(InputError, match="has 1 links, too few"):
        weft.train(tiny, **options)
    assert not (tmp_path / "out").exists()


def test_stages_of_both_tasks(tmp_path: Path) -> None:
    """Stages are those of table 4 of the paper, and take no longer together than the training step."""
    for task, stages in (("node", "encode loss update"), ("link", "negatives encode decode loss update")):
        run = weft.train("digits", out=tmp_path / task, task=task, epochs=5, quiet=True)
        table = stage_table({"single": run.summary})
        assert [column.header for column in table.columns] == ["strategy", *stages.split()]
        for line in run.records:
            # The first epoch includes the setup.
            if line["kind"] == "rank" and line["phase"] == "train" and line["epoch"]:
                parts = [line["stages"][stage] for stage in stages.split()]
                whole = sum(line[f"{kind}_seconds"] for kind in ("compute", "communication", "waiting"))
                assert 0 < sum(parts) <= whole


def test_inverse_relations_carry_messages_and_are_no_links(tmp_path: Path) -> None:
    config = Config(task="link", decoder="distmult", model="rgcn", hidden=WIDTH, epochs=1, inverse_relations=True)
    whole = replace(make("knowledge"), val_links=None, test_links=None)
    whole = replace(whole, x=torch.randn(whole.num_vertices, 7, generator=torch.Generator().manual_seed(1)))
    graph = graph_for_task(whole, config)
    assert graph.relations == (*whole.relations, *inverse_of(whole.relations))
    assert graph_for_task(graph, config).relations == graph.relations
    for augmented in (graph, graph_for_task(with_inverse_relations(whole), replace(config, inverse_relations=False))):
        assert augmented.val_links is not None
        assert augmented.test_links is not None
        held_out = torch.cat([augmented.val_links, augmented.test_links])
        assert held_out[:, 2].max() < len(whole.relations)
        endpoints = {tuple(pair) for pair in held_out[:, :2].tolist()}
        edges = {tuple(edge) for edge in torch.stack(augmented.in_edges.edges(), 1).tolist()}
        assert not endpoints & (edges | {edge[::-1] for edge in edges})
        links = Links.of(augmented)
        assert links.num_relations == len(whole.relations)
        assert links.train[:, 2].max() < len(whole.relations)
    whole.save(tmp_path / "graph")
    runs = compare_as(replace(config, graph=str(tmp_path / "graph")), ["single"], tmp_path / "out", quiet=True)
    assert 0 <= runs["single"].summary["test_auc"] <= 1


def test_a_graph_with_no_edge_but_loops_is_refused() -> None:
    loops = Graph.from_edges(torch.arange(5), torch.arange(5), x=torch.randn(5, 3))
    with pytest.raises(InputError, match="graph has self-loops only: --task link trains on"):
        graph_for_task(replace(loops, test_links=torch.tensor([[0, 1, 0]])), Config(task="link"))
