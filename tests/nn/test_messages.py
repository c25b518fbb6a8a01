"""Message functions of PyG's and custom convolutions as programs: PyG's results, for any tiles and threads."""

# ruff: noqa: ARG001, ARG005 (a message function takes the rows of both endpoints and of the edge)

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.nn.layers.pyg_conv import PyGConv, share_programs
from weft.nn.messages import TiledConv, messages, program, tiled_conv
from weft.nn.messages.edges import SortedEdges
from weft.nn.messages.operations import ROW_NUMBERS
from weft.nn.messages.program import EdgeProgram
from weft.nn.workload.flops import FlopCounter

pyg = pytest.importorskip("torch_geometric.nn")

NUM_VERTICES, NUM_EDGES, WIDTH, NUM_EDGE_FEATURES = 40, 300, 6, 5


class EdgeMLP(pyg.MessagePassing):
    """An MLP on both endpoints of an edge and its features."""

    def __init__(self) -> None:
        super().__init__("add")
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + NUM_EDGE_FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j, edge_attr], -1))


class GatedMax(pyg.MessagePassing):
    """A maximum of gated rows, updated with the target's own row."""

    def __init__(self) -> None:
        super().__init__("max")
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(x_i) * x_j

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return self.linear(torch.cat([inputs, x], 1))


