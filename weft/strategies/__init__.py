"""Where rows, columns and edges live: a folder per strategy, one table of names."""

from weft.strategies.base import CandidateLinks, MemoryUse, Options, Placed, Plan, Step
from weft.strategies.offload.plan import OffloadPlan
from weft.strategies.pipeline.plan import PipelinePlan
from weft.strategies.placed_view import Exchange, PlacedView
from weft.strategies.resident import AggregateSize, ResidentPlaced, ResidentPlan, aggregate
from weft.strategies.single import SinglePlan
from weft.strategies.split.plan import SampledPlan, SplitPlan
from weft.strategies.tensor.plan import TensorPlan
from weft.strategies.vertex.plan import CachedPlan, CommunicatedPlan, HybridPlan, VertexOptions
from weft.strategies.vertex.stale import StalePlan
from weft.utils.errors import unknown

STRATEGIES: dict[str, type[Plan]] = {
    plan.name: plan
    for plan in (
        SinglePlan,
        TensorPlan,
        CommunicatedPlan,
        CachedPlan,
        HybridPlan,
        StalePlan,
        OffloadPlan,
        PipelinePlan,
        SplitPlan,
        SampledPlan,
    )
}


def register(plan: type[Plan]) -> type[Plan]:
    """Makes a strategy known by its name, to `weft.train`, to the command line and to the tests; a decorator."""
    STRATEGIES[plan.name] = plan
    return plan


def get_strategy(name: str) -> type[Plan]:
    """The plans of the strategy of that name; InputError with the nearest name if there is none."""
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    return STRATEGIES[name]


__all__ = [
    "STRATEGIES",
    "AggregateSize",
    "CandidateLinks",
    "Exchange",
    "MemoryUse",
    "Options",
    "Placed",
    "PlacedView",
    "Plan",
    "ResidentPlaced",
    "ResidentPlan",
    "Step",
    "VertexOptions",
    "aggregate",
    "get_strategy",
    "register",
]
