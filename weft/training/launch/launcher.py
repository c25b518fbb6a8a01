"""The three ways to have ranks: this process, local processes that it starts, or those that torchrun started.

Local processes share the graph through the page cache, and receive the model's structure and weights from this process.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.comm import Group, join
from weft.config.config import RankOptions
from weft.config.optimisations import Optimisations
from weft.cost import Machine
from weft.data import Graph
from weft.nn import Outlines, Workload
from weft.runtime.meter import Meter, has_status
from weft.runtime.processes.cores import cores_per_rank
from weft.runtime.processes.temporary_folder import temporary_folder
from weft.strategies import Options, Plan
from weft.training.flag_checks import partition_of, rows_device, with_partition
from weft.training.input_checks import require_device
from weft.training.launch.joined_ranks import Result, make_on_all_ranks, named_tensors, result_of_rank_zero
from weft.training.launch.processes import NO_SPACE, STOPPED, Meeting, launch
from weft.training.launch.torchrun import under_torchrun
from weft.training.progress import waiting
from weft.training.rank import Ended, prepare_process
from weft.utils.errors import InputError, RunError
from weft.utils.files.tensor_file import load_tensors, save_tensors

RankWork = Callable[[Plan, Group], Ended]
"""Work of a rank on a plan. Returns the number of the signal that stopped it, or JSON values, of which those of rank 0
count."""

RESULT_FILE = "ended.json"
"""Name of the file to which rank 0 writes its JSON values."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One rank, which is this process. A subclass is another way to have ranks; `launcher_for` chooses one.

    A call such as `weft.train` connects its processes, plans together with them, and then runs work on all ranks.
    """

    options: RankOptions
    """Options of the call, with the number of ranks."""
    quiet: bool = False
    """True to show no progress."""
    starts_ranks: ClassVar[bool] = False
    """True if the ranks are processes that this process starts, and to which it sends the model and the work."""

    def load(self, make: Callable[[], Result]) -> Result:
        """Create an object, such as a graph, in each process of the call. If one raises InputError, all do."""
        return make()

    def on_first_process(self, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Compute JSON values in the first process of the call, for all of them. If it raises InputError, all do."""
        return compute()

    def connect(self) -> Group:
        """Return a new group of the processes that make the call, with a new meter.

        Raises:
            InputError: The device does not exist.
            RunError: The other ranks do not connect.
        """
        require_device(self.options)
        return Group(device=rows_device(self.options))

    def run(self, plan: Plan, work: RankWork, group: Group) -> Ended:
        """Run work on all ranks.

        Args:
            plan: The plan.
            work: Work of each rank.
            group: The connected processes.

        Returns:
            The number of the signal that stopped the ranks, or the JSON values of rank 0.

        Raises:
            InputError: A rank has raised it.
            RunError: A rank failed, or there is no space for the files that the ranks share.
        """
        return work(plan, group)


