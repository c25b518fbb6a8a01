"""Edges and index tensors of a round, stored in memory or in a file, and loaded to the device as a topology.

The sources of a round's edges are slots of the buffer; all positions are computed before the first pass (HongTu,
section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from weft.data import Adjacency, Transpose
from weft.kernels import EdgeFeatures, Scale
from weft.nn import RelationIndex, SubTopology, Topology
from weft.nn.aggregate.topology import Norm
from weft.parallel.chunks.run.rounds import Round
from weft.partition import Hop
from weft.runtime.native import id_dtype
from weft.storage.unnamed_files import ArrayFile, ArrayMemory, ArrayRef

SlotLayout = Literal["plain", "looped", "whole", "relations"]
"""Layout of a round's edges.

- plain: from slots to targets.
- looped: from slots to targets, with each missing self-loop added as an edge.
- whole: the sources are the rows of the targets, followed by the slots.
- relations: from slots to relation rows.
"""
Way = Literal["forward", "both", "back"]
"""Edge arrays to load: in-edges (forward), the transpose without edge numbers (back), or in-edges and transpose."""
FORWARD_FIELDS = ("load", "load_slots", "recv_row_slots", "send_rows")
"""Fields of `Round` that the forward pass reads."""
BACKWARD_FIELDS = ("write_back", "write_back_slots", "send_grad_slots", "recv_grads")
"""Fields of `Round` that only the backward pass reads."""


class SlotTopology(SubTopology):
    """The edges of a round on the device, from slots to targets.

    Args:
        adjacency: Edges whose source numbers are slots (or see `SlotLayout`).
        sources: Vertex of the row in each slot, int64; any vertex for a free slot.
        targets: Vertex of each target, int64 [n].
        whole: Topology of the whole graph.
        edge_ids: Number of each edge in the whole graph, int64 [e]; None if no one reads types or features.
        edge_positions: If self-loops were added: position of each edge among the round's own edges, -1 for an added
            self-loop, int64 [e + m]. None if no self-loop is an edge.
        relations: True if the edges lead to relation rows.
    """

    targets: Tensor

    def __init__(
        self,
        adjacency: Adjacency,
        sources: Tensor,
        targets: Tensor,
        whole: Topology,
        edge_ids: Tensor | None,
        edge_positions: Tensor | None,
        *,
        relations: bool = False,
    ) -> None:
        super().__init__(adjacency, sources, targets, whole)
        self.edge_ids, self.edge_positions, self.relations = edge_ids, edge_positions, relations

    @cached_property
    def edge_type(self) -> Tensor | None:
        types = self.whole.edge_type
        return None if types is None or self.edge_ids is None else types[self.edge_ids]

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = None if self.edge_ids is None else self.whole.edge_features_at(self.edge_ids)
        return None if features is None else features.to(self.adjacency.device)

    @property
    def relation_edges(self) -> Adjacency:
        return self.adjacency if self.relations else super().relation_edges

    @property
    def loop(self) -> Tensor | None:
        return None if self.edge_positions is not None else super().loop

    @cached_property
    def features_with_loops(self) -> EdgeFeatures | None:
        features = self.whole.features_with_loops
        if self.edge_positions is None or features is None or self.edge_features is None or features.loops is None:
            return super().features_with_loops
        means = features.loops[self.targets].to(self.adjacency.device)
        merged = spread(self.edge_features, self.edge_positions, means[self.whole.lacks_loop[self.targets]])
        loops = self.is_loop
        merged[loops] = means[self.adjacency.edges()[1][loops]]
        return EdgeFeatures(merged)

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        scale = super()._scale(norm, weighted, dtype)
        return scale if self.edge_positions is None else scale._replace(loop=None)


@dataclass(frozen=True, kw_only=True)
class Edges:
    """A round's edges in the array file, for one layout."""

    indptr: ArrayRef
    indices: ArrayRef
    weight: ArrayRef | None
    transpose: tuple[ArrayRef, ArrayRef, ArrayRef, ArrayRef | None]
    """Arrays indptr, indices, edge_ids and weight of the transpose."""
    edge_positions: ArrayRef | None
    """Position of each edge among the round's own edges, -1 for an added self-loop; None if none were added."""
    num_sources: int
    """Number of slots, or of targets and slots for the layout "whole"."""


REVERSED = {name: name for name in (*FORWARD_FIELDS, *BACKWARD_FIELDS)} | {
    "load": "write_back",
    "load_slots": "write_back_slots",
    "write_back": "load",
    "write_back_slots": "load_slots",
}
"""Field of a round that is read in place of each field if the rounds run from the last to the first."""


