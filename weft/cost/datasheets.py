"""Nominal prices of machines that were not measured: datasheets, and the share of their peak that programs reach.

No constant is fitted to a measurement of graph networks. The shares are generally known for such kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from weft.cost.prices import WORK, Network, Prices, PriceTable, table_of

GIB = 1 << 30
INDEX_BYTES, NUMBER_BYTES = 4, 4
"""Bytes of an int32 index, and of a float32 number."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Figures of a GPU's datasheet."""

    memory_gib: float
    """Memory in GiB."""
    memory_gbps: float
    """Memory bandwidth in GB/s."""
    tflops: float
    """Peak float32 TFLOP/s without tensor cores."""
    host_gbps: float
    """GB/s between host and device in each direction."""
    peer_gbps: float
    """GB/s to other GPUs of the host in each direction. Without a link between GPUs: GB/s to the host."""
    source: str
    """Name of the datasheet."""


PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0
"""GB/s of 16 PCIe lanes in each direction: 8, 16 and 32 GT/s, with 128 data bits in 130 (PCI-SIG)."""

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
"""Share of the memory bandwidth that kernels reach when they read rows in order, like a copy."""
GATHER_EFFICIENCY = 0.6
"""Share of the memory bandwidth that kernels reach when they read rows by index."""
MATMUL_EFFICIENCY = 0.7
"""Share of the peak FLOP/s reached by products of matrices with thousands of rows, tens to hundreds wide."""
CACHE_TIME_RATIO = 1 / 3
"""Time to read a row from the cache, relative to reading it from memory."""
LINK_EFFICIENCY, NETWORK_EFFICIENCY = 0.8, 0.85
"""Share of the bandwidth that messages of megabytes reach: on a link within a host, and on a network."""
SECTOR_BYTES = 32
"""Smallest number of bytes that is read from memory at once."""
LAUNCH_SECONDS = 1e-5
"""Seconds to launch a kernel from Python."""
STEP_SECONDS = 1e-3
"""Seconds of a training step outside of its kernels: reading the loss, and Python itself."""
LINK_LATENCY, NETWORK_LATENCY = 1e-5, 5e-5
"""Seconds of a message between GPUs of a host, and between hosts over TCP."""
PASSES_PER_HEAD = 6
"""Reads and writes of a number per edge and head by attention: logits, their maximum, sum and softmax."""

BYTES = tuple(float(1 << power) for power in range(8, 37, 4))
"""Sizes at which nominal tables of kernels and collectives have an entry, by axis."""
ROW_BYTES = (4.0, 16.0, 64.0, 1024.0)
ROWS, COLUMNS = (64.0, 4096.0, 1048576.0), (2.0, 16.0, 64.0, 256.0, 1024.0)
SOURCES, SHARES, DEGREES = (1.0,), (0.05, 0.25, 1.0), (1.0, 4.0, 16.0, 64.0, 1024.0)
WIDTHS, HEADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0), (1.0, 4.0, 16.0)


def nominal_prices(gpu: Gpu) -> Prices:
    """Return the prices of kernels on a GPU from its arithmetic or its memory, whichever is slower (a roofline)."""
    streamed, gathered = (1 / (share * gpu.memory_gbps * 1e9) for share in (STREAM_EFFICIENCY, GATHER_EFFICIENCY))
    flop_seconds = 1 / (MATMUL_EFFICIENCY * gpu.tflops * 1e12)

    def matmul_seconds(rows: float, columns: float, width: float) -> float:
        num_bytes = NUMBER_BYTES * (rows * columns + rows * width + columns * width)
        return max(flop_seconds, num_bytes * streamed / (2 * rows * columns * width))

    def sum_seconds(_: float, share: float, degree: float, width: float) -> float:
        # Bytes per edge: its index; its source row, from memory or cache; and its share of the target's row.
        row = NUMBER_BYTES * width
        read = share * max(row, SECTOR_BYTES) + (1 - share) * CACHE_TIME_RATIO * row
        written = (row + 2 * INDEX_BYTES) / degree
        return (INDEX_BYTES + read + written) * gathered / width

    def attention_prices(back: bool) -> Callable[..., float]:
        def seconds(sources: float, share: float, degree: float, width: float, heads: float) -> float:
            # In addition to the sum: numbers for each edge and head.
            per_head = PASSES_PER_HEAD * heads * NUMBER_BYTES * gathered / width
            return (1 + back) * (sum_seconds(sources, share, degree, width) + per_head)

        return seconds

    edges = (SOURCES, SHARES, DEGREES, WIDTHS)
    tables: dict[str, PriceTable] = {}
    for name in {table_of(kernel) for kernel in WORK if kernel != "draw"}:  # sampling runs on the host
        back = name.endswith("_backward")
        if name.startswith("linear"):
            tables[name] = table_from_formula((ROWS, COLUMNS, COLUMNS), matmul_seconds)
        elif name == "loss":
            tables[name] = table_from_formula((ROWS, COLUMNS), lambda _, __: 4 * NUMBER_BYTES * streamed)
        elif name == "gather":
            tables[name] = table_from_formula(
                (BYTES, ROW_BYTES), lambda _, row: (max(row, SECTOR_BYTES) / row) * gathered + streamed
            )
        elif name == "tiles":  # PyG's own code, in memory
            tables[name] = table_from_formula(((1.0,), (1.0,)), lambda *_: streamed)
        elif name in BYTES_PER_UNIT:
            tables[name] = table_from_formula((BYTES,), lambda _, num_bytes=BYTES_PER_UNIT[name]: num_bytes * streamed)
        elif name.startswith("Attend"):
            tables[name] = table_from_formula((*edges, HEADS), attention_prices(back))
        else:
            tables[name] = table_from_formula(edges, sum_seconds)
    return Prices(
        ranks=1,
        threads=1,
        tables=tables,
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
"""Bytes that a kernel moves per unit of work; the unit is a byte for `pass`, and a number for the others."""


def table_from_formula(axes: Sequence[tuple[float, ...]], seconds: Callable[..., float]) -> PriceTable:
    """Return a table whose entries are computed by a function of the sizes.

    Args:
        axes: Sizes of each axis, ascending.
        seconds: Function from one size per axis to seconds per unit.
    """
    return PriceTable(axes=tuple(axes), seconds=tuple(seconds(*sizes) for sizes in product(*axes)))


def nominal_network(ranks: int, hosts: int, bytes_per_second: float, like: Network | None = None) -> Network:
    """Return the nominal prices of collectives.

    Args:
        ranks: Number of ranks.
        hosts: Number of hosts.
        bytes_per_second: Bandwidth of each rank.
        like: Measured network whose fixed seconds per collective are used; None: 0.
    """
    latency = (NETWORK_LATENCY if hosts > 1 else LINK_LATENCY) * max(1, math.ceil(math.log2(max(ranks, 2))))
    rate = (NETWORK_EFFICIENCY if hosts > 1 else LINK_EFFICIENCY) * bytes_per_second

    def table(rounds: int) -> PriceTable:
        return table_from_formula((BYTES,), lambda num_bytes: (rounds * latency + num_bytes / rate) / num_bytes)

    return Network(
        ranks=ranks,
        hosts=hosts,
        tables={"all_to_all": table(1), "all_reduce": table(2)},
        collective_seconds=like.collective_seconds if like else 0.0,
    )
