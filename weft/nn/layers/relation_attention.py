"""Attention of PyG's GATConv, GATv2Conv and TransformerConv between two vertex types, by weft's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from weft.data import Adjacency
from weft.kernels import attend, attend_edges, dot_logits, pair_logits
from weft.nn.aggregate.attention import even_heads
from weft.nn.layers.conv import by_head


class AttentionCall(NamedTuple):
    """Call of a convolution over one relation."""

    conv: Any
    """The convolution, for which `native_attention` returns True."""
    adjacency: Adjacency
    """Edges of the relation."""
    sources: Tensor
    """Rows of the sources, [s, i]."""
    targets: Tensor
    """Rows of the targets, [n, j]."""


def native_attention(conv: Any) -> bool:
    """Return whether weft's kernels compute a convolution of PyG with its options."""
    kind = type(conv)
    if kind.__name__ not in KERNELS or not kind.__module__.startswith("torch_geometric.nn.conv"):
        return False
    # Of the convolution, its message functions (such as _message_forward_hooks) and its linear layers.
    names = ("forward_hooks", "forward_pre_hooks")
    hooked = any(hooks for part in conv.modules() for name, hooks in vars(part).items() if name.endswith(names))
    has_loops = getattr(conv, "add_self_loops", False)
    return not (hooked or has_loops or conv.edge_dim is not None or conv.aggr not in ("add", "sum"))


def relation_attention(call: AttentionCall) -> Tensor:
    """Return the result of a convolution that `native_attention` accepts, [n, .].

    Args:
        call: The convolution, and what it reads.
    """
    return KERNELS[type(call.conv).__name__](call)


def han_attention(conv: Any, relation: str, adjacency: Adjacency, sources: Tensor, targets: Tensor) -> Tensor:
    """Return the attention of HANConv over one relation, of rows that are already transformed.

    Wang et al. 2019, eqs. 2-5.

    Args:
        conv: The convolution.
        relation: Name of its parameters for the relation.
        adjacency: Edges of the relation.
        sources: Rows of the sources, [s, H D].
        targets: Rows of the targets, [n, H D].
    """
    of_sources, of_targets = (by_head(part[relation][0]) for part in (conv.lin_src, conv.lin_dst))
    bounds = even_heads(sources.shape[1], conv.heads)
    logits = sources @ of_sources, targets @ of_targets
    return torch.relu(attend(adjacency, sources, *logits, bounds=bounds, slope=conv.negative_slope))


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


def _gat(call: AttentionCall) -> Tensor:
    """Compute GATConv (Velickovic et al. 2018, eqs. 1-6)."""
    conv, adjacency, sources, targets = call
    linear, linear_target = (conv.lin_src, conv.lin_dst) if conv.lin is None else (conv.lin, conv.lin)
    h = functional.linear(sources, linear.weight)
    # The targets' logits are linear in their rows, so the weights [H, in] are combined instead of the rows.
    by_heads = linear_target.weight.view(conv.heads, conv.out_channels, -1)
    logit_dst = functional.linear(targets, (by_heads * conv.att_dst[0].unsqueeze(-1)).sum(1))
    bounds, logit_src = even_heads(h.shape[1], conv.heads), h @ by_head(conv.att_src[0])
    y = attend(adjacency, h, logit_src, logit_dst, bounds=bounds, slope=conv.negative_slope)
    result: Tensor = combine_heads(conv, y, targets)
    return result


def _gatv2(call: AttentionCall) -> Tensor:
    """Compute GATv2Conv (Brody et al. 2022, eq. 7)."""
    conv, adjacency, sources, targets = call
    left, right = conv.lin_l(sources), conv.lin_r(targets)
    bounds = even_heads(left.shape[1], conv.heads)
    logits = pair_logits(adjacency, left, right, conv.att.reshape(-1), bounds=bounds, slope=conv.negative_slope)
    result: Tensor = combine_heads(conv, attend_edges(adjacency, left, logits, bounds=bounds), targets)
    return result


def _transformer(call: AttentionCall) -> Tensor:
    """Compute TransformerConv (Shi et al. 2021, eqs. 3-5)."""
    conv, adjacency, sources, targets = call
    # The factor of the logits is applied to the weight of the queries instead of the edges.
    factor, weight, bias = conv.out_channels**-0.5, conv.lin_query.weight, conv.lin_query.bias
    query = functional.linear(targets, weight * factor, None if bias is None else bias * factor)
    value = conv.lin_value(sources)
    bounds = even_heads(value.shape[1], conv.heads)
    logits = dot_logits(adjacency, conv.lin_key(sources), query, bounds=bounds)
    y: Tensor = attend_edges(adjacency, value, logits, bounds=bounds)
    y = y if conv.concat else y.view(-1, conv.heads, conv.out_channels).mean(1)
    if not conv.root_weight:
        return y
    skip: Tensor = conv.lin_skip(targets)
    if conv.lin_beta is None:
        return y + skip
    return torch.lerp(y, skip, conv.lin_beta(torch.cat([y, skip, y - skip], 1)).sigmoid())


KERNELS: dict[str, Callable[[AttentionCall], Tensor]] = {
    "GATConv": _gat,
    "GATv2Conv": _gatv2,
    "TransformerConv": _transformer,
}
"""Function that computes each convolution, by the name of PyG's class."""
