"""The exchange of vertex parallelism: the rows that the blocks of a rank's vertices lack (NeutronStar, section 2.2).

`Halos` sends; `operations` is what it sends, by the blocks' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from weft.comm import EdgeSlices, Group, Halo, slice_edges
from weft.cost import Operation
from weft.nn import Aggregate, GraphOperation, Rows, SubTopology, Sum, Topology
from weft.partition import Hop
from weft.runtime.kernel_call import KernelCall
from weft.strategies.placed_view import Exchange, PlacedView
from weft.strategies.resident import AggregateSize, ResidentPlaced, aggregate
from weft.strategies.vertex.costs import fetched_width, is_fetched
from weft.strategies.vertex.embedding_rows import EmbeddedHalo


class Block(SubTopology):
    """A hop's in-edges on this rank.

    rows: int64, the vertices of the rank's rows, of which the hop's inputs are the first. placed: has the whole graph's
    topology and features, on the host. halo: None where no rank lacks any row, or none is asked for. least: the halo of
    the hop's cover, where sums have one.
    """

    sources: Tensor
    targets: Tensor

    def __init__(
        self, hop: Hop, rows: Tensor, placed: ResidentPlaced, halo: Halo | None, least: Halo | None = None
    ) -> None:
        self.device = placed.group.device
        sources = torch.cat([rows[: hop.num_inputs], hop.fetched])  # on the host
        adjacency = hop.block.cast(placed.work.dtype).to(self.device)
        super().__init__(adjacency, sources, sources[: adjacency.num_targets], placed.topology)
        self.num_relations = len(placed.graph.relations)
        self.hop, self.placed, self.halo, self.least_halo = hop, placed, halo, least
        self._slices: dict[Sum, EdgeSlices] = {}
        self._places: dict[Block, Tensor] = {}

    @cached_property
    def features(self) -> Tensor:
        """The sources' features, for who needs them in every epoch."""
        return self.placed.features(self.sources)

    @cached_property
    def edge_type(self) -> Tensor | None:
        types = self.placed.graph.edge_type
        return None if types is None else types[self.hop.edge_ids]

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = self.placed.topology.edge_features_at(self.hop.edge_ids)
        return None if features is None else features.to(self.device)

    @property
    def sums_need_halo(self) -> bool:
        """Whether sums over computed rows lack any."""
        return self.least_halo is not None or self.halo is not None

    def product(self, view: PlacedView, op: Sum, x: Tensor) -> Tensor:
        """A sum over the inputs' rows x and those that come, counted."""
        halo, num_edges = self.least_halo, self.adjacency.num_edges
        if halo is None:
            halo = self.halo
        else:
            num_edges = self.hop.cover.block.num_edges + halo.route.num_summed
        assert halo is not None
        y = halo.product(x, self.slices(op, x.dtype))
        view.count(y, num_edges)
        return y

    def slices(self, op: Sum, dtype: torch.dtype) -> EdgeSlices:
        """A sum in slices: over the inputs, and over what each rank sends."""
        if op not in self._slices:
            group, optimisations = self.placed.group, self.placed.work.optimisations
            ring = [(group.rank - step) % group.size for step in range(1, group.size)]
            block, received = self.adjacency, self.hop.received
            scale = self.scale(op.norm, op.weighted, dtype)
            if self.least_halo is not None:
                cover = self.hop.cover
                block, received = cover.block.cast(self.placed.work.dtype).to(self.device), cover.received
                if scale.source is not None:  # what comes has its sources' factors already
                    inputs = scale.source[: self.hop.num_inputs]
                    scale = scale._replace(source=torch.cat([inputs, inputs.new_ones(sum(received))]))
            self._slices[op] = slice_edges(
                block,
                self.hop.num_inputs,
                received,
                scale,
                weighted=op.weighted and self.has_weight,
                by_rank=ring if optimisations.ring else (),
            )
        return self._slices[op]

    def all_sources(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """The rows of all sources, from those of the inputs."""
        return rows if self.halo is None else self.halo.complete(*rows)

    def positions_in(self, other: Block) -> Tensor:
        """Where each of the sources stands among another block's, which has them all: int64."""
        if other not in self._places:
            place = torch.empty(self.placed.graph.num_vertices, dtype=torch.int64)
            place[other.sources] = torch.arange(len(other.sources))
            self._places[other] = place[self.sources].to(self.device)
        return self._places[other]


class Halos(Exchange):
    """The rows that the blocks of one stage lack are fetched; results are the first rows of those that come in.

    blocks: one for each step, the last one's targets last. whole: the graph's topology, for a stage without aggregates.
    row_ids: int64 [n], the original ids of the rank's rows, of which it answers for the first `num_own`.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        whole: Topology,
        row_ids: Tensor,
        num_own: int,
        group: Group,
        embedded: EmbeddedHalo | None,
    ) -> None:
        super().__init__(blocks[0] if blocks else whole, row_ids, whole.adjacency.num_targets, group)
        self.blocks, self.num_own, self.embedded = blocks, num_own, embedded

    def targets(self, x: Tensor) -> Tensor:
        num_targets = len(self.blocks[-1].targets) if self.blocks else len(x)
        return x if len(x) == num_targets else x[:num_targets]

    def own_rows(self, x: Tensor) -> Tensor:
        return x[: self.num_own]

    def embed(self, weight: Tensor) -> Tensor:
        return self.embedded.fetch(weight) if self.embedded else weight

    def is_exchanged(self, view: PlacedView, x: Tensor) -> bool:
        """Whether rows of other ranks come over the network, since they are not made here of constant features."""
        return view.origin(x) == "rows"

    def block(self, view: PlacedView, x: Tensor) -> tuple[Tensor, Tensor, int]:
        (block,) = self.blocks
        return self._sources(view, x, block, once=False), block.edge_index, len(block.targets)

    def aggregate(self, view: PlacedView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        x = rows[op.first]
        if not op.plain:
            return self._aggregate_several(view, op, rows, steps)
        once = view.aggregates_once(x)
        for block in self.blocks[:steps]:
            if isinstance(op, Sum) and block.sums_need_halo and self.is_exchanged(view, x):
                x = block.product(view, op, x)
            else:
                x = view.run(op, {op.first: self._sources(view, x, block, once=once)}, 1, block)
        return x

    def _aggregate_several(self, view: PlacedView, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        """Of several tensors, those of sources side by side on the network, and once for all steps."""
        first, names = self.blocks[0], op.source
        found = first.all_sources(*(rows[name] for name in names))
        op, rows = op.stepwise({**rows, **dict(zip(names, found, strict=True))})
        x, before, prepared = rows[op.first], first, op.prepare(first, self._rows_at(first, op, rows))
        for step, block in enumerate(self.blocks[:steps]):
            x = block.all_sources(x)[0] if step else x
            if block is not before:
                before, prepared = block, op.prepare(block, self._rows_at(block, op, {**rows, op.first: x}))
            x = view.run(op, {**prepared, op.first: x}, 1, block)
        return x

    def _rows_at(self, block: Block, op: Aggregate, rows: Rows) -> Rows:
        """A block's rows, from those of the first one's sources; what is aggregated is the block's already."""
        first, num_targets = self.blocks[0], len(block.targets)
        found = {name: rows[name][:num_targets] for name in op.target}
        for name in op.source:
            known = block is first or name == op.first
            found[name] = rows[name] if known else rows[name].index_select(0, block.positions_in(first))
        return {**found, **{name: rows[name] for name in op.shared}}

    def _sources(self, view: PlacedView, x: Tensor, block: Block, *, once: bool) -> Tensor:
        """The rows of all sources of a block, from those of its inputs; `once`: constant ones need not be kept."""
        if self.is_exchanged(view, x):
            return block.all_sources(x)[0]
        if not len(block.hop.fetched):
            return x
        return view.constant(x, block.placed.features(block.sources) if once else block.features, block.ids)


@dataclass(frozen=True, kw_only=True)
class BlockStats:
    """As much of one aggregate's block on a rank as a trace needs."""

    num_edges: int
    """Those of its sums for others included."""
    num_local_edges: int = 0
    """Those whose sources are the rank's own rows, where a sum goes over them while others come."""
    num_targets: int = 0
    num_sources: int = 0
    fresh_share: float = 1.0
    """See `Adjacency.fresh_share`."""
    num_sent: int = 0
    """Rows that the rank sends."""
    num_received: int = 0
    exchanged: bool = False
    """Whether any rank sends any."""

    def fetch(self, row_bytes: int, *, whole: bool = False) -> Operation:
        """The exchange that brings the missing rows; whole: whether they are copied behind those that are here."""
        sent, received = self.num_sent * row_bytes, self.num_received * row_bytes
        picked = KernelCall("gather", (self.num_sent, row_bytes))
        put = KernelCall("pass", (2 * (received + whole * self.num_sources * row_bytes),))
        return Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received, calls=(picked, put))

    def aggregate(self, op: GraphOperation, *, fetched: bool) -> list[Operation]:
        """One step of an aggregate on it; fetched: behind an exchange."""
        ahead = self.num_local_edges if fetched and isinstance(op.op, Sum) else 0
        parts = (ahead, self.num_edges - ahead) if ahead else (self.num_edges,)
        size = AggregateSize(self.num_targets, self.num_sources, self.fresh_share)
        made = [aggregate(op, edges, size) for edges in parts]
        return [replace(one, ahead=ahead > 0 and one is made[0]) for one in made]


def operations(
    op: GraphOperation, blocks: Mapping[int, BlockStats], itemsize: int, *, constants: bool = False
) -> list[Operation]:
    """What a rank does forward for an aggregate, block by block: a halo, where rows are missing, and the edges.

    constants: whether constant features cross as well.
    """
    made: list[Operation] = []
    for number in op.hops:
        fetched = blocks[number].exchanged and (constants or is_fetched(op, number))
        if fetched:
            whole = not isinstance(op.op, Sum)
            made.append(blocks[number].fetch(fetched_width(op, number) * itemsize, whole=whole))
        if op.is_aggregate:
            made += blocks[number].aggregate(op, fetched=fetched)
    return made
