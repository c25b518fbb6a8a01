"""Conversion to PyG and back, and from the forms in which PyG users store a graph."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.lib.graph_checks import CALM, assert_one_line, graphs, same_graph
from weft.data import Adjacency, DataWarning, Graph, reorder, require_links
from weft.data.vertex_types import merge_features
from weft.utils.errors import InputError

pyg = pytest.importorskip("torch_geometric.data")


@CALM
@given(graph=graphs())
def test_round_trip(graph: Graph) -> None:
    graph = canonical(graph)
    same_graph(graph, Graph.from_pyg(graph.to_pyg(), name="drawn"))


def canonical(graph: Graph) -> Graph:
    """Remove empty labels and masks from a graph with vertex types, because PyG cannot represent them."""
    if not graph.vertex_types:
        return graph
    labelled = graph.y is not None and bool((graph.y >= 0).any() if graph.y.dim() == 1 else graph.y.any())
    masks = {m: getattr(graph, m) for m in ("train_mask", "val_mask", "test_mask")}
    if labelled or any(mask is not None and mask.any() for mask in masks.values()):
        return graph
    return replace(graph, y=None, train_mask=None, val_mask=None, test_mask=None)


def test_a_reordered_graph_has_original_ids() -> None:
    graph = Graph.from_edges(torch.tensor([0, 1]), torch.tensor([2, 2]))
    assert reorder(graph, "degree").to_pyg().n_id.tolist() == [2, 0, 1]
    assert "n_id" not in graph.to_pyg()


def test_knowledge_graph_becomes_data_with_edge_types() -> None:
    graph = Graph.from_edges(
        torch.tensor([0, 1, 1]),
        torch.tensor([1, 0, 0]),
        edge_type=torch.tensor([1, 0, 1]),
        relations=("vertex|likes|vertex", "vertex|http://x/y|vertex"),
        vertex_types=("vertex",),
        type_offsets=(0, 2),
        name="drawn",
        num_vertices=2,
    )
    data = graph.to_pyg()
    assert isinstance(data, pyg.Data)
    assert data.edge_type.dtype == torch.int64
    same_graph(graph, Graph.from_pyg(data, name="drawn"))
    del data["relations"]
    assert Graph.from_pyg(data).relations == ("vertex|0|vertex", "vertex|1|vertex")


def edges() -> torch.Tensor:
    return torch.tensor([[0, 2, 1], [1, 1, 0]])


def test_number_of_vertices() -> None:
    assert Graph.from_pyg(pyg.Data(edge_index=edges())).num_vertices == 3
    assert Graph.from_pyg(pyg.Data(edge_index=edges(), num_nodes=9)).num_vertices == 9
    assert Graph.from_pyg(pyg.Data(edge_index=edges(), y=torch.zeros(4, dtype=torch.long))).num_vertices == 4
    sparse = torch.eye(5).to_sparse()
    graph = Graph.from_pyg(pyg.Data(edge_index=edges(), x=sparse))
    assert graph.x is not None
    assert torch.equal(graph.x, torch.eye(5))


def test_edge_weight_is_read_and_a_single_edge_attr_is_a_feature() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    column = Graph.from_pyg(pyg.Data(edge_index=edges(), edge_weight=weight[:, None]))
    same_graph(column, Graph.from_pyg(pyg.Data(edge_index=edges(), edge_weight=weight)))
    assert column.in_edges.weight is not None
    assert column.in_edges.weight.tolist() == [3.0, 1.0, 2.0]
    for attr in (weight, weight[:, None]):
        graph = Graph.from_pyg(pyg.Data(edge_index=edges(), edge_attr=attr))
        assert graph.in_edges.weight is None
        assert graph.edge_features is not None
        assert graph.edge_features.tolist() == [[3.0], [1.0], [2.0]]


def test_edge_attr_of_several_columns_is_edge_features() -> None:
    attr = torch.tensor([[1, 10], [2, 20], [3, 30]])
    graph = Graph.from_pyg(pyg.Data(edge_index=edges(), edge_attr=attr))
    assert graph.edge_features is not None
    assert graph.edge_features.tolist() == [[3.0, 30.0], [1.0, 10.0], [2.0, 20.0]]
    data = hetero()
    data["author", "writes", "paper"].edge_attr = attr
    with pytest.warns(DataWarning, match="edge_attr of 1 relations is left out: give all 2 relations the same number"):
        assert Graph.from_pyg(data).edge_features is None
    data["paper", "by", "author"].edge_attr = attr[:1] + 6
    graph = Graph.from_pyg(data)
    assert graph.edge_features is not None
    assert graph.edge_features[:, 0].tolist() == [2.0, 1.0, 3.0, 7.0]


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo, torch.sparse_csc])
def test_adj_t(layout: torch.layout) -> None:
    weight = torch.tensor([2.0, 3.0, 4.0])
    source, target = edges()
    for values in (weight, torch.ones(3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch warns that CSR is in beta.
            adj_t = torch.sparse_coo_tensor(torch.stack([target, source]), values, (3, 3)).coalesce()
            adj_t = adj_t.to_sparse(layout=layout) if layout != torch.sparse_coo else adj_t
            graph = Graph.from_pyg(pyg.Data(adj_t=adj_t, num_nodes=3))
        expected = None if values is not weight else weight
        same_graph(graph, Graph.from_edges(source, target, num_vertices=3, weight=expected))


def test_an_edge_index_of_pyg() -> None:
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    wrapped = pytest.importorskip("torch_geometric").EdgeIndex(edge_index, sparse_size=(3, 3))
    expected = Graph.from_edges(edge_index)
    same_graph(Graph.from_pyg(pyg.Data(edge_index=wrapped, num_nodes=3)), expected)
    for graph in (Graph.from_edges(wrapped), Graph.from_edges(wrapped[0], wrapped[1])):
        same_graph(graph, expected)
    in_edges = Adjacency.from_edges(wrapped[0], wrapped[1], num_sources=3, num_targets=3)
    assert in_edges.fingerprint == expected.fingerprint
    changed = replace(in_edges, indices=wrapped[0], known_transpose=None)
    assert changed.transpose.indices.tolist() == [0, 1, 2]


def test_other_objects_are_refused() -> None:
    with pytest.raises(InputError) as error:
        Graph.from_pyg({"edge_index": edges()})  # type: ignore[arg-type]
    assert_one_line(error, "type dict", "Data or HeteroData")


def test_unsigned_integers() -> None:
    y = torch.tensor([2, 0, 1])
    expected = Graph.from_pyg(pyg.Data(edge_index=edges(), y=y, edge_type=y, num_nodes=torch.tensor(3)))
    other = pyg.Data(edge_index=edges().to(torch.uint16), y=y.to(torch.uint32), edge_type=y.to(torch.uint64))
    same_graph(Graph.from_pyg(other), expected)


def test_labels_of_several_integer_dtypes() -> None:
    data = hetero()
    data["paper"].y = torch.tensor([0, 1, 300], dtype=torch.int16)
    data["author"].y = torch.tensor([1, 2], dtype=torch.uint8)
    with pytest.warns(DataWarning, match="1 vertices have class 300"):
        graph = Graph.from_pyg(data)
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1, 300, 1, 2]


def hetero() -> pyg.HeteroData:
    data = pyg.HeteroData()
    data["paper"].x = torch.arange(6.0).reshape(3, 2)
    data["paper"].y = torch.tensor([0, 1, -1])
    data["paper"].train_mask = torch.tensor([True, False, False])
    data["author"].num_nodes = 2
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [2, 0, 2]])
    data["paper", "by", "author"].edge_index = torch.tensor([[2], [1]])
    data["paper", "by", "author"].edge_weight = torch.tensor([0.5])
    return data


def test_hetero_data() -> None:
    graph = Graph.from_pyg(hetero(), name="h")
    assert graph.vertex_types == ("paper", "author")
    assert graph.type_offsets == (0, 3, 5)
    assert graph.relations == ("author|writes|paper", "paper|by|author")
    assert graph.x is None
    assert list(graph.features) == ["paper"]
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1, -1, -1, -1]
    assert graph.train_mask is not None
    assert graph.train_mask.tolist() == [True, False, False, False, False]
    assert graph.val_mask is None
    assert [ids.tolist() for ids in graph.in_edges.edges()] == [[4, 3, 4, 2], [0, 2, 2, 4]]
    assert graph.in_edges.weight is not None
    assert graph.in_edges.weight.tolist() == [1.0, 1.0, 1.0, 0.5]
    back = graph.to_pyg()
    assert "y" not in back["author"]
    assert back["author"].num_nodes == 2
    assert torch.equal(back["paper"].x, hetero()["paper"].x)
    assert torch.equal(back["author", "writes", "paper"].edge_index, torch.tensor([[1, 0, 1], [0, 2, 2]]))
    same_graph(graph, Graph.from_pyg(back, name="h"))


def test_negative_values_survive_a_conversion_to_pyg() -> None:
    data = hetero()
    data["paper"].y = torch.tensor([-0.5, -2.5, -1.5])
    assert torch.equal(Graph.from_pyg(data).to_pyg()["paper"].y, data["paper"].y)


def test_equal_widths_become_one_matrix() -> None:
    data = hetero()
    data["author"].x = torch.full((2, 2), 7.0)
    graph = Graph.from_pyg(data)
    assert graph.x is not None
    assert graph.x.shape == (5, 2)
    assert not graph.features
    assert merge_features((), {}) == (None, {})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: d["author"].__delattr__("num_nodes"), ["data['author']", "num_nodes"]),
        (lambda d: d["paper"].update({"y": torch.zeros(4)}), ["data['paper'].y", "[4]", "3 vertices of type paper"]),
        (lambda d: d["paper"].update({"x": torch.zeros(4, 2), "num_nodes": 3}), ["data['paper'].x", "3 vertices"]),
        (lambda d: d["author"].update({"y": torch.zeros(2, 3)}), ["y has rows of different shapes"]),
        (
            lambda d: d["paper", "by", "author"].update({"edge_index": torch.tensor([[0], [2]])}),
            ["data[paper, by, author].edge_index[1][0] is 2", "2 vertices"],
        ),
        (lambda d: d["paper", "by", "author"].__delattr__("edge_index"), ["data[paper, by, author]", "adj_t"]),
    ],
)
def test_hetero_errors_name_the_attribute(change: object, parts: list[str]) -> None:
    data = hetero()
    change(data)  # type: ignore[operator]
    with pytest.raises(InputError) as error:
        Graph.from_pyg(data)
    assert_one_line(error, *parts)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"x": torch.ones(3, 1)}, ["neither edge_index nor adj_t", "data.edge_index"]),
        ({"edge_index": torch.ones(3, 2, dtype=torch.long)}, ["edge_index has shape [3, 2]", "[2, E]"]),
        ({"edge_index": edges(), "y": ["a", "b", "c"]}, ["y is of type list", "tensor"]),
        ({"adj_t": torch.eye(3)}, ["adj_t", "torch.sparse"]),
        ({"edge_index": edges(), "y": 3}, ["y is a single number"]),
        ({"edge_index": edges(), "y": torch.tensor(3)}, ["y is a single number"]),
        ({"edge_index": edges().double()}, ["data.edge_index[0] is torch.float64", "int64"]),
        ({"edge_index": edges().to("meta")}, ["edge_index", "meta"]),
        ({"edge_index": edges(), "num_nodes": [3]}, ["num_vertices is [3]"]),
        ({"edge_index": edges(), "edge_type": torch.tensor([0, 1, 1 << 31])}, ["edge_type", "without gaps"]),
        ({"edge_index": edges(), "edge_type": torch.tensor([0, 1, 1]), "relations": 5}, ["data", "TypeError"]),
        ({"adj_t": torch.ones(2, 2, 2).to_sparse()}, ["adj_t", "torch.sparse"]),
        ({"edge_index": edges(), "x": torch.ones(2, 1)}, ["edge_index[0][1] is 2", "2 vertices"]),
    ],
)
def test_data_errors_name_the_attribute(fields: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        Graph.from_pyg(pyg.Data(**fields))
    assert_one_line(error, *parts)


def split(graph: Any, **options: Any) -> Any:
    """Return the train, validation and test graph of PyG's RandomLinkSplit."""
    torch.manual_seed(0)
    transform = pytest.importorskip("torch_geometric.transforms").RandomLinkSplit
    return transform(num_val=0.2, num_test=0.3, **options)(graph)


