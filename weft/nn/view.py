"""What a layer sees of the graph: `View`, and the view of one device that holds all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.meter import Meter
from weft.core.random import key as make_key
from weft.core.savings import ALL_SAVINGS, Savings
from weft.data import Adjacency
from weft.kernels import attend, attend_edges, keyed_dropout, pair_logits, spmm, spmm_max
from weft.nn.dense import linear
from weft.nn.pairs import PairMaps, Pairs
from weft.nn.topology import Norm, Product, Reduce, Topology


class View(Protocol):
    """A layer's middle phase, over in-edges, and what else couples rows or names them. Rows are [n, F]."""

    def propagate(
        self, x: Tensor, *, reduce: Reduce = "sum", norm: Norm = None, weighted: bool = False, steps: int = 1
    ) -> Tensor:
        """`A^steps x`: the sum, mean or maximum over in-neighbours, zero where there are none.

        norm 'gcn' is D^-1/2 (A + I) D^-1/2 (Kipf and Welling 2017, eq. 2). weighted uses the graph's edge weights.
        """
        ...

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        """The sum of h [n, H D] over in-edges and v itself, weighted by edge softmax; the weights serve all steps.

        The softmax is of leaky_relu(logit_src_u + logit_dst_v), logits [n, H], both of all rows of h.
        """
        ...

    def attend_pairs(
        self,
        h: Tensor,
        left: Tensor | None,
        right: Tensor,
        attention: Tensor,
        *,
        edge_map: Tensor | None = None,
        slope: float,
        steps: int = 1,
    ) -> Tensor:
        """As `attend`, by logits that need both ends of an edge: `attention . leaky_relu(left_u + right_v)`, by head.

        left, right [n, H C], of all rows of h, and attention [H, C]; left None: h itself. With edge_map [K, H C], the
        argument has the graph's edge features times it besides; v's own edge, where the graph has none, has the mean of
        those of v's in-edges.
        """
        ...

    def relate(self, x: Tensor, weight: Tensor) -> Tensor:
        """Over relations r, the sum of `W_r` times the mean of x [n, B i] over in-neighbours by r: [n, B o].

        weight: [R, B, i, o], for each relation a block-diagonal matrix with B blocks.
        """
        ...

    @property
    def typed_rows(self) -> TypedRows:
        """What is known of this rank's rows in a graph whose vertices have no features of one width."""
        ...

    def embed(self, weight: Tensor) -> Tensor:
        """A row for each of this rank's vertices without features, from the rows that it keeps of an embedding."""
        ...

    def targets(self, x: Tensor) -> Tensor:
        """The destination rows of a source tensor: its first ones. A rank may compute fewer rows than it reads."""
        ...

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """(source rows, edge_index [2, E], number of targets), for a layer that wants the edges themselves."""
        ...

    @property
    def edge_features(self) -> Tensor | None:
        """What is known of the edges that `block` gave, in their order: [E, K], constant; None if nothing is."""
        ...

    @property
    def edge_weight(self) -> Tensor | None:
        """The weights of the edges that `block` gave, in their order: [E], constant; None if they have none."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum [F] of the rows, every vertex counted once."""
        ...

    @property
    def num_vertices(self) -> int:
        """The number of rows that `total` sums."""
        ...

    def dropout(self, x: Tensor, p: float, *, relu: bool = False) -> Tensor:
        """Dropout whose mask depends on (seed, epoch, stage, call, vertex, column) alone; with relu, of max(x, 0)."""
        ...

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """`x W` and what is added to it, rows or one bias, as weft.nn.linear; constant features may be sparse."""
        ...

    def maps_first(self, x: Tensor, out_width: int) -> bool:
        """Whether mapping x to `out_width` columns before their aggregate costs a training step less than after it."""
        ...


class UnitCost(NamedTuple):
    """Passes over the edges, or over the network, that one column costs a training step, by where it comes from."""

    inputs: float
    dropped: float
    rows: float


Origin = Literal["inputs", "dropped", "rows"]


@dataclass(frozen=True, kw_only=True)
class TypedRows:
    """A rank's rows by vertex type, where types differ in their features.

    features: [k, F_t] of the rows of each type that has some. num_embedded: the rows of the other types.
    order: int64 [n], where each of the rank's rows stands among those of features[0], features[1] and so on, and the
    embedded ones last; None: they stand in order.
    """

    features: tuple[Tensor, ...]
    num_embedded: int
    order: Tensor | None = None


