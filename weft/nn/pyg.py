"""PyG's convolutions as layers, unchanged."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from weft.core.errors import InputError
from weft.nn.view import View

PADDED = ("GRUAggregation", "LSTMAggregation", "SetTransformerAggregation", "SortAggregation", "MLPAggregation")
"""Aggregations whose result depends on the largest degree around, and so on what else a rank has."""

WHOLE = ("PNAConv",)  # take no pair of sources and targets, but read of a source no more than its row


class PyGConv(nn.Module):
    """A PyG convolution over a view's block: sources, of which the targets are the first, and edges between them.

    It gets the graph's edge features where it was made for some, and its edge weights where it takes any.
    """

    def __init__(self, conv: Any, out_width: int) -> None:
        super().__init__()
        self.conv, self.out_width = conv, out_width
        self.takes_pair = takes_pair(conv)
        self.takes = frozenset(inspect.signature(conv.forward).parameters)

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, edge_index, num_targets = view.block(x)
        known = self._known(view, sources.shape[1])
        if sources.device.type == "meta":  # many convolutions look at the edges, which have no values there
            map_ = sources.new_empty(sources.shape[1], self.out_width)
            return sources[:num_targets] @ map_ + sum(t.sum() for t in (sources, *self.parameters()))
        if self.takes_pair:
            y: Tensor = self.conv((sources, sources[:num_targets]), edge_index, **known)
            return y
        whole: Tensor = self.conv(sources, edge_index, **known)
        return whole[:num_targets]

    def _known(self, view: View, in_width: int) -> dict[str, Tensor]:
        """What the convolution is given of the edges, by the name of its argument."""
        known = {}
        if "edge_weight" in self.takes and view.edge_weight is not None:
            known["edge_weight"] = view.edge_weight
        if "edge_attr" in self.takes:
            features = view.edge_features
            found = 0 if features is None else features.shape[1]
            wanted = edge_width(self.conv, in_width, found)
            if wanted and features is None:
                raise InputError(
                    f"{type(self.conv).__name__} needs edge features, and the graph has none: give the graph "
                    "edge_features [edges, features], or take a convolution without"
                )
            if wanted and wanted != found:
                raise InputError(
                    f"{type(self.conv).__name__} takes {wanted} edge features, and the graph has {found}: "
                    f"make it with edge_dim={found}"
                )
            if wanted and features is not None:
                known["edge_attr"] = features
        return known


def from_pyg(conv: Any) -> PyGConv:
    """A layer for weft.nn.Stack from a PyG convolution such as SAGEConv, GATv2Conv or TransformerConv.

    It runs under every strategy that gives a rank all in-edges of its vertices, with the numbers of one device.
    Raises InputError for a convolution that reads more of the graph than that (GCNConv: the degrees of sources), and
    for dropout or a batch norm of its own, which would depend on the number of ranks.
    """
    name = type(conv).__name__
    if not takes_pair(conv) and name not in WHOLE:
        raise InputError(
            f"PyG's {name} takes no pair of sources and targets, so a rank cannot run it on its part of the graph: "
            "use weft.nn.GCNConv for GCN, or a convolution that takes (x_source, x_target)"
        )
    for part in conv.modules():
        p = dropout_of(part)
        if p:
            raise InputError(f"{name} has dropout={p} of its own, drawn anew by every rank: use Stack's dropout")
    padded = [type(part).__name__ for part in conv.modules() if type(part).__name__ in PADDED]
    if padded:
        raise InputError(
            f"{name} has a {padded[0]}, whose result depends on the largest degree that a rank sees: take a sum, mean, "
            "maximum or softmax"
        )
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in conv.modules()):
        raise InputError(f"{name} has a batch norm of its own, which a rank would take over its rows: use Stack's norm")
    if isinstance(getattr(conv, "out_channels", None), int):
        heads = conv.heads if getattr(conv, "concat", False) and hasattr(conv, "heads") else 1
        return PyGConv(conv, conv.out_channels * heads)
    maps = [part for part in getattr(conv, "nn", nn.Identity()).modules() if isinstance(part, nn.Linear)]
    if not maps:
        raise InputError(f"{name} names no out_channels: use weft.nn.PyGConv(conv, out_width)")
    return PyGConv(conv, maps[-1].out_features)


def dropout_of(part: nn.Module) -> float:
    """The dropout that a module draws by itself."""
    p = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    if isinstance(p, list):  # PyG's MLP, layer by layer
        p = max(p, default=0.0)
    return p if isinstance(p, int | float) else 0.0


def takes_pair(conv: nn.Module) -> bool:
    """Whether a PyG convolution takes (x_source, x_target) for x."""
    parameter = inspect.signature(conv.forward).parameters.get("x")
    return parameter is not None and "Tuple" in str(parameter.annotation)


def edge_width(conv: Any, in_width: int, found: int) -> int:
    """How many features of an edge a convolution asks for, 0 for none, on rows of in_width and `found` edge features.

    It says so by a map of them, or by an option; GENConv adds them as they are where they are as wide as its result.
    """
    name = type(conv).__name__
    mapped = getattr(conv, "lin" if name == "GINEConv" else "lin_edge", None)
    if mapped is not None:
        return int(mapped.weight.shape[1])
    if name == "GINEConv":
        return in_width
    if name == "NNConv":
        return max(found, 1)
    if name == "GENConv":
        return found if found == conv.out_channels else 0
    return next((n for field in ("edge_dim", "in_edge_channels", "dim") if (n := getattr(conv, field, None))), 0)
