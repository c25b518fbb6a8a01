"""Attention of PyG's GATConv and GATv2Conv between two vertex types, by weft's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.data import Adjacency
from weft.kernels import attend, attend_edges, pair_logits
from weft.nn.aggregate.attention import even_heads

RunAttention = Callable[[Any, Adjacency, Tensor, Tensor], Tensor]
"""Function of a convolution, the edges, and the rows of sources and targets, that returns the convolution's result."""


def native_attention(conv: Any) -> RunAttention | None:
    """Return the function that computes a convolution by weft's kernels; None if there is none for its options.

    Args:
        conv: A PyG convolution.
    """
    kind = type(conv)
    run = KERNELS.get(kind.__name__) if kind.__module__.startswith("torch_geometric.nn.conv") else None
    if run is None or conv.add_self_loops or conv.edge_dim is not None or conv.aggr not in ("add", "sum"):
        return None
    # Of the convolution, its message functions (such as _message_forward_hooks) and its linear layers.
    names = ("forward_hooks", "forward_pre_hooks")
    hooked = any(hooks for part in conv.modules() for name, hooks in vars(part).items() if name.endswith(names))
    return None if hooked else run


def combine_heads(conv: Any, y: Any, x: Any) -> Any:
    """Return the output of an attention convolution.

    Args:
        conv: The convolution.
        y: Concatenated results of the heads, [n, H D].
        x: Input rows, for a residual connection.
    """
    if not conv.concat:
        y = y.view(-1, conv.heads, conv.out_channels).mean(1)
    y = y if getattr(conv, "res", None) is None else y + conv.res(x)
    return y if conv.bias is None else y + conv.bias


def _gat(conv: Any, adjacency: Adjacency, sources: Tensor, targets: Tensor) -> Tensor:
    """Compute GATConv (Velickovic et al. 2018, eqs. 1-6)."""
    linear, linear_target = (conv.lin_src, conv.lin_dst) if conv.lin is None else (conv.lin, conv.lin)
    h = linear(sources)
    # The targets' logits are linear in their rows, so the weights [in, H] are combined instead of the rows.
    weight = linear_target.weight.view(conv.heads, conv.out_channels, -1)
    logit_dst = targets @ (weight * conv.att_dst[0].unsqueeze(-1)).sum(1).t()
    logit_src = (h.view(-1, conv.heads, conv.out_channels) * conv.att_src).sum(-1)
    bounds = even_heads(h.shape[1], conv.heads)
    y = attend(adjacency, h, logit_src, logit_dst, bounds=bounds, slope=conv.negative_slope)
    result: Tensor = combine_heads(conv, y, targets)
    return result


def _gatv2(conv: Any, adjacency: Adjacency, sources: Tensor, targets: Tensor) -> Tensor:
    """Compute GATv2Conv (Brody et al. 2022, eq. 7)."""
    left, right = conv.lin_l(sources), conv.lin_r(targets)
    bounds = even_heads(left.shape[1], conv.heads)
    logits = pair_logits(adjacency, left, right, conv.att.reshape(-1), bounds=bounds, slope=conv.negative_slope)
    result: Tensor = combine_heads(conv, attend_edges(adjacency, left, logits, bounds=bounds), targets)
    return result


KERNELS: dict[str, RunAttention] = {"GATConv": _gat, "GATv2Conv": _gatv2}
"""Function for each convolution, by the name of PyG's class."""