NO_NEGATIVES = {"add_negative_train_samples": False, "neg_sampling_ratio": 0.0}


@pytest.mark.parametrize("options", [{}, {"split_labels": True}, NO_NEGATIVES])
@pytest.mark.parametrize("undirected", [False, True])
def test_links_of_random_link_split_are_held_out(undirected: bool, options: dict[str, Any]) -> None:
    pairs = torch.combinations(torch.arange(12))[::2].T
    edge_index = torch.cat([pairs, pairs.flip(0)], 1) if undirected else pairs
    train, val, test = split(pyg.Data(edge_index=edge_index, num_nodes=12), is_undirected=undirected, **options)
    if options is NO_NEGATIVES:
        graph = Graph.from_pyg(train, val=val, test=test)
    else:
        with pytest.warns(DataWarning, match="negative links of RandomLinkSplit are left out") as caught:
            graph = Graph.from_pyg(train, val=val, test=test)
        assert len(caught) == 1
        if not options:
            count = sum(int((part.edge_label == 0).sum()) for part in (train, val, test))
            assert f"graph: {count} negative links" in str(caught[0].message)
    assert graph.num_edges == train.edge_index.shape[1]
    for links, part in ((graph.val_links, val), (graph.test_links, test)):
        positive = part.edge_label_index[:, part.edge_label == 1] if "edge_label" in part else part.pos_edge_label_index
        assert links is not None
        assert torch.equal(links[:, :2], positive.T)
    require_links(graph)  # warns if held-out links were edges