class Coordinates(pyg.MessagePassing):
    """Rows whose first three columns are coordinates, which move along weighted differences (EGNN)."""

    def __init__(self) -> None:
        super().__init__("mean")
        self.weight = nn.Sequential(nn.Linear(2 * WIDTH - 5, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, place=x[:, :3].contiguous(), h=x[:, 3:].contiguous())

    def message(self, place_i: Tensor, place_j: Tensor, h_i: Tensor, h_j: Tensor) -> Tensor:
        away = place_i - place_j
        weight = self.weight(torch.cat([h_i, h_j, away.square().sum(1, keepdim=True)], 1))
        return torch.cat([away * weight, h_j], 1)


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(NUM_EDGE_FEATURES, out)


DEGREES = torch.tensor([3, 4, 9, 7, 5, 9, 6, 6])
PLAIN: dict[str, Callable[[], Any]] = {
    "transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2, beta=True, concat=False),
    "gated": lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH),
    "edge": lambda: pyg.EdgeConv(nn.Linear(2 * WIDTH, WIDTH)),
    "supergat": lambda: pyg.SuperGATConv(WIDTH, 4, heads=2),
    "local extrema": lambda: pyg.LEConv(WIDTH, WIDTH),
    "feast": lambda: pyg.FeaStConv(WIDTH, WIDTH, 2),
    "by degree": lambda: pyg.MFConv(WIDTH, WIDTH),
    "film": lambda: pyg.FiLMConv(WIDTH, WIDTH),
    "steps": lambda: pyg.GatedGraphConv(WIDTH, 2),
    "towers": lambda: pyg.PNAConv(WIDTH, WIDTH, ["mean", "std"], ["identity"], DEGREES, towers=2, divide_input=True),
    "polynomials": lambda: pyg.ChebConv(WIDTH, WIDTH, 3),
    "custom maximum": GatedMax,
    "custom coordinates": Coordinates,
}
WITH_EDGE_ROWS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2, edge_dim=NUM_EDGE_FEATURES),
    "pna": lambda: pyg.PNAConv(
        WIDTH, WIDTH, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES, NUM_EDGE_FEATURES
    ),
    "softmax": lambda: pyg.GENConv(WIDTH, WIDTH, edge_dim=NUM_EDGE_FEATURES, learn_t=True),
    "crystal": lambda: pyg.CGConv(WIDTH, dim=NUM_EDGE_FEATURES),
    "gine": lambda: pyg.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=NUM_EDGE_FEATURES),
    "gat": lambda: pyg.GATConv(WIDTH, 4, heads=2, edge_dim=NUM_EDGE_FEATURES),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, edge_dim=NUM_EDGE_FEATURES),
    "general": lambda: pyg.GeneralConv(WIDTH, WIDTH, in_edge_channels=NUM_EDGE_FEATURES),
    "matrices": lambda: pyg.NNConv(WIDTH, WIDTH, linear(WIDTH * WIDTH)),
    "diffusion": lambda: pyg.PDNConv(WIDTH, WIDTH, NUM_EDGE_FEATURES, 7),
    "mixture": lambda: pyg.GMMConv(WIDTH, WIDTH, dim=NUM_EDGE_FEATURES, kernel_size=3),
    "custom mlp": EdgeMLP,
}
CASES = [(make, False) for make in PLAIN.values()] + [(make, True) for make in WITH_EDGE_ROWS.values()]
NAMES = [*PLAIN, *(f"{name} with edge rows" for name in WITH_EDGE_ROWS)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tile have a few edges: fewer than the in-edges of some vertices."""
    monkeypatch.setattr(program, "TILE_BYTES", 0)
    monkeypatch.setattr(program, "MIN_TILE", 4)


def edges(*, in_order: bool = False) -> Tensor:
    """Return edges with self-loops, parallel edges, a vertex of many edges and isolated vertices."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NUM_VERTICES - 2, (2, NUM_EDGES), generator=generator)
    edge_index[1, :60], edge_index[0, 60:70] = 7, edge_index[1, 60:70]
    edge_index[:, 70:80] = edge_index[:, 80:90]
    return edge_index[:, edge_index[1].argsort(stable=True)] if in_order else edge_index


def results(
    conv: Any, edge_index: Tensor, *, with_edge_rows: bool, tiled: TiledConv | None = None
) -> list[Tensor | None]:
    """Return the result of a convolution and the gradients of its inputs and parameters."""
    random = torch.Generator().manual_seed(1)
    dtype = next(conv.parameters()).dtype
    x = torch.randn(NUM_VERTICES, WIDTH, dtype=dtype, generator=random).requires_grad_()
    features = torch.rand(NUM_EDGES, NUM_EDGE_FEATURES, dtype=dtype, generator=random).requires_grad_()
    arguments = {"edge_attr": features} if with_edge_rows else {}
    conv.zero_grad()
    call = partial(conv, x, edge_index, **arguments)
    y = call() if tiled is None else tiled.run(call)
    (y * torch.randn(y.shape, dtype=y.dtype, generator=random)).sum().backward()
    return [y.detach(), x.grad, features.grad, *(parameter.grad for parameter in conv.parameters())]


def difference(conv: Any, edge_index: Tensor, *, with_edge_rows: bool, tiled: TiledConv | None = None) -> float:
    """Return the largest difference between a convolution in tiles and PyG's."""
    expected, actual = (
        results(conv, edge_index, with_edge_rows=with_edge_rows, tiled=each)
        for each in (None, tiled or TiledConv(conv))
    )
    pairs = [
        (torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b)
        for a, b in zip(expected, actual, strict=True)
    ]
    return float(torch.stack([(a - b).abs().max().double() for a, b in pairs]).max())  # NaN if a difference is NaN


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[EdgeProgram]:
    """Return a list of the programs that run."""
    ran, original = list[EdgeProgram](), EdgeProgram.run

    def note(each: EdgeProgram, *arguments: Any) -> Any:
        ran.append(each)
        return original(each, *arguments)

    monkeypatch.setattr(EdgeProgram, "run", note)
    return ran


@pytest.mark.parametrize(("make", "with_edge_rows"), CASES, ids=NAMES)
@pytest.mark.parametrize("in_order", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shuffled", "in order"])
def test_results_and_gradients_are_those_of_pyg(
    make: Callable[[], Any], with_edge_rows: bool, in_order: bool, programs: list[EdgeProgram]
) -> None:
    torch.manual_seed(0)
    conv = make().double().eval()
    assert difference(conv, edges(in_order=in_order), with_edge_rows=with_edge_rows) < 1e-9
    assert len(programs) >= 2  # forward and backward
    assert "propagate" not in conv.__dict__
    tiled = TiledConv(conv.float())
    results(conv, edges(in_order=in_order), with_edge_rows=with_edge_rows, tiled=tiled)
    assert is_program(tiled)


@pytest.mark.parametrize("name", ["edge", "supergat", "towers"])
def test_linear_transforms_of_endpoints_run_for_each_vertex(name: str, programs: list[EdgeProgram]) -> None:
    conv = PLAIN[name]().double()
    results(conv, edges(), with_edge_rows=False, tiled=TiledConv(conv))
    assert programs
    assert not any(each.flops_per_edge for each in programs)


@pytest.mark.parametrize(("make", "with_edge_rows"), CASES[::4], ids=NAMES[::4])
def test_results_do_not_depend_on_threads(make: Callable[[], Any], with_edge_rows: bool) -> None:
    torch.manual_seed(0)
    conv, num_threads = make().double().eval(), torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            tiled = TiledConv(conv)
            runs.append(results(conv, edges(), with_edge_rows=with_edge_rows, tiled=tiled)[:3])  # of rows
    finally:
        torch.set_num_threads(num_threads)
    for run in runs[1:]:
        assert all(a is b or torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))  # type: ignore[arg-type]


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    conv = EdgeMLP().double()
    edge_index, features = edges()[:, :12], torch.rand(12, NUM_EDGE_FEATURES, dtype=torch.float64)
    tiled = TiledConv(conv)  # one for all calls, since each traces its function once

    def run(x: Tensor, features: Tensor) -> Tensor:
        with tiled.replacing():
            return conv(x, edge_index, edge_attr=features)

    x = torch.randn(NUM_VERTICES, WIDTH, dtype=torch.float64)
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), features.requires_grad_()))


