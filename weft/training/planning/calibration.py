"""What was told of a run beside what it took: for its summary, and for forecasts to come."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from weft.cost import KINDS, Profile
from weft.runtime.kernel_selection import Choices
from weft.training.planning.probe_command import default_path, teach
from weft.utils.errors import InputError

SECONDS = ("epoch_seconds", *(f"{kind}_seconds" for kind in ("compute", "network", "waiting")))
LEAST_EPOCHS = 5
"""Of a run that teaches: the first ones are slower."""
LEAST_SHARE = 0.05
"""Of an epoch's seconds: of a kind that takes less, a run teaches nothing."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch of training, as it was told or seen."""

    epoch_seconds: float
    compute_seconds: float
    """Of the rank that computes longest."""
    network_seconds: float
    """While rows cross and nobody computes."""
    waiting_seconds: float
    """Of the rank that waits longest for others."""
    host_bytes: int
    """In memory, of all ranks."""

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> Self:
        """That of a plan as JSON has it. KeyError, TypeError or ValueError for what is none."""
        seconds = {name: float(plan[name]) for name in SECONDS}
        return cls(**seconds, host_bytes=int(plan["host_bytes"]))

    @classmethod
    def seen(cls, summary: Mapping[str, Any]) -> Self:
        """That of a run which has ended."""
        ranks = summary["ranks"]
        return cls(
            epoch_seconds=summary["epoch_seconds"],
            compute_seconds=max(rank["compute_seconds"] for rank in ranks),
            network_seconds=max(rank["communication_seconds"] for rank in ranks),
            waiting_seconds=max(rank["waiting_seconds"] for rank in ranks),
            host_bytes=sum(rank["peak_memory_bytes"] for rank in ranks),
        )


@dataclass(frozen=True, kw_only=True)
class Correction:
    """By what a run was told, on the machine that it is on."""

    digest: str
    """Of the profile."""
    threads: int
    """Of a rank."""
    factors: Mapping[str, float]
    """By kind, what runs before had taught."""
    choices: Choices
    """The implementations of kernels that were measured."""

    @classmethod
    def of(cls, profile: Profile, threads: int) -> Self:
        """That of a profile as it is now."""
        factors = {kind: profile.factor(kind) for kind in KINDS}
        return cls(digest=profile.digest, threads=threads, factors=factors, choices=profile.choices)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What was told of a run before it began."""

    epoch: Epoch
    lesson: Correction | None = None
    """None: it was told elsewhere, and the run teaches nothing."""

    def record(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Both sides, as JSON knows them, of a run with this summary."""
        return {"told": asdict(self.epoch), "seen": asdict(Epoch.seen(summary))}

    def ratios(self, seen: Epoch) -> dict[str, float]:
        """By kind, how many times the seconds that the tables alone tell a run took."""
        assert self.lesson
        found = {}
        for kind in KINDS:
            told, took = (getattr(one, f"{kind}_seconds") for one in (self.epoch, seen))
            if min(told / self.epoch.epoch_seconds, took / seen.epoch_seconds) >= LEAST_SHARE:
                found[kind] = took / told * self.lesson.factors[kind]
        return found

    def teach(self, summary: Mapping[str, Any], epochs: int) -> None:
        """Has later forecasts learn of a run that trained so many epochs; nothing where the file cannot be written.

        Nor of one whose ranks had another number of threads than told.
        """
        lesson = self.lesson
        if lesson is None or epochs < LEAST_EPOCHS or torch.get_num_threads() != lesson.threads:
            return
        with suppress(InputError, OSError):
            teach(default_path(), lesson.digest, self.ratios(Epoch.seen(summary)))
