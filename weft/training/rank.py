"""Work of one rank in a run: places the plan, trains, and writes on rank 0; and what all ranks need for that."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.autotune import measured_machine
from weft.comm import Group, local_gpu
from weft.config.config import Config, PlacementOptions
from weft.config.optimisations import Optimisations
from weft.data import Graph, degree_counts
from weft.nn import Workload
from weft.partition import Quality
from weft.runtime.kernel_selection import DEFAULT, KernelSelection, select_kernels
from weft.runtime.memory.heap import keep_freed_memory, map_large_arrays, release_freed_memory
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.processes.stop_request import StopRequest
from weft.strategies import Plan, get_strategy
from weft.strategies.base import CHECKED_SHARE
from weft.strategies.resident import ResidentPlan
from weft.training.artifacts import checkpoint
from weft.training.artifacts.embedding_shards import restore_rows
from weft.training.artifacts.origin import command_line, run_origin
from weft.training.artifacts.run_folder import RunFolder
from weft.training.artifacts.run_writer import RunWriter
from weft.training.artifacts.saved_model import Description
from weft.training.artifacts.tensorboard import TensorBoard
from weft.training.custom_functions import NO_FUNCTIONS, Callback, OwnFunctions, combined_callbacks
from weft.training.flag_checks import make_options
from weft.training.launch.joined_ranks import plan_together
from weft.training.launch.torchrun import under_torchrun
from weft.training.launch.watchdog import Watchdog
from weft.training.loop import Trainer
from weft.training.machine_context import kernels_for_run, known_machine, num_hosts, profile_to_complete
from weft.training.planning.calibration import Estimate
from weft.training.progress import ProgressShow, waiting
from weft.training.tasks.losses import num_logits
from weft.training.tasks.task import make_task
from weft.utils.errors import InputError, refusing_exit
from weft.utils.log import LOGGER
from weft.utils.units import format_bytes

SHARED_GPU_WARNING = (
    "ranks share a GPU, which NCCL does not support: they exchange data through host memory and gloo, "
    "which is meant for tests: use fewer --workers"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of a run that all its ranks share."""

    config: Config
    out: Path | None
    """Folder of the run; None: a new folder."""
    resume: bool
    """True to continue the run in `out`."""
    restarted: bool = False
    """True if torchrun has restarted ranks: the run is continued if the folder contains one."""
    quiet: bool
    """True to show no progress."""
    name: str = ""
    """Name of the run in the progress display, if it is one of several."""
    idle: tuple[str, ...] = ()
    """Fields of the configuration that have no effect, so that config.toml leaves them out."""
    own_model: str = ""
    """Qualified class name of a custom module. Empty: the configuration names a built-in model."""
    own_graph: bool = False
    """True if the caller passed a Graph object, not a name."""
    functions: OwnFunctions = NO_FUNCTIONS
    """User-defined functions."""
    estimate: Estimate | None = None
    """Time and memory estimated before the run, if it was planned."""
    choices: KernelSelection = DEFAULT
    """Kernel selection of rank 0, which all ranks use."""
    command: str = field(default_factory=command_line)
    """Command that started the run, for its record."""

    @property
    def resumed(self) -> RunFolder | None:
        """Folder of the run to resume, or None."""
        return RunFolder(self.out) if self.resume and self.out else None


Ended = int | dict[str, Any]
"""Result of a run: the number of the signal that stopped it, or its summary (for other work, rank 0's JSON values)."""


def make_workload(config: Config, graph: Graph, model: nn.Module) -> Workload:
    """Return the workload of a configuration.

    Args:
        config: The run's configuration.
        graph: The graph, prepared for the task.
        model: The model, created or converted for the task.
    """
    width = num_logits(config, graph) if config.task == "node" else None
    return Workload(model, graph, Optimisations.without(config.disable), num_classes=width)


def make_plan(config: Config, work: Workload, *, predicts: bool = False) -> Plan:
    """Return the plan of the configured strategy for the configured number of ranks.

    Args:
        config: The run's configuration.
        work: The model and graph.
        predicts: The plan only evaluates, range by range of the rows if they exceed the memory.

    Raises:
        InputError: The strategy cannot run this workload, for instance within the given memory.
    """
    options, machine = make_options(config, work.graph), known_machine(config, work)
    plan = get_strategy(config.strategy)(work, config.workers, options, machine)
    if predicts and isinstance(plan, ResidentPlan):
        plan.planned_steps = (False,)
    plan.check_fits()
    if config.device == "cpu":
        check_memory(plan, predicts=predicts)
    release_freed_memory()  # planning of a large graph takes more than a step
    return plan