@dataclass(kw_only=True)
class Inputs:
    """The constant features of a run, and what of them needs to be computed only once.

    sparse: so few are not zero that maps go by those. sparse_first: and are dearer after an aggregate.
    typed: what there is instead, where the vertices have no features of one width; rows is [n, 0] then.
    related: the mean by pairs of vertex and relation.
    """

    rows: Tensor | None = None
    savings: Savings = ALL_SAVINGS
    sparse: bool = False
    sparse_first: bool = False
    kept: dict[Product, Tensor] = field(default_factory=dict)
    typed: TypedRows | None = None
    related: Tensor | None = None

    @cached_property
    def nonzeros(self) -> Adjacency:
        """The rows as a sparse matrix."""
        assert self.rows is not None
        return Adjacency.from_dense(self.rows)


class GraphView:
    """The view of one device that holds every row and every edge."""

    unit_cost = UnitCost(inputs=1, dropped=1, rows=2)
    sparse_first = True
    """Whether the kept aggregate of constant features may be given up for maps by their nonzeros."""
    no_block = ""
    """Why a layer cannot have the edges themselves, where it cannot."""
    nested = False
    """Whether a stage may have fewer rows after its product than before it."""

    def __init__(
        self, topology: Topology, *, key: int = 0, inputs: Inputs | None = None, meter: Meter | None = None
    ) -> None:
        self.topology = topology
        self.inputs = inputs or Inputs()
        self.meter = meter or Meter()
        self._key = key
        self._calls = 0
        self._dropped: Tensor | None = None
        self._mask = (0, 0.0)

    @classmethod
    def of(
        cls,
        adjacency: Adjacency,
        *,
        edge_features: Tensor | None = None,
        edge_type: Tensor | None = None,
        num_relations: int = 0,
        key: int = 0,
    ) -> GraphView:
        """The view that a plain script hands to a layer; edge_features [E, K] and edge_type [E] are in edge order."""
        topology = Topology(adjacency, edge_features=edge_features, edge_type=edge_type, num_relations=num_relations)
        return cls(topology, key=key)

    @property
    def num_vertices(self) -> int:
        return self.topology.adjacency.num_targets

    @property
    def row_ids(self) -> Tensor:
        """What the vertices of this rank's rows were called first, int64 [n]: dropout's masks go by it."""
        return self.topology.ids

    def propagate(
        self, x: Tensor, *, reduce: Reduce = "sum", norm: Norm = None, weighted: bool = False, steps: int = 1
    ) -> Tensor:
        weighted = weighted and self.topology.adjacency.weight is not None
        product = Product(reduce, norm, weighted, steps)
        if self.origin(x) != "inputs" or not self.inputs.savings.reuse:
            return self._propagate(x, product)
        if product not in self.inputs.kept:
            with self.meter.during("setup"), torch.no_grad():
                self.inputs.kept[product] = self._propagate(x, product)
        return self.inputs.kept[product]

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        return self._attention(h, logit_src, logit_dst, even_heads(h, logit_src), slope, steps, self.topology)

    def attend_pairs(
        self,
        h: Tensor,
        left: Tensor | None,
        right: Tensor,
        attention: Tensor,
        *,
        edge_map: Tensor | None = None,
        slope: float,
        steps: int = 1,
    ) -> Tensor:
        left = h if left is None else left
        bounds = even_heads(left, attention.t())
        logits = logits_of_pairs(self.topology, left, right, attention.reshape(-1), edge_map, bounds, slope)
        return self._attend_edges(h, logits, even_heads(h, logits), steps, self.topology)

    def relate(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.origin(x) != "inputs" or not self.inputs.savings.reuse:
            return self.pairs.map(self._relate(x), weight)
        if self.inputs.related is None:
            with self.meter.during("setup"), torch.no_grad():
                self.inputs.related = self._relate(x)
        return self.pairs.map(self.inputs.related, weight)

    @property
    def pairs(self) -> PairMaps:
        """The pairs of vertex and relation that this rank has at home."""
        return self.topology.pairs

    @property
    def typed_rows(self) -> TypedRows:
        if self.inputs.typed is None:
            raise InputError("a TypedInput is for a graph without x: leave it out")
        return self.inputs.typed

    def embed(self, weight: Tensor) -> Tensor:
        return weight

    def targets(self, x: Tensor) -> Tensor:
        return x

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        if self.no_block:
            raise InputError(self.no_block)
        return x, self.topology.edge_index, self.num_vertices

    @property
    def edge_features(self) -> Tensor | None:
        if self.no_block:
            raise InputError(self.no_block)
        return self.topology.edge_features

    @property
    def edge_weight(self) -> Tensor | None:
        if self.no_block:
            raise InputError(self.no_block)
        return self.topology.adjacency.weight

    def total(self, x: Tensor) -> Tensor:
        return x.sum(0)

    def dropout(self, x: Tensor, p: float, *, relu: bool = False) -> Tensor:
        if relu and (p == 0 or not self.inputs.savings.fuse):
            x, relu = torch.relu(x), False
        if p == 0:
            return x
        self._calls += 1
        key = make_key(self._key, self._calls)
        dropped = self._drop(x, key, p, relu)
        if self.origin(x) == "inputs":
            self._dropped, self._mask = dropped, (key, p)
        return dropped

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        inputs = self.inputs
        if not (inputs.sparse and self.origin(x) == "inputs"):
            return linear(x, weight, added)
        y = spmm(inputs.nonzeros, weight, weighted=True)
        return y if added is None else y.add_(added)

    def maps_first(self, x: Tensor, out_width: int) -> bool:
        origin, inputs = self.origin(x), self.inputs
        if not inputs.savings.swap:
            return False
        if origin == "inputs" and inputs.savings.reuse:
            return self.sparse_first and inputs.sparse_first
        unit: float = getattr(self.unit_cost, origin)
        return out_width * self.unit_cost.rows < x.shape[1] * unit

    def origin(self, x: Tensor) -> Origin:
        """Whether x is the run's constant features, those features under dropout, or rows that a layer computed."""
        if x is self.inputs.rows:
            return "inputs"
        return "dropped" if x is self._dropped else "rows"

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        return self._product(x, product, self.topology)

    def _relate(self, x: Tensor) -> Tensor:
        """The mean [m, F] by pair at home."""
        return self._mean_by_pair(x, self.topology.pairs)

    def _mean_by_pair(self, x: Tensor, pairs: Pairs) -> Tensor:
        """The mean [M, .] of the columns at hand by every pair, counted like a product."""
        z = pairs.mean(x)
        self._count(z, self.topology, 1)
        return z

    def _drop(self, x: Tensor, key: int, p: float, relu: bool) -> Tensor:
        return keyed_dropout(x, self.row_ids[: len(x)], key=key, p=p, relu=relu)

    def _constant(self, x: Tensor, features: Tensor, ids: Tensor, first_column: int = 0) -> Tensor:
        """Other rows or columns of the features, under the dropout that made x of them: no byte on the network."""
        if self.origin(x) == "inputs":
            return features
        key, p = self._mask
        return keyed_dropout(features, ids, key=key, p=p, first_column=first_column)

    def _product(self, x: Tensor, product: Product, topology: Topology) -> Tensor:
        """The product on the columns at hand, counted forward and backward."""
        for _ in range(product.steps):
            x = multiply(topology, x, product)
            self._count(x, topology, 1)
        return x

    def _attention(
        self,
        h: Tensor,
        logit_src: Tensor,
        logit_dst: Tensor,
        bounds: Sequence[int],
        slope: float,
        steps: int,
        topology: Topology,
    ) -> Tensor:
        """Attention on the columns at hand, of which head j has `bounds[j]:bounds[j + 1]`; counted like a product."""
        y = attend(
            topology.adjacency, h, logit_src, logit_dst, bounds=bounds, loop=topology.loop, slope=slope, steps=steps
        )
        self._count(y, topology, steps)
        return y

    def _attend_edges(self, h: Tensor, logits: Tensor, bounds: Sequence[int], steps: int, topology: Topology) -> Tensor:
        """Attention by given logits on the columns at hand; counted like a product."""
        y = attend_edges(topology.adjacency, h, logits, bounds=bounds, loop=topology.loop, steps=steps)
        self._count(y, topology, steps)
        return y

    def _count(self, y: Tensor, topology: Topology, steps: int) -> None:
        """Counts products on y's columns now, and the transposed ones when y's gradient arrives."""
        meter, edges, width = self.meter, topology.adjacency.num_edges * steps, y.shape[1]
        meter.aggregate(edges, width)
        if y.requires_grad:
            y.register_hook(lambda _: meter.aggregate(edges, width))


def multiply(topology: Topology, x: Tensor, product: Product) -> Tensor:
    """One step of a product."""
    if product.reduce == "max":
        return spmm_max(topology.adjacency, x)
    return spmm(topology.adjacency, x, scale=topology.scale(product, x.dtype), weighted=product.weighted)


def logits_of_pairs(
    topology: Topology,
    left: Tensor,
    right: Tensor,
    attention: Tensor,
    edge_map: Tensor | None,
    bounds: Sequence[int],
    slope: float,
) -> Tensor:
    """The logits [E + n, H] of a topology's edges and loops, or the part that the columns at hand contribute."""
    return pair_logits(
        topology.adjacency,
        left,
        right,
        attention,
        edge_map,
        bounds=bounds,
        loop=topology.loop,
        slope=slope,
        features=None if edge_map is None else topology.known_edges,
    )


def even_heads(h: Tensor, logits: Tensor) -> list[int]:
    """Bounds of the columns of each head, where all of them are here."""
    width = h.shape[1] // logits.shape[1]
    return [width * head for head in range(logits.shape[1] + 1)]
