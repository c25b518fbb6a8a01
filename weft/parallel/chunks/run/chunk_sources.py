"""The rows that chunks read at sources, in slots: what of them comes from other ranks, and of gradients goes there.

(HongTu, algorithms 2 and 3.) A row that chunks of several ranks read comes from the slots of the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from weft.parallel.chunks.run.activations import Rows
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.chunks.run.slots import PlacedRound


@dataclass(kw_only=True)
class Source:
    """Rows that an aggregate reads at sources, as these tensors; their slots, and those of their gradients.

    into: where the gradients go, if there are any.
    """

    names: tuple[str, ...]
    rows: Rows
    into: Rows | None = None
    buffer: Tensor | None = None
    grads: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The rows in the slots, [slots, F]."""
        assert self.buffer is not None
        return self.buffer


class SlotExchange:
    """What crosses between the slots of ranks before and after a round of an aggregate, whose number is `hop`."""

    def __init__(self, runtime: Runtime, hop: int) -> None:
        self.runtime, self.hop = runtime, hop

    def fetch(self, round_: PlacedRound, index: dict[str, Tensor], sources: Sequence[Source]) -> None:
        """Rows of other ranks come into their slots, from the slots, or the host, of those that have them."""
        if not round_.exchanges:
            return
        share, segments = self.runtime.optimisations.share, []
        for source in sources:
            if share:
                segments.append(source.values.index_select(0, index["serve"]))
            else:
                segments.append(self._read_for_each(source.rows, index["serve"], round_.serve_counts))
        got = self._exchange(segments, round_.serve_counts, round_.fetch_counts, "rows")
        for source, rows in zip(sources, got.split([one.rows.width for one in sources], 1), strict=True):
            source.values.index_copy_(0, index["fetch_slots"], rows)

    def _read_for_each(self, rows: Rows, wanted: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows for every receiver apart, each as often as it is wanted: [w, F]."""
        out = torch.empty(len(wanted), rows.width, dtype=self.runtime.dtype, device=self.runtime.device)
        for ids, segment in zip(wanted.split(list(counts)), out.split(list(counts)), strict=True):
            rows.gather(ids, segment)
        self.runtime.transfer("sources", out.nbytes, 0)
        return out

    def _exchange(self, given: list[Tensor], sent: Sequence[int], received: Sequence[int], what: str) -> Tensor:
        """Sends rows [w, .] side by side; those that come."""
        rows = given[0] if len(given) == 1 else torch.cat(given, 1)
        given.clear()
        width, key = rows.shape[1], self.runtime.group.next_key(f"halo {self.hop} {what}")
        counts = ([number * width for number in numbers] for numbers in (sent, received))
        return (
            self.runtime.group.all_to_all_async(rows.reshape(-1), *counts, tag="halo", key=key).wait().view(-1, width)
        )

    def leave(self, round_: PlacedRound, index: dict[str, Tensor], sources: Sequence[Source]) -> None:
        """Gradients of rows that the next round does not hold go to the ranks that own them, and to the host."""
        if round_.in_place:
            return
        sources = [source for source in sources if source.grads is not None]
        if round_.exchanges and sources:
            given = [cast(Tensor, one.grads).index_select(0, index["give_slots"]) for one in sources]
            got = self._exchange(given, round_.give_counts, round_.take_counts, "gradients")
            widths = [one.rows.width for one in sources]
            for source, added in zip(sources, got.split(widths, 1), strict=True):
                self._take(round_, index, source, added)
        for source in sources:
            assert source.grads is not None
            assert source.into is not None
            self.runtime.give(source.into, index["flush"], source.grads, index["flush_slots"])
            for name in ("flush_slots", "give_slots"):
                source.grads.index_fill_(0, index[name], 0)

    def _take(self, round_: PlacedRound, index: dict[str, Tensor], source: Source, added: Tensor) -> None:
        """Adds the gradients that the ranks gave, one rank's after the other's."""
        assert source.grads is not None
        assert source.into is not None
        counts = list(round_.take_counts)
        for segment, rows in zip(added.split(counts), index["take"].split(counts), strict=True):
            if self.runtime.optimisations.share:
                source.grads.index_add_(0, rows, segment)
            else:
                self.runtime.give(source.into, rows, segment.contiguous())
