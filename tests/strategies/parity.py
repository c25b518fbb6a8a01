"""What every exact strategy must show: the numbers of `single`, and the counts of its own trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group, exchange, halo
from weft.core.meter import Counts
from weft.core.random import key
from weft.core.savings import Savings
from weft.cost import Machine, Trace
from weft.data import Graph, TypedShape, reorder
from weft.engine.metrics import NodeTask
from weft.nn import MODELS, RelationRows, Stack, Workload, embedding_rows, embeddings, from_pyg, make_model, typed
from weft.nn.conv import mlp
from weft.partition import make_book
from weft.store.host import HostRows
from weft.strategies import STRATEGIES, Placed, Plan, Step
from weft.strategies.vertex.embedded import EmbeddedHalo
from weft.strategies.vertex.plan import PlacedVertices

TOLERANCE = 1e-9
NUM_FEATURES, NUM_FEATURES_SPARSE, NUM_CLASSES = 7, 300, 5
EXACT = [name for name in STRATEGIES if name != "single" and STRATEGIES[name].exact]
RESIDENT = [name for name in EXACT if name != "offload"]
"""Those whose rows stay where they are; test_offload.py has the matrix of the other, whose ways to run are more."""
MACHINE = Machine(seconds_per_flop=1e-10, seconds_per_edge=1e-9, seconds_per_byte=8e-10)
"""Such that hybrid caches some of the sources and fetches others."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph and a model; the sizes divide nothing."""

    model: str
    decoupled: bool = False
    num_vertices: int = 23
    hidden: int = 9
    heads: int = 3
    layers: int = 3
    norm: str = "none"
    residual: bool = False
    dropout: float = 0.4
    input_dropout: float = 0.0
    weighted: bool = False
    edge_features: int = 0
    edge_attention: bool = False
    multilabel: bool = False
    without: str = ""
    frozen: bool = False
    sparse: bool = False
    order: str = "none"
    bases: int = 0
    blocks: int = 0
    one_hot: bool = False
    typed: str = ""
    """What vertices of a typed graph have, see make_typed_graph; '' for a graph without types."""

    def build(self) -> tuple[Graph, Stack | nn.Module]:
        graph = (
            make_typed_graph(self.num_vertices, self.typed)
            if self.typed
            else make_graph(
                self.num_vertices,
                weighted=self.weighted,
                edge_features=self.edge_features,
                multilabel=self.multilabel,
                sparse=self.sparse,
            )
        )
        torch.manual_seed(5)
        model = self.make_pyg_stack() if self.model in PYG else self.make_model(graph.typed)
        if self.frozen:
            next(model.parameters()).requires_grad_(False)
            model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        for parameter in model.parameters():  # biases and eps start at zero, where an error in them would not show
            nn.init.uniform_(parameter, -0.6, 0.6)
        return reorder(graph, self.order), model.double()

    def make_model(self, typed: TypedShape) -> nn.Module:
        return make_model(
            self.model,
            NUM_FEATURES_SPARSE if self.sparse else NUM_FEATURES,
            NUM_CLASSES,
            typed=typed,
            bases=self.bases,
            blocks=self.blocks,
            one_hot=self.one_hot,
            hidden=self.hidden,
            heads=self.heads,
            layers=self.layers,
            decoupled=self.decoupled,
            dropout=self.dropout,
            input_dropout=self.input_dropout,
            norm=self.norm,
            residual=self.residual,
            edge_width=self.edge_features if self.edge_attention else 0,
        )

    def make_pyg_stack(self) -> Stack:
        import torch_geometric.nn as pyg

        options: dict[str, object] = {}
        if self.model == "PNAConv":
            options = {"aggregators": ["mean", "max", "std"], "scalers": ["amplification"], "deg": torch.arange(9)}
        if self.model == "GENConv":
            options = {"norm": "layer"}
        if self.edge_features:
            options["edge_dim"] = self.edge_features
        kind = getattr(pyg, self.model)
        widths = [NUM_FEATURES, *[self.hidden] * (self.layers - 1), NUM_CLASSES]
        sizes = [(mlp(a, b),) if self.model == "GINEConv" else (a, b) for a, b in pairwise(widths)]
        layers = [from_pyg(kind(*size, **options)) for size in sizes]
        return Stack(layers, dropout=self.dropout, norm=self.norm)


