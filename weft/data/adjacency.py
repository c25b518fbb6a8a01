"""Edges into targets as compressed rows, and their transpose, which every backward pass walks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weft.data.degrees import CompressedRows
from weft.runtime import native
from weft.storage.unnamed_files import release

BLOCK_ENTRIES = 1 << 22  # of a mapped array, read together
RUNS, RUN_EDGES = 16, 1 << 14  # that tell how often edges one after the other have a source in common


def topology_digest(num_targets: int, num_edges: int) -> hashlib._Hash:
    """What a fingerprint begins with; row pointers and source ids follow."""
    return hashlib.sha256(f"weft topology {num_targets} {num_edges}\n".encode())


@dataclass(frozen=True, kw_only=True, eq=False)
class Transpose(CompressedRows):
    """The same edges by source: row u lists the targets that u reaches, ascending."""

    indptr: Tensor
    """int64 [s + 1]: where each source's entries begin."""
    indices: Tensor
    """int32 or int64 [E]: targets."""
    edge_ids: Tensor
    """int32 or int64 [E]: the position of each entry among the forward ones."""
    weight: Tensor | None = None
    """float32 or float64 [E]: the forward weights in this order."""

    def to(self, device: torch.device | str) -> Transpose:
        """This transpose on a device; itself where it is there already."""
        if self.indptr.device == torch.device(device):
            return self
        return Transpose(
            indptr=self.indptr.to(device),
            indices=self.indices.to(device),
            edge_ids=self.edge_ids.to(device),
            weight=None if self.weight is None else self.weight.to(device),
        )

    def with_weight(self, weight: Tensor | None) -> Transpose:
        """The same edges with other weights, given in forward order."""
        permuted = None if weight is None else weight.index_select(0, self.edge_ids)
        return Transpose(indptr=self.indptr, indices=self.indices, edge_ids=self.edge_ids, weight=permuted)


