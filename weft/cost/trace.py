"""Trace: the operations that a strategy will run on one rank in a step, known before the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from weft.runtime.kernel_call import KernelCall, backward_of


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a rank."""

    kind: Literal["dense", "aggregate", "collective", "transfer"]
    """Type of the operation, which decides the fields that count its work.

    'dense' (`flops` of matrix products), 'aggregate' (`edges`, counted edges x width), 'collective' (bytes sent to and
    received from other ranks) or 'transfer' (bytes sent to and received from the host).
    """
    tag: str = ""
    """Purpose of a collective or transfer; '' for other kinds.

    Collectives of a strategy: rows_to_cols, cols_to_rows, logits, halo, gradients, statistics. Collectives of a task:
    route, halo, scores, ends, ranks. Transfers: rows, sources, edges, gradients.
    """
    flops: int = 0
    edges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    recomputed: bool = False
    """True if the backward pass runs the aggregate again, because nothing of its forward pass was saved."""
    how: str = ""
    """Text for people: the method that was chosen among several, and the bytes that each would send."""
    ahead: bool = False
    """True if the operation overlaps with the operations before it.

    A kernel runs while the previous collective, whose rows it does not read, is in progress. A transfer to the device
    runs during the kernels of the previous chunk. The messages of a collective leave one by one during the operations
    before it.
    """
    messages: int = 0
    """Number of messages of a collective that goes message by message; 0 if all ranks meet for it."""
    prefetched: bool = False
    """True if a background thread runs the operation before its step, during earlier steps."""
    calls: tuple[KernelCall, ...] = ()
    """Kernels that run on the device for the operation; for a collective, those that pack and unpack rows."""
    backward: tuple[Operation, ...] | None = None
    """Operations of the backward pass, in order; None: the adjoint of this operation."""

    def adjoint(self) -> Operation:
        """Return the operation of the backward pass.

        Bytes that were sent are received, an aggregate runs over the transposed edges, and an all-reduce stays the
        same.
        """
        # An exchange of rows and columns is undone by the opposite exchange; all other tags stay.
        tag = {"rows_to_cols": "cols_to_rows", "cols_to_rows": "rows_to_cols"}.get(self.tag, self.tag)
        edges = self.edges * (2 if self.recomputed else 1)
        back = tuple(backward_of(call) for call in self.calls)
        return replace(
            self,
            tag=tag,
            edges=edges,
            bytes_sent=self.bytes_received,
            bytes_received=self.bytes_sent,
            calls=(*self.calls, *back) if self.recomputed else back,
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Operations of one training step or one evaluation on one rank."""

    operations: tuple[Operation, ...]
    """All operations, in the order in which they run."""

    def select(self, *, prefetched: bool) -> Trace:
        """Return the trace of the operations that are prefetched, or of those that are not."""
        return Trace(operations=tuple(operation for operation in self.operations if operation.prefetched == prefetched))

    @property
    def flops(self) -> int:
        """Floating-point operations of dense layers, forward and backward, as PyTorch's FlopCounterMode counts them."""
        return sum(operation.flops for operation in self.operations)

    @property
    def edges(self) -> int:
        """Aggregated edges x width, forward and backward."""
        return sum(operation.edges for operation in self.operations)

    @property
    def collectives(self) -> Counter[str]:
        """Number of collectives by tag."""
        return Counter(operation.tag for operation in self._network())

    @property
    def bytes_sent(self) -> Counter[str]:
        """Bytes sent to other ranks, by tag."""
        return _total((operation.tag, operation.bytes_sent) for operation in self._network())

    @property
    def bytes_received(self) -> Counter[str]:
        """Bytes received from other ranks, by tag."""
        return _total((operation.tag, operation.bytes_received) for operation in self._network())

    @property
    def to_device(self) -> Counter[str]:
        """Bytes copied from the host to the device, by tag."""
        return +_total((operation.tag, operation.bytes_received) for operation in self._of("transfer"))

    @property
    def to_host(self) -> Counter[str]:
        """Bytes copied from the device to the host, by tag."""
        return +_total((operation.tag, operation.bytes_sent) for operation in self._of("transfer"))

    def _network(self) -> Iterable[Operation]:
        return self._of("collective")

    def _of(self, kind: str) -> Iterable[Operation]:
        return (operation for operation in self.operations if operation.kind == kind)


class Steps(NamedTuple):
    """Training steps of an epoch that all have about the same trace."""

    trace: Trace
    """Trace of one of the steps."""
    number: int
    """Number of steps that the trace stands for."""


def all_reduce(tag: str, numbers: int, itemsize: int, size: int) -> Operation:
    """Return the operation that sums numbers over all ranks in a ring.

    Each rank sends and receives 2 (P - 1) / P of the numbers.

    Args:
        tag: Tag of the operation.
        numbers: Number of elements that are summed.
        itemsize: Bytes of an element.
        size: Number of ranks P.
    """
    payload = 2 * numbers * itemsize * (size - 1) // size
    return Operation(kind="collective", tag=tag, bytes_sent=payload, bytes_received=payload)


def transfer(
    tag: str,
    *,
    to_device: int = 0,
    to_host: int = 0,
    ahead: bool = False,
    calls: tuple[KernelCall, ...] | None = None,
) -> Operation:
    """Return the operation that copies bytes between host and device.

    Args:
        tag: Tag of the operation.
        to_device: Bytes from the host to the device.
        to_host: Bytes from the device to the host.
        ahead: True if the copy overlaps with the operations before it.
        calls: Kernels that move the bytes. None: each byte is read once and written once, row after row.
    """
    if calls is None:
        copied = 2 * (to_device + to_host)
        calls = (KernelCall("pass", (copied,)),) if copied else ()
    return Operation(kind="transfer", tag=tag, bytes_sent=to_host, bytes_received=to_device, calls=calls, ahead=ahead)


def _total(items: Iterable[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for tag, amount in items:
        total[tag] += amount
    return total
