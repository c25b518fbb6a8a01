"""Tasks on edges equal `single` under every exact strategy, and held-out edges carry no messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.lib.cases import EXACT, EXAMPLE_STRATEGIES, MACHINE
from tests.lib.graph_checks import same_graph
from tests.lib.pairwise import hash_of, param
from tests.lib.planted import replaced
from tests.lib.ranks import on_ranks
from tests.lib.running import complaints
from tests.lib.session import Flops, Given, check_close
from weft.cli.main import main
from weft.comm import Group
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.cost import Trace
from weft.data import DataWarning, EdgeLabels, Graph, GraphShape, reorder
from weft.data.vertex_names import Texts, VertexNames
from weft.nn import LinkModel, Workload
from weft.strategies import Step
from weft.training.tasks.decoder_costs import DecoderCosts
from weft.training.tasks.edge_prediction import EdgeAssignment, EdgeTask
from weft.training.tasks.scores import binary_auc
from weft.training.tasks.task import graph_for_task, make_task, task_model
from weft.utils.errors import InputError

WIDTH, NUM_EDGES = 6, 400
KINDS = ("classes", "labels", "values")
SLOW_REACH = [pytest.param(name, 3, marks=pytest.mark.slow) for name in ("communicated", "cached", "hybrid", "offload")]
ALL = {"fanout": "all", "batch_size": "all"}
PLACEMENT = Given(task="edge", machine=MACHINE, seed=3, chunks=3, prefetch_batches=0, **ALL)


def make(kind: str = "classes", **fields: Any) -> Graph:
    """Return transactions between 60 accounts, some with an equal pair of accounts, and with labels of a kind."""
    random = torch.Generator().manual_seed(5)
    source, target = torch.randint(0, 60, (2, NUM_EDGES), generator=random)
    x, features = torch.randn(60, 7, generator=random), torch.randn(NUM_EDGES, 3, generator=random)
    value = features[:, 0] + x[source, 0] + x[target, 1]
    y = {
        "classes": (value > 1).long(),
        "labels": torch.stack([value > 0, value > 1], 1).long(),
        "values": value,
        "few": torch.where((source < 12) & (target < 12), (value > 0).long(), -1),
    }[kind]
    if kind in ("classes", "values"):
        y[::9] = -1 if kind == "classes" else torch.nan
    return Graph.from_edges(source, target, **{"x": x, "edge_features": features, "edge_y": y} | fields)


def config_of(kind: str, **fields: Any) -> Config:
    weights = "balanced" if kind == "classes" else "none"
    return Config(task="edge", dtype="float64", hidden=WIDTH, dropout=0.3, seed=3, class_weights=weights, **fields)


class Session:
    """Transactions placed by a strategy, with methods that train and score."""

    def __init__(
        self, kind: str, name: str, group: Group, order: str = "none", disable: str = "", **options: Any
    ) -> None:
        metrics = "mse,r2" if kind == "values" else "accuracy,macro_f1,roc_auc,average_precision"
        config = config_of(kind, metrics=metrics)
        graph = graph_for_task(reorder(make(kind), order), config)
        model = task_model(None, GraphShape.of(graph, "edge"), config, strategy=config.strategy)
        assert isinstance(model, LinkModel)
        self.group, self.config = group, config
        work = Workload(model, graph, Optimisations.without(disable))
        self.plan = Given(**PLACEMENT | options).plan(name, work, group.size)
        self.strategy = self.plan.place(group, seed=3)
        task = make_task(config, self.strategy)
        assert isinstance(task, EdgeTask)
        self.task = task

    def losses(self) -> Tensor:
        """Return the losses of the steps of 3 epochs with Adam, summed over all ranks."""
        losses = []
        optimizer = torch.optim.Adam(self.strategy.model.parameters(), lr=0.02)
        with self.group.meter.during("train"):
            for step in chain.from_iterable(self.strategy.steps(epoch) for epoch in range(3)):
                losses.append(self.step(step))
                optimizer.step()
        parts = [rank["losses"] for rank in self.group.all_gather_object({"losses": losses})]
        return torch.tensor(parts, dtype=torch.float64).sum(0)

    def step(self, step: Step) -> float:
        """Return the loss of a step on this rank, and set the gradients."""
        self.strategy.model.zero_grad()
        z = self.strategy.forward(step)
        loss, grad = self.task.loss(z, step)
        self.strategy.backward(z, grad)
        return loss.item()

    def check_work(self) -> None:
        """Check that a step counts the bytes, edges and FLOPs that plan and decoder state."""
        rank = self.group.rank
        self.step(next(iter(self.strategy.steps(0))))  # the first step locates the edges
        self.group.meter.take("train")
        with self.group.meter.during("train"), Flops() as flops:
            step = next(iter(self.strategy.steps(0)))
            self.step(step)
        plan_trace, costs = self.plan.trace(rank, training=True), DecoderCosts(self.config, 3, self.plan)
        trace = Trace(operations=(*plan_trace.operations, *costs.operations(rank, step.links)))
        counts = self.group.meter.take("train")
        for kind in ("edges", "collectives", "bytes_sent", "bytes_received", "to_device", "to_host"):
            assert getattr(counts, kind) == getattr(trace, kind), kind
        assert flops.total == trace.flops

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.strategy.model.named_parameters() if p.grad is not None}

    def scores(self) -> dict[str, float | None]:
        step = self.strategy.evaluation(0)
        with self.group.meter.during("eval"):
            counts = self.task.counts(self.strategy.forward(step), step)
        return self.task.scores(self.group.all_gather_object(counts))


@cache
def reference(kind: str) -> tuple[Tensor, dict[str, Tensor], dict[str, float | None]]:
    """Return losses, gradients and scores on one rank; computed once per process."""
    session = Session(kind, "single", Group())
    return session.losses(), session.gradients(), session.scores()


def check(group: Group, kind: str, name: str, expected: Any, order: str = "none", **options: Any) -> None:
    session = Session(kind, name, group, order, **options)
    session.check_work()
    losses, gradients, scores = expected
    check_close(session.losses(), losses, "losses")
    for parameter, gradient in session.gradients().items():
        check_close(gradient, gradients[parameter], f"gradient of {parameter}")
    assert session.scores() == pytest.approx(scores, abs=1e-9)


def matrix() -> list[Any]:
    """Return every kind of labels under every strategy and number of ranks; one kind and number is quick."""
    points = []
    for name in [name for name in (*EXACT, "sampled") if name not in EXAMPLE_STRATEGIES]:
        chosen = hash_of(name, 6)
        for number, (kind, size) in enumerate(product(KINDS, (1, 3))):
            points.append(param(name, kind, size, name=f"{name}-{kind}-P{size}", quick=number == chosen))
    return points


@pytest.mark.parametrize(("name", "kind", "size"), matrix())
def test_equals_single(name: str, kind: str, size: int) -> None:
    expected = reference(kind)
    assert all(score is not None for score in expected[2].values())
    on_ranks(size, check, kind, name, expected)


def check_reach(group: Group, name: str, expected: Any) -> None:
    options = {"chunks": 0} if name == "tensor" else {}  # chunks of columns are of the whole graph
    check(group, "few", name, expected, **options)
    fields = Session("few", name, group, **options).strategy.describe()["reach"]
    assert not any(isinstance(field, str) for field in fields.values()), fields


@pytest.mark.parametrize(("name", "size"), [("single", 1), ("tensor", 3), *SLOW_REACH])
def test_only_the_receptive_field_is_computed(name: str, size: int) -> None:
    """Steps compute only the rows that endpoints of labelled edges depend on, and results are the same."""
    whole = Session("few", "single", Group(), disable="reach")
    on_ranks(size, check_reach, name, (whole.losses(), whole.gradients(), whole.scores()))


def test_vertex_order_changes_nothing() -> None:
    on_ranks(1, check, "classes", "split", reference("classes"), "bfs")


def check_batches(group: Group, name: str, expected: Tensor) -> None:
    check_close(Session("classes", name, group, batch_size="60", fanout="2").losses(), expected, "losses")


@pytest.mark.parametrize("name", ["split", pytest.param("sampled", marks=pytest.mark.slow)])
def test_batches_of_edges_equal_one_rank(name: str) -> None:
    expected = Session("classes", name, Group(), batch_size="60", fanout="2").losses()
    assert len(expected) == 3 * 4
    on_ranks(3, check_batches, name, expected)


def check_planted(group: Group, expected: Any) -> None:
    def twice(self: EdgeAssignment, rank: int) -> Any:
        pairs = train(self, rank)
        return torch.cat([pairs, pairs[:1]])

    train = EdgeAssignment.train
    with replaced(EdgeAssignment, "train", twice), pytest.raises(AssertionError, match=r"losses|Expected|mismatch"):
        check(group, "classes", "tensor", expected)


def test_an_edge_that_counts_twice_is_detected() -> None:
    on_ranks(1, check_planted, reference("classes"))


def message_edges(graph: Graph) -> list[tuple[float, ...]]:
    """Return the edges that carry messages, each with its features."""
    assert graph.edge_features is not None
    rows = torch.cat([torch.stack(graph.in_edges.edges(), 1), graph.edge_features], 1)
    return sorted(map(tuple, rows.tolist()))


def labelled_edges(labels: EdgeLabels, mask: Tensor) -> list[tuple[float, ...]]:
    """Return labelled edges that a mask selects, each with its features."""
    assert labels.features is not None
    return sorted(map(tuple, torch.cat([labels.edges[:, :2], labels.features], 1)[mask].tolist()))


def check_split(graph: Graph) -> None:
    """Check that edges to validate or test on carry no messages, and that all others do."""
    labels, messages = graph.edge_labels, message_edges(graph)
    assert labels is not None
    held_out = labelled_edges(labels, labels.val_mask | labels.test_mask)
    assert not set(held_out) & set(messages)
    assert set(labelled_edges(labels, labels.train_mask)) <= set(messages)
    assert len(held_out) + len(messages) == NUM_EDGES


def test_held_out_edges_carry_no_messages() -> None:
    """Several edges between two vertices are distinct; unlabelled ones carry messages unless they are to be tested."""
    graph = make()
    check_split(graph)
    split = torch.arange(NUM_EDGES) % 4 - 1
    graph = make(edge_split=split)
    check_split(graph)
    labels = graph.edge_labels
    assert labels is not None
    unlabelled = torch.arange(NUM_EDGES) % 9 == 0
    assert len(labels.edges) == int((~unlabelled | (split > 0)).sum())
    train = labels.labelled("train")
    assert train is not None
    assert int(train.sum()) == int((~unlabelled & (split == 0)).sum())
    leaky = replace(graph, in_edges=make(edge_y=None).in_edges, edge_features=make(edge_y=None).edge_features)
    with pytest.raises(AssertionError):
        check_split(leaky)
    with pytest.warns(
        DataWarning, match=r"all edges of edge_labels.(val|test)_mask are edges of the graph too"
    ) as seen:
        graph_for_task(leaky, config_of("classes"))
    assert len(seen) == 2


def test_no_reverse_of_a_held_out_edge_carries_messages() -> None:
    """The edges that `undirected` adds are those of training edges only."""
    split = {"edge_features": None, "edge_y": torch.arange(NUM_EDGES) % 2, "edge_split": torch.arange(NUM_EDGES) % 3}
    graph = make(undirected=True, **split)
    labels = graph.edge_labels
    assert labels is not None
    messages = {tuple(edge) for edge in torch.stack(graph.in_edges.edges(), 1).tolist()}
    train = {tuple(edge) for edge in labels.edges[labels.train_mask][:, :2].tolist()}
    assert messages == train | {edge[::-1] for edge in train}


def test_saved_and_reordered(tmp_path: Path) -> None:
    graph = make()
    graph.save(tmp_path / "graph")
    opened = Graph.open(tmp_path / "graph")
    same_graph(opened, graph)
    assert graph.edge_labels is not None
    assert opened.edge_labels is not None
    for name, array in graph.edge_labels.arrays().items():
        assert torch.equal(opened.edge_labels.arrays()[name], array)
    moved = reorder(opened, "bfs")
    assert moved.edge_labels is not None
    assert moved.ids is not None
    assert torch.equal(moved.ids[moved.edge_labels.edges[:, :2]], graph.edge_labels.edges[:, :2])


def test_runs_resumes_and_predicts(tmp_path: Path) -> None:
    data = tmp_path / "graph"
    make().save(data)
    options: dict[str, Any] = {"task": "edge", "hidden": WIDTH, "dtype": "float64", "metrics": "roc_auc", "quiet": True}
    whole = weft.train(data, out=tmp_path / "whole", epochs=6, **options)
    weft.train(data, out=tmp_path / "run", epochs=3, **options)
    resumed = weft.train(data, out=tmp_path / "run", epochs=6, resume=True, **options)
    assert resumed.summary["test_roc_auc"] == whole.summary["test_roc_auc"]
    out = tmp_path / "edges.parquet"
    logits = weft.predict(tmp_path / "run", out=out)
    labels = make().edge_labels
    assert labels is not None
    assert logits.shape == (len(labels.edges), 2)
    check_close(weft.predict(whole, strategy="tensor", workers=2), logits, "logits")
    assert torch.equal(weft.predict(tmp_path / "run", what="classes"), logits.argmax(1))
    assert weft.predict(tmp_path / "run", what="embeddings").shape == (60, WIDTH)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(out).to_pydict()
    assert list(table) == ["source", "target", "logit_0", "logit_1"]
    assert [table["source"], table["target"]] == labels.edges[:, :2].t().tolist()
    weft.train(data, out=tmp_path / "moved", epochs=6, order="bfs", **options)
    check_close(weft.predict(tmp_path / "moved", out=out, overwrite=True), logits, "logits in another order")
    table = pyarrow.parquet.read_table(out).to_pydict()
    assert [table["source"], table["target"]] == labels.edges[:, :2].t().tolist()
    unknown = make(edge_y=torch.full((NUM_EDGES,), -1), edge_split=torch.arange(NUM_EDGES) % 3)
    assert unknown.edge_labels is not None
    named = replace(unknown, vertex_names=VertexNames.of(Texts.of([f"account {v}" for v in range(60)]), "account"))
    assert len(weft.predict(tmp_path / "run", named, out=out, overwrite=True)) == len(unknown.edge_labels.edges)
    targets = pyarrow.parquet.read_table(out).to_pydict()["target"]
    assert targets == [f"account {v}" for v in unknown.edge_labels.edges[:, 1].tolist()]
    with pytest.raises(InputError, match="has no labels of edges: give edge_y of Graph"):
        weft.predict(tmp_path / "run", make(edge_y=None))
    with pytest.raises(InputError, match="has 0 features of labelled edges, and the run's graph had 3"):
        weft.predict(tmp_path / "run", replace(unknown, edge_labels=replace(unknown.edge_labels, features=None)))


def transactions() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return edges, features, labels and split of transactions, whose fraud depends on who else pays the target."""
    random, num_accounts, num_edges = torch.Generator().manual_seed(0), 1000, 10_000
    edges = torch.randint(num_accounts, (2, num_edges), generator=random)
    x, amount = torch.randn(num_accounts, 8, generator=random), torch.randn(num_edges, 1, generator=random)
    degree = torch.bincount(edges[1], minlength=num_accounts).clamp(min=1)
    payers = torch.zeros(num_accounts).index_add_(0, edges[1], x[edges[0], 0]) / degree.sqrt()
    logits = 2 * payers[edges[1]] + x[edges[0], 1] + amount[:, 0] - 4
    return edges, x, amount, logits, torch.bernoulli(logits.sigmoid(), generator=random).long()


