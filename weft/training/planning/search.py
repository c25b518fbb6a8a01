"""`weft plan`, `--plan` and `--strategy auto`: choose a strategy by the estimated time and memory of each."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from weft.autotune import (
    CONTEXT_BYTES,
    Cluster,
    RankEstimate,
    Samples,
    cluster_memory,
    estimate_ranks,
    extrapolated,
    steps_time,
)
from weft.config.config import OPTIONS, Config
from weft.cost import Machine, MemoryUse
from weft.cost.simulate import StepTime
from weft.nn import Unconverted, Workload
from weft.reporting.rerun import flags
from weft.strategies import STRATEGIES, Plan, get_strategy
from weft.training.flag_checks import (
    configured_options,
    draws_batches,
    foreign_flags,
    make_options,
    refuse_foreign_flags,
    requests_batches,
)
from weft.training.machine_context import known_machine
from weft.training.planning.calibration import Correction, Epoch, Estimate
from weft.training.planning.machine_list import clusters_of
from weft.training.planning.plan_subject import PlannedWorkload, Point, Subject, WholeSubject
from weft.training.planning.probe_command import required_profile
from weft.training.tasks.decoder_costs import DecoderCosts
from weft.utils.errors import InputError
from weft.utils.units import format_bytes

AUTO = "auto"
QUICK_NOTE = "measured by the quick probe: for smaller errors, run weft probe while the machine is idle"
"""Note on estimates from a profile of `weft probe --quick`."""
CHUNK_COUNTS = tuple(4**power for power in range(1, 6))
"""Numbers of chunks to try for a graph of which only the sizes are known."""
TOLERANCE = 0.1
"""Relative difference of estimated seconds below which two strategies count as equally fast."""


@dataclass(frozen=True, kw_only=True)
class StrategyEstimate:
    """Estimated time and memory of a run under one strategy."""

    strategy: str
    """Name of the strategy."""
    workers: int
    """Number of ranks."""
    options: Mapping[str, Any]
    """Fields of the configuration that the estimate sets in addition to the requested ones."""
    command: str
    """Command that starts the run."""
    fits: bool
    """True if the run is possible and its memory fits."""
    reason: str = ""
    """Why the run is impossible or does not fit. Empty: it fits."""
    epoch_seconds: float = 0.0
    """Seconds of an epoch of training, without evaluations. 0: only memory is estimated."""
    compute_seconds: float = 0.0
    """Seconds of computing, on the rank that computes longest."""
    network_seconds: float = 0.0
    """Seconds in which rows cross the network and no rank computes."""
    disk_seconds: float = 0.0
    """Seconds of waiting for temporary files that do not fit in memory, on the rank that waits longest."""
    waiting_seconds: float = 0.0
    """Seconds of waiting for other ranks, on the rank that waits longest."""
    device_bytes: int = 0
    """Peak bytes of device memory, on the rank that needs most."""
    host_bytes: int = 0
    """Peak bytes of host memory, on the host that needs most."""
    disk_bytes: int = 0
    """Bytes of temporary files, on the host that needs most."""
    sent_bytes: int = 0
    """Bytes sent per epoch, summed over ranks; for mini-batch strategies extrapolated from the profiled steps."""
    machines: str = ""
    """Machines of the run, as `--machines` names them. Empty: this machine."""

    @property
    def order(self) -> tuple[bool, float, int]:
        """Sort key: estimates that fit first, then by seconds, or by memory if only memory is estimated."""
        return not self.fits, self.epoch_seconds, 0 if self.epoch_seconds else self.host_bytes


def estimate_strategies(
    config: Config,
    work: Workload | Subject,
    clusters: Sequence[Cluster],
    *,
    approximate: bool = False,
) -> list[StrategyEstimate]:
    """Estimate a workload under each strategy, with the options that each strategy proposes.

    Args:
        config: The requested configuration. If it sets a flag that only mini-batch strategies have, only these are
            estimated, else only strategies that train on the whole graph.
        work: The model and the graph.
        clusters: Machines and numbers of ranks to estimate for.
        approximate: Also estimate strategies on the whole graph whose results differ from those of `single`.

    Returns:
        The estimates, the best first.

    Raises:
        InputError: The configuration cannot be estimated, or no strategy has its flags.
    """
    subject = WholeSubject(work) if isinstance(work, Workload) else work
    check_can_estimate(config)
    if requests_batches(config):
        check_can_estimate_batches(subject, clusters)
        names = [name for name, plan in STRATEGIES.items() if draws_batches(plan)]
    else:
        whole = {name: plan for name, plan in STRATEGIES.items() if not draws_batches(plan)}
        names = [name for name, plan in whole.items() if plan.exact or approximate]
    refuse_foreign_flags(config, tuple(names))
    names = [name for name in names if not foreign_flags(config, name)]
    estimates = [
        first_fitting(candidate_configs(variant, subject, cluster), config, subject, cluster)
        for cluster in clusters
        for name in names
        if (STRATEGIES[name].max_ranks or cluster.ranks) >= cluster.ranks
        for variant in variants(replace(config, strategy=name, workers=cluster.ranks), STRATEGIES[name])
    ]
    return best_first(without_duplicates(estimates))


def check_can_estimate(config: Config) -> None:
    """Check that a run can be estimated. InputError for GPUs of this machine."""
    if config.device == "cuda":
        raise InputError("--device cuda cannot be estimated yet: choose a --strategy yourself")


def check_can_estimate_batches(subject: Subject, clusters: Sequence[Cluster]) -> None:
    """Check that mini-batches can be estimated.

    Args:
        subject: The workload.
        clusters: Machines to estimate for.

    Raises:
        InputError: Only the sizes of the graph are known, or a cluster has GPUs.
    """
    if not subject.has_graph:
        raise InputError(
            "mini-batches cannot be estimated for stats:..., which has no edges to sample: name a graph, or leave out "
            "the flags of mini-batches"
        )
    if any(cluster.device_bytes is not None for cluster in clusters):
        raise InputError(
            "mini-batches on GPUs cannot be estimated, since their hosts were not measured: give --machines without "
            "GPUs, or leave out the flags of mini-batches"
        )


def without_duplicates(estimates: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    """Return the estimates without those that equal an earlier one: on one rank, most strategies are `single`."""
    first = {
        (
            estimate.machines,
            estimate.workers,
            estimate.epoch_seconds,
            estimate.device_bytes,
            estimate.host_bytes,
            estimate.reason,
        ): estimate
        for estimate in reversed([*estimates])
    }
    return [*first.values()]


def variants(config: Config, plan: type[Plan]) -> Iterable[Config]:
    """Yield a configuration with each set of options that a strategy proposes.

    A set is left out if the configuration already sets one of its options.

    Args:
        config: The configuration.
        plan: Type of the strategy's plan.
    """
    for options in plan.variants:
        if config.non_defaults().keys().isdisjoint(options):
            yield replace(config, **options)


def candidate_configs(config: Config, subject: Subject, cluster: Cluster) -> Iterable[Config]:
    """Yield a configuration, and then the same with chunks, for a device that cannot hold the whole step.

    If only the sizes of the graph are known, several numbers of chunks are tried: the small graphs that stand for it
    would fit in one chunk.

    Args:
        config: The configuration.
        subject: The workload.
        cluster: Machines to estimate for.
    """
    options = configured_options(get_strategy(config.strategy))
    if cluster.device_bytes is not None:
        config = replace(config, device="cuda")
    yield config
    limit = device_limit(config, cluster)
    if limit is None or "device_memory" not in options:
        return
    limited = replace(config, device_memory=config.device_memory or limit)
    if not subject.has_graph and not config.chunks:
        yield from (replace(limited, chunks=count) for count in CHUNK_COUNTS)
    elif limited != config:
        yield limited


def device_limit(config: Config, cluster: Cluster) -> int | None:
    """Return the bytes that a rank may use on its device: `--device-memory`, or a GPU's memory without CUDA's own.

    Args:
        config: The configuration.
        cluster: Machines to estimate for.

    Returns:
        None if there is no limit other than the host's memory.
    """
    if config.device_bytes is not None:
        return config.device_bytes
    return None if cluster.device_bytes is None else cluster.device_bytes - CONTEXT_BYTES


def first_fitting(
    candidates: Iterable[Config], requested: Config, subject: Subject, cluster: Cluster
) -> StrategyEstimate:
    """Return the estimate of the first configuration that fits, or of the last one if none fits.

    Args:
        candidates: Configurations to try in this order.
        requested: The configuration that the user requested.
        subject: The workload.
        cluster: Machines to estimate for.
    """
    estimate = None
    for config in candidates:
        estimate = estimate_config(config, requested, subject, cluster)
        if estimate.fits or not estimate.host_bytes:
            break
    assert estimate is not None
    return estimate


def estimate_config(config: Config, requested: Config, subject: Subject, cluster: Cluster) -> StrategyEstimate:
    """Estimate one configuration.

    Args:
        config: The configuration.
        requested: The configuration that the user requested, from which it may differ in some options.
        subject: The workload.
        cluster: Machines to estimate for.
    """
    options = {
        name: getattr(config, name)
        for name in OPTIONS
        if name not in ("strategy", "workers") and getattr(config, name) != getattr(requested, name)
    }
    estimate = StrategyEstimate(
        strategy=config.strategy,
        workers=config.workers,
        machines=cluster.machines,
        options=options,
        command=command(config if subject.has_graph else replace(config, graph="GRAPH"), cluster.hosts),
        fits=False,
    )
    try:
        ranks = rank_estimates(config, subject, cluster)
        memory = cluster_memory([rank.memory for rank in ranks], ranks[0].graph, cluster)
        steps, calls = [rank.steps for rank in ranks], [rank.untraced_calls for rank in ranks]
        seconds = steps_time(steps, calls, cluster, memory) if cluster.profile.prices else StepTime()
    except (InputError, NotImplementedError) as error:  # a custom strategy may have no estimate
        return replace(estimate, reason=str(error))
    reason = misfit_reason(memory, config, cluster)
    return replace(
        estimate,
        fits=not reason,
        reason=reason,
        epoch_seconds=seconds.total,
        compute_seconds=seconds.compute,
        network_seconds=seconds.network,
        disk_seconds=seconds.disk,
        waiting_seconds=seconds.waiting,
        device_bytes=memory.device,
        host_bytes=memory.host,
        disk_bytes=memory.disk,
        sent_bytes=sum(rank.sent_bytes for rank in ranks),
    )


def rank_estimates(config: Config, subject: Subject, cluster: Cluster) -> list[RankEstimate]:
    """Estimate the work and memory of each rank under a configuration.

    On a graph of which only the sizes are known:

    1. Make plans for a small and a larger generated graph, for `config.workers` ranks but at most `MAX_RANKS`.
    2. For more ranks, also make plans of the larger graph for a quarter and for half of `MAX_RANKS`.
    3. Extrapolate each number of these plans to the sizes of the graph and to `config.workers` ranks.

    Args:
        config: The configuration.
        subject: The workload.
        cluster: Machines to estimate for.

    Raises:
        InputError: The strategy does not support the configuration, or a rank does not fit in memory or on disk.
    """
    ranks = config.workers
    if isinstance(subject, WholeSubject):
        if isinstance(subject.planned.work.model, Unconverted) and config.strategy != "single":
            raise InputError("only strategy single runs a model as it is, without conversion")
        machine = known_machine(config, subject.planned.work, cluster=cluster)
        return plan_rank_estimates(config, subject.planned, machine, required=True)
    bare = without_fixed_costs(cluster)

    def estimate_point(point: Point) -> list[RankEstimate]:
        small = replace(config, workers=point.ranks)
        machine = known_machine(small, point.planned.work, cluster=bare)
        key = small, point.planned.work.graph, machine
        return subject.cached(key, lambda: plan_rank_estimates(small, point.planned, machine))

    by_vertices = [estimate_point(point) for point in subject.by_vertices(ranks)]
    fewer_ranks = [estimate_point(point) for point in subject.fewer_ranks(ranks)]
    samples = Samples(by_vertices=by_vertices, by_ranks=[*fewer_ranks, by_vertices[-1]])
    return extrapolated(samples, subject.size_ratio(ranks), ranks)


def without_fixed_costs(cluster: Cluster) -> Cluster:
    """Return a cluster whose kernel calls have no fixed cost, which is negligible on a graph of full size."""
    prices = [
        replace(price, call_seconds=0.0, move_seconds=0.0, attention_seconds=0.0) for price in cluster.profile.prices
    ]
    return replace(cluster, profile=replace(cluster.profile, prices=prices))


def plan_rank_estimates(
    config: Config, planned: PlannedWorkload, machine: Machine | None, *, required: bool = False
) -> list[RankEstimate]:
    """Make a plan for a graph that exists, and estimate the work and memory of each of its ranks.

    Args:
        config: The configuration.
        planned: The workload.
        machine: Cost rates that the plan decides by. None: nominal ones.
        required: True if the run itself uses this graph: memory and disk must suffice, and memory is exact for each
            rank. False: the graph stands for a larger one, which is assumed to be stored in files already.

    Raises:
        InputError: The strategy does not support the configuration, or (if `required`) memory or disk are too small.
    """
    options = make_options(config, planned.work.graph, planned.find_book)
    plan = get_strategy(config.strategy)(planned.work, config.workers, options, machine)
    if required:
        plan.check_fits()
    estimates = estimate_ranks(plan, exactly=required)
    if config.task != "node":
        decoder = DecoderCosts(config, config.seed, plan)
        estimates = [decoder.add_to(rank, estimate) for rank, estimate in enumerate(estimates)]
    plan.release()
    if required:
        return estimates
    return [replace(estimate, graph=estimate.graph._replace(store=0)) for estimate in estimates]


def misfit_reason(memory: MemoryUse, config: Config, cluster: Cluster) -> str:
    """Return why a run does not fit in memory; empty if it fits.

    Args:
        memory: Estimated memory of the run, of the host and the device that need most.
        config: The configuration.
        cluster: Machines of the run.
    """
    if memory.host > cluster.memory_bytes:
        return f"needs {format_bytes(memory.host)} of host memory, {format_bytes(cluster.memory_bytes)} available"
    limit = device_limit(config, cluster)
    if limit is not None and memory.device > limit:
        return f"needs {format_bytes(memory.device)} of device memory, {format_bytes(limit)} available"
    return ""


def command(config: Config, hosts: int = 1) -> str:
    """Return the command line that trains with a configuration; it has to be run on each host.

    Args:
        config: The configuration.
        hosts: Number of hosts. More than one: the command starts with torchrun.
    """
    words = ["weft", "train", config.graph]
    if hosts > 1:
        each = config.workers // hosts
        words = ["torchrun", "--nnodes", str(hosts), "--nproc-per-node", str(each), "-m", *words]
        config = replace(config, workers=1)  # without --workers
    return shlex.join([*words, *chain.from_iterable(flags(config.non_defaults(("graph",))))])


def close_to_fastest(fitting: Sequence[StrategyEstimate]) -> list[StrategyEstimate]:
    """Return the estimates whose seconds are within `TOLERANCE` of the fastest, at least one."""
    limit = min(estimate.epoch_seconds for estimate in fitting) * (1 + TOLERANCE)
    return [estimate for estimate in fitting if estimate.epoch_seconds <= limit]


def best_first(estimates: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    """Return estimates sorted by `order`, except that the best one is first.

    Of the estimates close to the fastest, the best is the one with the fewest ranks, then the strategy that comes first
    in `STRATEGIES`, then the one with the fewest options. If only memory is estimated, no estimate is moved.
    """
    ranked = sorted(estimates, key=lambda estimate: estimate.order)
    if fitting := [estimate for estimate in ranked if estimate.fits and estimate.epoch_seconds]:
        order = list(STRATEGIES)
        best = min(
            close_to_fastest(fitting),
            key=lambda estimate: (estimate.workers, order.index(estimate.strategy), len(estimate.options)),
        )
        ranked.sort(key=lambda estimate: estimate is not best)
    return ranked


def best(estimates: Sequence[StrategyEstimate]) -> tuple[StrategyEstimate, str]:
    """Return the estimate of the strategy to use, and a line with the reason.

    Args:
        estimates: Result of `best_first`: the one to use is the first that fits.

    Raises:
        InputError: No strategy fits.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        reasons = "; ".join(f"{estimate.strategy}: {estimate.reason}" for estimate in estimates[:3])
        raise InputError(f"no strategy fits: {reasons}")
    chosen = fitting[0]
    others = [estimate for estimate in fitting if estimate.strategy != chosen.strategy]
    why = f"{chosen.epoch_seconds:.3g} s per epoch"
    if others:
        next_best = min(others, key=lambda estimate: estimate.epoch_seconds)
        equal = ", which is within the error of the estimates" if next_best in close_to_fastest(fitting) else ""
        why += f"; next: {next_best.strategy} {next_best.epoch_seconds:.3g} s{equal}"
    return chosen, why