@dataclass(frozen=True, kw_only=True, eq=False)
class Adjacency(CompressedRows):
    """Edges into targets: a CSR matrix; its rows are destinations, its entries source ids, ascending in a row.

    Duplicate edges and self loops are legal. Ids are trusted here: `from_edges` checks them, and so must whoever reads
    arrays from elsewhere.
    """

    indptr: Tensor
    """int64 [n + 1]: where each target's entries begin."""
    indices: Tensor
    """int32 or int64 [E]: sources."""
    num_sources: int
    """s: ids in `indices` are below it."""
    weight: Tensor | None = None
    """float32 or float64 [E], constant."""
    known_transpose: Transpose | None = None
    """The transpose where a store has kept it; otherwise it is made when first used."""

    @classmethod
    def from_edges(
        cls, source: Tensor, target: Tensor, *, num_sources: int, num_targets: int, weight: Tensor | None = None
    ) -> Adjacency:
        """Sorts edges source[e] -> target[e] (int32 or int64 [E], any order) by (target, source), duplicates as given.

        Raises ValueError where an id is out of range.
        """
        if weight is not None and weight.shape != source.shape:
            raise ValueError(f"weight {list(weight.shape)} must hold one number per edge {list(source.shape)}")
        indptr, indices, edge_ids = native.coo_to_csr(target.cpu(), source.cpu(), num_targets, num_sources)
        if weight is not None:
            weight = weight.cpu().index_select(0, edge_ids)
        return cls(indptr=indptr, indices=indices, num_sources=num_sources, weight=weight).to(source.device)

    @classmethod
    def from_dense(cls, matrix: Tensor) -> Adjacency:
        """The nonzeros of a matrix [n, s] as weights: column s is a source, row n a target."""
        target, source = matrix.nonzero(as_tuple=True)
        weight = matrix[target, source]
        return cls.from_edges(source, target, num_sources=matrix.shape[1], num_targets=len(matrix), weight=weight)

    @property
    def num_targets(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    @cached_property
    def transpose(self) -> Transpose:
        """The edges by source, made once, where the edges are."""
        if self.known_transpose is not None:
            return self.known_transpose
        if self.device.type == "cpu":
            indptr, indices, edge_ids = native.transpose(self.indptr, self.indices, self.num_sources)
        else:
            indptr, indices, edge_ids = transpose_by_sorting(self)
        return Transpose(indptr=indptr, indices=indices, edge_ids=edge_ids).with_weight(self.weight)

    @cached_property
    def degree(self) -> Tensor:
        """In-degree of each target, int64 [n]; duplicates count."""
        return self.indptr[1:] - self.indptr[:-1]

    @cached_property
    def fresh_share(self) -> float:
        """The share of edges whose source no edge shortly before it has; of some runs of them.

        So many rows have to be brought from memory where those of a run fit into the cache.
        """
        run = min(RUN_EDGES, self.num_edges)
        runs = min(RUNS, -(-self.num_edges // RUN_EDGES))
        begins = torch.linspace(0, self.num_edges - run, runs).long().tolist()
        place = torch.arange(run, dtype=torch.int32, device=self.device)
        marked = torch.empty(self.num_sources, dtype=torch.int32, device=self.device)
        distinct = 0
        for first in begins:
            sources = self.indices[first : first + run]
            marked[sources] = place
            distinct += int((marked[sources] == place).sum())  # of edges with the same source, one has marked it
        return distinct / (runs * run) if run else 1.0

    @cached_property
    def has_loop(self) -> Tensor:
        """Whether v is among its own in-neighbours, bool [n]; meant where targets are the first n sources."""
        return native.find_loops(self.indptr.cpu(), self.indices.cpu()).to(self.device)

    @cached_property
    def fingerprint(self) -> str:
        """Names the topology: sha256 over target and edge count, row pointers and source ids; 64 hex digits."""
        digest = topology_digest(self.num_targets, self.num_edges)
        for tensor in (self.indptr, self.indices):
            for block in tensor.split(BLOCK_ENTRIES):
                digest.update(block.numpy().view(np.uint8).data)
                release(block)
        return digest.hexdigest()

    def edges(self) -> tuple[Tensor, Tensor]:
        """(source, target) of every edge in stored order, int64 [E] each."""
        targets = torch.arange(self.num_targets, device=self.device)
        return self.indices.long(), targets.repeat_interleave(self.degree, output_size=self.num_edges)

    def to(self, device: torch.device | str) -> Adjacency:
        """These edges on a device, with the transpose if it is known; itself where they are there already."""
        if self.device == torch.device(device):
            return self
        known = self._made_transpose()
        return Adjacency(
            indptr=self.indptr.to(device),
            indices=self.indices.to(device),
            num_sources=self.num_sources,
            weight=None if self.weight is None else self.weight.to(device),
            known_transpose=None if known is None else known.to(device),
        )

    def with_weight(self, weight: Tensor | None) -> Adjacency:
        """The same edges with other weights [E] in stored order; shares the topology, and the transpose if known."""
        if weight is not None and weight.shape != self.indices.shape:
            raise ValueError(f"weight {list(weight.shape)} must hold one number per edge [{self.num_edges}]")
        known = self._made_transpose()
        return Adjacency(
            indptr=self.indptr,
            indices=self.indices,
            num_sources=self.num_sources,
            weight=weight,
            known_transpose=None if known is None else known.with_weight(weight),
        )

    def cast(self, dtype: torch.dtype) -> Adjacency:
        """The same edges with weights of a dtype; itself where nothing changes."""
        if self.weight is None or self.weight.dtype == dtype:
            return self
        return self.with_weight(self.weight.to(dtype))

    def _made_transpose(self) -> Transpose | None:
        made: Transpose | None = self.__dict__.get("transpose", self.known_transpose)
        return made


def transpose_by_sorting(adjacency: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    """What `core.native.transpose` makes, on any device."""
    sources, edge_ids = adjacency.indices.sort(stable=True)  # targets, which ascend, stay in order
    begins = torch.arange(adjacency.num_sources + 1, dtype=sources.dtype, device=sources.device)
    indptr = torch.searchsorted(sources, begins)
    return indptr, adjacency.entry_rows[edge_ids], edge_ids.to(native.id_dtype(adjacency.num_edges))
