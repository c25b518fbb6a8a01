"""Source rows of a round in the slots of the buffer, and their exchange between ranks.

Source: HongTu, algorithms 2 and 3. A row that chunks of several ranks read comes from the slots of the rank that owns
it; gradients go back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from weft.parallel.chunks.run.activations import StoredRows
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.chunks.run.slots import PlacedRound


@dataclass(kw_only=True)
class Source:
    """Rows that an aggregate reads at sources, with their slots and those of their gradients."""

    names: tuple[str, ...]
    """Names of the aggregate's tensors that are these rows."""
    rows: StoredRows
    """The rows on the host."""
    into: StoredRows | None = None
    """Destination of the gradients on the host; None if there are none."""
    buffer: Tensor | None = None
    """Rows in the slots, [slots, F]."""
    grads: Tensor | None = None
    """Gradients in the slots, [slots, F]; None if there are none."""

    @property
    def values(self) -> Tensor:
        """Rows in the slots, [slots, F]."""
        assert self.buffer is not None
        return self.buffer


class SlotExchange:
    """Exchange of rows before a round, and of gradients after it, between the slots of all ranks.

    Args:
        runtime: Rows and rounds of this rank.
        hop: Number of the aggregate; part of the key that identifies a message.
    """

    def __init__(self, runtime: Runtime, hop: int) -> None:
        self.runtime, self.hop = runtime, hop

    def fetch(self, round_: PlacedRound, index: dict[str, Tensor], sources: Sequence[Source]) -> None:
        """Receive rows of other ranks into their slots, and send the rows that other ranks need.

        Args:
            round_: The round that reads the rows.
            index: Index tensors of the round by field name.
            sources: Rows that the aggregate reads.
        """
        if not round_.exchanges:
            return
        share, outgoing = self.runtime.optimisations.share, []
        for source in sources:
            if share:
                outgoing.append(source.values.index_select(0, index["send_rows"]))
            else:
                outgoing.append(self._read_for_each(source.rows, index["send_rows"], round_.send_row_counts))
        received = self._exchange(outgoing, round_.send_row_counts, round_.recv_row_counts, "rows")
        for source, rows in zip(sources, received.split([source.rows.width for source in sources], 1), strict=True):
            source.values.index_copy_(0, index["recv_row_slots"], rows)

    def _read_for_each(self, rows: StoredRows, row_numbers: Tensor, counts: Sequence[int]) -> Tensor:
        """Return rows [w, F] read from the host for every receiver in turn; a row may occur several times."""
        out = torch.empty(len(row_numbers), rows.width, dtype=self.runtime.dtype, device=self.runtime.device)
        for ids, segment in zip(row_numbers.split(list(counts)), out.split(list(counts)), strict=True):
            rows.gather(ids, segment)
        self.runtime.transfer("sources", out.nbytes, 0)
        return out

    def _exchange(self, tensors: list[Tensor], sent: Sequence[int], received: Sequence[int], content: str) -> Tensor:
        """Send tensors [w, .] joined along columns, and return the received rows."""
        rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
        tensors.clear()
        width, key = rows.shape[1], self.runtime.group.next_key(f"halo {self.hop} {content}")
        counts = ([number * width for number in numbers] for numbers in (sent, received))
        pending = self.runtime.group.all_to_all_async(rows.reshape(-1), *counts, tag="halo", key=key)
        return pending.wait().view(sum(received), width)

    def return_grads(self, round_: PlacedRound, index: dict[str, Tensor], sources: Sequence[Source]) -> None:
        """Send the gradients of rows that leave the buffer to their owners, and add those of local rows on the host.

        Args:
            round_: The round that read the rows.
            index: Index tensors of the round by field name.
            sources: Rows that the aggregate read.
        """
        if round_.in_place:
            return
        sources = [source for source in sources if source.grads is not None]
        if round_.exchanges and sources:
            outgoing = [cast(Tensor, source.grads).index_select(0, index["send_grad_slots"]) for source in sources]
            received = self._exchange(outgoing, round_.send_grad_counts, round_.recv_grad_counts, "gradients")
            widths = [source.rows.width for source in sources]
            for source, added in zip(sources, received.split(widths, 1), strict=True):
                self._accumulate(round_, index, source, added)
        for source in sources:
            assert source.grads is not None
            assert source.into is not None
            self.runtime.accumulate_rows(source.into, index["write_back"], source.grads, index["write_back_slots"])
            for name in ("write_back_slots", "send_grad_slots"):
                source.grads.index_fill_(0, index[name], 0)

    def _accumulate(self, round_: PlacedRound, index: dict[str, Tensor], source: Source, added: Tensor) -> None:
        """Add the gradients that the other ranks sent, in the order of ranks."""
        assert source.grads is not None
        assert source.into is not None
        counts = list(round_.recv_grad_counts)
        for segment, rows in zip(added.split(counts), index["recv_grads"].split(counts), strict=True):
            if self.runtime.optimisations.share:
                source.grads.index_add_(0, rows, segment)
            else:
                self.runtime.accumulate_rows(source.into, rows, segment.contiguous())
