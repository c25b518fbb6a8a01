"""A trained stack as a plain torch_geometric module, to be served where weft is not."""

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
    """A torch_geometric.nn.Sequential with a copy of the weights, for evaluation: x [N, F] and edge_index to logits.

    Called as `twin(x, edge_index)`, with edge_weight for a model with GCNConv (None: no weights) and then edge_attr for
    one that attends by edge features. Its numbers are those of one device, to rounding, on graphs without a repeated
    self loop, and for edge_attr without any, which PyG takes otherwise.
    InputError for another model than a weft.nn.Stack of GCN, SAGE, GIN, GAT, GATv2 and linear layers.
    """
    pyg = import_extra("torch_geometric.nn", "to_pyg")
    if not isinstance(model, Stack) or not model.is_plain or model.input is not None:
        raise InputError(f"a {type(model).__name__} has no twin in PyG: give a weft.nn.Stack over rows of one width")
    layers = list(model.layers)
    twins = [twin_of(pyg, layer) for layer in layers]
    given = [name for name in ("edge_weight", "edge_attr") if any(name in takes for _, takes in twins)]
    parts: list[tuple[Any, str]] = []
    rows = "x"
    for number, (layer, (conv, takes)) in enumerate(zip(layers, twins, strict=True)):
        behind = f"x{number + 1}"
        parts.append((conv, f"{', '.join([rows, *takes])} -> {behind}"))
        if number < len(model.norms):
            parts.append((norm_of(model.norms[number]), f"{behind} -> {behind}"))
            parts.append((activation_of(model.activation), f"{behind} -> {behind}"))
            if model.residual and in_width(layer) == layer.out_width:
                parts.append((operator.add, f"{behind}, {rows} -> {behind}"))
        rows = behind
    made = pyg.Sequential(", ".join(["x", "edge_index", *given]), parts)
    return made.to(next(model.parameters()).dtype).eval()


def twin_of(pyg: Any, layer: nn.Module) -> tuple[nn.Module, list[str]]:
    """PyG's layer with the same numbers, and what it takes beside rows. InputError where there is none."""
    plain = {"bias": getattr(layer, "bias", None) is not None}
    if isinstance(layer, GCNConv) and layer.weight is not None:
        made = pyg.GCNConv(layer.in_width, layer.out_width, **plain)
        return filled(made, {"lin.weight": layer.weight.t(), "bias": layer.bias}), ["edge_index", "edge_weight"]
    if isinstance(layer, SAGEConv) and layer.weight is not None and layer.weight_self is not None:
        made = pyg.SAGEConv(layer.in_width, layer.out_width, **plain)
        known = {"lin_l.weight": layer.weight.t(), "lin_l.bias": layer.bias, "lin_r.weight": layer.weight_self.t()}
        return filled(made, known), ["edge_index"]
    if isinstance(layer, GINConv) and isinstance(layer.mlp, nn.Sequential):
        mlp = nn.Sequential(*(linear_of(part) if isinstance(part, nn.Linear) else nn.ReLU() for part in layer.mlp))
        known = {f"nn.{name}": value for name, value in layer.mlp.state_dict().items()}  # drawn anew by GINConv
        return filled(pyg.GINConv(mlp, train_eps=True), {**known, "eps": layer.eps}), ["edge_index"]
    if isinstance(layer, GATConv | GATv2Conv) and layer.weight is not None:
        return attention_of(pyg, layer), ["edge_index", *(["edge_attr"] if layer.weight_edge is not None else [])]
    if isinstance(layer, RowLayer) and isinstance(layer.update, nn.Linear):
        return linear_of(layer.update), []
    raise InputError(f"a {type(layer).__name__} of this kind has no twin in PyG: serve the model by weft.predict")


def attention_of(pyg: Any, layer: GATConv | GATv2Conv) -> nn.Module:
    """PyG's layer for one of attention."""
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
    known: dict[str, Tensor | None]
    if isinstance(layer, GATConv):
        made = pyg.GATConv(layer.in_width, layer.head_width, **options)
        known = {"lin.weight": layer.weight.t(), "att_src": layer.attention_src, "att_dst": layer.attention_dst}
        edges |= {} if layer.attention_edge is None else {"att_edge": layer.attention_edge}
    else:
        made = pyg.GATv2Conv(layer.in_width, layer.head_width, **options)
        known = {"lin_l.weight": layer.weight.t(), "lin_r.weight": layer.weight_right.t(), "att": layer.attention}
        zeros = None if layer.bias is None else layer.weight.new_zeros(layer.weight.shape[1])
        known |= {"lin_l.bias": zeros, "lin_r.bias": zeros}
    return filled(made, {**known, **edges, "bias": layer.bias})


def filled(made: nn.Module, known: dict[str, Tensor | None]) -> nn.Module:
    """A module with these numbers in its parameters, by name; None: it has no such."""
    given = {name: value.detach() for name, value in known.items() if value is not None}
    parameters = dict(made.named_parameters())
    made.to(next(iter(given.values())).dtype)
    for name, value in given.items():
        parameters[name].data.copy_(value.view_as(parameters[name]))
    return made


def linear_of(layer: nn.Linear) -> nn.Linear:
    """A plain copy of a linear layer."""
    made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    made.to(layer.weight.dtype).load_state_dict(layer.state_dict())
    return made


def norm_of(norm: nn.Module) -> nn.Module:
    """PyTorch's layer for a normalisation in evaluation."""
    if isinstance(norm, LayerNorm):
        return copy.deepcopy(norm.norm)
    if not isinstance(norm, BatchNorm):
        return nn.Identity()
    made = nn.BatchNorm1d(len(norm.weight), norm.eps, norm.momentum).to(norm.weight.dtype)
    made.load_state_dict(norm.state_dict(), strict=False)  # but for its count of batches
    return made


def activation_of(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An activation that needs no weft."""
    return functional.elu if activation is elu else activation


def in_width(layer: nn.Module) -> int:
    """The columns that a layer takes."""
    return int(layer.update.in_features if isinstance(layer, RowLayer) else layer.in_width)  # type: ignore[arg-type]
