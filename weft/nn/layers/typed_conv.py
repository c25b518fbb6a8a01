"""PyG convolutions that take the rows of all vertex types and the edges of all relations, such as HGTConv."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.nn.aggregate.typed_block import Place, TypedBlock
from weft.nn.layers.pyg_conv import PyGConv, drop_results
from weft.nn.view import View


class CalledTypes(NamedTuple):
    """Vertex types and relations of a convolution's call."""

    names: tuple[str, ...]
    """Names of the vertex types, in the order of the call."""
    numbers: tuple[int, ...]
    """Numbers of these types."""
    relations: tuple[tuple[str, str, str], ...]
    """Relations, in the order of the call."""
    relation_numbers: tuple[int, ...]
    """Numbers of these relations."""
    results: tuple[str, ...]
    """Names of the types of which it returns rows."""

    @property
    def small_size(self) -> tuple[int, ...]:
        """Size of a small block: sources of each type, targets of each type in `results`, edges of each relation."""
        return (6,) * len(self.names) + (4,) * len(self.results) + (5,) * len(self.relations)

    def small_block(self, size: tuple[int, ...], dtype: torch.dtype) -> BlockByType:
        """Return a block of a size as in `small_size`, to count the cost of the convolution on it.

        Args:
            size: The size.
            dtype: Ignored: the block has no rows.
        """
        del dtype
        num_types, num_results = len(self.names), len(self.results)
        sources = dict(zip(self.names, size, strict=False))
        targets = dict(zip(self.results, size[num_types:], strict=False))
        edges = []
        for (source, _, target), count in zip(self.relations, size[num_types + num_results :], strict=True):
            numbers = torch.arange(count)
            edges.append(torch.stack([(numbers + 1) % sources[source], (numbers % targets[target]).sort().values]))
        return BlockByType(self, size[:num_types], targets, edges)


class BlockByType:
    """View of a block for a `TypedConv`.

    Args:
        types: Types and relations of the call.
        num_rows: Number of sources of each type.
        targets: Number of targets of each type of which the convolution returns rows, by name.
        edges: Source and target of the edges of each relation, int64 [2, .], numbered by type.
        size: Size of the block as in `CalledTypes.small_size`, in an `OutlineView`.
    """

    edge_features = edge_weight = edge_type = target_rows = None

    def __init__(
        self,
        types: CalledTypes,
        num_rows: Sequence[int],
        targets: dict[str, int],
        edges: Sequence[Tensor],
        size: tuple[int, ...] | None = None,
    ) -> None:
        self.types, self.num_rows, self.num_results, self.edges = types, num_rows, targets, edges
        self.block_size = size

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (rows x of the first type, no edges, number of rows of the result)."""
        return x, torch.empty(2, 0, dtype=torch.int64, device=x.device), sum(self.num_results.values())


class TypedConv(PyGConv):
    """Layer that calls a PyG convolution with dicts of rows by vertex type and of edges by relation.

    It is called with the rows of each type. Its result has those of all types in `CalledTypes.results`, one type after
    the other. Arguments are those of `PyGConv`.
    """

    def forward(self, view: Any, *rows: Tensor) -> Tensor:
        types: CalledTypes = view.types
        device, num_results = rows[0].device.type, sum(view.num_results.values())
        if device == "meta":  # see PyGConv
            widest = max(x.shape[1] for x in rows)
            product = rows[0].new_empty(num_results, widest) @ rows[0].new_empty(widest, self.out_width)
            return product + sum(t.sum() for t in (*rows, *self.parameters()))
        edges = dict(zip(types.relations, view.edges, strict=True))
        call = partial(self.conv, dict(zip(types.names, rows, strict=True)), edges)
        y = self.tiled.run(call) if device == "cpu" else call()
        drop_results(self.conv)
        return torch.cat([y[name][:count] for name, count in view.num_results.items()])


class TypedLayer(nn.Module):
    """Layer that calls a `TypedConv` on a block, without owning it.

    The first column of its rows is the number of the vertex's type.

    Args:
        conv: The convolution.
        types: Types and relations of the call.
        places: Place of the rows of each type.
        num_types: Number of vertex types.
    """

    def __init__(self, conv: TypedConv, types: CalledTypes, places: Sequence[Place], num_types: int) -> None:
        super().__init__()
        self.__dict__["conv"] = conv
        self.types, self.places, self.num_types = types, places, num_types
        self.number_of = dict(zip(types.names, types.numbers, strict=True))
        """Number of each type, by name."""

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, _, num_targets = view.block(x)
        vertex_type = sources[:, :1]
        block: TypedBlock = view.typed_block(vertex_type, num_targets, self.num_types)
        results = self.on_block(view, block, block.split(sources, self.places))
        return block.join(vertex_type, [self.number_of[name] for name in self.types.results], results)

    def on_block(self, view: View, block: TypedBlock, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the result of each type in `CalledTypes.results`, [n_t, .].

        Args:
            view: View of the edges of all relations.
            block: The edges by relation.
            rows: Rows of the sources of each type, [k, .].
        """
        types = self.types
        counts = {name: block.num_targets_of(self.number_of[name]) for name in types.results}
        part = BlockByType(
            types,
            [*map(len, rows)],
            counts,
            [block.edges[number].index for number in types.relation_numbers],
            self._size(view),
        )
        y: Tensor = self.__dict__["conv"](part, *rows)
        return torch.split(y, [*counts.values()])

    def _size(self, view: Any) -> tuple[int, ...] | None:
        """Return the size of the block in an `OutlineView`; None if it is unknown, as in other views."""
        size = getattr(view, "typed_size", None)
        if size is None:
            return None
        return (
            *(size.sources.counts[number] for number in self.types.numbers),
            *(size.targets.counts[self.number_of[name]] for name in self.types.results),
            *(size.edges[number] for number in self.types.relation_numbers),
        )