class TorchrunRanks(Launcher):
    """Ranks that torchrun started, of which this process is one."""

    def load(self, make: Callable[[], Result]) -> Result:
        return make_on_all_ranks(self.connect(), make)

    def on_first_process(self, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return result_of_rank_zero(self.connect(), compute)

    def connect(self) -> Group:
        require_device(self.options)
        return join(timeout_seconds=self.options.timeout, meter=Meter(), device=rows_device(self.options))


class LocalRanks(Launcher):
    """Processes that this process starts. This process is no rank: it plans, and waits for the ranks."""

    starts_ranks = True

    def connect(self) -> Group:
        return Group()

    def run(self, plan: Plan, work: RankWork, group: Group) -> Ended:
        del group  # this process, which is no rank
        options, graph, model = self.options, plan.work.graph, plan.work.model
        with temporary_folder() as scratch:
            weights, store = scratch / "weights.safetensors", graph.path or scratch / "graph"
            part = partition_of(plan.options)
            try:
                save_tensors(dict(named_tensors(model)), weights)
                if graph.path is None:
                    graph.save(store)
                if part is not None:
                    save_tensors({"part": part}, scratch / "part.safetensors")
            except (OSError, InputError) as error:
                raise RunError(NO_SPACE.format(scratch, error)) from error
            skeleton, planned = copy.deepcopy(model).to("meta"), Planned.of(plan)
            plan.release()  # while the ranks work, this process does not need it
            arguments = (options, work, store, skeleton, weights, planned)
            meeting = Meeting(scratch)
            starting = f"starting {options.workers} {'rank' if options.workers == 1 else 'ranks'}"
            with waiting(starting, quiet=self.quiet, until=lambda: has_status(meeting.status, 0)):
                stopped_by = launch(local_rank, arguments, workers=options.workers, folder=meeting.folder)
            return stopped_by or dict(json.loads((scratch / RESULT_FILE).read_text()))


def launcher_for(options: RankOptions, *, in_subprocess: bool = False, quiet: bool = False) -> Launcher:
    """Return the launcher of a call.

    Args:
        options: The configuration, with the number of ranks.
        in_subprocess: Start a process even for a single rank.
        quiet: Show no progress.
    """
    is_local = in_subprocess or options.workers > 1
    way = TorchrunRanks if under_torchrun() else LocalRanks if is_local else Launcher
    return way(options=options, quiet=quiet)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Plan in a form to send to another process, which has the graph and the model."""

    strategy: type[Plan]
    """Class of the plan. To unpickle it imports the module that defines and registers it."""
    options: Options
    """Options of the strategy, without the partition."""
    machine: Machine | None
    """Cost factors of the plan."""
    state: Any
    """State of the plan, see `Plan.state`."""
    optimisations: Optimisations
    """Optimisations of the workload."""
    num_classes: int | None
    """Number of outputs per vertex, see Workload."""
    outlines: Outlines
    """Outlines of the model, which need not be traced again."""

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        """Return the form of a plan, without its partition, which is large and is sent in a file instead."""
        return cls(
            strategy=type(plan),
            options=with_partition(plan.options, None),
            machine=plan.machine,
            state=plan.state(),
            optimisations=plan.work.optimisations,
            num_classes=plan.work.num_classes,
            outlines=plan.work.outlines,
        )

    def plan(self, workers: int, graph: Graph, model: nn.Module, part: Tensor | None) -> Plan:
        """Return the same plan in the other process, without a search.

        Args:
            workers: Number of ranks.
            graph: The graph.
            model: The model.
            part: Rank of every vertex, int32 [N], or None.
        """
        options = with_partition(self.options, part)
        work = Workload(model, graph, self.optimisations, num_classes=self.num_classes, outlines=self.outlines)
        return self.strategy(work, workers, options, self.machine, self.state)


def local_rank(
    options: RankOptions,
    work: RankWork,
    store: Path,
    skeleton: nn.Module,
    weights: Path,
    planned: Planned,
    meeting: Meeting,
) -> None:
    """Run one local rank. The launcher calls it in each of its processes.

    Args:
        options: The run's configuration.
        work: Work of the rank.
        store: Folder of the graph.
        skeleton: The model without data, on the meta device.
        weights: File of parameters and buffers. The other shared files are next to it.
        planned: The plan.
        meeting: Files over which the ranks connect.
    """
    prepare_process(options)
    meter = Meter()
    meter.write_status_to(meeting.status, int(os.environ["RANK"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank(options.workers))
    graph = Graph.open(store, verify=False)
    model = skeleton.to_empty(device="cpu")
    values = load_tensors(weights)
    with torch.no_grad():
        for name, tensor in named_tensors(model):
            tensor.copy_(values[name])
    parts = weights.with_name("part.safetensors")
    plan = planned.plan(options.workers, graph, model, load_tensors(parts)["part"] if parts.exists() else None)
    group = join(
        timeout_seconds=options.timeout, meter=meter, device=rows_device(options), init_method=meeting.init_method
    )
    ended = work(plan, group)
    group.close()
    if isinstance(ended, int):
        sys.exit(STOPPED + ended)
    if group.rank == 0:
        weights.with_name(RESULT_FILE).write_text(json.dumps(ended))
