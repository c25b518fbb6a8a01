"""Strategies: rules for where rows, columns and edges are stored and what crosses the network.

Each strategy has a file or a folder; `STRATEGIES` maps their names to their plans. Reading order: base, single,
resident, vertex, tensor, offload, pipeline, split.
"""

from weft.parallel.blocks.vertex_layout import VertexLayout
from weft.parallel.exchange import Exchange, PlacedView
from weft.parallel.layout import Layout, StepInputs
from weft.parallel.operations import AggregateSize, aggregate
from weft.strategies.base import CandidateLinks, Options, Placed, Plan, Step, VertexOptions
from weft.strategies.offload.plan import OffloadPlan
from weft.strategies.pipeline.plan import PipelinePlan
from weft.strategies.resident import ResidentPlaced, ResidentPlan
from weft.strategies.single import SinglePlan
from weft.strategies.split.plan import SampledPlan, SplitPlan
from weft.strategies.tensor.plan import TensorPlan
from weft.strategies.vertex.plan import CachedPlan, CommunicatedPlan, HybridPlan
from weft.strategies.vertex.stale import StalePlan
from weft.utils.entry_points import load_entry_point
from weft.utils.errors import InputError, unknown

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
"""Plan class of each strategy, by name."""


def register(plan: type[Plan]) -> type[Plan]:
    """Register a strategy under its name, for `weft.train`, the command line and the tests.

    Use it as a decorator of the plan class.
    """
    STRATEGIES[plan.name] = plan
    return plan


def find_strategy(name: str) -> type[Plan] | None:
    """Return the plan class of a strategy, or None. Register one that an installed package declares.

    Raises:
        InputError: It cannot be imported, or is no plan class of this name.
    """
    if (plan := load_entry_point("strategy", name, STRATEGIES)) is not None:
        if getattr(plan, "name", None) != name:
            raise InputError(f"strategy {name}: {plan.__module__}.{plan.__name__}.name must be {name!r}: correct it")
        register(plan)
    return STRATEGIES.get(name)


def get_strategy(name: str) -> type[Plan]:
    """Return the plan class of a strategy.

    Raises:
        InputError: There is no strategy of that name; the message suggests the nearest one.
    """
    if (plan := find_strategy(name)) is None:
        raise unknown("strategy", name, STRATEGIES)
    return plan


__all__ = [
    "STRATEGIES",
    "AggregateSize",
    "CandidateLinks",
    "Exchange",
    "Layout",
    "Options",
    "Placed",
    "PlacedView",
    "Plan",
    "ResidentPlaced",
    "ResidentPlan",
    "Step",
    "StepInputs",
    "VertexLayout",
    "VertexOptions",
    "aggregate",
    "find_strategy",
    "get_strategy",
    "register",
]
