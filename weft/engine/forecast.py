"""`weft.plan`: what a training run will take under each strategy, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from weft.core.config import Config
from weft.cost import KINDS
from weft.data import Graph
from weft.engine.own import taken_functions
from weft.engine.planning import Foreseen, clusters_of, foresee, record
from weft.engine.probing import known_profile
from weft.engine.run import asked, prepared_workload


def plan(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    machine: str | Path = "",
    hosts: int = 1,
    approximate: bool = False,
    **options: Any,
) -> list[Foreseen]:
    """What training will take under each strategy that has the options, those that fit and are fastest first.

    graph, model, options: as of `weft.train`; `workers`, by default 1, 2, 4, ... up to this machine's cores.
    machine: the file of a profile, as `weft probe` writes it; by default this machine's. hosts: such as it, with as
    many ranks on each. approximate: also strategies that do not give the numbers of `single`. Nothing is run or
    written. InputError for a mistake of the caller.
    """
    _, options = taken_functions(options)
    config, whole, module = asked(graph, model, options, "weft.plan")
    return planned(config, whole, module, machine=machine, hosts=hosts, approximate=approximate)[0]


def planned(
    config: Config, graph: Graph | None, model: nn.Module | None, *, machine: str | Path, hosts: int, approximate: bool
) -> tuple[list[Foreseen], dict[str, Any]]:
    """`plan` for a configuration, and what a file of it says."""
    profile = known_profile(machine)
    clusters = clusters_of(config, profile, hosts)
    work = prepared_workload(config, graph, model)
    found = foresee(config, work, clusters, approximate=approximate)
    return found, record(found, work) | {
        "learned": {"runs": len(profile.learned), **{kind: profile.factor(kind) for kind in KINDS}}
    }
