"""Local ranks that work on a plan: they share the graph through the page cache, and get the model and its weights."""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.comm import Group, join
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.cost import Machine
from weft.data import Graph
from weft.nn import Outlines, Workload
from weft.runtime.cores import cores_per_rank
from weft.runtime.forkserver import temporary_folder
from weft.runtime.meter import Meter, has_status
from weft.strategies import Options, Plan, get_strategy
from weft.training.flag_checks import partition_of, rows_device, with_partition
from weft.training.launch.processes import NO_ROOM, STOPPED, Meeting, launch
from weft.training.progress import waiting
from weft.training.rank import Ended, prepare_process, named_tensors
from weft.utils.errors import InputError, RunError
from weft.utils.tensor_file import save_tensors

RankWork = Callable[[Plan, Group], Ended]
"""What a rank does with a plan: the signal that stopped it, or values that JSON knows, of which rank 0's are told."""

ENDED = "ended.json"
"""Where rank 0's values are told."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan as it is handed to another process, which has the graph and the model."""

    options: Options
    machine: Machine | None
    decisions: Any
    optimisations: Optimisations
    num_classes: int | None
    """See Workload."""
    outlines: Outlines

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        """That of a plan. A partition, which is large, goes by a file."""
        return cls(
            options=with_partition(plan.options, None),
            machine=plan.machine,
            decisions=plan.state(),
            optimisations=plan.work.optimisations,
            num_classes=plan.work.num_classes,
            outlines=plan.work.outlines,
        )

    def plan(self, config: Config, graph: Graph, model: nn.Module, part: Tensor | None) -> Plan:
        """The same plan, made without a search."""
        options = with_partition(self.options, part)
        work = Workload(model, graph, self.optimisations, num_classes=self.num_classes, outlines=self.outlines)
        return get_strategy(config.strategy)(work, config.workers, options, self.machine, self.decisions)


def on_local_ranks(config: Config, work: RankWork, plan: Plan, *, quiet: bool = False) -> Ended:
    """Has local ranks work on a plan, which is let go of here; the signal that stopped them, or rank 0's values.

    quiet: does not show that they start.

    RunError, see `launch`, and where there is no room for what they share.
    """
    graph, model = plan.work.graph, plan.work.model
    with tempfile.TemporaryDirectory(prefix="weft-", dir=temporary_folder()) as scratch:
        weights, store = Path(scratch) / "weights.safetensors", graph.path or Path(scratch) / "graph"
        part = partition_of(plan.options)
        try:
            save_tensors(dict(named_tensors(model)), weights)
            if graph.path is None:
                graph.save(store)
            if part is not None:
                save_tensors({"part": part}, Path(scratch) / "part.safetensors")
        except (OSError, InputError) as error:
            raise RunError(NO_ROOM.format(scratch, error)) from error
        skeleton, planned = copy.deepcopy(model).to("meta"), Planned.of(plan)
        plan.release()
        arguments = (config, work, store, skeleton, weights, planned)
        meeting = Meeting(Path(scratch))
        starting = f"starting {config.workers} {'rank' if config.workers == 1 else 'ranks'}"
        with waiting(starting, quiet=quiet, until=lambda: has_status(meeting.status, 0)):
            stopped_by = launch(local_rank, arguments, workers=config.workers, folder=meeting.folder)
        return stopped_by or dict(json.loads((Path(scratch) / ENDED).read_text()))


def local_rank(
    config: Config,
    work: RankWork,
    store: Path,
    skeleton: nn.Module,
    weights: Path,
    planned: Planned,
    meeting: Meeting,
) -> None:
    """What each process of the launcher runs."""
    prepare_process(config)
    meter = Meter()
    meter.show_in(meeting.status, int(os.environ["RANK"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank(config.workers))
    graph = Graph.open(store, verify=False)
    model = skeleton.to_empty(device="cpu")
    values = load_file(weights)
    with torch.no_grad():
        for name, tensor in named_tensors(model):
            tensor.copy_(values[name])
    parts = weights.with_name("part.safetensors")
    plan = planned.plan(config, graph, model, load_file(parts)["part"] if parts.exists() else None)
    group = join(
        timeout_seconds=config.timeout, meter=meter, device=rows_device(config), init_method=meeting.init_method
    )
    ended = work(plan, group)
    group.close()
    if isinstance(ended, int):
        sys.exit(STOPPED + ended)
    if group.rank == 0:
        weights.with_name(ENDED).write_text(json.dumps(ended))
