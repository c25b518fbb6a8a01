"""Artificial machine profiles, for tests of decisions that depend on prices."""

from __future__ import annotations

from weft.cost import Network, Prices, PriceTable, Profile
from weft.cost.prices import WORK, table_of

PER_UNIT = {"linear": 5e-11, "linear_weights": 5e-11, "Attend": 2e-9, "Attend_backward": 4e-9}
SECONDS = 4e-10
"""Seconds per unit of work of any other kernel."""


def profile(cores: int = 2, *, byte_seconds: float = 1e-9, message_seconds: float = 1e-4) -> Profile:
    """Return prices that do not depend on size, with kernels that share cores fairly, and a network with latency."""
    tables = {table_of(name) for name in WORK}
    prices = [
        Prices(
            ranks=ranks,
            threads=threads,
            tables={name: flat(PER_UNIT.get(name, SECONDS) * ranks / threads, name) for name in tables},
            call_seconds=1e-5,
            step_seconds=1e-3,
        )
        for threads in (cores, 1)
        for ranks in {1, cores // threads}
    ]
    sizes = tuple(float(1 << power) for power in (4, 12, 20, 30))
    seconds = tuple((message_seconds + size * byte_seconds) / size for size in sizes)
    network = PriceTable(axes=(sizes,), seconds=seconds)
    networks = [
        Network(ranks=2, hosts=hosts, tables={"all_to_all": network, "all_reduce": network}) for hosts in (1, 2)
    ]
    return Profile(host={"cores": cores, "processor": "none"}, prices=prices, networks=networks)


def flat(seconds: float, name: str) -> PriceTable:
    """Return a table with a single price."""
    axes = {"pass": 1, "gather": 2, "tiles": 2, "exponential": 1, "dropout": 1, "update": 1, "loss": 2, "draw": 2}
    axes |= {"Attend": 5, "AttendEdges": 5}
    count = axes.get(name.removesuffix("_backward"), 3 if name.startswith("linear") else 4)
    return PriceTable(axes=((1.0,),) * count, seconds=(seconds,))
