"""Message functions of PyG's and custom convolutions in tiles of edges: PyG's results, for any tiles and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.nn.layers import edge_tiles
from weft.nn.layers.edge_tiles import MessageFunction, SortedEdges, Tile, TiledConv

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
    monkeypatch.setattr(edge_tiles, "TILE_BYTES", 8 * 8 * WIDTH)
    monkeypatch.setattr(edge_tiles, "MIN_TILE", 4)


def edges(*, in_order: bool = False) -> Tensor:
    """Return edges with self-loops, parallel edges, a vertex of many edges and isolated vertices."""
    random = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NUM_VERTICES - 2, (2, NUM_EDGES), generator=random)
    edge_index[1, :60], edge_index[0, 60:70] = 7, edge_index[1, 60:70]
    edge_index[:, 70:80] = edge_index[:, 80:90]
    return edge_index[:, edge_index[1].argsort(stable=True)] if in_order else edge_index


def results(conv: Any, edge_index: Tensor, *, with_edge_rows: bool, tiled: bool) -> list[Tensor | None]:
    """Return the result of a convolution and the gradients of its inputs and parameters."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_VERTICES, WIDTH, dtype=torch.float64, generator=random).requires_grad_()
    features = torch.rand(NUM_EDGES, NUM_EDGE_FEATURES, dtype=torch.float64, generator=random).requires_grad_()
    arguments = {"edge_attr": features} if with_edge_rows else {}
    conv.zero_grad()
    if tiled:
        with TiledConv(conv).replacing():
            y = conv(x, edge_index, **arguments)
    else:
        y = conv(x, edge_index, **arguments)
    (y * torch.randn(y.shape, dtype=y.dtype, generator=random)).sum().backward()
    return [y.detach(), x.grad, features.grad, *(parameter.grad for parameter in conv.parameters())]


def difference(conv: Any, edge_index: Tensor, *, with_edge_rows: bool) -> float:
    """Return the largest difference between a convolution in tiles and PyG's."""
    expected, actual = (
        results(conv, edge_index, with_edge_rows=with_edge_rows, tiled=tiled) for tiled in (False, True)
    )
    pairs = [
        (torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b)
        for a, b in zip(expected, actual, strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.fixture
def tiled_functions(monkeypatch: pytest.MonkeyPatch) -> list[MessageFunction]:
    """Return a list of the message functions that run in tiles."""
    functions, original = list[MessageFunction](), MessageFunction.on_tile

    def note(function: MessageFunction, *arguments: Any) -> Tensor:
        functions.append(function)
        return original(function, *arguments)

    monkeypatch.setattr(MessageFunction, "on_tile", note)
    return functions


@pytest.mark.parametrize(("make", "with_edge_rows"), CASES, ids=NAMES)
@pytest.mark.parametrize("in_order", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shuffled", "in order"])
def test_results_and_gradients_are_those_of_pyg(
    make: Callable[[], Any], with_edge_rows: bool, in_order: bool, tiled_functions: list[MessageFunction]
) -> None:
    torch.manual_seed(0)
    conv = make().double().eval()
    assert difference(conv, edges(in_order=in_order), with_edge_rows=with_edge_rows) < 1e-9
    assert len(tiled_functions) > 10
    assert "propagate" not in conv.__dict__


@pytest.mark.parametrize(("make", "with_edge_rows"), CASES[::4], ids=NAMES[::4])
def test_results_do_not_depend_on_threads(make: Callable[[], Any], with_edge_rows: bool) -> None:
    torch.manual_seed(0)
    conv, num_threads = make().double().eval(), torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            runs.append(results(conv, edges(), with_edge_rows=with_edge_rows, tiled=True)[:3])  # of rows
    finally:
        torch.set_num_threads(num_threads)
    for run in runs[1:]:
        assert all(a is b or torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))  # type: ignore[arg-type]


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    conv = EdgeMLP().double()
    edge_index, features = edges()[:, :12], torch.rand(12, NUM_EDGE_FEATURES, dtype=torch.float64)

    def run(x: Tensor, features: Tensor) -> Tensor:
        with TiledConv(conv).replacing():
            return conv(x, edge_index, edge_attr=features)

    x = torch.randn(NUM_VERTICES, WIDTH, dtype=torch.float64)
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), features.requires_grad_()))


def test_tiles_contain_whole_targets() -> None:
    sorted_edges = SortedEdges.of(edges(), NUM_VERTICES)
    for size in (1, 4, 50, 1000):
        tiles = list(sorted_edges.tiles(size))
        assert [tile.targets.start for tile in tiles[1:]] == [tile.targets.stop for tile in tiles[:-1]]
        assert (tiles[0].targets.start, tiles[-1].targets.stop) == (0, NUM_VERTICES)
        for targets, of_tile in tiles:
            assert of_tile == slice(*sorted_edges.indptr[[targets.start, targets.stop]].tolist())
            assert of_tile.stop - of_tile.start <= size or targets.stop - targets.start == 1


def test_what_reads_the_whole_graph_runs_as_it_is(tiled_functions: list[MessageFunction]) -> None:
    conv = EdgeMLP().double()
    conv.register_message_forward_hook(lambda *_: None)
    assert difference(conv, edges(), with_edge_rows=True) == 0
    assert not tiled_functions


def plant(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiles be wrong: a boundary, the endpoint that gets a gradient, or a vertex of many edges that runs twice."""
    tiles, add, rows_of = SortedEdges.tiles, edge_tiles.add_to_sources, MessageFunction.rows_of
    if error == "boundary":
        monkeypatch.setattr(MessageFunction, "rows_of", lambda *each: [rows.roll(1, 0) for rows in rows_of(*each)])
    elif error == "endpoint":
        monkeypatch.setattr(edge_tiles, "add_to_sources", lambda whole, ids, grad: add(whole, ids.flip(0), grad))
    else:

        def twice(sorted_edges: SortedEdges, number: int) -> Iterator[Tile]:
            for tile in tiles(sorted_edges, number):
                yield from [tile] * (1 + (tile.edges.stop - tile.edges.start > number))

        monkeypatch.setattr(SortedEdges, "tiles", twice)


@pytest.mark.parametrize("error", ["boundary", "endpoint", "twice"])
def test_planted_errors_show(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(error, monkeypatch)
    assert difference(GatedMax().double(), edges(), with_edge_rows=False) > 1e-3
