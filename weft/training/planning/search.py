"""`weft plan`, `--plan` and `--strategy auto`: which strategy a run is to have, by what each will take."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from weft.autotune import CONTEXT_BYTES, Cluster, RankEstimate, Samples, extrapolated, held_by_all, time_of, works_of
from weft.config.config import Config
from weft.cost import Machine
from weft.nn import Workload
from weft.reporting.rerun import flags
from weft.strategies import STRATEGIES, MemoryUse, Plan, get_strategy
from weft.training.flag_checks import (
    asks_for_batches,
    configured_options,
    draws_batches,
    foreign_flags,
    refuse_foreign_flags,
)
from weft.training.machine_context import known_machine
from weft.training.planning.calibration import Correction, Epoch, Estimate
from weft.training.planning.machine_list import clusters_of
from weft.training.planning.plan_subject import PlannedWorkload, Point, Subject, WholeSubject
from weft.training.planning.probe_command import known_profile
from weft.utils.errors import InputError
from weft.utils.units import format_bytes, parse_bytes

AUTO = "auto"
SOME_CHUNKS = tuple(4**power for power in range(1, 6))
"""That a described graph is tried in."""
SAME = 0.1
"""Strategies whose seconds differ by less than this share are alike, as far as a forecast can tell."""


@dataclass(frozen=True, kw_only=True)
class StrategyEstimate:
    """A run as it could be, and what it will take."""

    strategy: str
    workers: int
    options: Mapping[str, Any]
    """The strategy's fields of the configuration that are not as in the one that was given."""
    command: str
    """The command that runs it."""
    fits: bool
    reason: str = ""
    """Why it cannot be, or does not fit."""
    epoch_seconds: float = 0.0
    compute_seconds: float = 0.0
    """Of the rank that computes longest."""
    network_seconds: float = 0.0
    """While rows cross and nobody computes."""
    disk_seconds: float = 0.0
    """Of the rank that waits longest for temporary files, which a host's memory has no room for."""
    waiting_seconds: float = 0.0
    """Of the rank that waits longest for others."""
    device_bytes: int = 0
    """On the device of the rank that takes most there."""
    host_bytes: int = 0
    """In memory of the host that takes most there."""
    disk_bytes: int = 0
    sent_bytes: int = 0
    """To other ranks, by all, in an epoch; of more mini-batches than are examined, as these tell."""
    machines: str = ""
    """On which, where several were asked for."""

    @property
    def order(self) -> tuple[bool, float]:
        """The best first."""
        return not self.fits, self.epoch_seconds


def foresee(
    config: Config,
    work: Workload | Subject,
    clusters: Sequence[Cluster],
    *,
    approximate: bool = False,
) -> list[StrategyEstimate]:
    """What a workload will take under each strategy with its sensible options, on each of some clusters: best first.

    approximate: also under strategies that do not give the numbers of `single`, which those of mini-batches, asked for
    by a flag that these alone have, never do. InputError where none has the flags that the configuration gives.
    """
    subject = WholeSubject(work) if isinstance(work, Workload) else work
    require_foreseeable(config)
    if asks_for_batches(config):
        require_batches_foreseeable(subject, clusters)
        names = [name for name, plan in STRATEGIES.items() if draws_batches(plan)]
    else:
        whole = {name: plan for name, plan in STRATEGIES.items() if not draws_batches(plan)}
        names = [name for name, plan in whole.items() if plan.exact or approximate]
    refuse_foreign_flags(config, tuple(names))
    having = [name for name in names if not foreign_flags(config, name)]
    found = [
        first_fitting(attempts(one, subject, cluster), config, subject, cluster)
        for cluster in clusters
        for name in having
        if (STRATEGIES[name].max_ranks or cluster.ranks) >= cluster.ranks
        for one in variants(replace(config, strategy=name, workers=cluster.ranks), STRATEGIES[name])
    ]
    return sorted(without_same(found), key=lambda one: one.order)


def require_foreseeable(config: Config) -> None:
    """InputError for what cannot be told yet, so that nothing is told wrongly."""
    unknown = {"--task link": config.task == "link", "--device cuda": config.device == "cuda"}
    for flag, asked in unknown.items():
        if asked:
            raise InputError(f"{flag}: what that takes cannot be told beforehand yet: choose a --strategy by yourself")


