"""The blocks that a rank of a vertex-parallel strategy multiplies by, and the view that layers have of them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from weft.comm import Halo, Parts, split_product, sum_over_ranks
from weft.nn import Aggregate, GraphView, Rows, SubTopology, Sum, UnitCost
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
        self._parts: dict[Sum, Parts] = {}
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

    def parts(self, op: Sum, dtype: torch.dtype) -> Parts:
        """A sum in parts: over the inputs, and over what each rank sends."""
        if op not in self._parts:
            group, savings = self.home.group, self.home.work.savings
            ring = [(group.rank - step) % group.size for step in range(1, group.size)]
            self._parts[op] = split_product(
                self.adjacency,
                self.hop.num_inputs,
                self.hop.received,
                self.scale(op.norm, op.weighted, dtype),
                weighted=op.weighted and self.has_weight,
                by_rank=ring if savings.ring else (),
            )
        return self._parts[op]

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

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        (block,) = self.blocks
        return self._sources(x, block, once=False), block.edge_index, len(block.targets)

    def embed(self, weight: Tensor) -> Tensor:
        return self.embedded.fetch(weight) if self.embedded else weight

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x[: self._num_own].sum(0), self.home.group, tag="statistics")

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        x = rows[op.first]
        if not op.plain:
            return self._aggregate_several(op, rows, steps)
        once = self.origin(x) == "inputs" and self.inputs.savings.reuse
        for block in self.blocks[:steps]:
            if isinstance(op, Sum) and block.halo is not None and self.origin(x) == "rows":
                x = block.halo.product(x, block.parts(op, x.dtype))
                self._count(x, block, 1)
            else:
                x = self._run(op, {op.first: self._sources(x, block, once=once)}, 1, block)
        return x

    def _aggregate_several(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Of several tensors, those of sources side by side on the network, and once for all steps."""
        first, names = self.blocks[0], op.source
        packed = torch.cat([rows[name] for name in names], 1) if len(names) > 1 else rows[names[0]]
        packed = first.all_sources(packed)
        brought = packed.split([rows[name].shape[1] for name in names], 1)
        found = dict(zip(names, (one.contiguous() for one in brought), strict=True))
        op, rows = op.stepwise({**rows, **found})
        x, before, prepared = rows[op.first], first, op.prepare(first, self._rows_at(first, op, rows))
        for step, block in enumerate(self.blocks[:steps]):
            x = block.all_sources(x) if step else x
            if block is not before:
                before, prepared = block, op.prepare(block, self._rows_at(block, op, {**rows, op.first: x}))
            x = self._run(op, {**prepared, op.first: x}, 1, block)
        return x

    def _rows_at(self, block: Block, op: Aggregate, rows: Rows) -> Rows:
        """A block's rows, from those of the first one's sources; what is aggregated is the block's already."""
        first, num_targets = self.blocks[0], len(block.targets)
        found = {name: rows[name][:num_targets] for name in op.target}
        for name in op.source:
            known = block is first or name == op.first
            found[name] = rows[name] if known else rows[name].index_select(0, block.places_in(first))
        return {**found, **{name: rows[name] for name in op.shared}}

    def _sources(self, x: Tensor, block: Block, *, once: bool) -> Tensor:
        """The rows of all sources of a block, from those of its inputs; `once`: constant ones need not be kept."""
        if self.origin(x) == "rows":
            return block.all_sources(x)
        return self._constant(x, self.home.features(block.sources) if once else block.features, block.ids)


class SameRowsView(BlockView):
    """Blocks without cached vertices: a stage has the same rows before and after its products."""

    nested = False
