"""Where rows, columns and edges live: one file per strategy, one table of names."""

from weft.core.errors import unknown
from weft.strategies.base import GraphShape, Placement, Step, Strategy
from weft.strategies.offload.run import Offload
from weft.strategies.single import Single
from weft.strategies.tensor.plan import TensorParallel
from weft.strategies.vertex.plan import Cached, Communicated, Hybrid
from weft.strategies.vertex.stale import Stale

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Single,
    "tensor": TensorParallel,
    "communicated": Communicated,
    "cached": Cached,
    "hybrid": Hybrid,
    "stale": Stale,
    "offload": Offload,
}


APPROXIMATE = ("stale",)
"""Strategies that change the numbers; all others give those of single."""


def get_strategy(name: str) -> type[Strategy]:
    """The strategy of that name; InputError with the nearest name if there is none."""
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    return STRATEGIES[name]


__all__ = ["APPROXIMATE", "STRATEGIES", "GraphShape", "Placement", "Step", "Strategy", "get_strategy"]
