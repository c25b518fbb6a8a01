"""Export of a trained `Stack` to a plain PyG module, for inference without weft."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from weft.nn.layers.activation import elu
from weft.nn.layers.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv
from weft.nn.layers.norm import BatchNorm, LayerNorm
from weft.nn.layers.stack import RowLayer, Stack
from weft.utils.errors import InputError
from weft.utils.optional_packages import import_extra


def to_pyg(model: nn.Module) -> Any:
    """Return a torch_geometric.nn.Sequential with a copy of a model's weights, in evaluation mode.

    Call it as `exported(x, edge_index)` with features x [N, F]; it returns logits. A model with GCNConv takes
    edge_weight next (None: no weights), and one that attends by edge features takes edge_attr last. Results equal
    weft's up to rounding, except on graphs with repeated self-loops, or with edge_attr and any self-loop, which PyG
    treats differently.

    Args:
        model: A weft.nn.Stack of GCN, SAGE, GIN, GAT, GATv2 and linear layers.

    Raises:
        InputError: The model is not such a stack.
    """
    pyg = import_extra("torch_geometric.nn", "to_pyg")
    if not isinstance(model, Stack) or not model.is_plain or model.input is not None:
        raise InputError(f"a {type(model).__name__} cannot be exported to PyG: use a weft.nn.Stack for a graph with x")
    layers = list(model.layers)
    exported = [export_layer(pyg, layer) for layer in layers]
    edge_arguments = [name for name in ("edge_weight", "edge_attr") if any(name in takes for _, takes in exported)]
    parts: list[tuple[Any, str]] = []
    rows = "x"
    for number, (layer, (conv, takes)) in enumerate(zip(layers, exported, strict=True)):
        output = f"x{number + 1}"
        parts.append((conv, f"{', '.join([rows, *takes])} -> {output}"))
        if number < len(model.norms):
            parts.append((norm_of(model.norms[number]), f"{output} -> {output}"))
            parts.append((activation_of(model.activation), f"{output} -> {output}"))
            if model.residual and in_width(layer) == layer.out_width:
                parts.append((operator.add, f"{output}, {rows} -> {output}"))
        rows = output
    result = pyg.Sequential(", ".join(["x", "edge_index", *edge_arguments]), parts)
    return result.to(next(model.parameters()).dtype).eval()


def export_layer(pyg: Any, layer: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return PyG's equivalent of a layer, with a copy of its weights.

    Args:
        pyg: The module torch_geometric.nn.
        layer: The layer.

    Returns:
        The equivalent, and the names of its arguments after x.

    Raises:
        InputError: PyG has no equivalent.
    """
    bias_option = {"bias": getattr(layer, "bias", None) is not None}
    if isinstance(layer, GCNConv) and layer.weight is not None:
        conv = pyg.GCNConv(layer.in_width, layer.out_width, **bias_option)
        return with_parameters(conv, {"lin.weight": layer.weight.t(), "bias": layer.bias}), [
            "edge_index",
            "edge_weight",
        ]
    if isinstance(layer, SAGEConv) and layer.weight is not None and layer.weight_self is not None:
        conv = pyg.SAGEConv(layer.in_width, layer.out_width, **bias_option)
        parameters = {"lin_l.weight": layer.weight.t(), "lin_l.bias": layer.bias, "lin_r.weight": layer.weight_self.t()}
        return with_parameters(conv, parameters), ["edge_index"]
    if isinstance(layer, GINConv) and isinstance(layer.mlp, nn.Sequential):
        mlp = nn.Sequential(*(linear_of(part) if isinstance(part, nn.Linear) else nn.ReLU() for part in layer.mlp))
        parameters = {f"nn.{name}": value for name, value in layer.mlp.state_dict().items()}  # GINConv has reset these
        return with_parameters(pyg.GINConv(mlp, train_eps=True), {**parameters, "eps": layer.eps}), ["edge_index"]
    if isinstance(layer, GATConv | GATv2Conv) and layer.weight is not None:
        return export_attention(pyg, layer), ["edge_index", *(["edge_attr"] if layer.weight_edge is not None else [])]
    if isinstance(layer, RowLayer) and isinstance(layer.update, nn.Linear):
        return linear_of(layer.update), []
    raise InputError(f"a {type(layer).__name__} of this kind cannot be exported to PyG: use weft.predict")


def export_attention(pyg: Any, layer: GATConv | GATv2Conv) -> nn.Module:
    """Return PyG's equivalent of an attention layer.

    Args:
        pyg: The module torch_geometric.nn.
        layer: The layer.
    """
    options: dict[str, Any] = {
        "heads": layer.heads,
        "concat": layer.concat,
        "dropout": layer.dropout,
        "negative_slope": layer.slope,
        "bias": layer.bias is not None,
        "edge_dim": None if layer.weight_edge is None else len(layer.weight_edge),
    }
    assert layer.weight is not None
    edges = {} if layer.weight_edge is None else {"lin_edge.weight": layer.weight_edge.t()}
    parameters: dict[str, Tensor | None]
    if isinstance(layer, GATConv):
        conv = pyg.GATConv(layer.in_width, layer.head_width, **options)
        parameters = {"lin.weight": layer.weight.t(), "att_src": layer.attention_src, "att_dst": layer.attention_dst}
        edges |= {} if layer.attention_edge is None else {"att_edge": layer.attention_edge}
    else:
        conv = pyg.GATv2Conv(layer.in_width, layer.head_width, **options)
        parameters = {"lin_l.weight": layer.weight.t(), "lin_r.weight": layer.weight_right.t(), "att": layer.attention}
        zeros = None if layer.bias is None else layer.weight.new_zeros(layer.weight.shape[1])
        parameters |= {"lin_l.bias": zeros, "lin_r.bias": zeros}
    return with_parameters(conv, {**parameters, **edges, "bias": layer.bias})


def with_parameters(module: nn.Module, values: dict[str, Tensor | None]) -> nn.Module:
    """Copy values into the parameters of a module, and return the module.

    Args:
        module: The module.
        values: Value of each parameter, by name; None: the module does not have this parameter.
    """
    present = {name: value.detach() for name, value in values.items() if value is not None}
    parameters = dict(module.named_parameters())
    module.to(next(iter(present.values())).dtype)
    for name, value in present.items():
        parameters[name].data.copy_(value.view_as(parameters[name]))
    return module


def linear_of(layer: nn.Linear) -> nn.Linear:
    """Return a copy of a linear layer as a torch.nn.Linear."""
    copied = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    copied.to(layer.weight.dtype).load_state_dict(layer.state_dict())
    return copied


def norm_of(norm: nn.Module) -> nn.Module:
    """Return PyTorch's equivalent of a normalization layer."""
    if isinstance(norm, LayerNorm):
        return copy.deepcopy(norm.norm)
    if not isinstance(norm, BatchNorm):
        return nn.Identity()
    copied = nn.BatchNorm1d(len(norm.weight), norm.eps, norm.momentum).to(norm.weight.dtype)
    copied.load_state_dict(norm.state_dict(), strict=False)  # without its count of batches
    return copied


def activation_of(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return PyTorch's equivalent of an activation."""
    return functional.elu if activation is elu else activation


def in_width(layer: nn.Module) -> int:
    """Return the number of input columns of a layer."""
    return int(layer.update.in_features if isinstance(layer, RowLayer) else layer.in_width)  # type: ignore[arg-type]