def test_what_reads_the_whole_graph_runs_as_it_is(programs: list[EdgeProgram]) -> None:
    conv = EdgeMLP().double()
    conv.register_message_forward_hook(lambda *_: None)
    assert difference(conv, edges(), with_edge_rows=True) == 0
    assert not programs


class Unusual(pyg.MessagePassing):
    """A convolution with a given message function, and a parameter."""

    def __init__(self, message: Callable[..., Tensor], update: Callable[..., Tensor] | None = None) -> None:
        super().__init__("add")
        self.body, self.after = message, update
        self.a, self.linear = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, original=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, original: Tensor, index: Tensor, size_i: int) -> Tensor:
        return self.body(self, x_i, x_j, original[:, :1], index, size_i)

    def update(self, inputs: Tensor) -> Tensor:
        return inputs if self.after is None else self.after(self, inputs)


def without_grad(s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(e)
    return gate * j


def total_of_targets(s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
    return j * (pyg_scatter(j, index, n, "sum") * s.a)[index]


def pyg_scatter(rows: Tensor, index: Tensor, count: int, reduce: str) -> Tensor:
    from torch_geometric.utils import scatter

    return scatter(rows, index, 0, count, reduce)


def onto(start: float, s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
    rows = s.linear(j * e)
    return rows.new_full((n, WIDTH), start).scatter_add(0, index[:, None].expand_as(rows), rows)[index]


def extremum_onto(s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
    start = j.new_full((n, WIDTH), -5.0)
    return start.scatter_reduce(0, index[:, None].expand_as(j), j * e, "amax", include_self=False)[index]


def gated(s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
    return j * torch.sigmoid(e * s.a)


def gated_by_source(s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
    return j * torch.sigmoid(j * s.a)


UNUSUAL: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor] | None]] = {
    "parameter of targets": (total_of_targets, None),
    "no_grad": (without_grad, None),
    "stepped slice": (lambda s, i, j, e, index, n: (j * e + i)[:, ::2], None),
    "slice from before the start": (lambda s, i, j, e, index, n: (j * e)[:, -7:2], None),
    "sum that begins with ones": (lambda *all_: onto(1.0, *all_), None),
    "maximum that begins elsewhere": (extremum_onto, None),
    "truncated": (lambda s, i, j, e, index, n: j * (3 * e).long(), None),
    "or of numbers": (lambda s, i, j, e, index, n: j * torch.logical_or(e - 1, e * 0), None),
    "bias of all targets": (lambda s, i, j, e, index, n: j * e, lambda s, y: y + s.a.expand_as(y)),
    "bias with a factor": (lambda s, i, j, e, index, n: torch.add(j * e, s.a, alpha=2), None),
    "variance of one column": (lambda s, i, j, e, index, n: j * e.var(1, keepdim=True, correction=0), None),
    "number of rows": (lambda s, i, j, e, index, n: j * e / j.shape[0], None),
    "sum along rows": (lambda s, i, j, e, index, n: j.cumsum(0) * e, None),
    "computed index": (lambda s, i, j, e, index, n: j * e * pyg_scatter(j, index * 0, n, "sum")[index], None),
    "distance, 0 for a loop": (lambda s, i, j, e, index, n: (i - j).norm(dim=-1, keepdim=True) * j * s.a, None),
    "cubic distance": (lambda s, i, j, e, index, n: (i - j).norm(p=3, dim=-1, keepdim=True) * j * s.a, None),
    "largest distance": (lambda s, i, j, e, index, n: (i - j).norm(p=torch.inf, dim=-1, keepdim=True) * j, None),
    "small numbers": (lambda s, i, j, e, index, n: torch.tanh(1e-6 * j * e) * 1e6, None),
    "root of the number of targets": (lambda s, i, j, e, index, n: j * e / n**0.5, None),
    "root of the number of rows": (lambda s, i, j, e, index, n: j * e, lambda s, y: y / y.size(0) ** 0.5),
    "edges for each target": (lambda s, i, j, e, index, n: j * (index.numel() / n), None),
    "number of rows before the edges": (lambda s, i, j, e, index, n: j / j.size(0) * e, None),
    "number of edges after the sum": (lambda s, i, j, e, index, n: j * e, lambda s, y: y / (NUM_EDGES + 0 * len(y))),
    "sum of conditions": (lambda s, i, j, e, index, n: i * j * ((j * e > 0) + (i * e > 0)), None),
    "rows without gradient": (lambda s, i, j, e, index, n: j.data * i * e, None),
    "gradients in Python": (lambda s, i, j, e, index, n: j * e * (2.0 if j.requires_grad else 1.0), None),
    "between two numbers": (lambda s, i, j, e, index, n: torch.clamp(i * j, -0.5, 0.7) * e, None),
    "larger rows": (lambda s, i, j, e, index, n: torch.maximum(i * e, j), None),
    "one number": (lambda s, i, j, e, index, n: j.new_ones(len(j), WIDTH), lambda s, y: y * s.a),
    "softmax of rows without gradient": (lambda s, i, j, e, index, n: torch.softmax(i.data + j * e, -1), None),
    "small share": (lambda s, i, j, e, index, n: j * e * 1e-4 / n**0.5, None),
    "chosen by target": (lambda s, i, j, e, index, n: torch.where(i > 0, j * e, -j), None),
    "masked": (lambda s, i, j, e, index, n: (j * e).masked_fill(i < 0, 0) + (j > 0) * i, None),
    "rows of targets alone": (lambda s, i, j, e, index, n: j * e, lambda s, y: (0 * y + 1) * s.a),
}
"""Message functions that run as in PyG, or as programs with its numbers."""
AS_PROGRAMS = {
    *("parameter of targets", "slice from before the start", "sum that begins with ones", "bias of all targets"),
    *("bias with a factor", "distance, 0 for a loop", "largest distance", "small numbers", "between two numbers"),
    *("number of edges after the sum", "larger rows", "rows of targets alone", "chosen by target", "masked"),
}
"""Names of the functions in UNUSUAL that run as programs."""


def is_program(tiled: TiledConv) -> bool:
    """Return whether all calls of a convolution ran as programs."""
    return bool(tiled.messages) and not any(isinstance(each, str) for each in tiled.messages.values())


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_functions_have_pygs_numbers(name: str) -> None:
    torch.manual_seed(0)
    conv = Unusual(*UNUSUAL[name]).double()
    tiled, in_order = TiledConv(conv), name in ("sum along rows", "computed index")
    assert difference(conv, edges(in_order=in_order), with_edge_rows=True, tiled=tiled) < 1e-9
    assert is_program(tiled) == (name in AS_PROGRAMS)
    in_float32 = TiledConv(conv.float())
    results(conv, edges(in_order=in_order), with_edge_rows=True, tiled=in_float32)
    assert is_program(in_float32) == (name in AS_PROGRAMS)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_functions_have_pygs_numbers_without_gradients(name: str) -> None:
    torch.manual_seed(0)
    conv, edge_index = Unusual(*UNUSUAL[name]).double(), edges(in_order=name in ("sum along rows", "computed index"))
    x, features = torch.randn(NUM_VERTICES, WIDTH).double(), torch.rand(NUM_EDGES, NUM_EDGE_FEATURES).double()
    with torch.no_grad():
        y = TiledConv(conv).run(lambda: conv(x, edge_index, features))
        torch.testing.assert_close(y, conv(x, edge_index, features))


def draws(s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
    return j * e * (random.random() + np.random.rand())


def test_random_numbers_of_python_and_numpy_are_those_of_pyg() -> None:
    conv, arguments = Unusual(draws), (torch.ones(NUM_VERTICES, WIDTH), edges(), torch.ones(NUM_EDGES, 1))
    tiled, runs = TiledConv(conv), []
    for call in (tiled.run, tiled.run, lambda run: run()):
        random.seed(0)
        np.random.seed(0)
        runs.append([call(lambda: conv(*arguments)) for _ in range(2)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    assert not torch.equal(*runs[0])


class Doubling(Unusual):
    """A convolution whose result is not that of its message functions alone."""

    def propagate(self, edge_index: Tensor, **arguments: Any) -> Tensor:
        return 2 * super().propagate(edge_index, **arguments)


class Normalizing(EdgeMLP):
    """A convolution that reads an attribute which its message function sets."""

    reads = True

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        y = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        alpha, self.alpha = self.alpha, None
        return y / alpha.max() if self.reads else y

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        self.alpha = torch.sigmoid(x_i * x_j)
        return super().message(x_i, x_j, edge_attr) * self.alpha


class Keeping(Normalizing):
    """A convolution that keeps a tensor which its message function sets, under another name."""

    reads = False

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        y = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        self.kept, self.alpha = self.alpha, None
        return y


class Replacing(EdgeMLP):
    """A convolution that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().message(x_i, x_j, edge_attr) * self.seen


class InPlace(Replacing):
    """A convolution that changes the buffer in place."""

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        self.seen.add_(1)
        return EdgeMLP.message(self, x_i, x_j, edge_attr) * self.seen


class Counting(EdgeMLP):
    """A convolution that counts its calls in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        self.calls.append(len(x_j))
        return super().message(x_i, x_j, edge_attr) * len(self.calls)


@pytest.mark.parametrize(
    "make",
    [lambda: Doubling(gated), Normalizing, Keeping, Replacing, InPlace, Counting],
    ids=["method", "tensor", "another name", "buffer", "buffer in place", "list"],
)
def test_what_a_program_does_not_do_is_left_to_pyg(make: Callable[[], Any], programs: list[EdgeProgram]) -> None:
    """A program neither calls the methods of a class, nor does it set attributes."""
    torch.manual_seed(0)
    conv, expected = (make().double() for _ in range(2))
    conv.load_state_dict(expected.state_dict())
    x, features = torch.randn(NUM_VERTICES, WIDTH).double(), torch.rand(NUM_EDGES, NUM_EDGE_FEATURES).double()
    tiled = TiledConv(conv)
    for _ in range(2):
        y = tiled.run(lambda: conv(x, edges(), features))
        torch.testing.assert_close(y, expected(x, edges(), features))
    pickle.dumps(conv)
    assert getattr(conv, "calls", None) == getattr(expected, "calls", None)
    assert all(map(torch.equal, conv.buffers(), expected.buffers()))
    if hasattr(expected, "kept"):
        torch.testing.assert_close(conv.kept, expected.kept)


def test_attributes_that_nobody_reads_are_not_computed(programs: list[EdgeProgram]) -> None:
    torch.manual_seed(0)
    conv = Normalizing().double()
    conv.reads = False
    results(conv, edges(), with_edge_rows=True, tiled=TiledConv(conv))
    assert len(programs) == 3 * 2  # two of three compare with the message function
    assert difference(conv, edges(), with_edge_rows=True) < 1e-9
    pickle.dumps(conv)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.numbers.__setitem__(0, 3.0),
        lambda s: s.by_name.__setitem__("a", 3.0),
        lambda s: setattr(s, "function", torch.tanh),
        lambda s: setattr(s.settings, "factor", 3.0),
        lambda s: s.array.__setitem__(0, 3.0),
        lambda s: setattr(s.slots, "factor", 3.0),
        lambda s: s.queue.__setitem__(0, 3.0),
        lambda s: setattr(type(s), "of_class", 3.0),
        lambda s: setattr(s, "linear", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
    ],
    ids=["list", "dict", "function", "object", "array", "slots", "queue", "class", "module"],
)
def test_changed_attributes_count(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)

    class Slots:
        __slots__ = ("factor",)

    class Configured(Unusual):
        of_class = 1.0

    def message(s: Any, i: Tensor, j: Tensor, e: Tensor, index: Tensor, n: int) -> Tensor:
        factor = s.numbers[0] * s.by_name["a"] * s.settings.factor * float(s.array[0]) * s.of_class
        factor *= s.slots.factor * s.queue[0]
        return s.linear(s.function(i * j * factor)) * e

    conv: Any = Configured(message)
    conv.slots, conv.queue = Slots(), deque([1.0])
    conv.slots.factor = 1.0
    conv.numbers, conv.by_name, conv.function, conv.settings = [2.0], {"a": 2.0}, torch.sigmoid, SimpleNamespace()
    conv.settings.factor, conv.array = 2.0, np.ones(1)
    x, features, tiled = torch.randn(NUM_VERTICES, WIDTH), torch.rand(NUM_EDGES, NUM_EDGE_FEATURES), TiledConv(conv)
    before = tiled.run(lambda: conv(x, edges(), features))
    change(conv)
    after = tiled.run(lambda: conv(x, edges(), features))
    torch.testing.assert_close(after, conv(x, edges(), features))
    assert not torch.allclose(before, after)
    assert is_program(tiled)
    assert len(tiled.messages) == 2


@pytest.mark.parametrize("read", [float, np.asarray, torch.is_nonzero, bool], ids=lambda read: read.__name__)
def test_numbers_of_tensors_are_read_in_each_call(read: Callable[[Tensor], Any]) -> None:
    conv: Any = Unusual(lambda s, i, j, e, index, n: i * j * e * float(read(s.tensor)))
    conv.tensor = torch.ones(())
    x, features, tiled = torch.randn(NUM_VERTICES, WIDTH), torch.rand(NUM_EDGES, NUM_EDGE_FEATURES), TiledConv(conv)
    for conv.tensor in (torch.ones(()), torch.zeros(())):
        torch.testing.assert_close(tiled.run(lambda: conv(x, edges(), features)), conv(x, edges(), features))


def test_sums_of_tensors_that_changed_in_place_are_computed_again() -> None:
    """Also for another tensor that is equal to the changed one."""
    tiled, weights, sums = TiledConv(Unusual(gated)), torch.ones(3), []
    for change in (0.0, 1.0):
        weights += change
        for each in (weights, weights.clone(), weights.clone()):
            sums.append(tiled.constant_sums([each], torch.float32, lambda each=each: each.sum()))
    assert [float(each) for each in sums] == [3, 3, 3, 6, 6, 6]
    assert sums[0] is sums[1] is sums[2]


def test_an_attribute_that_always_changes_fills_no_memory(programs: list[EdgeProgram]) -> None:
    conv = Unusual(lambda s, i, j, e, index, n: j * e * s.factor)
    tiled, arguments = TiledConv(conv), (torch.ones(NUM_VERTICES, WIDTH), edges(), torch.ones(NUM_EDGES, 1))
    for number in range(tiled_conv.MAX_PROGRAMS + 2):
        conv.factor = float(number)
        y = tiled.run(lambda: conv(*arguments))
    torch.testing.assert_close(y, conv(*arguments))
    assert len(tiled.messages) == tiled_conv.MAX_PROGRAMS


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["inference", "autocast"]
)
def test_modes_of_pytorch_count(mode: Callable[[], Any]) -> None:
    conv = Unusual(lambda s, i, j, e, index, n: s.linear(i * j) * e)
    tiled, arguments = TiledConv(conv), (torch.rand(NUM_VERTICES, WIDTH), edges(), torch.ones(NUM_EDGES, 1))
    tiled.run(lambda: conv(*arguments))
    with mode():
        copies = tuple(each.clone() for each in arguments)
        torch.testing.assert_close(tiled.run(lambda: conv(*copies)), conv(*copies))


@pytest.mark.parametrize(
    "buffer",
    [torch.arange(WIDTH) > 2, torch.arange(WIDTH), torch.ones(WIDTH).double()],
    ids=lambda each: str(each.dtype),
)
def test_buffers_of_another_type_are_read_as_in_pyg(buffer: Tensor) -> None:
    conv = Unusual(lambda s, i, j, e, index, n: s.linear(i) * s.linear(j) * s.mask)
    conv.register_buffer("mask", buffer)
    tiled, arguments = TiledConv(conv), (torch.rand(NUM_VERTICES, WIDTH), edges(), torch.ones(NUM_EDGES, 1))
    for grads in (False, True):
        with torch.set_grad_enabled(grads):
            torch.testing.assert_close(tiled.run(lambda: conv(*arguments)), conv(*arguments))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(functional, name) for name in ("softplus", "elu", "celu", "selu", "mish", "silu", "gelu")},
    **{name: getattr(functional, name) for name in ("logsigmoid", "sigmoid", "tanh", "hardswish", "softsign")},
    "steep softplus": lambda x: functional.softplus(x, beta=3, threshold=5),
    "flat elu": lambda x: functional.elu(x, alpha=0.3),
}
"""Activations by name."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_large_numbers_are_those_of_pyg(name: str) -> None:
    """PyTorch's decompositions of some overflow where the result is not used, so that gradients are NaN."""
    conv = Unusual(lambda s, i, j, e, index, n: ACTIVATIONS[name](2000 * j * e) / 2000 + s.a).double()
    tiled = TiledConv(conv)
    assert difference(conv, edges(), with_edge_rows=True, tiled=tiled) < 1e-9
    assert is_program(tiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["log1p", "expm1", "erf", "sin", "cos", "tanh", "sigmoid"])
def test_functions_are_exact_for_all_magnitudes(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, name)
    conv = Unusual(lambda s, i, j, e, index, n: function(j * torch.ones_like(e)))
    magnitudes = torch.logspace(-30, 1.9, NUM_VERTICES // 2, dtype=dtype)
    x = torch.cat([magnitudes, -magnitudes if name != "log1p" else magnitudes / 3])[:, None].repeat(1, WIDTH)
    edge_index, features = torch.arange(NUM_VERTICES).repeat(2, 1), torch.ones(NUM_VERTICES, 1, dtype=dtype)
    tiled = TiledConv(conv)
    y = tiled.run(lambda: conv(x, edge_index, features))
    assert is_program(tiled)
    torch.testing.assert_close(y, function(x), rtol=4e-6 if dtype == torch.float32 else 1e-11, atol=0)


@pytest.mark.parametrize(
    "message",
    [
        lambda s, i, j, e, index, n: (i * j).amax(-1, keepdim=True) * e,
        lambda s, i, j, e, index, n: torch.clamp(e + 0 * j, min=i),
        lambda s, i, j, e, index, n: torch.maximum(e + 0 * i, j),
    ],
    ids=["amax", "clamp", "maximum"],
)
def test_nan_of_one_row_reaches_the_result(message: Any) -> None:
    conv, x = Unusual(message), torch.rand(NUM_VERTICES, WIDTH)
    x[::5, 2] = torch.nan
    tiled, features = TiledConv(conv), torch.rand(NUM_EDGES, NUM_EDGE_FEATURES)
    y = tiled.run(lambda: conv(x, edges(), features))
    assert is_program(tiled)
    torch.testing.assert_close(y, conv(x, edges(), features), equal_nan=True)


def test_convolutions_of_equal_structure_share_programs() -> None:
    """Others run programs of their own: they differ in a function, in a gradient, or in an unknown attribute."""
    convs = [Unusual(message).double() for message in (gated, gated, gated_by_source, gated, gated)]
    convs[3].a.requires_grad_(False)
    convs[4].unknown = object()
    layers = nn.ModuleList(PyGConv(conv, WIDTH) for conv in convs)
    share_programs(layers)
    for copied in (layers, pickle.loads(pickle.dumps(layers[:4]))):
        assert [layer.tiled.messages is copied[0].tiled.messages for layer in copied[1:4]] == [True, False, False]
    assert layers[4].tiled.messages is not layers[0].tiled.messages
    x, features = torch.randn(2, NUM_VERTICES, WIDTH).double(), torch.rand(NUM_EDGES, NUM_EDGE_FEATURES).double()
    for layer, rows in zip(layers, (x[0], x[1], x[0], x[0], x[0]), strict=True):
        with layer.tiled.replacing():
            y = layer.conv(rows, edges(), features)
        torch.testing.assert_close(y, layer.conv(rows, edges(), features))


def test_a_program_counts_its_bytes() -> None:
    """GatedMax loads the row of a source, spreads that of a target and multiplies; its gradient also stores a row."""
    conv, x = GatedMax().double(), torch.ones(NUM_VERTICES, WIDTH, dtype=torch.float64, requires_grad=True)
    with TiledConv(conv).replacing(), FlopCounter() as counter:
        y = conv(x, edges())
    row_bytes = 8 * NUM_EDGES * WIDTH
    assert counter.tiles == (3 * (2 * row_bytes + 8 * NUM_EDGES * ROW_NUMBERS), row_bytes, NUM_VERTICES)
    with FlopCounter() as counter:
        y.sum().backward()
    assert counter.tiles[1:] == ((1 + 4) * row_bytes, NUM_VERTICES)


def test_random_numbers_are_drawn_for_each_edge() -> None:
    """Each edge has a draw of its own, as in PyG, though all come from the same source."""
    conv = Unusual(lambda s, i, j, e, index, n: nn.functional.dropout(j, 0.5))
    edge_index, x = torch.stack([torch.zeros(64), torch.zeros(64)]).long(), torch.ones(1, WIDTH)
    with TiledConv(conv).replacing():
        y = conv(x, edge_index, torch.ones(64, NUM_EDGE_FEATURES))
    assert ((y > 0) & (y < 128)).all()


def test_changes_of_the_convolution_and_its_edges_count() -> None:
    conv, random = Unusual(lambda s, i, j, e, index, n: j * e * s.factor), torch.Generator().manual_seed(0)
    tiled, edge_index = TiledConv(conv), edges()
    x, features = torch.randn(NUM_VERTICES, WIDTH, generator=random), torch.rand(NUM_EDGES, NUM_EDGE_FEATURES)
    for conv.factor in (1.0, 3.0):
        edge_index[0, :50] = int(conv.factor)
        with tiled.replacing():
            y = conv(x, edge_index, features)
        torch.testing.assert_close(y, conv(x, edge_index, features))


def test_nan_stays() -> None:
    conv = Unusual(lambda s, i, j, e, index, n: torch.relu(j * e))
    with TiledConv(conv).replacing():
        y = conv(torch.full((NUM_VERTICES, WIDTH), torch.nan), edges(), torch.ones(NUM_EDGES, NUM_EDGE_FEATURES))
    assert y[7].isnan().all()


def test_edges_of_rows_that_do_not_exist_are_refused() -> None:
    conv, edge_index = Unusual(lambda s, i, j, e, index, n: j * e), edges()
    edge_index[0, 3] = -1
    with TiledConv(conv).replacing(), pytest.raises(IndexError, match="beyond"):
        conv(torch.ones(NUM_VERTICES, WIDTH), edge_index, torch.ones(NUM_EDGES, NUM_EDGE_FEATURES))


def test_parameters_of_a_part_with_two_names_stay() -> None:
    conv = Unusual(lambda s, i, j, e, index, n: s.linear(j) * e)
    conv.again = conv.linear
    weight = conv.linear.weight
    with TiledConv(conv).replacing():
        conv(torch.ones(NUM_VERTICES, WIDTH), edges(), torch.ones(NUM_EDGES, NUM_EDGE_FEATURES))
    assert conv.linear.weight is weight


def plant(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs be wrong: a tile's boundary, the endpoint that gets a gradient, or parts of a target.

    They are not compared with PyG's code before they run, which would detect the first two.
    """
    monkeypatch.setattr(messages, "compare", lambda *_, **__: None)
    run, of = EdgeProgram.run, SortedEdges.of
    if error == "boundary":

        def shifted(edge_index: Tensor, num_targets: int) -> SortedEdges:
            edges = of(edge_index, num_targets)
            edges.indptr[9] += 1
            return edges

        monkeypatch.setattr(SortedEdges, "of", shifted)
    elif error == "endpoint":

        def flipped(each: EdgeProgram, edges: SortedEdges, *arguments: Any) -> Any:
            is_backward = len(each.staged_width) > 0
            return run(each, replace(edges, sources=edges.sources.flip(0)) if is_backward else edges, *arguments)

        monkeypatch.setattr(EdgeProgram, "run", flipped)
    else:  # sums of an earlier level are added up again
        monkeypatch.setattr(program, "ONCE", [kind for kind in program.ONCE if kind != "reduce"])


@pytest.mark.parametrize("error", ["boundary", "endpoint", "twice"])
def test_planted_errors_show(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(error, monkeypatch)
    torch.manual_seed(0)
    assert difference(pyg.TransformerConv(WIDTH, 4, heads=2).double(), edges(), with_edge_rows=False) > 1e-3