FRAGMENTED_SHARE = 0.6
"""Share of memory above which a run maps its large arrays: freed ones in the C library's heap take up to half more."""


def check_memory(plan: Plan, *, predicts: bool = False) -> None:
    """Check that the rows of the ranks on this host fit in memory, before anything large is allocated.

    Arrays of a graph folder do not count, since the system can read them again. Small runs are not checked, because
    the estimate takes time. If ranks are on several hosts, only that of the planning rank is checked. A run that needs
    much memory maps its large arrays if this process lacks weft's heap, which takes more time and less memory.

    Args:
        plan: The plan of the run.
        predicts: The plan only evaluates; the rows need not fit if it then needs little memory.

    Raises:
        InputError: The rows do not fit. The message names options that need less.
    """
    limit, work = memory_limit_bytes(), plan.work
    if work.rough_bytes < CHECKED_SHARE * limit or (predicts and plan.streams):
        return
    ranks = range(min(int(os.environ.get("LOCAL_WORLD_SIZE", plan.size)), plan.size))
    uses = [plan.peak_memory(rank) for rank in ranks]
    copies = 0 if work.graph.path is not None else len(ranks) if under_torchrun() else 1
    needed = sum(use.device + use.host - use.shared - use.in_file for use in uses) + copies * work.stats.num_bytes
    if needed > limit:
        options = ["a smaller --hidden", "more hosts"]
        if work.row_dtype == torch.float32:
            options.insert(0, "--dtype bfloat16")
        if plan.name != "offload":
            options.insert(0, f"--strategy offload --device-memory {limit // 4}")
        raise InputError(
            f"{work.graph.name}: strategy {plan.name} needs {format_bytes(needed)} of memory, and "
            f"{format_bytes(limit)} are available: give {', '.join(options[:-1])}, or {options[-1]}"
        )
    if needed > FRAGMENTED_SHARE * limit and map_large_arrays():
        LOGGER.info(
            "the run needs most of the memory, so this process returns large arrays to the system when they are freed, "
            "which takes time: weft train has an allocator that need not"
        )


def prepare_process(options: PlacementOptions) -> None:
    """Apply the optimisations that are settings of the whole process.

    Call it in the process that trains, not while a rank still imports the script.
    """
    if Optimisations.without(options.disable).pages:
        keep_freed_memory()


def use_kernels_of_rank_zero(choices: KernelSelection, group: Group) -> KernelSelection:
    """Select on all ranks the kernels that rank 0 has selected. All ranks must call it.

    Args:
        choices: Kernel selection of this rank; that of rank 0 counts.
        group: The ranks.

    Returns:
        The kernel selection of rank 0.
    """
    selection = KernelSelection.from_record(group.all_gather_object(choices.record())[0])
    select_kernels(selection)
    return selection


def plan_with_kernels(
    config: Config, work: Workload, group: Group, resumed: RunFolder | None = None, *, predicts: bool = False
) -> tuple[Plan, KernelSelection]:
    """Return the plan and the kernel selection of rank 0 in all processes.

    Args:
        config: The run's configuration.
        work: The model and graph.
        group: The processes.
        resumed: Folder of the run that is resumed, or that predicts.
        predicts: The plan only evaluates.

    Raises:
        InputError: Rank 0 has raised it.
    """

    def lead() -> tuple[Plan, dict[str, Any]]:
        return make_plan(config, work, predicts=predicts), kernels_for_run(config, resumed).record()

    plan, kernels = plan_together(group, work, get_strategy(config.strategy), make_options(config), lead)
    return plan, KernelSelection.from_record(kernels)


def use_local_gpu(options: PlacementOptions) -> None:
    """Select this rank's GPU as the current device, if the run is on GPUs."""
    if options.device == "cuda":
        torch.cuda.set_device(local_gpu())


def run_rank(job: Job, folder: RunFolder, plan: Plan, group: Group) -> Ended:
    """Train on one rank, and leave the best weights in the model of the workload.

    Args:
        job: Settings of the run.
        folder: The run's folder, which only rank 0 touches.
        plan: The plan of the run.
        group: The ranks.
    """
    group.meter.set_status("setup")
    watchdog = Watchdog(group.meter, group.rank, job.config.timeout)
    with watchdog, StopRequest(impatient=not under_torchrun()) as stop, refusing_exit():
        return _run_rank(job, folder, plan, group, stop)


