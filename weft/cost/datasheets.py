"""What machines take that nobody has measured: datasheets, and how much of what these promise programs get.

Nothing here is fitted to a measurement of graph networks. Shares are what is generally known of such kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from weft.cost.prices import WORK, Network, Prices, PriceTable, table_of

GIB = 1 << 30
INDEX_BYTES, NUMBER_BYTES = 4, 4


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its datasheet."""

    memory_gib: float
    memory_gbps: float
    """GB/s of its memory."""
    tflops: float
    """float32, without tensor cores."""
    host_gbps: float
    """GB/s from the host or to it, each way."""
    peer_gbps: float
    """GB/s to other GPUs of the host, each way; over the host's link where it has no other."""
    source: str
    """The datasheet."""


PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0
"""GB/s each way of 16 lanes: 8, 16 and 32 GT/s, of 130 bits 128 (PCI-SIG)."""

GPUS = {
    "P100": Gpu(
        memory_gib=16, memory_gbps=732, tflops=10.6, host_gbps=PCIE3, peer_gbps=80, source="NVIDIA Tesla P100 (SXM2)"
    ),
    "T4": Gpu(memory_gib=16, memory_gbps=320, tflops=8.1, host_gbps=PCIE3, peer_gbps=PCIE3, source="NVIDIA T4"),
    "V100": Gpu(
        memory_gib=16, memory_gbps=900, tflops=15.7, host_gbps=PCIE3, peer_gbps=150, source="NVIDIA V100 (SXM2, 16 GB)"
    ),
    "V100-32GB": Gpu(
        memory_gib=32, memory_gbps=900, tflops=15.7, host_gbps=PCIE3, peer_gbps=150, source="NVIDIA V100 (SXM2, 32 GB)"
    ),
    "A10": Gpu(memory_gib=24, memory_gbps=600, tflops=31.2, host_gbps=PCIE4, peer_gbps=PCIE4, source="NVIDIA A10"),
    "A100": Gpu(
        memory_gib=80, memory_gbps=2039, tflops=19.5, host_gbps=PCIE4, peer_gbps=300, source="NVIDIA A100 (SXM, 80 GB)"
    ),
    "A100-40GB": Gpu(
        memory_gib=40, memory_gbps=1555, tflops=19.5, host_gbps=PCIE4, peer_gbps=300, source="NVIDIA A100 (SXM, 40 GB)"
    ),
    "H100": Gpu(
        memory_gib=80, memory_gbps=3350, tflops=67.0, host_gbps=PCIE5, peer_gbps=450, source="NVIDIA H100 (SXM)"
    ),
    "H200": Gpu(
        memory_gib=141, memory_gbps=4800, tflops=67.0, host_gbps=PCIE5, peer_gbps=450, source="NVIDIA H200 (SXM)"
    ),
    "L4": Gpu(
        memory_gib=24, memory_gbps=300, tflops=30.3, host_gbps=PCIE4 / 2, peer_gbps=PCIE4 / 2, source="NVIDIA L4"
    ),
    "L40S": Gpu(memory_gib=48, memory_gbps=864, tflops=91.6, host_gbps=PCIE4, peer_gbps=PCIE4, source="NVIDIA L40S"),
    "RTX3090": Gpu(
        memory_gib=24, memory_gbps=936, tflops=35.6, host_gbps=PCIE4, peer_gbps=PCIE4, source="GeForce RTX 3090"
    ),
    "RTX3090TI": Gpu(
        memory_gib=24, memory_gbps=1008, tflops=40.0, host_gbps=PCIE4, peer_gbps=PCIE4, source="GeForce RTX 3090 Ti"
    ),
    "RTX4090": Gpu(
        memory_gib=24, memory_gbps=1008, tflops=82.6, host_gbps=PCIE4, peer_gbps=PCIE4, source="GeForce RTX 4090"
    ),
}

STREAM_EFFICIENCY = 0.8
"""Of a memory's bytes a second, where rows are read one after the other, as copies reach."""
GATHER_EFFICIENCY = 0.6
"""The same where rows are read by index."""
MATMUL_EFFICIENCY = 0.7
"""Of the peak's flops, in products of matrices of thousands of rows that are tens to hundreds wide."""
CACHE_TIME_RATIO = 1 / 3
"""Of the time of a row from memory, what one from the cache takes."""
LINK_EFFICIENCY, NETWORK_EFFICIENCY = 0.8, 0.85
"""Of the bytes a second of a link inside a host, and of a network, in messages of megabytes."""
SECTOR_BYTES = 32
"""The least that is read of memory."""
LAUNCH_SECONDS = 1e-5
"""Of a kernel, from Python."""
STEP_SECONDS = 1e-3
"""Of a step beside its kernels: reading the loss, and Python's own."""
LINK_LATENCY, NETWORK_LATENCY = 1e-5, 5e-5
"""Seconds of a message between GPUs of a host, and between hosts over TCP."""
PASSES_PER_HEAD = 6
"""Over numbers by edge and head, of attention: logits, their maximum, sum and softmax, read and written."""