def require_batches_foreseeable(subject: Subject, clusters: Sequence[Cluster]) -> None:
    """InputError where it is not known what mini-batches take."""
    if not subject.is_there:
        raise InputError(
            "mini-batches of a graph that is only described cannot be told of: give a graph that is there, or leave "
            "the flags of mini-batches out"
        )
    if any(one.device_bytes is not None for one in clusters):
        raise InputError(
            "mini-batches on GPUs cannot be told of, since hosts that nobody measured draw them: give --machines "
            "without GPUs, or leave the flags of mini-batches out"
        )


def without_same(found: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    """Those that do not do what one before does: on one rank, most strategies are `single`."""
    first = {
        (one.machines, one.workers, one.epoch_seconds, one.device_bytes, one.reason): one for one in reversed([*found])
    }
    return [*first.values()]


def variants(config: Config, plan: type[Plan]) -> Iterable[Config]:
    """A configuration, and those with other sensible options where the configuration gives none of these."""
    default = Config()
    for options in plan.variants:
        if all(getattr(config, name) == getattr(default, name) for name in options):
            yield replace(config, **options)


def attempts(config: Config, subject: Subject, cluster: Cluster) -> Iterable[Config]:
    """A configuration, and the same chunk by chunk on a device of its own that has too little memory for the whole.

    How many chunks a described graph needs is tried out, since small graphs fit.
    """
    options = configured_options(get_strategy(config.strategy))
    if cluster.device_bytes is not None:
        config = replace(config, device="cuda")
    yield config
    limit = device_limit(config, cluster)
    if limit is None or "device_memory" not in options:
        return
    limited = replace(config, device_memory=config.device_memory or str(limit))
    if not subject.is_there and not config.chunks:
        yield from (replace(limited, chunks=count) for count in SOME_CHUNKS)
    elif limited != config:
        yield limited


def device_limit(config: Config, cluster: Cluster) -> int | None:
    """Bytes that a rank may have on its device: what a person says, or what a GPU has beside CUDA itself."""
    if config.device_memory:
        return parse_bytes(config.device_memory, "--device-memory")
    return None if cluster.device_bytes is None else cluster.device_bytes - CONTEXT_BYTES


def first_fitting(tried: Iterable[Config], asked: Config, subject: Subject, cluster: Cluster) -> StrategyEstimate:
    """What the first configuration that fits will take, or the last."""
    found = None
    for config in tried:
        found = foreseen(config, asked, subject, cluster)
        if found.fits or not found.epoch_seconds:
            break
    assert found is not None
    return found


def foreseen(config: Config, asked: Config, subject: Subject, cluster: Cluster) -> StrategyEstimate:
    """What one configuration will take."""
    options = {
        spec.name: getattr(config, spec.name)
        for spec in dataclasses.fields(config)
        if spec.name not in ("strategy", "workers") and getattr(config, spec.name) != getattr(asked, spec.name)
    }
    known = StrategyEstimate(
        strategy=config.strategy,
        workers=config.workers,
        machines=cluster.machines,
        options=options,
        command=command(config if subject.is_there else replace(config, graph="GRAPH"), cluster.hosts),
        fits=False,
    )
    try:
        works = rank_works(config, subject, cluster)
        held = held_by_all([one.held for one in works], works[0].graph, cluster)
        seconds = time_of([one.steps for one in works], [one.besides for one in works], cluster, held)
    except (InputError, NotImplementedError) as error:  # a strategy of one's own may not say what it takes
        return replace(known, reason=str(error))
    reason = too_little(held, config, cluster)
    return replace(
        known,
        fits=not reason,
        reason=reason,
        epoch_seconds=seconds.total,
        compute_seconds=seconds.compute,
        network_seconds=seconds.network,
        disk_seconds=seconds.disk,
        waiting_seconds=seconds.waiting,
        device_bytes=held.device,
        host_bytes=held.host,
        disk_bytes=held.disk,
        sent_bytes=sum(one.sent_bytes for one in works),
    )


def rank_works(config: Config, subject: Subject, cluster: Cluster) -> list[RankEstimate]:
    """What each rank does and holds under a configuration. InputError for what cannot be."""
    ranks = config.workers
    if isinstance(subject, WholeSubject):
        machine = known_machine(config, subject.whole.work, cluster=cluster)
        return planned_works(config, subject.whole, machine, required=True)
    bare = without_fixed_costs(cluster)

    def sampled(point: Point) -> list[RankEstimate]:
        one = replace(config, workers=point.ranks)
        machine = known_machine(one, point.known.work, cluster=bare)
        return subject.found((one, point.known.parts.graph, machine), lambda: planned_works(one, point.known, machine))

    by_vertices = [sampled(one) for one in subject.by_vertices(ranks)]
    before = [sampled(one) for one in subject.fewer_ranks(ranks)]
    samples = Samples(by_vertices=by_vertices, by_ranks=[*before, by_vertices[-1]])
    return extrapolated(samples, subject.times(ranks), ranks)


def without_fixed_costs(cluster: Cluster) -> Cluster:
    """The same where a call costs its work alone, as on graphs that are large enough."""
    prices = [replace(one, call_seconds=0.0, move_seconds=0.0, attention_seconds=0.0) for one in cluster.profile.prices]
    return replace(cluster, profile=replace(cluster.profile, prices=prices))


def planned_works(
    config: Config, known: PlannedWorkload, machine: Machine | None, *, required: bool = False
) -> list[RankEstimate]:
    """The same on a graph that is there; required: where there is memory and disk for it, and of all ranks exactly.

    Else it stands for a larger one, which is opened where it is stored.
    """
    plan = get_strategy(config.strategy)(known.work, config.workers, known.parts.options(config), machine)
    if required:
        plan.require()
    found = works_of(plan, exactly=required)
    plan.forget()
    return found if required else [replace(one, graph=one.graph._replace(store=0)) for one in found]


def too_little(held: MemoryUse, config: Config, cluster: Cluster) -> str:
    """Why that does not fit; '': it does."""
    if held.host > cluster.memory_bytes:
        return f"takes {format_bytes(held.host)} of a host's {format_bytes(cluster.memory_bytes)}"
    limit = device_limit(config, cluster)
    if limit is not None and held.device > limit:
        return f"takes {format_bytes(held.device)} of a device's {format_bytes(limit)}"
    return ""


def command(config: Config, hosts: int = 1) -> str:
    """The command line that trains as a configuration says, on each of some hosts."""
    words = ["weft", "train", config.graph]
    if hosts > 1:
        each = config.workers // hosts
        words = ["torchrun", "--nnodes", str(hosts), "--nproc-per-node", str(each), "-m", *words]
        config = replace(config, workers=Config().workers)
    values = {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config) if spec.name != "graph"}
    default = Config()
    changed = {name: value for name, value in values.items() if value != getattr(default, name)}
    return shlex.join([*words, *chain.from_iterable(flags(changed))])


