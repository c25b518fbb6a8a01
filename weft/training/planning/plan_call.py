"""`weft.plan`: estimate time and memory of a training run under each strategy, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from weft.autotune import Cluster
from weft.config.config import Config, PlacementOptions
from weft.cost import KINDS, Profile
from weft.data import DescribedGraph, Graph, is_described
from weft.training.arguments import PlanArguments
from weft.training.custom_functions import extract_functions
from weft.training.machine_context import kernels_for_run
from weft.training.planning.machine_list import clusters_of, clusters_on, machines_of
from weft.training.planning.plan_file import record
from weft.training.planning.plan_subject import DescribedSubject, Subject, WholeSubject
from weft.training.planning.probe_command import host_facts, required_profile
from weft.training.planning.search import StrategyEstimate, estimate_strategies, notes_on
from weft.training.run import parse_call, prepared_workload
from weft.training.signature import listing
from weft.utils.errors import InputError


@listing(PlanArguments)
def plan(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    machine: str | Path = "",
    hosts: int = 1,
    machines: str = "",
    approximate: bool = False,
    memory: bool = False,
    **options: Unpack[PlanArguments],
) -> list[StrategyEstimate]:
    """Estimate training under each strategy, without running or writing anything.

    Args:
        graph: A graph, its folder or its name, as for `weft.train`; or `stats:vertices=111m,edges=1.6b,...` for a graph
            of which you know only the sizes.
        model: As for `weft.train`.
        machine: File of a profile, as `weft probe` writes it. Default: the profile of this machine.
        hosts: Number of identical hosts, each with the same number of ranks.
        machines: Machines that you do not have, as for `weft plan --machines`, such as "8xT4@15gbit".
        approximate: Also estimate strategies whose results differ from those of `single`.
        memory: Estimate only memory, for which no profile is needed.
        **options: Fields of `weft.Config`. `workers` is 1, 2, 4, ... up to the number of cores by default. Strategies
            that do not have one of the options are left out.

    Returns:
        An estimate for each strategy: first those that fit in memory, the fastest first; if only memory is estimated,
            first the one that needs least.

    Raises:
        InputError: An argument is wrong.
    """
    _, fields = extract_functions(options)
    config, whole, module = parse_call(graph, model, fields, "weft.plan")
    where = Where(machine=machine, hosts=hosts, machines=machines, memory_only=memory)
    return planned(config, whole, module, where, approximate=approximate)[0]


@dataclass(frozen=True, kw_only=True)
class Where:
    """Machines to estimate training on."""

    machine: str | Path = ""
    """File of a profile. Empty: the profile of this machine."""
    hosts: int = 1
    """Number of identical hosts."""
    machines: str = ""
    """Machines that need not exist here, in the format of `--machines`. Empty: none."""
    memory_only: bool = False
    """True if only memory is estimated, for which no profile is needed."""

    def clusters(self, options: PlacementOptions) -> tuple[list[Cluster], Profile | None]:
        """Return the clusters to plan for, and the profile that they are like (None: all have GPUs).

        Raises:
            InputError: There is no profile, or arguments contradict each other.
        """
        if self.memory_only and self.machine:
            raise InputError("--machine has no effect with --memory, which needs no profile: leave one of them out")
        if not self.machines:
            profile = self._profile()
            return clusters_of(options, profile, self.hosts), profile
        if self.hosts != 1:
            raise InputError("--hosts has no effect with --machines, which lists the hosts: leave --hosts out")
        alternatives = machines_of(self.machines)
        needs_profile = any(not machines.gpu for machines in alternatives)
        if self.machine and not needs_profile:
            raise InputError("--machine has no effect if all --machines have GPUs: leave --machine out")
        this_machine = self._profile() if needs_profile else None
        return clusters_on(alternatives, options, this_machine), this_machine

    def _profile(self) -> Profile:
        """Return the profile of the machine; one without prices if only memory is estimated."""
        return Profile(host=host_facts(), prices=[]) if self.memory_only else required_profile(self.machine)


def planned(
    config: Config, graph: Graph | None, model: nn.Module | None, where: Where, *, approximate: bool
) -> tuple[list[StrategyEstimate], dict[str, Any]]:
    """Return the estimates of `plan` for a configuration, and the content of its plan file.

    Args:
        config: The configuration.
        graph: The graph. None: the configuration names it.
        model: A custom model. None: the configuration names it.
        where: Machines to estimate training on.
        approximate: Also estimate strategies whose results differ from those of `single`.
    """
    kernels_for_run(config)  # only checks --choices: prices are those of the kernels that the probe measured
    clusters, profile = where.clusters(config)
    subject = subject_of(config, graph, model)
    estimates = estimate_strategies(config, subject, clusters, approximate=approximate)
    fingerprint = subject.planned.work.graph.fingerprint if isinstance(subject, WholeSubject) else ""
    learned: dict[str, Any] = {}
    if profile and profile.prices:
        learned = {"runs": len(profile.calibration), **{kind: profile.factor(kind) for kind in KINDS}}
    return estimates, record(estimates, fingerprint, notes_on(subject, clusters)) | {"learned": learned}


def subject_of(config: Config, graph: Graph | None, model: nn.Module | None) -> Subject:
    """Return the workload to estimate.

    Args:
        config: The configuration.
        graph: The graph. None: the configuration names it, or has its sizes (`stats:...`).
        model: A custom model. None: the configuration names it.

    Raises:
        InputError: No graph can have the sizes, or the task needs more than sizes.
    """
    if graph is not None or not is_described(config.graph):
        return WholeSubject(prepared_workload(config, graph, model))
    if config.task == "edge":
        raise InputError("--task edge cannot be estimated for stats:..., which has no labelled edges: name a graph")
    described = DescribedGraph.parse(config.graph, config.seed)
    return DescribedSubject(described, lambda small_graph: prepared_workload(config, small_graph, model))
