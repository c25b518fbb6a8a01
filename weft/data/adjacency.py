"""In-edges as a compressed sparse row (CSR) matrix, and its transpose, which backward passes read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weft.data.degrees import CompressedRows
from weft.runtime import native
from weft.storage.unnamed_files import release

BLOCK_ENTRIES = 1 << 22
"""Entries of a memory-mapped array that `Adjacency.fingerprint` reads at once."""
LOOP_VERTICES = 1 << 16
"""Number of targets whose edges `Adjacency.num_repeated_loops` reads at once."""
RUNS, RUN_EDGES = 16, 1 << 14
"""Number of runs of consecutive edges that `Adjacency.fresh_share` looks at, and edges in each run."""


def topology_digest(num_targets: int, num_edges: int) -> hashlib._Hash:
    """Return a new sha256 that has hashed the sizes of a graph; row pointers and source ids are to follow.

    Args:
        num_targets: Number of target vertices.
        num_edges: Number of edges.
    """
    return hashlib.sha256(f"weft topology {num_targets} {num_edges}\n".encode())


@dataclass(frozen=True, kw_only=True, eq=False)
class Transpose(CompressedRows):
    """The edges of an `Adjacency` sorted by source: row u lists the targets of the edges that leave u, ascending."""

    indptr: Tensor
    """int64 [s + 1]: position of each source's first entry."""
    indices: Tensor
    """int32 or int64 [E]: target of each entry."""
    edge_ids: Tensor | None = None
    """int32 or int64 [E]: position of each entry's edge in the `Adjacency`; None: use `transposed_edge_ids` there.

    Only attention, maxima and data of edges need it, so graph folders whose edges have no data lack it.
    """
    weight: Tensor | None = None
    """float32 or float64 [E]: weight of each entry, in the order of the transpose."""

    def to(self, device: torch.device | str) -> Transpose:
        """Return this transpose on a device; the same object if it is there already."""
        if self.indptr.device == torch.device(device):
            return self
        return Transpose(
            indptr=self.indptr.to(device),
            indices=self.indices.to(device),
            edge_ids=None if self.edge_ids is None else self.edge_ids.to(device),
            weight=None if self.weight is None else self.weight.to(device),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Adjacency(CompressedRows):
    """In-edges of a graph or a block as a CSR matrix: rows are targets, entries are source ids, ascending in each row.

    Duplicate edges and self-loops are legal. The constructor checks nothing: use `from_edges`, which checks ids, or
    check arrays from elsewhere before.
    """

    indptr: Tensor
    """int64 [n + 1]: position of each target's first entry."""
    indices: Tensor
    """int32 or int64 [E]: source of each edge."""
    num_sources: int
    """Number of sources, s: all ids in `indices` are below."""
    weight: Tensor | None = None
    """float32 or float64 [E]: constant edge weights."""
    known_transpose: Transpose | None = None
    """The transpose if it exists already, for example in a stored graph; None: `transpose` computes it when needed."""

    def __post_init__(self) -> None:
        for field in ("indptr", "indices", "weight"):
            value = getattr(self, field)
            if isinstance(value, Tensor) and type(value) is not Tensor:
                object.__setattr__(self, field, native.plain_tensor(value))

    @classmethod
    def from_edges(
        cls, source: Tensor, target: Tensor, *, num_sources: int, num_targets: int, weight: Tensor | None = None
    ) -> Adjacency:
        """Sort edges source[e] -> target[e] by (target, source); duplicates keep their order.

        Args:
            source: int32 or int64 [E], in any order.
            target: int32 or int64 [E].
            num_sources: Number of sources.
            num_targets: Number of targets.
            weight: float32 or float64 [E], or None.

        Raises:
            ValueError: If an id is out of range, or the weights are not one per edge.
        """
        if weight is not None and weight.shape != source.shape:
            raise ValueError(f"weight {list(weight.shape)} must hold one number per edge {list(source.shape)}")
        if source.is_meta:
            return cls.without_data(num_sources, num_targets, len(source)).with_weight(weight)
        source, target = native.plain_tensor(source), native.plain_tensor(target)
        indptr, indices, edge_ids = native.coo_to_csr(target.cpu(), source.cpu(), num_targets, num_sources)
        if weight is not None:
            weight = weight.cpu().index_select(0, edge_ids)
        return cls(indptr=indptr, indices=indices, num_sources=num_sources, weight=weight).to(source.device)

    @classmethod
    def without_data(cls, num_sources: int, num_targets: int, num_edges: int) -> Adjacency:
        """Return edges on the meta device, which have sizes and no data, with their transpose.

        Args:
            num_sources: Number of sources.
            num_targets: Number of targets.
            num_edges: Number of edges.
        """
        ids = torch.empty(num_edges, dtype=torch.int64, device="meta")
        back = Transpose(indptr=ids.new_empty(num_sources + 1), indices=ids, edge_ids=ids)
        indptr = ids.new_empty(num_targets + 1)
        return cls(indptr=indptr, indices=ids, num_sources=num_sources, known_transpose=back)

    @classmethod
    def from_dense(cls, matrix: Tensor) -> Adjacency:
        """Return the nonzero entries of a matrix [n, s] as weighted edges: column s is a source, row n a target."""
        target, source = matrix.nonzero(as_tuple=True)
        weight = matrix[target, source]
        return cls.from_edges(source, target, num_sources=matrix.shape[1], num_targets=len(matrix), weight=weight)

    @property
    def num_targets(self) -> int:
        """Number of targets, n."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges, E."""
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        """Device of all arrays."""
        return self.indptr.device

    @cached_property
    def transpose(self) -> Transpose:
        """The edges by source, computed once, on the device of the edges."""
        if self.known_transpose is not None:
            return self.known_transpose
        indptr, indices, edge_ids = self._transposed()
        weight = None if self.weight is None else self.weight.index_select(0, edge_ids)
        return Transpose(indptr=indptr, indices=indices, edge_ids=edge_ids, weight=weight)

    @cached_property
    def transposed_edge_ids(self) -> Tensor:
        """Position in this object of each entry's edge of the transpose, int32 or int64 [E]."""
        stored = self.transpose.edge_ids
        return self._transposed()[2] if stored is None else stored

    def _transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute indptr, indices and edge_ids of the transpose."""
        if self.device.type == "cpu":
            return native.transpose(self.indptr, self.indices, self.num_sources)
        return transpose_by_sorting(self)

    @property
    def degree(self) -> Tensor:
        """In-degree of each target, int64 [n]; duplicate edges count. Computed at each access."""
        return self.indptr[1:] - self.indptr[:-1]

    @cached_property
    def fresh_share(self) -> float:
        """Fraction of edges whose source is new within a run of consecutive edges, estimated from a sample of runs.

        The rows of these sources must be fetched from memory; the other rows of a run are still in the cache.
        """
        # Each run: write every edge's position into a slot of its source, then count the edges whose position stayed.
        # Exactly one edge of each distinct source does.
        run = min(RUN_EDGES, self.num_edges)
        num_runs = min(RUNS, -(-self.num_edges // RUN_EDGES))
        last_first = self.num_edges - run
        first_edges = [last_first * number // max(num_runs - 1, 1) for number in range(num_runs)]
        positions = torch.arange(run, dtype=torch.int32, device=self.device)
        position_of_source = torch.empty(self.num_sources, dtype=torch.int32, device=self.device)
        distinct = 0
        for first in first_edges:
            sources = self.indices[first : first + run]
            position_of_source[sources] = positions
            distinct += int((position_of_source[sources] == positions).sum())
        return distinct / (num_runs * run) if run else 1.0

    @cached_property
    def unsorted_target(self) -> int | None:
        """First target whose source ids do not ascend, as they must; None: there is none."""
        for first in range(1, self.num_edges, BLOCK_ENTRIES):
            last = min(first + BLOCK_ENTRIES, self.num_edges)
            descends = self.indices[first:last] < self.indices[first - 1 : last - 1]
            bounds = torch.tensor([first, last], device=self.device)
            low, high = torch.searchsorted(self.indptr, bounds).tolist()
            descends[self.indptr[low:high] - first] = False  # a row's first id may be smaller than the one before
            if descends.any():
                edge = first + int(descends.nonzero()[0])
                return int(torch.searchsorted(self.indptr, edge, right=True)) - 1
        return None

    @cached_property
    def has_loop(self) -> Tensor:
        """True for each target v that has an edge v -> v, bool [n]. Target ids must be the first n source ids."""
        return native.find_loops(self.indptr.cpu(), self.indices.cpu()).to(self.device)

    @cached_property
    def num_repeated_loops(self) -> int:
        """Number of edges v -> v beyond the first of each target v. Target ids must be the first n source ids."""
        vertices, count = self.has_loop.nonzero().view(-1), 0
        for targets in vertices.split(LOOP_VERTICES):
            degree = self.degree[targets]
            first = self.indptr[targets] - degree.cumsum(0) + degree
            position = torch.arange(int(degree.sum())) + first.repeat_interleave(degree)
            count += int((self.indices[position] == targets.repeat_interleave(degree)).sum())
        return count - len(vertices)

    @cached_property
    def fingerprint(self) -> str:
        """Digest that identifies the topology: sha256 of the CSR arrays and their sizes; 64 hex digits."""
        digest = topology_digest(self.num_targets, self.num_edges)
        for tensor in (self.indptr, self.indices):
            for block in tensor.split(BLOCK_ENTRIES):
                digest.update(block.numpy().view(np.uint8).data)
                release(block)
        return digest.hexdigest()

    def edges(self) -> tuple[Tensor, Tensor]:
        """Return (source, target) of every edge in stored order, int64 [E] each."""
        targets = torch.arange(self.num_targets, device=self.device)
        return self.indices.long(), targets.repeat_interleave(self.degree, output_size=self.num_edges)

    def to(self, device: torch.device | str) -> Adjacency:
        """Return these edges on a device, with the transpose if it exists; the same object if already there."""
        if self.device == torch.device(device):
            return self
        transpose = self._existing_transpose()
        return Adjacency(
            indptr=self.indptr.to(device),
            indices=self.indices.to(device),
            num_sources=self.num_sources,
            weight=None if self.weight is None else self.weight.to(device),
            known_transpose=None if transpose is None else transpose.to(device),
        )

    def with_weight(self, weight: Tensor | None) -> Adjacency:
        """Return these edges with other weights, [E] in stored order.

        The copy shares the topology, and the transpose if it has been computed.
        """
        if weight is not None and weight.shape != self.indices.shape:
            raise ValueError(f"weight {list(weight.shape)} must hold one number per edge [{self.num_edges}]")
        transpose = self._existing_transpose()
        if transpose is not None:
            edge_ids = transpose.edge_ids if weight is None else self.transposed_edge_ids
            permuted = None if weight is None else weight.index_select(0, self.transposed_edge_ids)
            transpose = replace(transpose, edge_ids=edge_ids, weight=permuted)
        return Adjacency(
            indptr=self.indptr,
            indices=self.indices,
            num_sources=self.num_sources,
            weight=weight,
            known_transpose=transpose,
        )

    def cast(self, dtype: torch.dtype) -> Adjacency:
        """Return these edges with weights of a dtype; the same object if nothing changes."""
        if self.weight is None or self.weight.dtype == dtype:
            return self
        return self.with_weight(self.weight.to(dtype))

    def _existing_transpose(self) -> Transpose | None:
        """Return the transpose if it was given or computed before, without computing it."""
        transpose: Transpose | None = self.__dict__.get("transpose", self.known_transpose)
        edge_ids: Tensor | None = self.__dict__.get("transposed_edge_ids")
        return transpose if transpose is None or edge_ids is None else replace(transpose, edge_ids=edge_ids)


def transpose_by_sorting(adjacency: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (indptr, indices, edge_ids) of the transpose as `runtime.native.transpose` does, on any device."""
    sources, edge_ids = adjacency.indices.sort(stable=True)  # stable: targets of a source stay in ascending order
    source_ids = torch.arange(adjacency.num_sources + 1, dtype=sources.dtype, device=sources.device)
    indptr = torch.searchsorted(sources, source_ids)
    return indptr, adjacency.entry_rows[edge_ids], edge_ids.to(native.id_dtype(adjacency.num_edges))
