"""A round of a schedule on the device: its edges by the slots of their sources, and the rows that go in and out.

(HongTu, section 6: one buffer of rows, positions computed beforehand.) Index sets and edges wait in an array file.
"""

from __future__ import annotations

import copy
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
"""How a round's edges stand: from slots to targets; so, with a missing loop as an edge; with the slots behind the
targets' own rows; or from slots to relation rows."""
Way = Literal["forward", "both", "back"]
"""What of a round's edges is brought: those into targets, also those out of sources, or of the latter only the ends."""
FORWARD, BACKWARD = ("load", "load_slots", "fetch_slots", "serve"), ("flush", "flush_slots", "give_slots", "take")
"""Index sets of a round."""


class SlotTopology(SubTopology):
    """A round's edges. sources: int64, the vertex in each slot, any for a free one; edge_ids: int64 [e], or None.

    targets: int64 [n], vertices. looped: int64 [e + m], where each edge stands among the round's, -1 for those of the m
    loops that were missing; None: loops are no edges. relations: whether the edges go to relation rows.
    """

    targets: Tensor

    def __init__(
        self,
        adjacency: Adjacency,
        sources: Tensor,
        targets: Tensor,
        whole: Topology,
        edge_ids: Tensor | None,
        looped: Tensor | None,
        *,
        relations: bool = False,
    ) -> None:
        super().__init__(adjacency, sources, targets, whole)
        self.edge_ids, self.looped, self.relations = edge_ids, looped, relations
        self.num_relations = whole.num_relations

    @cached_property
    def edge_type(self) -> Tensor | None:
        types = self.whole.edge_type
        return None if types is None or self.edge_ids is None else types[self.edge_ids]

    @cached_property
    def edge_features(self) -> Tensor | None:
        found = None if self.edge_ids is None else self.whole.edge_features_at(self.edge_ids)
        return None if found is None else found.to(self.adjacency.device)

    @property
    def relation_edges(self) -> Adjacency:
        return self.adjacency if self.relations else super().relation_edges

    @property
    def loop(self) -> Tensor | None:
        return None if self.looped is not None else super().loop

    @cached_property
    def features_with_loops(self) -> EdgeFeatures | None:
        known = self.whole.features_with_loops
        if self.looped is None or known is None or self.edge_features is None or known.loops is None:
            return super().features_with_loops
        loops = known.loops[self.targets[self.whole.lacks_loop[self.targets]]]
        return EdgeFeatures(spread(self.edge_features, self.looped, loops.to(self.adjacency.device)))

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        scale = super()._scale(norm, weighted, dtype)
        return scale if self.looped is None else scale._replace(loop=None)


@dataclass(frozen=True, kw_only=True)
class Edges:
    """A round's edges in the array file."""

    indptr: ArrayRef
    indices: ArrayRef
    weight: ArrayRef | None
    transpose: tuple[ArrayRef, ArrayRef, ArrayRef, ArrayRef | None]
    looped: ArrayRef | None
    num_sources: int