def best(found: Sequence[StrategyEstimate]) -> tuple[StrategyEstimate, str]:
    """The one to take, and why, in a line: of those as good as the fastest, the one with the fewest ranks and options.

    InputError where none fits.
    """
    fitting = [one for one in found if one.fits]
    if not fitting:
        raise InputError("no strategy fits: " + "; ".join(f"{one.strategy}: {one.reason}" for one in found[:3]))
    alike = [one for one in fitting if one.epoch_seconds <= fitting[0].epoch_seconds * (1 + SAME)]
    order = list(STRATEGIES)
    chosen = min(alike, key=lambda one: (one.workers, order.index(one.strategy), len(one.options)))
    others = [one for one in fitting if one.strategy != chosen.strategy]
    why = f"{chosen.epoch_seconds:.3g} s an epoch"
    if others:
        next_best = min(others, key=lambda one: one.epoch_seconds)
        alike_too = ", no faster as far as can be told" if next_best in alike else ""
        why += f"; {next_best.strategy} {next_best.epoch_seconds:.3g} s{alike_too}"
    return chosen, why


def chosen(config: Config, work: Workload) -> tuple[Config, Estimate, str]:
    """The configuration that `--strategy auto` comes to on this machine, what it will take, and a line that says so."""
    profile = known_profile()
    taken, why = best(foresee(config, work, clusters_of(config, profile)))
    lesson = Correction.of(profile, max(1, profile.cores // taken.workers))
    said = f"auto: {taken.strategy} {' '.join(f'{name}={value}' for name, value in taken.options.items())}".rstrip()
    taking = replace(config, strategy=taken.strategy, workers=taken.workers, **taken.options)
    return taking, Estimate(epoch=Epoch.of(vars(taken)), lesson=lesson), f"{said} ({why})"


def notes_on(subject: Subject, clusters: Sequence[Cluster]) -> list[str]:
    """What of a forecast is nominal, and what is extrapolated and how far."""
    assumed = {f"{one.machines}: nominal, not measured: {one.assumed}" for one in clusters if one.assumed}
    return [*sorted(assumed), *filter(None, map(subject.explain, sorted({one.ranks for one in clusters})))]