def test_links_of_random_link_split_of_a_typed_graph() -> None:
    data = hetero()
    data["author", "writes", "paper"].edge_index = torch.cartesian_prod(torch.arange(2), torch.arange(3)).T
    train, val, test = split(data, edge_types=[("author", "writes", "paper")], **NO_NEGATIVES)
    graph = Graph.from_pyg(train, val=val, test=test)
    pairs = test["author", "writes", "paper"].edge_label_index
    assert graph.test_links is not None
    assert graph.test_links.tolist() == [[3 + u, v, 0] for u, v in pairs.T.tolist()]
    assert graph.val_links is not None
    assert len(graph.val_links) == 1


def test_errors_of_links_name_the_remedy() -> None:
    data = pyg.Data(edge_index=torch.randint(0, 9, (2, 60)), num_nodes=9)
    train, val, test = split(data, **NO_NEGATIVES)
    disjoint = split(data, disjoint_train_ratio=0.5, **NO_NEGATIVES)[0]
    several = test.clone()
    several.edge_label = torch.arange(len(several.edge_label))
    typed = train.clone()
    typed.edge_type = torch.zeros(typed.edge_index.shape[1], dtype=torch.int64)
    for graphs_of_split, parts in (
        ((train, None, None), ["data has edge_label_index", "Graph.from_pyg(train, val=val, test=test)"]),
        ((train, val, data), ["test has no edge_label_index"]),
        ((disjoint, val, test), ["training links are no edges", "disjoint_train_ratio=0"]),
        ((train, val, several), ["test.edge_label has other values than 0 and 1"]),
        ((train, hetero(), test), ["val is of type HeteroData, data of type Data"]),
        ((typed, val, test), ["data.edge_label_index has no relations"]),
    ):
        with pytest.raises(InputError) as error:
            Graph.from_pyg(graphs_of_split[0], val=graphs_of_split[1], test=graphs_of_split[2])
        assert_one_line(error, *parts)
