"""A stack exported to PyG gives the same results on one device, and contains no module of weft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.lib.pairwise import param
from weft.data import Graph
from weft.nn import MODELS, GraphView, RowLayer, Stack, Topology, convert, from_pyg, make_model, to_pyg
from weft.utils.errors import InputError

pyg = pytest.importorskip("torch_geometric.nn")


def make(edge_features: int = 0) -> Graph:
    """Return a weighted, directed graph with one self-loop, or with none if edges have features."""
    random = torch.Generator().manual_seed(5)
    source, target = torch.randint(0, 29, (2, 120), generator=random)
    keep = source != target
    source, target = source[keep], target[keep]
    if not edge_features:
        source, target = torch.cat([source, torch.tensor([4])]), torch.cat([target, torch.tensor([4])])
    return Graph.from_edges(
        source,
        target,
        num_vertices=31,
        weight=torch.rand(len(source), generator=random) + 0.1,
        edge_features=torch.randn(len(source), edge_features, generator=random) if edge_features else None,
    )


def randomized(model: nn.Module) -> nn.Module:
    """Replace all parameters and statistics by random numbers."""
    random = torch.Generator().manual_seed(6)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape, generator=random, dtype=torch.float64) + 0.1)
    return model


def rows_of(model: nn.Module, graph: Graph, x: Tensor) -> Tensor:
    topology = Topology(graph.in_edges.cast(torch.float64), None, graph.edge_features, torch.float64)
    rows: Tensor = model([GraphView(topology) for _ in range(int(model.num_stages))], x)  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
@pytest.mark.parametrize(
    "options", [{"norm": "layer", "residual": True}, {"norm": "batch", "dropout": 0.5}], ids=["layer", "batch"]
)
@pytest.mark.parametrize("edge_width", [0, 3])
def test_exported_model_has_the_same_results(model: str, options: dict[str, Any], edge_width: int) -> None:
    if edge_width and not model.startswith("gat"):
        pytest.skip("has no attention")
    torch.manual_seed(0)
    graph, x = make(edge_width), torch.randn(31, 7, dtype=torch.float64)
    drops = {"attention_dropout": 0.6} if model.startswith("gat") else {}
    ours = randomized(
        make_model(model, 7, 5, hidden=8, layers=3, edge_width=edge_width, **drops, **options).double()
    ).eval()
    exported = to_pyg(ours)
    assert [part.dropout for part in exported.modules() if hasattr(part, "att_src") or hasattr(part, "att")] == (
        [0.6] * 3 if drops else []
    )
    inputs: list[Tensor] = [x, torch.stack(graph.in_edges.edges()).long()]
    if model == "gcn":
        assert graph.in_edges.weight is not None
        inputs.append(graph.in_edges.weight.double())
    if edge_width:
        assert graph.edge_features is not None
        inputs.append(graph.edge_features.double())
    torch.testing.assert_close(exported(*inputs), rows_of(ours, graph, x), rtol=1e-9, atol=1e-9)
    assert not any(type(part).__module__.startswith("weft") for part in exported.modules())


@pytest.mark.parametrize("model", [param(model, name=model, quick=model == "gatv2") for model in MODELS])
@pytest.mark.parametrize(
    "with_values",
    [pytest.param(False, id="edges", marks=pytest.mark.slow), pytest.param(True, id="weights or features")],
)
def test_exports(model: str, with_values: bool) -> None:
    """torch.export gives PyTorch operators only, for any number of vertices and edges, as docs/predict.md shows."""
    if with_values and model in ("sage", "gin"):
        pytest.skip("has no edge weights or features")
    torch.manual_seed(0)
    attends = with_values and model != "gcn"
    ours = randomized(make_model(model, 7, 5, hidden=8, norm="batch", edge_width=3 if attends else 0).double())
    exported, vertices, edges = to_pyg(ours), Dim("vertices"), Dim("edges")
    numbers: list[tuple[int, ...]] = [(3,)] if attends else [()]

    def inputs(num_vertices: int, num_edges: int) -> tuple[Tensor | None, ...]:
        x = torch.randn(num_vertices, 7, dtype=torch.float64)
        edge_index = torch.randint(0, num_vertices, (2, num_edges))
        edge_inputs = (
            [torch.rand(num_edges, *shape, dtype=torch.float64) for shape in numbers] if with_values else [None]
        )
        return (x, edge_index, *(edge_inputs if with_values or model == "gcn" else []))

    shapes = [{0: vertices}, {1: edges}, {0: edges} if with_values else None]
    first = inputs(31, 120)
    program = torch.export.export(exported, first, dynamic_shapes=(tuple(shapes[: len(first)]),))
    for size in ((31, 120), (50, 11), (1, 0)):
        other = inputs(*size)
        torch.testing.assert_close(program.module()(*other), exported(*other), rtol=1e-9, atol=1e-9)
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {type(function).__module__.partition(".")[0] for function in called} <= {"torch", "builtins"}
    fixed = torch.export.export(exported, first)
    with pytest.raises((AssertionError, RuntimeError)):
        fixed.module()(*inputs(50, 11))


def test_row_layers_and_residuals() -> None:
    ours = randomized(Stack([RowLayer(nn.Linear(7, 7), 7), *make_model("sage", 7, 5).layers], residual=True).double())
    graph, x = make(), torch.randn(31, 7, dtype=torch.float64)
    edges = torch.stack(graph.in_edges.edges()).long()
    wanted = rows_of(ours.eval(), graph, x)
    torch.testing.assert_close(to_pyg(ours)(x, edges), wanted, rtol=1e-9, atol=1e-9)
    ours.residual = False
    assert (to_pyg(ours)(x, edges) - wanted).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make_model("gcn", 7, 5, decoupled=True), "a Decoupled cannot be exported to PyG"),
        (Stack([RowLayer(nn.Sequential(), 7)]), "a RowLayer of this kind cannot be exported to PyG"),
    ],
)
def test_unsupported_models_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_pyg(model)


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_a_pyg_checkpoint_is_loaded_through_the_pyg_model(model: str) -> None:
    """A PyG checkpoint is loaded into the PyG model, which is then converted, as docs/models.md shows."""
    graph, x = make(), torch.randn(31, 7, dtype=torch.float64)
    ours = randomized(make_model(model, 7, 5, hidden=8).double()).eval()
    saved, fresh = to_pyg(ours).state_dict(), to_pyg(make_model(model, 7, 5, hidden=8).double())
    with pytest.raises(RuntimeError, match="of a PyG model: load them into that model, and give the model to weft"):
        ours.load_state_dict(saved)
    fresh.load_state_dict(saved)
    moved = convert(fresh, edge_inputs=["edge_weight"]).eval()
    torch.testing.assert_close(rows_of(moved, graph, x), rows_of(ours, graph, x), rtol=1e-9, atol=1e-9)
    assert moved.state_dict().keys() == saved.keys()


def test_a_checkpoint_of_another_stack_is_refused_by_torch() -> None:
    """The error mentions no PyG model, and a stack of PyG convolutions accepts its own PyG names."""
    ours = Stack([from_pyg(pyg.SAGEConv(7, 5))])
    ours.load_state_dict(ours.state_dict())
    with pytest.raises(RuntimeError) as caught:
        make_model("gcn", 7, 5).load_state_dict(make_model("sage", 7, 5).state_dict())
    assert "PyG" not in str(caught.value)
