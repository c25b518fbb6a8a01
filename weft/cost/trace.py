"""A trace: what one epoch of a strategy will do on one rank, promised before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from weft.runtime.kernel_call import KernelCall, backward_of


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a rank, in the order of execution.

    kind: 'map' (flops of dense matrix products), 'aggregate' (edges x width), 'collective' (bytes sent to and received
    from other ranks), or 'transfer' (bytes sent to and received from the host).
    tag: rows_to_cols, cols_to_rows, logits, halo, gradients, statistics; of a task route, halo, scores, ends, ranks;
    of a transfer rows, sources, edges, gradients; else empty.
    how: where there were several ways, which was taken and what each would send.
    """

    kind: Literal["map", "aggregate", "collective", "transfer"]
    tag: str = ""
    flops: int = 0
    edges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    recomputed: bool = False
    """Whether an aggregate is made again in the backward pass, since nothing of it was kept."""
    how: str = ""
    ahead: bool = False
    """Whether it is done beside what is before it: while a collective is under way of which it needs nothing, or of a
    transfer to the device, while that works on the chunk before; of a collective, whether its messages leave one by one
    while what is before it goes on."""
    messages: int = 0
    """How many leave and come, where a collective goes message by message; 0: ranks meet for it."""
    prefetched: bool = False
    """Whether a thread does it ahead of the step, beside those before."""
    calls: tuple[KernelCall, ...] = ()
    """What runs on the device for it, which takes its time; of a collective, what packs and unpacks."""
    backward: tuple[Operation, ...] | None = None
    """What the backward pass does for it, in order; None: its adjoint."""

    def adjoint(self) -> Operation:
        """The adjoint: what was sent comes back; the transposed aggregate; a sum stays a sum."""
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
    """The operations of one epoch's training step, or of one evaluation."""

    operations: tuple[Operation, ...]

    def select(self, *, prefetched: bool) -> Trace:
        """What is prefetched, or what is not."""
        return Trace(operations=tuple(one for one in self.operations if one.prefetched == prefetched))

    @property
    def flops(self) -> int:
        """Floating-point operations of dense maps, forward and backward, as PyTorch's FlopCounterMode counts them."""
        return sum(operation.flops for operation in self.operations)

    @property
    def edges(self) -> int:
        """Edges x width aggregated, forward and backward."""
        return sum(operation.edges for operation in self.operations)

    @property
    def collectives(self) -> Counter[str]:
        """Collectives by tag."""
        return Counter(operation.tag for operation in self._network())

    @property
    def bytes_sent(self) -> Counter[str]:
        """Bytes to other ranks by tag."""
        return _total((operation.tag, operation.bytes_sent) for operation in self._network())

    @property
    def bytes_received(self) -> Counter[str]:
        """Bytes from other ranks by tag."""
        return _total((operation.tag, operation.bytes_received) for operation in self._network())

    @property
    def to_device(self) -> Counter[str]:
        """Bytes from the host to the device by tag."""
        return +_total((operation.tag, operation.bytes_received) for operation in self._of("transfer"))

    @property
    def to_host(self) -> Counter[str]:
        """Bytes from the device to the host by tag."""
        return +_total((operation.tag, operation.bytes_sent) for operation in self._of("transfer"))

    def _network(self) -> Iterable[Operation]:
        return self._of("collective")

    def _of(self, kind: str) -> Iterable[Operation]:
        return (operation for operation in self.operations if operation.kind == kind)


class Steps(NamedTuple):
    """Training steps of an epoch of which one tells."""

    trace: Trace
    number: int
    """How many do as much."""


def all_reduce(tag: str, numbers: int, itemsize: int, size: int) -> Operation:
    """The sum of `numbers` numbers over `size` ranks, as a ring moves it: 2 (P - 1) / P of them each way."""
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
    """So many bytes that come from the host, or go there.

    calls: by which these are moved; None: each is read and written, row after row.
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