PYG = ("SAGEConv", "GATv2Conv", "TransformerConv", "PNAConv", "GraphConv", "GENConv", "GINEConv")
"""PyG's convolutions that are run as they are, under strategies that can give a layer the edges."""


def pyg_cases() -> list[Case]:
    """Every convolution, those that can with edge features, and GraphConv with edge weights."""
    found = [Case(model=name, layers=2, hidden=8, norm="batch" if name == "SAGEConv" else "none") for name in PYG[:-1]]
    for name in ("GINEConv", "GATv2Conv", "TransformerConv", "PNAConv", "GENConv"):
        found.append(Case(model=name, layers=2, hidden=8, edge_features=3))
    found.append(Case(model="GATv2Conv", layers=2, hidden=8, edge_features=3, order="bfs"))
    found.append(Case(model="GINEConv", layers=2, num_vertices=3, edge_features=3))  # P = 4: a rank has no edge
    found.append(Case(model="GraphConv", layers=2, hidden=8, weighted=True))
    return found


def cases() -> list[Case]:
    """Every model, coupled and decoupled, and each option at least once."""
    found = [Case(model=model, decoupled=decoupled) for model, decoupled in product(MODELS, (False, True))]
    for model in MODELS:
        found.append(Case(model=model, norm="batch", residual=True, input_dropout=0.3, layers=2))
        found.append(Case(model=model, hidden=2, heads=2, layers=2, without="reuse"))  # P beyond the width
        found.append(Case(model=model, num_vertices=3, layers=2))  # P = 4: a rank answers for no row
    found.append(Case(model="gcn", weighted=True, input_dropout=0.3, hidden=4, layers=2))
    found.append(Case(model="sage", frozen=True, layers=2))
    found.append(Case(model="gcn", decoupled=True, norm="layer", multilabel=True, layers=4))
    found += [Case(model=model, sparse=True, layers=2) for model in MODELS]
    found.append(Case(model="sage", sparse=True, decoupled=True))
    found.append(Case(model="gat", hidden=20, heads=5, layers=3, norm="layer"))  # heads that no P in 2..4 divides
    found.append(Case(model="gcn", order="bfs", weighted=True, input_dropout=0.3, layers=2))
    found.append(Case(model="sage", order="degree", input_dropout=0.3, norm="batch", multilabel=True))
    found.append(Case(model="gat", order="bfs", decoupled=True))
    return found + attention_cases()


def attention_cases() -> list[Case]:
    """Edge features in the logit, and 5 heads that no P divides, one that every rank has a part of, none for a rank."""
    edges: dict[str, Any] = {"edge_features": 3, "edge_attention": True}
    found = [Case(model=model, decoupled=True, layers=2, **edges) for model in ("gat", "gatv2")]
    found.append(Case(model="gat", hidden=20, heads=5, layers=2, order="degree", **edges))
    found.append(Case(model="gatv2", hidden=20, heads=5, layers=2, order="bfs", **edges))
    found.append(PARTS_OF_LOGITS)
    found.append(Case(model="gatv2", num_vertices=3, layers=2, **edges))
    return found


PARTS_OF_LOGITS = Case(model="gatv2", hidden=120, heads=1, layers=2, edge_features=2, edge_attention=True)
"""A head so wide that parts of its logits are less than its vectors."""


def typed_cases() -> list[Case]:
    """Relations with every kind of maps, and vertices with and without features."""
    return [
        Case(model="rgcn", typed="some", hidden=8, layers=3, blocks=2),
        Case(model="rgcn", typed="some", layers=2, bases=2),
        Case(model="rgcn", typed="none", layers=2, hidden=6, input_dropout=0.3, norm="batch", residual=True),
        Case(model="rgcn", typed="x", layers=2),
        Case(model="rgcn", typed="x", layers=2, input_dropout=0.3, without="reuse", hidden=2),
        Case(model="rgcn", typed="none", num_vertices=7, layers=2),  # P = 4: hardly a row each
        Case(model="rgcn", typed="one", order="bfs", layers=2, bases=2, one_hot=True, hidden=4),
        Case(model="sage", typed="some", decoupled=True),
    ]


