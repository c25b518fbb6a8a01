"""Epochs of PyG and DGL with weft's weights, in the style of their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Graph
from weft.data.sampling import Fanout

Forward = Callable[[], Tensor]


def train(
    model: nn.Module, forward: Forward, graph: Graph, device: str = "cpu"
) -> tuple[Callable[[], object], Forward]:
    """Prepare a full-graph training loop, and return functions that train an epoch and compute logits.

    Args:
        model: Module with the parameters.
        forward: Function that computes the logits.
        graph: The graph.
        device: Device of the model.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert graph.train_mask is not None
    assert graph.y is not None
    train_rows = graph.train_mask.nonzero().view(-1).to(device)
    y = graph.y.to(device)[train_rows]

    def epoch() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward()[train_rows], y).backward()
        optimizer.step()

    return epoch, forward


def run_pyg(graph: Graph, model: Any, name: str, device: str = "cpu") -> tuple[Callable[[], object], Forward]:
    """Prepare epochs of PyG's layers with weft's weights, with the normalization computed beforehand.

    Args:
        graph: The graph.
        model: weft's model.
        name: "pyg-csr" for products with a CSR matrix, otherwise edge_index is used.
        device: Device of the model.

    Raises:
        ImportError: PyG has no such form of the model.
    """
    from torch_geometric import nn as pyg
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    edges = torch.stack(graph.in_edges.edges()).to(device)
    weight = None
    layers: list[nn.Module] = []
    for ours in model.layers:
        gat = {"heads": ours.heads, "concat": ours.concat} if hasattr(ours, "heads") else {}
        if gat:
            layer = pyg.GATConv(ours.in_width, ours.head_width, **gat)
            layer.lin.weight.data = ours.weight.data.t().contiguous()
            layer.att_src.data, layer.att_dst.data = ours.attention_src.data[None], ours.attention_dst.data[None]
        elif getattr(ours, "weight_self", None) is not None:
            layer = pyg.SAGEConv(ours.in_width, ours.out_width)
            layer.lin_l.weight.data = ours.weight.data.t().contiguous()
            layer.lin_r.weight.data = ours.weight_self.data.t().contiguous()
            layer.lin_l.bias.data = ours.bias.data
        else:
            layer = pyg.GCNConv(ours.in_width, ours.out_width, normalize=False)
            layer.lin.weight.data = ours.weight.data.t().contiguous()
        layers.append(layer)
    if not gat and getattr(ours, "weight_self", None) is None:
        edges, weight = gcn_norm(edges, None, graph.num_vertices, dtype=torch.float32)
    if name == "pyg-csr":
        if gat:
            raise ImportError("PyG's attention does not support CSR matrices")
        size = (graph.num_vertices, graph.num_vertices)
        values = torch.ones(edges.shape[1], device=device) if weight is None else weight
        edges, weight = torch.sparse_coo_tensor(edges.flip(0), values, size).coalesce().to_sparse_csr(), None
    activation = nn.functional.elu if gat else torch.relu
    assert graph.x is not None
    x, modules = graph.x[:].to(device), nn.ModuleList(layers).to(device)
    return train(modules, lambda: pyg_forward(layers, x, edges, weight, activation), graph, device)


def pyg_forward(
    layers: list[nn.Module], x: Tensor, edges: Tensor, weight: Tensor | None, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    for stage, layer in enumerate(layers):
        x = layer(x, edges) if weight is None else layer(x, edges, weight)
        x = activation(x) if stage + 1 < len(layers) else x
    return x


def dgl_graph(graph: Graph, *, loops: bool) -> Any:
    """Return a graph as a DGL graph; with `loops`, each vertex gets a self-loop."""
    import dgl

    result = dgl.graph(graph.in_edges.edges(), num_nodes=graph.num_vertices)
    result = dgl.add_self_loop(dgl.remove_self_loop(result)) if loops else result
    result.create_formats_()
    return result


def dgl_sage(model: Any) -> nn.ModuleList:
    """Return DGL's GraphSAGE layers with the weights of weft's model."""
    from dgl import nn as dgl_nn

    layers = []
    for ours in model.layers:
        layer = dgl_nn.SAGEConv(ours.in_width, ours.out_width, "mean")
        layer.fc_neigh.weight.data = ours.weight.data.t().contiguous()
        layer.fc_self.weight.data = ours.weight_self.data.t().contiguous()
        layer.fc_self.bias.data = ours.bias.data
        layers.append(layer)
    return nn.ModuleList(layers)


def run_dgl_batches(
    graph: Graph,
    model: nn.Module,
    name: str,  # noqa: ARG001
    fanouts: tuple[Fanout, ...],
    batch_size: int,
) -> tuple[Callable[[], object], Forward]:
    """Prepare epochs of DGL's data loader, which samples between steps, and DGL's layers with weft's weights."""
    import dgl

    assert graph.x is not None
    assert graph.y is not None
    assert graph.train_mask is not None
    x, y = graph.x[:], graph.y
    whole, layers = dgl_graph(graph, loops=False), dgl_sage(model)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    loader = dgl.dataloading.DataLoader(
        whole,
        graph.train_mask.nonzero().view(-1),
        dgl.dataloading.NeighborSampler(list(fanouts)[::-1]),
        batch_size=batch_size,
        shuffle=True,
    )

    def forward(blocks: Sequence[Any], rows: Tensor) -> Tensor:
        for stage, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
            rows = layer(block, rows)
            rows = torch.relu(rows) if stage + 1 < len(layers) else rows
        return rows

    def epoch() -> None:
        for sources, targets, blocks in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(forward(blocks, x[sources]), y[targets]).backward()
            optimizer.step()

    return epoch, lambda: forward([whole] * len(layers), x)


def run_dgl(graph: Graph, model: Any, name: str) -> tuple[Callable[[], object], Forward]:  # noqa: ARG001
    """Prepare full-graph epochs of DGL's layers with weft's weights."""
    from dgl import nn as dgl_nn

    sage = getattr(model.layers[0], "weight_self", None) is not None
    blocks = dgl_graph(graph, loops=not sage)
    layers: list[nn.Module] = list(dgl_sage(model)) if sage else []
    for ours in () if sage else model.layers:
        if hasattr(ours, "heads"):
            layer = dgl_nn.GATConv(ours.in_width, ours.head_width, ours.heads, allow_zero_in_degree=True)
            layer.fc.weight.data = ours.weight.data.t().contiguous()
            layer.attn_l.data, layer.attn_r.data = ours.attention_src.data[None], ours.attention_dst.data[None]
        else:
            norm = "none"
            layer = dgl_nn.GraphConv(ours.in_width, ours.out_width, norm=norm, allow_zero_in_degree=True)
            layer.weight.data = ours.weight.data.clone()
        layers.append(layer)
    root = blocks.in_degrees().float().rsqrt()[:, None]

    def forward() -> Tensor:
        assert graph.x is not None
        x = graph.x[:]
        for stage, (ours, layer) in enumerate(zip(model.layers, layers, strict=True)):
            if hasattr(ours, "heads"):
                x = layer(blocks, x)
                x = x.flatten(1) if ours.concat else x.mean(1)
            else:
                x = layer(blocks, x) if sage else layer(blocks, x * root) * root
            if stage + 1 < len(layers):
                x = nn.functional.elu(x) if hasattr(ours, "heads") else torch.relu(x)
        return x

    return train(nn.ModuleList(layers), forward, graph)
