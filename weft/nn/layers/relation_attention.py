"""Attention of PyG's GATConv, GATv2Conv and TransformerConv between two vertex types, by weft's kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from weft.data import Adjacency
from weft.kernels import attend, attend_edges, dot_logits, pair_logits
from weft.nn.aggregate.attention import even_heads
from weft.nn.layers.conv import by_head


class Transform(NamedTuple):
    """Linear transform of some rows."""

    weight: Tensor
    """Weight, [o, i]."""
    bias: Tensor | None
    """Bias, [o]; None: there is none."""

    @classmethod
    def of(cls, linear: Any) -> Transform:
        """Return the transform of a linear layer."""
        return cls(linear.weight, linear.bias)


class AttentionKernel(NamedTuple):
    """Computation of one class of convolutions."""

    transforms: Callable[[Any], tuple[Sequence[Transform], Sequence[Transform]]]
    """Function of a convolution that returns transforms of the rows of sources, and of those of targets."""
    run: Callable[..., Tensor]
    """Function of an `AttentionCall` and the rows after each transform that returns the result, [n, .]."""


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


def attend_relations(calls: Sequence[AttentionCall]) -> list[Tensor]:
    """Return the results of several convolutions, whose linear transforms of the same rows are one product.

    Args:
        calls: The calls.
    """
    kernels, products, counts = [KERNELS[type(call.conv).__name__] for call in calls], [], []
    for call, kernel in zip(calls, kernels, strict=True):
        of_sources, of_targets = kernel.transforms(call.conv)
        products += [(call.sources, each) for each in of_sources] + [(call.targets, each) for each in of_targets]
        counts.append(len(of_sources) + len(of_targets))
    transformed = transform_each(products)
    return [
        kernel.run(call, *islice(transformed, count))
        for call, kernel, count in zip(calls, kernels, counts, strict=True)
    ]


def transform_each(products: Sequence[tuple[Tensor, Transform]]) -> Iterator[Tensor]:
    """Yield the rows after each linear transform; those of the same tensor are computed as one.

    Args:
        products: Rows [n, i], and their transform.
    """
    numbers_by_rows = defaultdict[int, list[int]](list)
    for number, (x, _) in enumerate(products):
        numbers_by_rows[id(x)].append(number)
    transformed: dict[int, Tensor] = {}
    for numbers in numbers_by_rows.values():
        (x, _), weights = products[numbers[0]], [products[number][1].weight for number in numbers]
        biases = [products[number][1].bias for number in numbers]
        present = [x.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        y = functional.linear(x, torch.cat(weights), torch.cat(present) if any(b is not None for b in biases) else None)
        # Kernels need contiguous rows; the product is freed.
        parts = [part.contiguous() for part in y.split([*map(len, weights)], 1)]
        transformed |= zip(numbers, parts, strict=True)
        del y
    return (transformed.pop(number) for number in range(len(products)))


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


def _transforms_of_gat(conv: Any) -> tuple[list[Transform], list[Transform]]:
    linear, linear_target = (conv.lin_src, conv.lin_dst) if conv.lin is None else (conv.lin, conv.lin)
    # The targets' logits are linear in their rows, so the weights [H, in] are combined instead of the rows.
    by_heads = linear_target.weight.view(conv.heads, conv.out_channels, -1)
    logits = Transform((by_heads * conv.att_dst[0].unsqueeze(-1)).sum(1), None)
    return [Transform(linear.weight, None)], [logits]


def _gat(call: AttentionCall, h: Tensor, logit_dst: Tensor) -> Tensor:
    """Compute GATConv (Velickovic et al. 2018, eqs. 1-6)."""
    conv, adjacency, _, targets = call
    bounds, logit_src = even_heads(h.shape[1], conv.heads), h @ by_head(conv.att_src[0])
    y = attend(adjacency, h, logit_src, logit_dst, bounds=bounds, slope=conv.negative_slope)
    result: Tensor = combine_heads(conv, y, targets)
    return result


def _transforms_of_gatv2(conv: Any) -> tuple[list[Transform], list[Transform]]:
    return [Transform.of(conv.lin_l)], [Transform.of(conv.lin_r)]


def _gatv2(call: AttentionCall, left: Tensor, right: Tensor) -> Tensor:
    """Compute GATv2Conv (Brody et al. 2022, eq. 7)."""
    conv, adjacency, _, targets = call
    bounds = even_heads(left.shape[1], conv.heads)
    logits = pair_logits(adjacency, left, right, conv.att.reshape(-1), bounds=bounds, slope=conv.negative_slope)
    result: Tensor = combine_heads(conv, attend_edges(adjacency, left, logits, bounds=bounds), targets)
    return result


def _transforms_of_transformer(conv: Any) -> tuple[list[Transform], list[Transform]]:
    # The factor of the logits is applied to the weights of the queries instead of the edges.
    (weight, bias), factor = Transform.of(conv.lin_query), conv.out_channels**-0.5
    query = Transform(weight * factor, None if bias is None else bias * factor)
    skip = [Transform.of(conv.lin_skip)] if conv.root_weight else []
    return [Transform.of(conv.lin_key), Transform.of(conv.lin_value)], [query, *skip]


def _transformer(call: AttentionCall, key: Tensor, value: Tensor, query: Tensor, skip: Tensor | None = None) -> Tensor:
    """Compute TransformerConv (Shi et al. 2021, eqs. 3-5)."""
    conv, bounds = call.conv, even_heads(value.shape[1], call.conv.heads)
    logits = dot_logits(call.adjacency, key, query, bounds=bounds)
    y = attend_edges(call.adjacency, value, logits, bounds=bounds)
    y = y if conv.concat else y.view(-1, conv.heads, conv.out_channels).mean(1)
    if skip is None:
        return y
    if conv.lin_beta is None:
        return y + skip
    beta = conv.lin_beta(torch.cat([y, skip, y - skip], 1)).sigmoid()
    return torch.lerp(y, skip, beta)


KERNELS = {
    "GATConv": AttentionKernel(_transforms_of_gat, _gat),
    "GATv2Conv": AttentionKernel(_transforms_of_gatv2, _gatv2),
    "TransformerConv": AttentionKernel(_transforms_of_transformer, _transformer),
}
"""Kernel of each convolution, by the name of PyG's class."""
