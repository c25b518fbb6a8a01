"""`weft.plan`: what a training run will take under each strategy, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from weft.autotune import Cluster
from weft.config.config import Config
from weft.cost import KINDS, Profile
from weft.data import DescribedGraph, Graph, is_described
from weft.training.custom_functions import taken_functions
from weft.training.machine_context import known_choices
from weft.training.planning.machine_list import clusters_of, clusters_on, machines_of
from weft.training.planning.plan_file import record
from weft.training.planning.plan_subject import DescribedSubject, Subject, WholeSubject
from weft.training.planning.probe_command import known_profile
from weft.training.planning.search import StrategyEstimate, foresee, notes_on
from weft.training.run import asked, prepared_workload
from weft.utils.errors import InputError


def plan(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    machine: str | Path = "",
    hosts: int = 1,
    machines: str = "",
    approximate: bool = False,
    **options: Any,
) -> list[StrategyEstimate]:
    """What training will take under each strategy that has the options, those that fit and are fastest first.

    graph, model, options: as of `weft.train`, or `stats:...`, a graph of which only numbers are known;
    `workers`, by default 1, 2, 4, ... up to this machine's cores. machine: the file of a profile, as `weft probe`
    writes it; by default this machine's. hosts: such as it, with as many ranks on each. machines: those that are not
    there, as of `weft plan --machines`. approximate: also strategies that do not give the numbers of `single`.
    Nothing is run or written. InputError for a mistake of the caller.
    """
    _, options = taken_functions(options)
    config, whole, module = asked(graph, model, options, "weft.plan")
    where = Where(machine=machine, hosts=hosts, machines=machines)
    return planned(config, whole, module, where, approximate=approximate)[0]


@dataclass(frozen=True, kw_only=True)
class Where:
    """On what machines a person wants to know what training takes."""

    machine: str | Path = ""
    """The file of a profile; '': this machine's."""
    hosts: int = 1
    """Such as it."""
    machines: str = ""
    """Others, see `machines_of`."""

    def clusters(self, config: Config) -> tuple[list[Cluster], Profile | None]:
        """What a configuration may run on, and the profile that this is of. InputError for what is not known."""
        if not self.machines:
            profile = known_profile(self.machine)
            return clusters_of(config, profile, self.hosts), profile
        if self.hosts != 1:
            raise InputError("--hosts has no effect beside --machines, which says how many: leave it out")
        asked = machines_of(self.machines)
        like_this = any(not one.gpu for one in asked)
        if self.machine and not like_this:
            raise InputError("--machine has no effect where --machines are GPUs: leave it out")
        like = known_profile(self.machine) if like_this else None
        return clusters_on(asked, config, like), like


def planned(
    config: Config, graph: Graph | None, model: nn.Module | None, where: Where, *, approximate: bool
) -> tuple[list[StrategyEstimate], dict[str, Any]]:
    """`plan` for a configuration, and what a file of it says."""
    known_choices(config)  # the command has them, and prices are of those that were measured
    clusters, profile = where.clusters(config)
    subject = subject_of(config, graph, model)
    found = foresee(config, subject, clusters, approximate=approximate)
    fingerprint = subject.whole.work.graph.fingerprint if isinstance(subject, WholeSubject) else ""
    learned = {"runs": len(profile.learned), **{kind: profile.factor(kind) for kind in KINDS}} if profile else {}
    return found, record(found, fingerprint, notes_on(subject, clusters)) | {"learned": learned}


def subject_of(config: Config, graph: Graph | None, model: nn.Module | None) -> Subject:
    """What a configuration asks to be told of. InputError for statistics that cannot be."""
    if graph is not None or not is_described(config.graph):
        return WholeSubject(prepared_workload(config, graph, model))
    described = DescribedGraph.parse(config.graph, config.seed)
    return DescribedSubject(described, lambda drawn: prepared_workload(config, drawn, model))
