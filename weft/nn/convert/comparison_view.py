"""View of a converted model that is compared with its original. It records dropout, and splits the vertices in two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.nn.aggregate.aggregate import Aggregate, Rows, WholeLayer
from weft.nn.aggregate.attention import MaskKey
from weft.nn.aggregate.topology import Topology
from weft.nn.aggregate.typed_block import TypedBlock, split_by_relation
from weft.nn.convert.traced_model import Converted
from weft.nn.graph_view import GraphView
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.layers.relation_convs import RelationConvs
from weft.nn.layers.typed_conv import TypedLayer

ON_BY_DEFAULT = ("dropout", "dropout1d", "dropout2d", "dropout3d")
"""Functions of torch.nn.functional that drop values unless `training=False` is given."""
DROPOUT = (*ON_BY_DEFAULT, "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
"""All functions that drop values; those in place have the same names with "_" at the end."""


class Dropped(NamedTuple):
    """One call of dropout."""

    function: str
    """Name of the function."""
    p: float
    """Probability that a number becomes zero."""
    num_values: int
    """Number of values of its argument; -1: unknown, for weights of edges in a fused kernel."""


class WithoutDropout(TorchFunctionMode):
    """Mode in which PyTorch's dropout functions return their argument, and are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Dropped] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "").rstrip("_")
        if name not in DROPOUT:
            return function(*args, **(kwargs or {}))
        values = dict(zip(("input", "p", "training"), args, strict=False)) | (kwargs or {})
        x, p = values["input"], values.get("p", 0.5)
        if values.get("training", values.get("train", name in ON_BY_DEFAULT)) and p:
            self.calls.append(Dropped(name, p, x.numel()))
        return x

    def dropped(self, model: nn.Module) -> list[Dropped]:
        """Return the calls; those of a converted model are marked, since only dropout of its views is keyed.

        Args:
            model: The model that was running.
        """
        if not isinstance(model, Converted):
            return self.calls
        return [call._replace(function=f"unkeyed {call.function}") for call in self.calls]


class ComparisonView(GraphView):
    """View of the random graph that records dropout instead of applying it.

    It calls convolutions that run as PyG's code once for each of two parts of the vertices, as two ranks would: with
    the in-edges of the part alone, and copies of the rows that these read.

    Args:
        topology: The edges.
        calls: Receives the calls of dropout.
        **options: Further arguments of `GraphView`.
    """

    has_all_sources = False

    def __init__(self, topology: Topology, calls: list[Dropped], **options: Any) -> None:
        super().__init__(topology, **options)
        self._dropped_calls = calls

    def dropout(self, x: Tensor, p: float, *, relu: bool = False, rows: slice | Tensor = slice(None)) -> Tensor:
        del rows
        if p:
            self._dropped_calls.append(Dropped("dropout", p, x.numel()))
        return torch.relu(x) if relu else x

    def mask_key(self, p: float) -> MaskKey | None:
        if p:
            self._dropped_calls.append(Dropped("dropout", p, -1))
        return None

    def aggregate(self, op: Aggregate, rows: Rows, steps: int = 1) -> Tensor:
        if not (isinstance(op, WholeLayer) and isinstance(op.layer, PyGConv | RelationConvs | TypedLayer)):
            return super().aggregate(op, rows, steps)
        x = rows[op.first]
        parts = [torch.arange(first, len(x), 2) for first in (0, 1)]
        results = [op.layer(PartView(self.topology, part, x), x[part]) for part in parts]
        return torch.cat(results)[torch.cat(parts).argsort()]


class PartView:
    """Part of a view that a convolution running as PyG's code reads, on a rank that stores some of the vertices.

    Args:
        topology: The edges of the whole graph.
        part: The rank's vertices, int64, ascending.
        x: Rows of all vertices.
    """

    def __init__(self, topology: Topology, part: Tensor, x: Tensor) -> None:
        source, target = topology.edge_index
        edges = torch.isin(target, part).nonzero().view(-1)
        halo = source[edges].unique()
        self._halo = x[halo[~torch.isin(halo, part)]]
        sources = torch.cat([part, halo[~torch.isin(halo, part)]])
        position = torch.empty(len(x), dtype=torch.int64).index_copy(0, sources, torch.arange(len(sources)))
        self._edge_index = position[torch.stack([source, target])[:, edges]]
        weight, features = topology.adjacency.weight, topology.edge_features
        self.edge_weight = None if weight is None else weight[edges]
        self.edge_features = None if features is None else features[edges]
        self.edge_type = None if topology.edge_type is None else topology.edge_type[edges]
        self._num_relations = topology.num_relations

    def typed_block(self, vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        """Return what `block` returned, by relation and vertex type.

        Args:
            vertex_type: Number of each source's vertex type, [s, 1].
            num_targets: Number of targets.
            num_types: Number of vertex types.
        """
        assert self.edge_type is not None
        edges = split_by_relation(self._edge_index, self.edge_type, self._num_relations)
        return TypedBlock.divide(edges, vertex_type, num_targets, num_types)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the rows of the sources, of which x are the first, the edges, and the number of rows of x."""
        return torch.cat([x, self._halo]), self._edge_index, len(x)
