"""PyG's convolutions as layers, unchanged."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from weft.core.errors import InputError
from weft.nn.view import View

WHOLE = ("PNAConv",)  # take no pair of sources and targets, but read of a source no more than its row


class PyGConv(nn.Module):
    """A PyG convolution over a view's block: sources, of which the targets are the first, and edges between them."""

    def __init__(self, conv: Any, out_width: int) -> None:
        super().__init__()
        self.conv, self.out_width = conv, out_width
        self.takes_pair = takes_pair(conv)

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, edge_index, num_targets = view.block(x)
        if sources.device.type == "meta":  # many convolutions look at the edges, which have no values there
            map_ = sources.new_empty(sources.shape[1], self.out_width)
            return sources[:num_targets] @ map_ + sum(t.sum() for t in (sources, *self.parameters()))
        if self.takes_pair:
            y: Tensor = self.conv((sources, sources[:num_targets]), edge_index)
            return y
        whole: Tensor = self.conv(sources, edge_index)
        return whole[:num_targets]


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
    if getattr(conv, "dropout", 0.0):
        raise InputError(f"{name} has dropout={conv.dropout} of its own, drawn anew by every rank: use Stack's dropout")
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in conv.modules()):
        raise InputError(f"{name} has a batch norm of its own, which a rank would take over its rows: use Stack's norm")
    heads = conv.heads if getattr(conv, "concat", False) and hasattr(conv, "heads") else 1
    if not isinstance(getattr(conv, "out_channels", None), int):
        raise InputError(f"{name} names no out_channels: use weft.nn.PyGConv(conv, out_width)")
    return PyGConv(conv, conv.out_channels * heads)


def takes_pair(conv: nn.Module) -> bool:
    """Whether a PyG convolution takes (x_source, x_target) for x."""
    parameter = inspect.signature(conv.forward).parameters.get("x")
    return parameter is not None and "Tuple" in str(parameter.annotation)