class PlacedRound:
    """A round whose index tensors and edges are stored in an array file, ready to be loaded.

    Args:
        round_: The round.
        hop: Block of the aggregate.
        vertices: Vertex of each source number of the block, int64.
        whole: Topology of the whole graph.
        layouts: Layouts in which to store the edges.
        array_file: File or memory that stores the arrays.
        relations: Index of the relation rows, if the results are relation rows.
    """

    def __init__(
        self,
        round_: Round,
        hop: Hop,
        vertices: Tensor,
        whole: Topology,
        layouts: Iterable[SlotLayout],
        array_file: ArrayFile | ArrayMemory,
        relations: RelationIndex | None = None,
    ) -> None:
        sizes = round_.sizes
        self.targets, self.num_edges = sizes.targets, sizes.num_edges
        self.results = relations.span(self.targets) if relations else self.targets
        """Range of the result's rows that the round computes."""
        self.whole, self.array_file, self.num_slots = whole, array_file, len(round_.slot_sources)
        self.recv_row_counts, self.send_row_counts = sizes.recv_row_counts, sizes.send_row_counts
        self.send_grad_counts, self.recv_grad_counts = sizes.send_grad_counts, sizes.recv_grad_counts
        self.in_place = sizes.in_place
        self._topologies: dict[SlotLayout, SlotTopology] = {}
        ids = vertices[round_.slot_sources.clamp(min=0)]
        dtype = id_dtype(whole.adjacency.num_sources)
        self._sources, self._targets = array_file.put(ids.to(dtype)), array_file.put(vertices[self.targets].to(dtype))
        self._indices = {
            name: array_file.put(getattr(round_, name).to(dtype)) for name in FORWARD_FIELDS + BACKWARD_FIELDS
        }
        needs_edge_ids = whole.edge_type is not None or whole.edge_features is not None
        self._edge_ids = array_file.put(hop.edge_ids_of(self.targets)) if needs_edge_ids else None
        self._edges = {layout: self._store(layout, round_, hop, relations) for layout in layouts}

    @property
    def exchanges(self) -> bool:
        """True if the round has several ranks, which exchange rows."""
        return len(self.recv_row_counts) > 1

    def index(self, name: str, *, in_reverse: bool = False) -> Tensor:
        """Return an index tensor of the round, int64.

        Args:
            name: Its field in `Round`.
            in_reverse: The rounds run from the last to the first, so loaded rows are written back, and vice versa. For
                a single rank only: rows that ranks exchange are not swapped.
        """
        name = REVERSED[name] if in_reverse else name
        return self.array_file.get(self._indices[name]).long()

    def topology(self, layout: SlotLayout, to_device: Callable[[Tensor], Tensor], way: Way) -> SlotTopology:
        """Return the edges on the device.

        Rounds in memory keep one topology per layout, which is good for all ways.

        Args:
            layout: Layout of the edges.
            to_device: Copies an array to the device.
            way: Edge arrays to load. With "back", the topology has only the transpose, without edge numbers.
        """
        if not isinstance(self.array_file, ArrayMemory):
            return self._topology(layout, to_device, way)
        if layout not in self._topologies:
            self._topologies[layout] = self._topology(layout, to_device, "both")
        return self._topologies[layout]

    def _topology(self, layout: SlotLayout, to_device: Callable[[Tensor], Tensor], way: Way) -> SlotTopology:
        edges, get, transpose = self._edges[layout], self.array_file.get, None

        def load(stored: ArrayRef) -> Tensor:
            return to_device(get(stored))

        no_edges = to_device(torch.empty(0, dtype=edges.indices.dtype)) if way == "back" else None
        if way != "forward":
            indptr, indices, ids, weight = edges.transpose
            transpose = Transpose(
                indptr=load(indptr),
                indices=load(indices),
                edge_ids=load(ids) if no_edges is None else no_edges,
                weight=None if weight is None else load(weight),
            )
        adjacency = Adjacency(
            indptr=load(edges.indptr),
            indices=load(edges.indices) if no_edges is None else no_edges,
            num_sources=edges.num_sources,
            weight=None if edges.weight is None or no_edges is not None else load(edges.weight),
            known_transpose=transpose,
        )
        sources, targets = get(self._sources).long(), get(self._targets).long()
        return SlotTopology(
            adjacency,
            torch.cat([targets, sources]) if layout == "whole" else sources,
            targets,
            self.whole,
            None if self._edge_ids is None else get(self._edge_ids),
            None if edges.edge_positions is None else get(edges.edge_positions),
            relations=layout == "relations",
        )

    def edge_bytes(self, layout: SlotLayout, way: Way) -> int:
        """Return the bytes of edges that `topology` loads from a file.

        Args:
            layout: Layout of the edges.
            way: Edge arrays to load.
        """
        edges = self._edges[layout]
        indptr, indices, ids, weight = edges.transpose
        forward, back = (edges.indices, edges.weight), (indptr, indices, weight)
        arrays = {"forward": forward, "both": (*forward, *back, ids), "back": back}[way]
        return edges.indptr.num_bytes + sum(array.num_bytes for array in arrays if array is not None)

    def _store(self, layout: SlotLayout, round_: Round, hop: Hop, relations: RelationIndex | None) -> Edges:
        """Store a round's edges in a layout."""
        first, end = self.targets.start, self.targets.stop
        indptr = hop.block.indptr[first : end + 1] - hop.block.indptr[first]
        graph_weight = self.whole.adjacency.weight
        weight = (
            None
            if hop.block.weight is None or graph_weight is None
            else hop.block.weight[round_.sizes.edges].to(graph_weight.dtype)
        )
        indices, num_sources, edge_positions = round_.indices, self.num_slots, None
        if layout == "whole":  # a target's own row is read among the targets' rows, every other row in its slot
            source = round_.slot_sources[indices]
            is_target = (source >= first) & (source < end)
            indices = torch.where(is_target, source - first, indices + (end - first)).to(indices.dtype)
            num_sources += end - first
        if layout == "looped":
            missing = self.whole.lacks_loop.cpu()[self.array_file.get(self._targets).long()]
            indptr, edge_positions = with_loops(indptr, missing)
            loop_slots = round_.target_slots[missing].to(indices.dtype)
            indices = spread(indices, edge_positions, loop_slots)
            weight = None if weight is None else spread(weight, edge_positions, weight.new_ones(len(loop_slots)))
            # Only edge features need the positions later.
            edge_positions = edge_positions if self.whole.edge_features is not None else edge_positions[:0]
        adjacency = Adjacency(indptr=indptr, indices=indices, num_sources=num_sources, weight=weight)
        if layout == "relations":
            assert relations is not None
            assert self.whole.edge_type is not None
            types = self.whole.edge_type[round_.sizes.edges]
            adjacency = relations.in_edges(adjacency, self.targets, types, self.whole.num_relations)
        back, put = adjacency.transpose, self.array_file.put
        return Edges(
            indptr=put(adjacency.indptr),
            indices=put(adjacency.indices),
            weight=None if adjacency.weight is None else put(adjacency.weight),
            transpose=(
                put(back.indptr),
                put(back.indices),
                put(adjacency.transposed_edge_ids),
                None if back.weight is None else put(back.weight),
            ),
            edge_positions=None if edge_positions is None else put(edge_positions),
            num_sources=num_sources,
        )


