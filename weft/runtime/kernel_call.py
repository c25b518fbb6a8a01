"""Kernel calls, described by the sizes on which their time depends, for cost estimates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol


class KernelCall(NamedTuple):
    """Calls of a kernel on tensors of the same sizes."""

    kernel: str
    """Name of the kernel. The backward pass of a kernel has the suffix `_backward`. Besides kernels, `round` stands
    for the overhead of a round of chunks, without sizes.
    """
    sizes: tuple[int, ...]
    """Sizes of one call, by kernel.

    - linear, linear_weights (gradient of weights): rows, columns in, columns out.
    - product: FLOPs, whatever the shape.
    - sparse: nonzeros, rows, columns in, columns out.
    - pass: bytes read and written.
    - tiles (message functions in tiles of edges): the fields of `TileSizes`.
    - gather: rows that are moved by index, bytes of a row.
    - exponential, dropout, update: elements.
    - loss (with its gradient): rows, classes.
    - draw (sampling of a hop of a mini-batch): sampled edges, targets.
    - kinds of aggregates: edges, targets, sources, edges whose source is read from memory, width, heads.
    """
    number: int = 1
    """Number of calls."""

    @property
    def flops(self) -> int:
        """FLOPs of matrix products in all calls."""
        if self.kernel in ("linear", "linear_weights"):
            return 2 * math.prod(self.sizes) * self.number
        return self.sizes[0] * self.number if self.kernel == "product" else 0


def merged(calls: Iterable[KernelCall]) -> tuple[KernelCall, ...]:
    """Return the same calls, with calls of the same kernel and sizes counted together."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for call in calls:
        counts[call.kernel, call.sizes] += call.number
    return tuple(KernelCall(*key, number) for key, number in counts.items())


def backward_of(call: KernelCall) -> KernelCall:
    """Return the call of the backward pass. Kernels that move rows move as many bytes backward."""
    is_same = call.kernel in ("pass", "tiles", "gather", "round")
    return call if is_same else call._replace(kernel=f"{call.kernel}_backward")


class TileSizes(NamedTuple):
    """Sizes of a run of a program in tiles of edges."""

    num_bytes: int
    """Bytes that operations other than products read and write in a core's cache."""
    source_bytes: int
    """Bytes of source rows that they read and write outside of it."""
    sources: int
    """Number of sources."""


class WorkCounter(Protocol):
    """Counter of work that PyTorch's dispatcher does not see."""

    def add_tiles(self, flops: int, tiles: TileSizes) -> None:
        """Count runs of programs in tiles of edges.

        Args:
            flops: FLOPs of products.
            tiles: Sizes of the runs, summed.
        """


work_counters: list[WorkCounter] = []
"""The counters that are active now."""
