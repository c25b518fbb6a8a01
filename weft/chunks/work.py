"""What is done on one chunk of a graph, and what memory that takes on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weft.chunks.bounds import WorkingSet
from weft.core import native
from weft.data import Adjacency
from weft.kernels import attend, attend_edges, spmm, spmm_transposed
from weft.nn import Product, Topology, logits_of_pairs, mean_scale, multiply


class Work(Protocol):
    """What is done on a chunk's rows h [s, f], with `extra` numbers [s, e] of each that stay what they are.

    parameters: of the model, the same for all chunks; None where one is left out.
    """

    @property
    def linear(self) -> bool:
        """Whether its gradient needs no rows; `transposed` gives it then."""
        ...

    def __call__(self, topology: Topology, h: Tensor, extra: Tensor, *parameters: Tensor | None) -> Tensor:
        """The destinations' rows [n, f]."""
        ...

    def transposed(self, topology: Topology, grad: Tensor) -> Tensor:
        """The gradient [s, f] of h from that of the result [n, f]."""
        ...


@dataclass(frozen=True)
class Multiply:
    """A product with the adjacency."""

    product: Product

    @property
    def linear(self) -> bool:
        return self.product.reduce != "max"

    def __call__(self, topology: Topology, h: Tensor, extra: Tensor, *parameters: Tensor | None) -> Tensor:
        del extra, parameters
        return multiply(topology, h, self.product)

    def transposed(self, topology: Topology, grad: Tensor) -> Tensor:
        scale = topology.scale(self.product, grad.dtype)
        return spmm_transposed(topology.adjacency, grad, scale=scale, weighted=self.product.weighted)


@dataclass(frozen=True)
class Attend:
    """Attention by logits [logit_src | logit_dst], those of the heads that the columns at hand belong to."""

    bounds: tuple[int, ...]
    slope: float
    linear = False

    def __call__(self, topology: Topology, h: Tensor, extra: Tensor, *parameters: Tensor | None) -> Tensor:
        del parameters
        heads = len(self.bounds) - 1
        logit_src = extra[:, :heads].contiguous()
        logit_dst = extra[: topology.adjacency.num_targets, heads:].contiguous()
        loop, bounds = topology.loop, self.bounds
        return attend(topology.adjacency, h, logit_src, logit_dst, bounds=bounds, loop=loop, slope=self.slope)

    def transposed(self, topology: Topology, grad: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class MeanByPair:
    """The mean over the in-edges of each pair of a vertex and a relation; the topology's targets are the pairs."""

    linear = True

    def __call__(self, topology: Topology, h: Tensor, extra: Tensor, *parameters: Tensor | None) -> Tensor:
        del extra, parameters
        return spmm(topology.adjacency, h, scale=mean_scale(topology.adjacency, h.dtype))

    def transposed(self, topology: Topology, grad: Tensor) -> Tensor:
        return spmm_transposed(topology.adjacency, grad, scale=mean_scale(topology.adjacency, grad.dtype))


@dataclass(frozen=True)
class AttendPairs:
    """Attention by logits of both ends of an edge, from [left | right]; parameters: the attention vector, an edge map.

    bounds: of the heads in h. logit_bounds: in left, and in right.
    """

    bounds: tuple[int, ...]
    logit_bounds: tuple[int, ...]
    slope: float
    linear = False

    def __call__(self, topology: Topology, h: Tensor, extra: Tensor, *parameters: Tensor | None) -> Tensor:
        attention, edge_map = parameters
        assert attention is not None
        width = self.logit_bounds[-1]
        left, right = extra[:, :width].contiguous(), extra[: topology.adjacency.num_targets, width:].contiguous()
        logits = logits_of_pairs(topology, left, right, attention, edge_map, self.logit_bounds, self.slope)
        return attend_edges(topology.adjacency, h, logits, bounds=self.bounds, loop=topology.loop)

    def transposed(self, topology: Topology, grad: Tensor) -> Tensor:
        raise NotImplementedError


def working_set(
    adjacency: Adjacency,
    *,
    width: int,
    itemsize: int,
    heads: int = 0,
    logit_width: int = 0,
    num_edge_features: int = 0,
    by_edge: bool = False,
    weighted: bool = False,
    maximum: bool = False,
    relates: bool = False,
) -> WorkingSet:
    """What a product on `width` columns, of `heads` heads, has on the device for each vertex and edge of a chunk.

    That is the larger of forward and backward, where whatever is not linear is computed again: the chunk's edges, and
    backward their transpose; rows and results with their gradients; scalings, what logits are made of (`logit_width`
    numbers of either end) and, by edge, the logits; a maximum's places. A product that relates has a result for each
    pair of a vertex and a relation, of which there may be as many as edges.
    """
    row, index = width * itemsize, adjacency.indices.itemsize
    edge_id = native.id_dtype(adjacency.num_edges).itemsize
    if heads:
        logits, ends = heads * itemsize, logit_width * itemsize
        edges = 5 * logits + num_edge_features * itemsize if by_edge else 0
        return WorkingSet(
            9 + 3 * row + 5 * logits + 2 * ends + edges, 16 + 2 * row + 7 * ends, 2 * index + edge_id + edges
        )
    if relates:
        return WorkingSet(0, 16 + row, index + 8 + itemsize + row, relates=True)  # a pair has an edge at least
    if maximum:
        return WorkingSet(8 + 3 * row, 16 + 2 * row, 2 * index + edge_id)
    weight = itemsize if weighted else 0
    return WorkingSet(8 + 2 * itemsize + row, 16 + itemsize + row, index + weight)
