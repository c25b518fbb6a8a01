"""Compares the estimate of a run with what was measured, for its summary and to calibrate later estimates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from weft.cost import KINDS, Profile
from weft.runtime.kernel_selection import KernelSelection
from weft.training.planning.probe_command import default_path, update_calibration
from weft.utils.errors import InputError

SECONDS = ("epoch_seconds", *(f"{kind}_seconds" for kind in ("compute", "network", "waiting")))
MIN_EPOCHS = 5
"""Fewest epochs of a run that calibrates the profile, since the first epochs are slower."""
MIN_SHARE = 0.05
"""A kind of seconds that takes a smaller share of an epoch than this is too short to calibrate by."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Time and memory of an epoch of training, estimated or measured."""

    epoch_seconds: float
    compute_seconds: float
    """Seconds of computing, on the rank that computes longest."""
    network_seconds: float
    """Seconds in which rows cross the network and no rank computes."""
    waiting_seconds: float
    """Seconds of waiting for other ranks, on the rank that waits longest."""
    host_bytes: int
    """Peak bytes of host memory, summed over the ranks."""

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> Self:
        """Return the estimate in a row of `weft plan --json`.

        Args:
            plan: The fields of a `StrategyEstimate`.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is of another type.
            ValueError: A field is not a number.
        """
        seconds = {name: float(plan[name]) for name in SECONDS}
        return cls(**seconds, host_bytes=int(plan["host_bytes"]))

    @classmethod
    def measured(cls, summary: Mapping[str, Any]) -> Self:
        """Return the measured values of a finished run, from its summary."""
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
    """State of the profile that a run was estimated with; needed to calibrate the profile after the run."""

    digest: str
    """Checksum of the profile's measurements."""
    threads: int
    """Number of threads of a rank."""
    factors: Mapping[str, float]
    """Calibration factor of each kind of seconds, which the estimate already contains."""
    choices: KernelSelection
    """Implementations of kernels that the profile measured."""

    @classmethod
    def of(cls, profile: Profile, threads: int) -> Self:
        """Return the data of a profile in its present state.

        Args:
            profile: The profile of this machine.
            threads: Number of threads of a rank.
        """
        factors = {kind: profile.factor(kind) for kind in KINDS}
        return cls(digest=profile.digest, threads=threads, factors=factors, choices=profile.choices)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of a run, made before it begins."""

    epoch: Epoch
    correction: Correction | None = None
    """None: the run does not calibrate the profile, since the estimate comes from another machine or other kernels."""

    def record(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the field `forecast` of a run's summary: the estimated (`told`) and the measured (`seen`) values."""
        return {"told": asdict(self.epoch), "seen": asdict(Epoch.measured(summary))}

    def ratios(self, measured: Epoch) -> dict[str, float]:
        """Return the ratio of measured to uncalibrated estimated seconds, for each kind of `KINDS`.

        A kind that takes less than `MIN_SHARE` of the epoch is left out.

        Args:
            measured: The epoch as it was measured.
        """
        assert self.correction
        ratios = {}
        for kind in KINDS:
            estimate, measurement = (getattr(epoch, f"{kind}_seconds") for epoch in (self.epoch, measured))
            if min(estimate / self.epoch.epoch_seconds, measurement / measured.epoch_seconds) >= MIN_SHARE:
                # The estimate contains the calibration factor: multiply by it to compare with the tables alone.
                ratios[kind] = measurement / estimate * self.correction.factors[kind]
        return ratios

    def update_calibration(self, summary: Mapping[str, Any], epochs: int) -> None:
        """Calibrate the profile of this machine by a finished run.

        Does nothing if the run is too short, its ranks had another number of threads than estimated, or the profile
        cannot be read or written.

        Args:
            summary: The summary of the run.
            epochs: Number of epochs that this process trained.
        """
        correction = self.correction
        if correction is None or epochs < MIN_EPOCHS or torch.get_num_threads() != correction.threads:
            return
        with suppress(InputError, OSError):
            update_calibration(default_path(), correction.digest, self.ratios(Epoch.measured(summary)))