def choose_options(config: Config, work: Workload) -> tuple[dict[str, Any], Estimate, str]:
    """Choose a strategy for `--strategy auto` on this machine.

    Args:
        config: The requested configuration.
        work: The model and the graph.

    Returns:
        The strategy, its number of ranks and its options, by name; the estimate; a line for the user.
    """
    profile = required_profile()
    chosen, why = best(estimate_strategies(config, work, clusters_of(config, profile)))
    # Estimates of tasks on edges lack the time in which negative samples are drawn, so they calibrate nothing.
    correction = Correction.of(profile, max(1, profile.cores // chosen.workers)) if config.task == "node" else None
    text = " ".join([chosen.strategy, *(f"{name}={value}" for name, value in chosen.options.items())])
    options = {"strategy": chosen.strategy, "workers": chosen.workers, **chosen.options}
    return options, Estimate(epoch=Epoch.of(vars(chosen)), correction=correction), f"auto: {text} ({why})"


def notes_on(subject: Subject, clusters: Sequence[Cluster]) -> list[str]:
    """Return notes on what is nominal in the estimates, and on what is extrapolated and how far.

    Args:
        subject: The workload.
        clusters: Machines of the estimates.
    """
    assumed = {
        f"{cluster.machines}: nominal, not measured: {cluster.assumed}" for cluster in clusters if cluster.assumed
    }
    quick = [QUICK_NOTE] if any(cluster.profile.is_quick for cluster in clusters) else []
    return [
        *quick,
        *sorted(assumed),
        *filter(None, map(subject.explain, sorted({cluster.ranks for cluster in clusters}))),
    ]
