"""A call of a kernel by what its time depends on, for whoever prices it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class KernelCall(NamedTuple):
    """So many calls of a kernel on tensors of the same sizes."""

    kernel: str
    """linear, linear_weights, product, sparse, pass, gather, exponential, dropout, update, loss, draw; an aggregate's
    kind; with _backward where it is that of one. round: what a round of chunks takes beside its kernels, without sizes.
    """
    sizes: tuple[int, ...]
    """linear: rows, columns in, columns out, also of the weights' gradient. product: flops, of whatever shape. sparse:
    nonzeros, rows, columns in and out. pass: bytes read and written. gather: rows moved by index, bytes of
    one. exponential, dropout, update: numbers. loss: rows, classes, with its gradient. draw: edges drawn, targets, of a
    hop of a mini-batch. An aggregate: edges, targets, sources, edges whose source has to be brought from memory, width,
    heads."""
    number: int = 1

    @property
    def flops(self) -> int:
        """Those of matrix products, of all its calls."""
        if self.kernel in ("linear", "linear_weights"):
            return 2 * math.prod(self.sizes) * self.number
        return self.sizes[0] * self.number if self.kernel == "product" else 0


def merged(calls: Iterable[KernelCall]) -> tuple[KernelCall, ...]:
    """The same calls, those that are alike counted together."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for call in calls:
        counts[call.kernel, call.sizes] += call.number
    return tuple(KernelCall(*key, number) for key, number in counts.items())


def backward_of(call: KernelCall) -> KernelCall:
    """The call of the backward pass; of what moves rows, as many bytes, and a round is one."""
    return call if call.kernel in ("pass", "gather", "round") else call._replace(kernel=f"{call.kernel}_backward")
