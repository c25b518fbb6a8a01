"""The blocks that a rank of a vertex-parallel strategy multiplies by, and the view that layers have of them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from weft.comm import Halo, Parts, split_product, sum_over_ranks
from weft.nn import GraphView, Product, SubTopology, UnitCost, even_heads, logits_of_pairs
from weft.partition import Dependencies, Hop
from weft.strategies.base import Placed
from weft.strategies.vertex.embedded import EmbeddedHalo


class Block(SubTopology):
    """A hop's in-edges on this rank.

    rows: int64, the vertices of the rank's rows, of which the hop's inputs are the first. home: has the whole graph's
    topology and features, on the host. halo: None where no rank lacks any row.
    """

    sources: Tensor
    targets: Tensor

    def __init__(self, hop: Hop, rows: Tensor, home: Placed, halo: Halo | None) -> None:
        self.device = home.group.device
        sources = torch.cat([rows[: hop.num_inputs], hop.fetched])  # on the host
        adjacency = hop.block.cast(home.work.dtype).to(self.device)
        super().__init__(adjacency, sources, sources[: adjacency.num_targets], home.topology)
        self.num_relations = len(home.graph.relations)
        self.hop, self.home, self.halo = hop, home, halo
        self._parts: dict[Product, Parts] = {}
        self._places: dict[Block, Tensor] = {}

    @cached_property
    def features(self) -> Tensor:
        """The sources' features, for who needs them in every epoch."""
        return self.home.features(self.sources)

    @cached_property
    def edge_type(self) -> Tensor | None:
        types = self.home.graph.edge_type
        return None if types is None else types[self.hop.edge_ids]

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = self.home.topology.edge_features_at(self.hop.edge_ids)
        return None if features is None else features.to(self.device)

    def parts(self, product: Product, dtype: torch.dtype) -> Parts:
        """The product in parts: over the inputs, and over what each rank sends."""
        if product not in self._parts:
            group, savings = self.home.group, self.home.work.savings
            ring = [(group.rank - step) % group.size for step in range(1, group.size)]
            self._parts[product] = split_product(
                self.adjacency,
                self.hop.num_inputs,
                self.hop.received,
                self.scale(product, dtype),
                weighted=product.weighted,
                by_rank=ring if savings.ring else (),
            )
        return self._parts[product]

    def all_sources(self, x: Tensor) -> Tensor:
        """The rows of all sources, from those of the inputs."""
        return x if self.halo is None else torch.cat([x, self.halo.fetch(x)])

    def places_in(self, other: Block) -> Tensor:
        """Where each of the sources stands among another block's, which has them all: int64."""
        if other not in self._places:
            place = torch.empty(self.home.graph.num_vertices, dtype=torch.int64)
            place[other.sources] = torch.arange(len(other.sources))
            self._places[other] = place[self.sources].to(self.device)
        return self._places[other]


class BlockView(GraphView):
    """Products over the blocks of one stage; what a block's sources lack is fetched."""

    unit_cost = UnitCost(inputs=1, dropped=1, rows=4)
    nested = True

    def __init__(
        self,
        home: Placed,
        dependencies: Dependencies,
        blocks: tuple[Block, ...],
        row_ids: Tensor,
        view_key: int,
        embedded: EmbeddedHalo | None = None,
    ) -> None:
        first = blocks[0] if blocks else home.topology
        super().__init__(first, key=view_key, inputs=home.inputs, meter=home.group.meter)
        self.home, self.blocks, self.embedded = home, blocks, embedded
        self._num_own, self._row_ids = dependencies.num_own, row_ids

    @property
    def num_vertices(self) -> int:
        return self.home.graph.num_vertices

    @property
    def row_ids(self) -> Tensor:
        return self._row_ids

    def targets(self, x: Tensor) -> Tensor:
        num_targets = len(self.blocks[-1].targets) if self.blocks else len(x)
        return x if len(x) == num_targets else x[:num_targets]

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        bounds = even_heads(h, logit_src)
        first = self.blocks[0]
        packed = first.all_sources(torch.cat([h, logit_src], 1))
        h, logits = (part.contiguous() for part in packed.split([h.shape[1], logit_src.shape[1]], 1))
        for step, block in enumerate(self.blocks[:steps]):
            h = block.all_sources(h) if step else h
            logit_src = logits if block is first else logits.index_select(0, block.places_in(first))
            h = self._attention(h, logit_src, logit_dst[: len(block.targets)], bounds, slope, 1, block)
        return h

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
        first, vector = self.blocks[0], attention.reshape(-1)
        if left is None:
            h = left = first.all_sources(h)
        else:
            packed = first.all_sources(torch.cat([h, left], 1))
            h, left = (part.contiguous() for part in packed.split([h.shape[1], left.shape[1]], 1))
        bounds = even_heads(left, attention.t())
        for step, block in enumerate(self.blocks[:steps]):
            h = block.all_sources(h) if step else h
            if step == 0 or block is not self.blocks[step - 1]:
                own = left if block is first else left.index_select(0, block.places_in(first))
                dst = right[: len(block.targets)]
                logits = logits_of_pairs(block, own, dst, vector, edge_map, bounds, slope)
            h = self._attend_edges(h, logits, even_heads(h, logits), 1, block)
        return h

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        (block,) = self.blocks
        return self._sources(x, block, once=False), block.edge_index, len(block.targets)

    def embed(self, weight: Tensor) -> Tensor:
        return self.embedded.fetch(weight) if self.embedded else weight

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x[: self._num_own].sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        one, once = product._replace(steps=1), self.origin(x) == "inputs" and self.inputs.savings.reuse
        for block in self.blocks[: product.steps]:
            if block.halo is None or product.reduce == "max" or self.origin(x) != "rows":
                x = self._product(self._sources(x, block, once=once), one, block)
            else:
                x = block.halo.product(x, block.parts(one, x.dtype))
                self._count(x, block, 1)
        return x

    def _relate(self, x: Tensor) -> Tensor:
        once = self.origin(x) == "inputs" and self.inputs.savings.reuse
        return super()._relate(self._sources(x, self.blocks[0], once=once))

    def _sources(self, x: Tensor, block: Block, *, once: bool) -> Tensor:
        """The rows of all sources of a block, from those of its inputs; `once`: constant ones need not be kept."""
        if self.origin(x) == "rows":
            return block.all_sources(x)
        return self._constant(x, self.home.features(block.sources) if once else block.features, block.ids)


class SameRowsView(BlockView):
    """Blocks without cached vertices: a stage has the same rows before and after its products."""

    nested = False