def make_typed_graph(num_vertices: int, kind: str) -> Graph:
    """Three types of vertices, of which the second has no in-edge, and five relations, of which one has no edge.

    kind: 'x' gives features of one width; 'some' features of two widths, the last type none; 'none' nobody any; 'one'
    the same with a single type of vertices. Edges repeat, also by another relation, and one relation has self loops.
    """
    random = torch.Generator().manual_seed(4)
    offsets = (0, num_vertices // 2, 2 * num_vertices // 3, num_vertices)
    names, ends = ("a", "b", "c"), ((0, 0), (1, 0), (2, 0), (0, 2), (1, 2))
    edges = []
    for number, (start, end) in enumerate(ends[:-1]):
        size = 2 * num_vertices
        source, target = (
            torch.randint(offsets[one], offsets[one + 1], (size,), generator=random) for one in (start, end)
        )
        edges.append(torch.stack([source, target, torch.full((size,), number)]))
    merged = torch.cat([*edges, edges[0][:, :5]], 1)
    y = torch.randint(0, NUM_CLASSES, (num_vertices,), generator=random)
    y[0], y[offsets[1] :] = NUM_CLASSES - 1, -1
    widths = (4, 3) if kind == "some" else ()
    types = (names, offsets) if kind != "one" else (("a",), (0, num_vertices))
    place = dict(enumerate(names)) if kind != "one" else dict.fromkeys(range(3), "a")
    train = (torch.arange(num_vertices) % 3 != 1) & (y >= 0)
    return Graph.from_edges(
        merged[0],
        merged[1],
        num_vertices=num_vertices,
        x=torch.randn(num_vertices, NUM_FEATURES, generator=random) if kind == "x" else None,
        y=y,
        train_mask=train,
        val_mask=~train & (y >= 0),
        edge_type=merged[2],
        relations=tuple(f"{place[start]}|r{number}|{place[end]}" for number, (start, end) in enumerate(ends)),
        vertex_types=types[0],
        type_offsets=types[1],
        features={
            name: torch.randn(offsets[i + 1] - offsets[i], width, generator=random)
            for i, (name, width) in enumerate(zip(names, widths, strict=False))
        },
    )


def make_graph(
    num_vertices: int,
    *,
    weighted: bool = False,
    edge_features: int = 0,
    multilabel: bool = False,
    sparse: bool = False,
) -> Graph:
    """A directed graph with self loops, duplicate edges and, where there is room, an isolated vertex.

    sparse: of many features, 5 of a vertex are not zero.
    """
    random = torch.Generator().manual_seed(3)
    linked = max(num_vertices - 1, 1)
    source = torch.randint(0, linked, (5 * num_vertices,), generator=random)
    target = torch.randint(0, linked, (5 * num_vertices,), generator=random)
    source = torch.cat([source, torch.tensor([0, 1, 1]), source[:3]])
    target = torch.cat([target, torch.tensor([0, 1, 1]), target[:3]])
    y = torch.randint(0, NUM_CLASSES, (num_vertices,), generator=random)
    y[0] = NUM_CLASSES - 1
    labels = (
        torch.nn.functional.one_hot(y, NUM_CLASSES) | torch.nn.functional.one_hot(y.flip(0), NUM_CLASSES)
        if multilabel
        else y
    )
    train = torch.arange(num_vertices) % 3 != 1
    return Graph.from_edges(
        source,
        target,
        num_vertices=num_vertices,
        weight=torch.rand(len(source), generator=random) + 0.1 if weighted else None,
        edge_features=torch.randn(len(source), edge_features, generator=random) if edge_features else None,
        x=torch.randn(num_vertices, NUM_FEATURES, generator=random)
        if not sparse
        else sparse_features(num_vertices, random),
        y=labels.float() if multilabel else labels,
        train_mask=train,
        val_mask=~train,
    )


def sparse_features(num_vertices: int, random: torch.Generator) -> Tensor:
    columns = torch.randint(0, NUM_FEATURES_SPARSE, (num_vertices, 5), generator=random)
    return torch.zeros(num_vertices, NUM_FEATURES_SPARSE).scatter_(
        1, columns, torch.randn(columns.shape, generator=random)
    )


class Given(dict[str, Any]):
    """What is said to any strategy: those of its options that it has, and the machine."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options)

    def plan(self, name: str, work: Workload, size: int) -> Plan:
        kind = STRATEGIES[name]
        known = {spec.name for spec in fields(kind.options_type)}
        options = kind.options_type(**{one: value for one, value in self.items() if one in known})
        return kind(work, size, options, self.get("machine") if "cache_ratio" in known and name != "offload" else None)


NOTHING = Given()


class Session:
    """A case under a strategy: what can be seen of it."""

    def __init__(self, case: Case, strategy: str, group: Group, given: Given = NOTHING) -> None:
        self.case, self.group = case, group
        self.graph, model = case.build()
        self.savings = Savings.without(case.without)
        self.plan = given.plan(strategy, Workload(model, self.graph, self.savings), group.size)
        self.strategy: Placed = self.plan.place(group, seed=7)
        self.model = self.strategy.model
        self.task = NodeTask(self.graph, self.strategy.rows, group, self.strategy.empty_rows, self.strategy.rows_device)
        self.meter = group.meter

    def step(self, epoch: int) -> tuple[Tensor, float]:
        """One training step without the optimiser's: logits of this rank's rows and its part of the loss."""
        step = Step(epoch=epoch, training=True)
        self.model.zero_grad()
        with self.meter.during("train"):
            logits = self.strategy.forward(step)
            loss, grad = self.task.loss(logits, step)
            self.strategy.backward(logits, grad)
        return logits.detach(), loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def input_gradient(self) -> Tensor:
        """The gradient of the loss by all features, summed over the ranks, which are not taken for constant here."""
        self.model.train()
        self.model.zero_grad()
        assert self.strategy.inputs.rows is not None
        if not self.strategy.inputs.rows.shape[1]:
            return torch.empty(0)
        x = self.strategy.inputs.rows.clone().requires_grad_()
        views = [self.strategy.view(stage, key(7, 0, stage)) for stage in range(self.model.num_stages)]
        logits = self.model(views, x)
        _, grad = self.task.loss(logits, Step(epoch=0, training=True))
        logits.backward(grad)
        assert x.grad is not None
        whole = x.new_zeros(self.graph.num_vertices, x.shape[1])
        whole[self.strategy.input_rows] = x.grad
        total = self.group.all_reduce(whole, tag="test")
        return total[self.graph.ids.argsort()] if self.graph.ids is not None else total

    def pass_again(self) -> None:
        """For a strategy that has no view of all rows, what `input_gradient` does to running statistics."""
        assert self.strategy.inputs.rows is not None
        if self.strategy.inputs.rows.shape[1]:
            self.strategy.forward(Step(epoch=0, training=True))

    def losses(self, steps: int) -> list[float]:
        """This rank's part of the losses of Adam steps."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02, weight_decay=1e-3)
        losses = []
        for epoch in range(steps):
            losses.append(self.step(epoch)[1])
            optimizer.step()
        return losses

    def evaluation(self) -> Tensor:
        with self.meter.during("eval"):
            return self.strategy.forward(Step(epoch=0, training=False))

    def trace(self, rank: int, *, training: bool) -> Trace:
        return self.plan.trace(rank, training=training)


class Reference:
    """What `single` gives for a case, with the vertices as they were first numbered, whatever the case's order."""

    def __init__(self, case: Case) -> None:
        whole = Session(replace(case, order="none"), "single", Group())
        self.logits, _ = whole.step(0)
        self.gradients = whole.gradients()
        self.input_gradient = whole.input_gradient()
        self.evaluation = whole.evaluation()
        self.losses = whole.losses(5)


@cache
def reference(case: Case) -> Reference:
    """The reference of a case, computed once a process."""
    return Reference(case)


def check_case(group: Group, case: Case, name: str, given: Given = NOTHING) -> Session:
    """Logits, every gradient, losses and scores of `name` equal single's; its counts equal its trace."""
    expected, placed = reference(case), Session(case, name, group, given)
    rows = placed.strategy.topology.ids[placed.strategy.rows]

    placed.meter.take("train")
    logits, _ = placed.step(0)
    check_counts(placed.meter.take("train"), placed.trace(group.rank, training=True), case)
    check_close(logits, expected.logits[rows], f"{case}: logits")
    gradients = placed.gradients()
    assert gradients.keys() == expected.gradients.keys(), f"{case}: other parameters have gradients"
    for parameter, gradient in expected.gradients.items():
        if parameter in embeddings(placed.model):  # single's rows are in the order of the first ids
            gradient = gradient[placed.strategy.embedded]
        check_close(gradients[parameter], gradient, f"{case}: gradient of {parameter}")
    if name == "offload":
        placed.pass_again()
    else:
        check_close(placed.input_gradient(), expected.input_gradient, f"{case}: gradient of the features")

    placed.meter.take("eval")
    check_close(placed.evaluation(), expected.evaluation[rows], f"{case}: evaluation")
    check_counts(placed.meter.take("eval"), placed.trace(group.rank, training=False), case)

    parts = [report["losses"] for report in group.all_gather_object({"losses": placed.losses(5)})]
    losses = torch.tensor(parts, dtype=torch.float64).sum(0)
    check_close(losses, torch.tensor(expected.losses, dtype=torch.float64), f"{case}: losses of 5 Adam steps")
    return placed


def check_counts(counts: Counts, trace: Trace, case: Case) -> None:
    assert counts.edges == trace.edges, f"{case}: {counts.edges} edges x width, the trace says {trace.edges}"
    for kind in ("collectives", "bytes_sent", "bytes_received", "to_device", "to_host"):
        counted, promised = getattr(counts, kind), getattr(trace, kind)
        assert counted == promised, f"{case}: {kind} {dict(counted)}, the trace says {dict(promised)}"


def check_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Every element, by the tolerance that every exact strategy is held to."""
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}\n{text}")


def part_by(method: str, case: Case, size: int) -> Tensor:
    """The part of every vertex of a case's graph."""
    graph, _ = case.build()
    return make_book(graph, min(size, graph.num_vertices), method=method).part


@contextmanager
def planted_error(strategy: str) -> Iterator[None]:
    """Makes the last column of what a strategy moves 0.1 % too large; for one that moves no rows, a mask another."""
    if strategy == "cached":
        with replaced(PlacedVertices, "__init__", wrong_ids(PlacedVertices.__init__)):
            yield
    elif strategy == "tensor":
        with replaced(exchange, "_join_columns", too_large(exchange._join_columns)):
            yield
    elif strategy == "offload":
        with replaced(HostRows, "gather", wrong_gather(HostRows.gather)):
            yield
    else:
        with replaced(halo.Rows, "wait", too_large(halo.Rows.wait)):
            yield


def too_large(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(*arguments: object) -> Tensor:
        x = move(*arguments).clone()
        x[:, -1:] *= 1.001
        return x

    return wrong


def wrong_gather(gather: Callable[..., None]) -> Callable[..., None]:
    def wrong(home: HostRows, rows: Tensor, out: Tensor, places: Tensor) -> None:
        gather(home, rows, out, places)
        out[places, -1:] *= 1.001

    return wrong


def wrong_ids(place: Callable[..., None]) -> Callable[..., None]:
    def wrong(home: PlacedVertices, *arguments: Any, **options: Any) -> None:
        place(home, *arguments, **options)
        home.halos[0].row_ids[home.dependencies.num_own :] += 1  # which all stages share

    return wrong


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    right = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, right)


def planted_typed_errors() -> list[AbstractContextManager[str]]:
    """The strategies that move rows of pairs and of embeddings, each with an error in what it does with them."""
    return [wrong_pairs(), wrong_embedded_rows(), summed_embedding()]


@contextmanager
def wrong_pairs() -> Iterator[str]:
    """Two pairs of a rank change places on their way to their vertices."""
    right = RelationRows.map

    def wrong(pairs: RelationRows, z: Tensor, weight: Tensor) -> Tensor:
        return right(pairs, z.roll(1, 0), weight)

    with replaced(RelationRows, "map", wrong):
        yield "tensor"


@contextmanager
def wrong_embedded_rows() -> Iterator[str]:
    """The gradients of embedded rows that other ranks have again do not come back."""
    right = EmbeddedHalo.fetch

    def wrong(halo: EmbeddedHalo, weight: Tensor) -> Tensor:
        rows = right(halo, weight)
        return torch.cat([weight, rows[len(weight) :].detach()])

    with replaced(EmbeddedHalo, "fetch", wrong):
        yield "cached"


@contextmanager
def summed_embedding() -> Iterator[str]:
    """A rank trains other rows than those of its vertices."""
    with replaced(typed, "embedding_rows", lambda graph, rows: embedding_rows(graph, rows).flip(0)):
        yield "communicated"
