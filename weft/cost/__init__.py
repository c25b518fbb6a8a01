"""Cost model: prices of kernels and networks, traces of steps, and the estimated time of a step.

Reading order: trace, memory_use, prices, simulate, profile, machine, datasheets.
"""

from weft.cost.datasheets import GPUS, Gpu, nominal_network, nominal_prices
from weft.cost.machine import NOMINAL_RATES, Machine, Rates
from weft.cost.memory_use import MemoryUse
from weft.cost.prices import Network, Prices, PriceTable
from weft.cost.profile import KINDS, Disk, Processes, Profile, holds_profile
from weft.cost.trace import Operation, Steps, Trace, all_reduce, transfer

__all__ = [
    "GPUS",
    "KINDS",
    "NOMINAL_RATES",
    "Disk",
    "Gpu",
    "Machine",
    "MemoryUse",
    "Network",
    "Operation",
    "PriceTable",
    "Prices",
    "Processes",
    "Profile",
    "Rates",
    "Steps",
    "Trace",
    "all_reduce",
    "holds_profile",
    "nominal_network",
    "nominal_prices",
    "transfer",
]