def edge_bytes(way: Way, targets: int, sources: int, edges: int, index: int, weight: int) -> int:
    """Return the bytes of edges that a round loads from a file.

    Args:
        way: Edge arrays to load.
        targets: Number of targets.
        sources: Number of slots.
        edges: Number of edges, including added self-loops.
        index: Bytes of a source number.
        weight: Bytes of an edge weight; 0 without weights.
    """
    # index pointers of the targets, in-edges (forward), transpose (back), and edge numbers of the transpose (ids)
    forward = 0 if way == "back" else edges * (index + weight)
    back = 0 if way == "forward" else 8 * (sources + 1) + edges * (index + weight)
    ids = edges * 4 if way == "both" else 0
    return 8 * (targets + 1) + forward + back + ids


def with_loops(indptr: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the adjacency's row pointers after appending a self-loop to the rows that lack one.

    Args:
        indptr: Row pointers before, int64 [n + 1].
        missing: True for a row that gets a self-loop as its last edge, bool [n].

    Returns:
        The new row pointers, and the former position of each edge (-1 for a new self-loop).
    """
    num_added = torch.cat([missing.new_zeros(1, dtype=torch.int64), missing.cumsum(0)])
    longer = indptr + num_added
    positions = torch.full((int(longer[-1]),), -1)
    row = torch.arange(len(missing)).repeat_interleave(indptr.diff())
    positions[torch.arange(len(row)) + num_added[row]] = torch.arange(len(row))
    return longer, positions


def spread(values: Tensor, positions: Tensor, added: Tensor) -> Tensor:
    """Return the values of edges after self-loops were added.

    Args:
        values: Values of the edges before, [e, ...].
        positions: Former position of each edge, -1 for an added self-loop, int64 [e + m].
        added: Values of the added self-loops in order, [m, ...].
    """
    merged = values.new_empty(len(positions), *values.shape[1:])
    merged[positions >= 0] = values
    merged[positions < 0] = added
    return merged
