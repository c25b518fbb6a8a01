"""What a run will cost, told beforehand."""

from weft.cost.machine import NOMINAL_RATES, Machine, Rates
from weft.cost.nominal import GPUS, Gpu, nominal_network, nominal_prices
from weft.cost.prices import Network, Prices, Profile, Table
from weft.cost.trace import Operation, Trace, all_reduce

__all__ = [
    "GPUS",
    "NOMINAL_RATES",
    "Gpu",
    "Machine",
    "Network",
    "Operation",
    "Prices",
    "Profile",
    "Rates",
    "Table",
    "Trace",
    "all_reduce",
    "nominal_network",
    "nominal_prices",
]