def _run_rank(job: Job, folder: RunFolder, plan: Plan, group: Group, stop: StopRequest) -> Ended:
    # 1. Agree on kernels, measure the machine if requested, and place the plan.
    # 2. Restore the newest checkpoint of a resumed run.
    # 3. Train: rank 0 also records and saves.
    # 4. Send the best embedding rows and the summary from rank 0 to all ranks.
    config, work = job.config, plan.work
    use_local_gpu(config)
    choices = use_kernels_of_rank_zero(job.choices, group)
    if group.shares_gpu and group.rank == 0:
        LOGGER.warning(SHARED_GPU_WARNING)
    measured: tuple[str, ...] = ()
    measure_seconds = 0.0
    if config.measure and group.size > 1:
        started = time.perf_counter()
        with waiting("measuring this machine", quiet=job.quiet):
            profile, hosts = profile_to_complete(config), num_hosts(group.size)
            machine, measured = measured_machine(work, group, profile, hosts=hosts)
        plan = type(plan)(work, plan.size, plan.options, machine)
        measure_seconds = time.perf_counter() - started
    with waiting(f"placing rows under {config.strategy}", quiet=job.quiet):
        strategy = plan.place(group, seed=config.seed)
        trainer = Trainer(config, strategy, make_task(config, strategy, job.functions), job.functions)
        restored = checkpoint.broadcast_newest(folder.checkpoints, group) if job.resume else None
        if restored:
            trainer.restore(*restored)
        reports = group.all_gather_object(
            {"placement": strategy.describe(), "has_callbacks": bool(job.functions.callbacks)}
        )
        may_end = reports[0]["has_callbacks"]
    if group.rank:
        stopped_by, summary, best = _follow(trainer, stop, may_end=may_end)
    else:
        facts = {
            "placement": [report["placement"] for report in reports],
            "machine": asdict(plan.machine) if plan.machine else None,
            "measured": measured,
            "measure_seconds": measure_seconds,
            "partition": _partition_quality(plan),
        }
        stopped_by, summary, best = _lead(job, folder, trainer, stop, choices=choices.record(), **facts)
    if stopped_by:
        return stopped_by
    with group.meter.during("record", "the end of the run"):
        restore_rows(best, strategy)
        work.model.load_state_dict(best)
        return dict(group.all_gather_object(summary)[0])


def _partition_quality(plan: Plan) -> dict[str, Any] | None:
    """Return the quality of the plan's partition, as a record; None if there is no partition."""
    part = plan.part if plan.size > 1 else None
    if part is None:
        return None
    measured = Quality.measure(plan.work.graph, part, plan.size, 0.0).record()
    del measured["seconds"]  # the time to compute the partition, which this rank does not know
    return measured


Led = tuple[int, dict[str, Any], dict[str, Tensor]]
"""Number of the signal that stopped a run, or 0; its summary; and its best weights."""


def _follow(trainer: Trainer, stop: StopRequest, *, may_end: bool) -> Led:
    """Train on a rank other than 0."""
    stopped_by = trainer.run(stop, None, may_end=may_end)
    return stopped_by, {}, {} if stopped_by else trainer.whole_best()


def _lead(job: Job, folder: RunFolder, trainer: Trainer, stop: StopRequest, **placed: Any) -> Led:
    """Train on rank 0, and write records, checkpoints and results.

    Args:
        job: Settings of the run.
        folder: The run's folder.
        trainer: The training loop.
        stop: The stop request of this rank.
        **placed: Facts about plan and ranks for the first record.
    """
    config, group = job.config, trainer.group
    first = trainer.progress.epoch
    show = ProgressShow(first, config.epochs, quiet=job.quiet, name=job.name)
    description = Description.of(
        config, trainer.strategy.work, own_model=job.own_model, own_graph=job.own_graph, data=trainer.data
    )
    callbacks: list[Callback] = [*job.functions.callbacks]
    if config.tensorboard:
        callbacks.append(TensorBoard(folder.tensorboard))
    with (
        closing(RunWriter(folder, description, show, job.idle)) as writer,
        combined_callbacks(callbacks) as call,
    ):
        with show:
            writer.begin(
                first,
                ranks=group.size,
                threads=torch.get_num_threads(),
                **run_origin(config.device),
                command=job.command,
                degrees=degree_counts(trainer.strategy.work.graph),
                **placed,
            )
            stopped_by = trainer.run(stop, writer, call if callbacks else None, may_end=bool(job.functions.callbacks))
        if stopped_by:
            writer.stopped(trainer.progress.epoch - 1, stopped_by)
            return stopped_by, {}, {}
        best = trainer.whole_best()
        summary = writer.finish(trainer.progress, best, job.estimate)
    if job.estimate:
        job.estimate.update_calibration(summary, trainer.progress.epoch - first)
    return 0, summary, best
