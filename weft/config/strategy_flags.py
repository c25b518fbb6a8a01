"""Options that only some strategies read: each is declared once, for the command line and for the plans.

A plan's options (`weft.strategies`) combine some of these classes; `Config` combines all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weft.config.option import bytes_of, option
from weft.utils.errors import InputError

strategy_option = partial(option, section="strategy")


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Mini-batches of `split` and `sampled`."""

    batch_size: str = strategy_option(
        "",
        "split, sampled: number of training vertices, links or labelled edges of a mini-batch on all ranks together, "
        "or all; "
        "none: 1024",
        fixed=True,
    )
    accumulate_grad_batches: int = strategy_option(
        1,
        "split, sampled: number of mini-batches whose gradients are added up for an optimizer step, which then equals "
        "a step on a mini-batch as large as all of them",
        least=1,
        fixed=True,
    )
    fanout: str = strategy_option(
        "10",
        "split, sampled: in-edges to sample for each vertex: a number for all layers, or one for each layer, "
        "starting at the batch; or all",
        fixed=True,
    )
    sampling: str = strategy_option(
        "uniform",
        "split, sampled: sampling of in-edges: uniform, labor (reads fewer vertices) or weighted (by edge weights)",
        choices=("uniform", "labor", "weighted"),
        fixed=True,
    )
    batch_dependency: int = strategy_option(
        1,
        "split, sampled: number of batches over which labor's random numbers change gradually (1: new ones for "
        "each batch)",
        least=1,
        most=1 << 20,
        fixed=True,
    )
    prefetch_batches: int = strategy_option(
        2, "split, sampled: number of mini-batches that a thread prepares in advance (0: none)", least=0, most=1000
    )


@dataclass(frozen=True, kw_only=True)
class CacheFlags:
    """Size of a cache."""

    cache_memory: int | str = strategy_option(
        "",
        "hybrid, offload, split, sampled: limit of each rank's cache, such as 512MB. hybrid, offload: remote "
        "vertices to recompute (none: no limit); split, sampled: features of vertices (none: no cache)",
        amount=True,
    )

    @property
    def cache_bytes(self) -> int | None:
        """Limit of a rank's cache in bytes; None: not given."""
        return bytes_of(self.cache_memory, "--cache-memory")


@dataclass(frozen=True, kw_only=True)
class CachingFlags(CacheFlags):
    """Which remote vertices are recomputed, and not fetched."""

    cache_ratio: float = strategy_option(
        -1.0,
        "hybrid, offload: fraction of remote neighbours to recompute locally instead of fetching, at each layer; "
        "-1 lets the cost model choose (offload: none)",
        least=-1,
        most=1,
    )

    @property
    def ratio(self) -> float | None:
        """Share of remote sources to cache at each layer; None: chosen by the cost model.

        Raises:
            InputError: The value is negative, but not -1.
        """
        if -1 < self.cache_ratio < 0:
            raise InputError(
                f"--cache-ratio {self.cache_ratio}: give a fraction from 0 to 1, or -1 to let the cost model choose"
            )
        return self.cache_ratio if self.cache_ratio >= 0 else None


@dataclass(frozen=True, kw_only=True)
class StaleFlags:
    """When `stale` exchanges halos."""

    refresh_every: int = strategy_option(4, "stale: number of training steps between two exchanges of halos", least=1)
    staleness: float = strategy_option(
        0.0, "stale: exchange earlier if rows have changed by more than this fraction (0: never earlier)", least=0
    )


@dataclass(frozen=True, kw_only=True)
class ChunkFlags:
    """Aggregates in chunks, and the memory that they may use."""

    device_memory: int | str = strategy_option(
        "",
        "tensor, offload, pipeline: limit of the device memory of each rank, such as 512MB; none: no limit",
        amount=True,
    )
    chunks: int = strategy_option(
        0,
        "tensor, offload, pipeline: number of chunks in which a rank computes aggregates (0: as few as "
        "--device-memory allows; for pipeline 1, or 4 to 8 if there is enough work)",
        least=0,
        most=1 << 14,
    )

    @property
    def device_bytes(self) -> int | None:
        """Limit of the peak device memory of a rank in bytes; None: no limit."""
        return bytes_of(self.device_memory, "--device-memory")


@dataclass(frozen=True, kw_only=True)
class HostRowFlags(ChunkFlags):
    """Chunks whose rows are on the host."""

    intermediates: str = strategy_option(
        "auto",
        "offload, pipeline: results of aggregates that the backward pass needs: keep them on the host, or "
        "recompute them; auto: whichever costs less",
        choices=("auto", "keep", "recompute"),
    )
    scratch: str = strategy_option(
        "",
        "offload, pipeline: folder for rows on the host; none: in memory, or with --device-memory in the folder "
        "for temporary files",
    )

    @property
    def folder(self) -> Path | None:
        """Folder of the rows on the host; None: the folder for temporary files."""
        return Path(self.scratch) if self.scratch else None