class PlainPyg(nn.Module):
    """GraphSAGE and a decoder, as a user of PyG writes them."""

    def __init__(self, conv: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = conv(8, 32), conv(32, 32)
        self.decoder = nn.Sequential(nn.Linear(65, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor, messages: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        z = nn.functional.dropout(self.first(x, messages).relu(), 0.5, self.training)
        z = self.second(z, messages)
        logits: Tensor = self.decoder(torch.cat([z[edges[0]], z[edges[1]], features], 1))
        return logits


@pytest.mark.slow
def test_fraud_is_found_as_with_pyg(tmp_path: Path) -> None:
    """The AUC on test transactions is that of a plain PyG loop, and near that of the true probabilities."""
    edges, x, amount, true_logits, fraud = transactions()
    split = torch.bucketize(torch.arange(len(fraud)), torch.tensor([6000, 8000]), right=True)
    train, val, test = (split == number for number in range(3))
    graph = Graph.from_edges(edges, x=x, edge_features=amount, edge_y=fraud, edge_split=split)
    options = {"task": "edge", "model": "sage", "hidden": 32, "metrics": "roc_auc", "epochs": 60, "quiet": True}
    run = weft.train(graph, out=tmp_path / "run", class_weights="balanced", **options)
    torch.manual_seed(0)
    model = PlainPyg(pytest.importorskip("torch_geometric.nn").SAGEConv)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    weight = 1 / torch.bincount(fraud[train]).float()
    best_scores = (0.0, 0.0)
    for _ in range(60):
        model.train()
        optimizer.zero_grad()
        logits = model(x, edges[:, train], edges[:, train], amount[train])
        nn.functional.cross_entropy(logits, fraud[train], weight).backward()
        optimizer.step()
        with torch.no_grad():
            logits = model.eval()(x, edges[:, train], edges, amount).diff(dim=1)[:, 0]
        best_scores = max(best_scores, (auc_of(logits, fraud, val), auc_of(logits, fraud, test)))
    best_possible = auc_of(true_logits, fraud, test)
    assert run.summary["test_roc_auc"] == pytest.approx(best_scores[1], abs=0.02)
    assert best_possible - 0.1 < run.summary["test_roc_auc"] < best_possible


def auc_of(logits: Tensor, fraud: Tensor, mask: Tensor) -> float:
    score = binary_auc(logits[mask], fraud[mask] > 0)
    assert score is not None
    return score


def ratings() -> Graph:
    """Return ratings of 20 items by 40 users, as values, and the other relation 'user|sees|item' without labels."""
    random = torch.Generator().manual_seed(6)
    source = torch.randint(40, (NUM_EDGES,), generator=random)
    target = 40 + torch.randint(20, (NUM_EDGES,), generator=random)
    rating = torch.where(torch.arange(NUM_EDGES) % 2 == 0, torch.rand(NUM_EDGES, generator=random), torch.nan)
    return Graph.from_edges(
        source,
        target,
        x=torch.randn(60, 7, generator=random),
        edge_type=torch.arange(NUM_EDGES) % 2,
        relations=("user|rates|item", "user|sees|item"),
        vertex_types=("user", "item"),
        type_offsets=(0, 40, 60),
        edge_y=rating,
    )


def test_ratings_of_a_typed_graph(tmp_path: Path) -> None:
    """Inverse relations are those of edges that carry messages, and results are equal under another strategy."""
    graph = ratings()
    labels = graph.edge_labels
    assert labels is not None
    assert labels.edges[:, 2].unique().tolist() == [0]
    graph.save(tmp_path / "graph")
    options: dict[str, Any] = {"task": "edge", "model": "rgcn", "inverse_relations": True, "dtype": "float64"}
    runs = [
        weft.train(tmp_path / "graph", out=tmp_path / name, strategy=name, epochs=3, quiet=True, **options)
        for name in ("single", "offload")
    ]
    for score in ("loss", "test_mse", "test_mae", "test_r2"):
        assert runs[0].summary[score] == pytest.approx(runs[1].summary[score], abs=1e-9), score


def test_labels_of_random_link_split() -> None:
    """PyG's split of ratings gives the same messages and labels, with vertices numbered over all types."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import HeteroData
    from torch_geometric.transforms import RandomLinkSplit, ToUndirected

    data = HeteroData()
    data["user"].x, data["item"].x = torch.randn(40, 3), torch.randn(20, 3)
    edges = torch.stack([torch.randint(40, (200,)), torch.randint(20, (200,))])
    rates, back = ("user", "rates", "item"), ("item", "rev_rates", "user")
    data[rates].edge_index, data[rates].edge_label = edges, torch.rand(200)
    data = ToUndirected()(data)
    del data[back].edge_label
    split = RandomLinkSplit(0.1, 0.2, neg_sampling_ratio=0.0, edge_types=[rates], rev_edge_types=[back])
    train, val, test = split(data)
    graph = Graph.from_pyg(train, val=val, test=test, edge_labels=True)
    labels = graph.edge_labels
    assert labels is not None
    assert graph.num_edges == 2 * 140
    assert [int(mask.sum()) for mask in (labels.train_mask, labels.val_mask, labels.test_mask)] == [140, 20, 40]
    assert torch.equal(
        labels.edges[labels.test_mask][:, :2].t(), test[rates].edge_label_index + torch.tensor([[0], [40]])
    )
    assert torch.equal(labels.y[labels.val_mask], val[rates].edge_label)
    with pytest.raises(InputError, match="edge_labels=True needs val and test"):
        Graph.from_pyg(train, edge_labels=True)
    del test[rates].edge_label_index
    with pytest.raises(InputError, match="test has no edge_label_index"):
        Graph.from_pyg(train, val=val, test=test, edge_labels=True)


class Product(nn.Module):
    """A decoder without weights."""

    def forward(self, source: Tensor, target: Tensor, features: Tensor) -> Tensor:
        del features
        return source * target


def test_a_custom_model_and_decoder(tmp_path: Path) -> None:
    graph = make()
    model = weft.nn.GCN(7, out_width=5)
    weft.train(graph, model, out=tmp_path / "one", task="edge", hidden=5, epochs=2, quiet=True)
    with pytest.raises(InputError, match="the model returns 5 columns, but its decoder needs 64: use --hidden 5"):
        weft.train(graph, model, out=tmp_path / "two", task="edge", quiet=True)
    pair = LinkModel(weft.nn.GCN(7, out_width=2), Product())
    weft.train(graph, pair, out=tmp_path / "three", task="edge", epochs=2, quiet=True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--negatives", "2"], "--negatives has no effect under task edge: leave it out, or give --task link"),
        (["--loss", "mse", "--metrics", "accuracy"], "unknown --metrics 'accuracy'"),
        (["--loss", "bce", "--class-weights", "balanced"], "--class-weights balanced has no effect on loss bce"),
        (["--strategy", "split", "--batch-size", "1000"], "has 213 training edges: give all"),
    ],
)
def test_mistakes(arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make().save(tmp_path / "graph")
    command = ["train", str(tmp_path / "graph"), "--task", "edge", *arguments, "--out", str(tmp_path / "out")]
    assert main(command) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert error in line


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"edge_y": None}, "graph has no labels of edges: give edge_y of Graph"),
        ({"edge_split": torch.full((NUM_EDGES,), 2)}, "graph has no labelled edge to train on: set some of edge_split"),
        ({"edge_split": torch.full((NUM_EDGES,), 3)}, r"edge_split\[0\] is 3: give 0 \(train\), 1"),
        ({"edge_split": torch.zeros(7, dtype=torch.int64)}, r"edge_split has shape \[7\]"),
        ({"edge_y": torch.zeros(7, dtype=torch.int64)}, r"edge_y has shape \[7\]"),
        ({"edge_y": None, "edge_split": [0.6, 0.2, 0.2]}, "edge_split has no effect without edge_y"),
    ],
)
def test_wrong_data(fields: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        weft.train(make(**fields), out=tmp_path / "out", task="edge", quiet=True)