BYTES = tuple(float(1 << power) for power in range(8, 37, 4))
ROW_BYTES = (4.0, 16.0, 64.0, 1024.0)
ROWS, COLUMNS = (64.0, 4096.0, 1048576.0), (2.0, 16.0, 64.0, 256.0, 1024.0)
SOURCES, SHARES, DEGREES = (1.0,), (0.05, 0.25, 1.0), (1.0, 4.0, 16.0, 64.0, 1024.0)
WIDTHS, HEADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0), (1.0, 4.0, 16.0)


def nominal_prices(gpu: Gpu) -> Prices:
    """What kernels take on a GPU: by its arithmetic or by its memory, whichever takes longer (a roofline)."""
    streamed, gathered = (1 / (share * gpu.memory_gbps * 1e9) for share in (STREAM_EFFICIENCY, GATHER_EFFICIENCY))
    flop = 1 / (MATMUL_EFFICIENCY * gpu.tflops * 1e12)

    def product_of(rows: float, columns: float, width: float) -> float:
        moved = NUMBER_BYTES * (rows * columns + rows * width + columns * width)
        return max(flop, moved * streamed / (2 * rows * columns * width))

    def summed(_: float, share: float, degree: float, width: float) -> float:
        row = NUMBER_BYTES * width
        read = share * max(row, SECTOR_BYTES) + (1 - share) * CACHE_TIME_RATIO * row
        written = (row + 2 * INDEX_BYTES) / degree
        return (INDEX_BYTES + read + written) * gathered / width

    def attended(back: bool) -> Callable[..., float]:
        def seconds(sources: float, share: float, degree: float, width: float, heads: float) -> float:
            by_head = PASSES_PER_HEAD * heads * NUMBER_BYTES * gathered / width
            return (1 + back) * (summed(sources, share, degree, width) + by_head)

        return seconds

    edges = (SOURCES, SHARES, DEGREES, WIDTHS)
    known: dict[str, PriceTable] = {}
    for name in {table_of(kernel) for kernel in WORK if kernel != "draw"}:  # by hosts
        back = name.endswith("_backward")
        if name.startswith("linear"):
            known[name] = table_from_formula((ROWS, COLUMNS, COLUMNS), product_of)
        elif name == "loss":
            known[name] = table_from_formula((ROWS, COLUMNS), lambda _, __: 4 * NUMBER_BYTES * streamed)
        elif name == "gather":
            known[name] = table_from_formula(
                (BYTES, ROW_BYTES), lambda _, row: (max(row, SECTOR_BYTES) / row) * gathered + streamed
            )
        elif name in BYTES_PER_UNIT:
            known[name] = table_from_formula((BYTES,), lambda _, num_bytes=BYTES_PER_UNIT[name]: num_bytes * streamed)
        elif name.startswith("Attend"):
            known[name] = table_from_formula((*edges, HEADS), attended(back))
        else:
            known[name] = table_from_formula(edges, summed)
    return Prices(
        ranks=1,
        threads=1,
        tables=known,
        call_seconds=LAUNCH_SECONDS,
        move_seconds=LAUNCH_SECONDS,
        step_seconds=STEP_SECONDS,
        link_seconds=1 / (LINK_EFFICIENCY * gpu.host_gbps * 1e9),
    )


BYTES_PER_UNIT = {
    "pass": 1,
    "exponential": 2 * NUMBER_BYTES,
    "dropout": 2 * NUMBER_BYTES,
    "update": 7 * NUMBER_BYTES,
}
"""Bytes that kernels over numbers move for a unit: of a pass a byte, of the others a number."""


def table_from_formula(axes: Sequence[tuple[float, ...]], seconds: Callable[..., float]) -> PriceTable:
    """The table of a formula."""
    return PriceTable(axes=tuple(axes), seconds=tuple(seconds(*sizes) for sizes in product(*axes)))


def nominal_network(ranks: int, hosts: int, bytes_per_second: float, like: Network | None = None) -> Network:
    """Collectives among so many ranks, each of which sends so many bytes a second.

    like: a measured one, of which a collective's fixed costs are.
    """
    latency = (NETWORK_LATENCY if hosts > 1 else LINK_LATENCY) * max(1, math.ceil(math.log2(max(ranks, 2))))
    rate = (NETWORK_EFFICIENCY if hosts > 1 else LINK_EFFICIENCY) * bytes_per_second

    def taken(rounds: int) -> PriceTable:
        return table_from_formula((BYTES,), lambda size: (rounds * latency + size / rate) / size)

    return Network(
        ranks=ranks,
        hosts=hosts,
        tables={"all_to_all": taken(1), "all_reduce": taken(2)},
        collective_seconds=like.collective_seconds if like else 0.0,
    )
