"""What a rank of a run does, from its plan to the best weights, and how it is told."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group, local_gpu
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.data import Graph, degree_counts
from weft.nn import Workload
from weft.partition import Quality
from weft.runtime.kernel_selection import DEFAULT, KernelSelection, select_kernels
from weft.runtime.memory import keep_freed_memory
from weft.runtime.stop_request import StopRequest
from weft.strategies import Plan, get_strategy
from weft.strategies.probe import probe
from weft.training.artifacts.embedding_shards import restore_rows
from weft.training.artifacts.rank_zero import broadcast_checkpoint
from weft.training.artifacts.run_folder import RunFolder
from weft.training.artifacts.run_writer import RunWriter
from weft.training.artifacts.saved_model import Description
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, combined_callbacks
from weft.training.flag_checks import make_options
from weft.training.launch.watchdog import Watchdog
from weft.training.loop import Trainer
from weft.training.machine_context import known_machine
from weft.training.planning.calibration import Estimate
from weft.training.progress import ProgressShow, waiting
from weft.training.tasks.losses import num_logits
from weft.training.tasks.task import make_task

SHARED = (
    "weft: warning: ranks share a GPU, which NCCL does not do: what they exchange goes by the host and gloo, for "
    "tests: give fewer --workers"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of a run have in common."""

    config: Config
    out: Path | None
    """The run's folder; None: a new one."""
    resume: bool
    quiet: bool
    name: str = ""
    """What progress calls the run, where it is one of several."""
    idle: tuple[str, ...] = ()
    """Fields of the configuration that have no effect, and that config.toml does not have."""
    own_model: str = ""
    """The qualified name of the class of a module of one's own; '': the configuration names the model."""
    own_graph: bool = False
    """Whether the graph was given as an object."""
    own: OwnFunctions = NO_FUNCTIONS
    """What a person has given as functions."""
    estimate: Estimate | None = None
    """What the run is expected to take, where somebody has asked."""
    choices: KernelSelection = DEFAULT
    """Which implementations rank 0 uses, and so all."""

    @property
    def resumed(self) -> RunFolder | None:
        """The folder of the run that goes on, if one does."""
        return RunFolder(self.out) if self.resume and self.out else None


Ended = int | dict[str, Any]
"""The signal that stopped a run, or its summary; of other work on a plan, what rank 0 tells of it."""


def make_workload(config: Config, graph: Graph, model: nn.Module) -> Workload:
    """What a configuration asks for."""
    width = num_logits(config, graph) if config.task == "node" else None
    return Workload(model, graph, Optimisations.without(config.disable), num_classes=width)


def make_plan(config: Config, work: Workload, resumed: RunFolder | None = None) -> Plan:
    """The plan of a run on the configuration's workers; resumed: the folder of the run that goes on.

    InputError for what its strategy cannot do.
    """
    options, machine = make_options(config, work.graph), known_machine(config, work, resumed)
    plan = get_strategy(config.strategy)(work, config.workers, options, machine)
    plan.check_fits()
    return plan


def prepare_process(config: Config) -> None:
    """The optimisations that are settings of the whole process, which has to be no rank that imports its script."""
    if Optimisations.without(config.disable).pages:
        keep_freed_memory()


def use_kernels_of_rank_zero(choices: KernelSelection, group: Group) -> KernelSelection:
    """Has all ranks use the implementations that rank 0 is told: those."""
    same = KernelSelection.from_record(group.all_gather_object(choices.record())[0])
    select_kernels(same)
    return same


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and all buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def use_own_gpu(config: Config) -> None:
    """Has this rank work on its GPU, if it works on one."""
    if config.device == "cuda":
        torch.cuda.set_device(local_gpu())


def run_rank(job: Job, folder: RunFolder, plan: Plan, group: Group, *, impatient: bool = False) -> Ended:
    """One rank's part of a run; the workload's model has the best weights afterwards. impatient: see StopRequest."""
    with Watchdog(group.meter, group.rank, job.config.timeout), StopRequest(impatient=impatient) as stop:
        return _run_rank(job, folder, plan, group, stop)


def _run_rank(job: Job, folder: RunFolder, plan: Plan, group: Group, stop: StopRequest) -> Ended:
    config, work = job.config, plan.work
    use_own_gpu(config)
    choices = use_kernels_of_rank_zero(job.choices, group)
    if group.shares_gpu and group.rank == 0:
        print(SHARED, file=sys.stderr, flush=True)
    probe_seconds = 0.0
    if config.measure and plan.machine is None:
        started = time.perf_counter()
        plan = type(plan)(work, plan.size, plan.options, probe(work, plan.traits, group))
        probe_seconds = time.perf_counter() - started
    with waiting(f"placing rows under {config.strategy}", quiet=job.quiet or group.rank > 0):
        strategy = plan.place(group, seed=config.seed)
        trainer = Trainer(config, strategy, make_task(config, strategy, job.own), job.own)
        found = broadcast_checkpoint(folder, group) if job.resume else None
        if found:
            trainer.restore(*found)
        placed = group.all_gather_object(strategy.describe() | {"probe_seconds": probe_seconds})
    if group.rank:
        stopped_by, summary, best = _follow(trainer, stop)
    else:
        facts = {"placement": placed, "machine": plan.machine, "partition": _partition_quality(plan)}
        stopped_by, summary, best = _lead(job, folder, trainer, stop, choices=choices.record(), **facts)
    if stopped_by:
        return stopped_by
    with group.meter.during("record", "the end of the run"):
        restore_rows(best, strategy)
        work.model.load_state_dict(best)
        return dict(group.all_gather_object(summary)[0])


def _partition_quality(plan: Plan) -> dict[str, Any] | None:
    """What the plan's division of the vertices is worth; None: there is none."""
    part = plan.part if plan.size > 1 else None
    if part is None:
        return None
    measured = Quality.measure(plan.work.graph, part, plan.size, 0.0).record()
    del measured["seconds"]  # of finding the parts, which is not known here
    return measured


Led = tuple[int, dict[str, Any], dict[str, Tensor]]
"""The signal that stopped a run, or 0, its summary and its best weights."""


def _follow(trainer: Trainer, stop: StopRequest) -> Led:
    """What the other ranks do."""
    stopped_by = trainer.run(stop, None)
    return stopped_by, {}, {} if stopped_by else trainer.whole_best()


def _lead(job: Job, folder: RunFolder, trainer: Trainer, stop: StopRequest, **placed: Any) -> Led:
    """Rank 0's part: it writes. placed: what the record is to say of the plan and of the ranks."""
    config, group = job.config, trainer.group
    first = trainer.progress.epoch
    show = ProgressShow(first, config.epochs, quiet=job.quiet, name=job.name)
    described = Description.of(
        config, trainer.strategy.work, own_model=job.own_model, own_graph=job.own_graph, data=trainer.data
    )
    with closing(RunWriter(folder, described, show, job.idle)) as writer, combined_callbacks(job.own.callbacks) as call:
        with show:
            writer.begin(
                first,
                ranks=group.size,
                threads=torch.get_num_threads(),
                torch=torch.__version__,
                degrees=degree_counts(trainer.strategy.work.graph),
                **placed,
            )
            stopped_by = trainer.run(stop, writer, call if job.own.callbacks else None)
        if stopped_by:
            writer.stopped(trainer.progress.epoch - 1, stopped_by)
            return stopped_by, {}, {}
        best = trainer.whole_best()
        summary = writer.finish(trainer.progress, best, job.estimate)
    if job.estimate:
        job.estimate.update_profile(summary, trainer.progress.epoch - first)
    return 0, summary, best