class PlacedRound:
    """A round, its index sets and edges in an array file.

    vertices: int64, that of each source number of the hop. relations: the relation rows, where results are these.
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
        self.targets, self.num_edges = round_.targets, round_.edges.stop - round_.edges.start
        self.results = relations.span(self.targets) if relations else self.targets
        """The rows of the result."""
        self.whole, self.array_file, self.num_slots = whole, array_file, len(round_.slot_sources)
        self.recv_row_counts, self.send_row_counts = round_.recv_row_counts, round_.send_row_counts
        self.send_grad_counts, self.recv_grad_counts = round_.send_grad_counts, round_.recv_grad_counts
        self.in_place = round_.in_place
        self._topologies: dict[SlotLayout, SlotTopology] = {}
        ids = vertices[round_.slot_sources.clamp(min=0)]
        narrow = id_dtype(len(whole.ids))
        self._sources, self._targets = array_file.put(ids.to(narrow)), array_file.put(vertices[self.targets].to(narrow))
        self._indices = {name: array_file.put(getattr(round_, name).to(narrow)) for name in FORWARD + BACKWARD}
        asked = whole.edge_type is not None or whole.edge_features is not None
        self._edge_ids = array_file.put(hop.edge_ids[round_.edges]) if asked else None
        self._edges = {layout: self._keep(layout, round_, hop, relations) for layout in layouts}

    @property
    def num_loaded(self) -> int:
        """Rows that come from the host."""
        return self._indices["load"].shape[0]

    @property
    def mirrored(self) -> PlacedRound:
        """The round in a pass that goes from the last one to the first: what came leaves, and what left comes.

        Of a rank alone: what is exchanged stays as it is.
        """
        other, index = copy.copy(self), self._indices
        swapped = {"load": "flush", "load_slots": "flush_slots", "flush": "load", "flush_slots": "load_slots"}
        other._indices = index | {name: index[from_] for name, from_ in swapped.items()}
        return other

    @property
    def exchanges(self) -> bool:
        """Whether it is one of a round of several ranks, which exchange what their chunks read."""
        return len(self.recv_row_counts) > 1

    def index(self, name: str) -> Tensor:
        """An index set of the round, int64."""
        return self.array_file.get(self._indices[name]).long()

    def topology(self, layout: SlotLayout, to_device: Callable[[Tensor], Tensor], way: Way) -> SlotTopology:
        """The edges on the device; `back`: good for the transpose alone, and for what needs no numbers of edges.

        to_device: brings an array there. In memory there is one for all ways.
        """
        if not isinstance(self.array_file, ArrayMemory):
            return self._topology(layout, to_device, way)
        if layout not in self._topologies:
            self._topologies[layout] = self._topology(layout, to_device, "both")
        return self._topologies[layout]

    def _topology(self, layout: SlotLayout, to_device: Callable[[Tensor], Tensor], way: Way) -> SlotTopology:
        edges, get, known = self._edges[layout], self.array_file.get, None

        def bring(stored: ArrayRef) -> Tensor:
            return to_device(get(stored))

        left_out = to_device(torch.empty(0, dtype=edges.indices.dtype)) if way == "back" else None
        if way != "forward":
            indptr, indices, ids, weight = edges.transpose
            known = Transpose(
                indptr=bring(indptr),
                indices=bring(indices),
                edge_ids=bring(ids) if left_out is None else left_out,
                weight=None if weight is None else bring(weight),
            )
        adjacency = Adjacency(
            indptr=bring(edges.indptr),
            indices=bring(edges.indices) if left_out is None else left_out,
            num_sources=edges.num_sources,
            weight=None if edges.weight is None or left_out is not None else bring(edges.weight),
            known_transpose=known,
        )
        sources, targets = get(self._sources).long(), get(self._targets).long()
        return SlotTopology(
            adjacency,
            torch.cat([targets, sources]) if layout == "whole" else sources,
            targets,
            self.whole,
            None if self._edge_ids is None else get(self._edge_ids),
            None if edges.looped is None else get(edges.looped),
            relations=layout == "relations",
        )

    def edge_bytes(self, layout: SlotLayout, way: Way) -> int:
        """What of the edges is taken to the device."""
        edges = self._edges[layout]
        indptr, indices, ids, weight = edges.transpose
        forward, back = (edges.indices, edges.weight), (indptr, indices, weight)
        taken = {"forward": forward, "both": (*forward, *back, ids), "back": back}[way]
        return edges.indptr.num_bytes + sum(one.num_bytes for one in taken if one is not None)

    def _keep(self, layout: SlotLayout, round_: Round, hop: Hop, relations: RelationIndex | None) -> Edges:
        first, end = self.targets.start, self.targets.stop
        indptr = hop.block.indptr[first : end + 1] - hop.block.indptr[first]
        known = self.whole.adjacency.weight
        weight = None if hop.block.weight is None or known is None else hop.block.weight[round_.edges].to(known.dtype)
        indices, num_sources, looped = round_.indices, self.num_slots, None
        if layout == "whole":
            number = round_.slot_sources[indices]
            its_own = (number >= first) & (number < end)
            indices = torch.where(its_own, number - first, indices + (end - first)).to(indices.dtype)
            num_sources += end - first
        if layout == "looped":
            missing = self.whole.lacks_loop.cpu()[self.array_file.get(self._targets).long()]
            indptr, looped = with_loops(indptr, missing)
            own = round_.target_slots[missing].to(indices.dtype)
            indices = spread(indices, looped, own)
            weight = None if weight is None else spread(weight, looped, weight.new_ones(len(own)))
            looped = looped if self.whole.edge_features is not None else looped[:0]  # which alone are spread by it
        adjacency = Adjacency(indptr=indptr, indices=indices, num_sources=num_sources, weight=weight)
        if layout == "relations":
            assert relations is not None
            assert self.whole.edge_type is not None
            types = self.whole.edge_type[round_.edges]
            adjacency = relations.in_edges(adjacency, self.targets, types, self.whole.num_relations)
        back, put = adjacency.transpose, self.array_file.put
        return Edges(
            indptr=put(adjacency.indptr),
            indices=put(adjacency.indices),
            weight=None if adjacency.weight is None else put(adjacency.weight),
            transpose=(
                put(back.indptr),
                put(back.indices),
                put(back.edge_ids),
                None if back.weight is None else put(back.weight),
            ),
            looped=None if looped is None else put(looped),
            num_sources=num_sources,
        )


def edge_bytes(way: Way, targets: int, sources: int, edges: int, index: int, weight: int) -> int:
    """What is brought of so many edges, of whose index and weight a number takes so many bytes."""
    forward = 0 if way == "back" else edges * (index + weight)
    back = 0 if way == "forward" else 8 * (sources + 1) + edges * (index + weight)
    ids = edges * 4 if way == "both" else 0
    return 8 * (targets + 1) + forward + back + ids


def with_loops(indptr: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with one more edge where it is missing (bool [n]), the last one: their indptr, and each edge's old place.

    The place is -1 for the new ones.
    """
    more = torch.cat([missing.new_zeros(1, dtype=torch.int64), missing.cumsum(0)])
    longer = indptr + more
    place = torch.full((int(longer[-1]),), -1)
    row = torch.arange(len(missing)).repeat_interleave(indptr.diff())
    place[torch.arange(len(row)) + more[row]] = torch.arange(len(row))
    return longer, place


def spread(values: Tensor, place: Tensor, added: Tensor) -> Tensor:
    """What [e, ...] belongs to the edges at these places, and, where one is -1, what was added, in order."""
    found = values.new_empty(len(place), *values.shape[1:])
    found[place >= 0] = values
    found[place < 0] = added
    return found
