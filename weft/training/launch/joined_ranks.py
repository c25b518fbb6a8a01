"""Ranks that torchrun started: they join, see that they have the same work, and get rank 0's plan of it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from weft.comm import Group, join
from weft.config.config import Config
from weft.cost import Machine
from weft.nn import Workload
from weft.runtime.kernel_selection import KernelSelection
from weft.runtime.meter import Meter
from weft.strategies import Plan, get_strategy
from weft.training.artifacts.run_folder import RunFolder
from weft.training.flag_checks import make_options, partition_of, rows_device, with_partition
from weft.training.input_checks import require_device
from weft.training.launch.consistency import check_consistent
from weft.training.launch.torchrun import under_torchrun
from weft.training.machine_context import kernels_for_run
from weft.training.rank import make_plan
from weft.utils.errors import InputError

Made = TypeVar("Made")


def make_on_all_ranks(config: Config, make: Callable[[], Made]) -> Made:
    """What every rank makes by itself before they work together, of files that each host has.

    Under torchrun the ranks meet before, so that an InputError of some is everyone's, and says whose it is.
    """
    if not under_torchrun():
        return make()
    require_device(config)
    group = join(timeout_seconds=config.timeout, meter=Meter(), device=rows_device(config))
    mistake = ""
    with closing_on_error(group):
        try:
            made = make()
        except InputError as error:
            mistake = str(error)
        told = group.all_gather_object({"host": socket.gethostname(), "mistake": mistake})
        if text := combined_errors(told):
            raise InputError(text)
    return made


def result_of_rank_zero(config: Config, say: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 says, in values that JSON knows, on every rank of torchrun; its InputError is every rank's."""
    if not under_torchrun():
        return say()
    group = join(timeout_seconds=config.timeout, meter=Meter(), device=config.device)
    with closing_on_error(group):
        told: dict[str, Any] = {}
        if group.rank == 0:
            try:
                told = {"said": say()}
            except InputError as error:
                told = {"mistake": str(error)}
        told = group.all_gather_object(told)[0]
        if "mistake" in told:
            raise InputError(told["mistake"])
    return dict(told["said"])


def combined_errors(told: Sequence[Mapping[str, str]]) -> str:
    """The mistakes of all ranks in one line, '' where there is none. told: each rank's, and its host."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(told):
        if one["mistake"]:
            found.setdefault((one["host"], one["mistake"]), []).append(rank)
    if len({mistake for _, mistake in found}) == 1 and all(one["mistake"] for one in told):
        return told[0]["mistake"]
    return "; ".join(
        f"on {host} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}): {mistake}"
        for (host, mistake), ranks in found.items()
    )


def join_ranks(call: str, config: Config, work: Workload) -> Group:
    """The ranks that torchrun started, which have the same work, or this one alone; call: see `agree`."""
    if not under_torchrun():
        return Group(device=rows_device(config))
    group = join(timeout_seconds=config.timeout, meter=Meter(), device=rows_device(config))
    with closing_on_error(group):
        check_consistent(group, call, config, work.graph, work.model)
    return group


@contextmanager
def closing_on_error(group: Group) -> Iterator[None]:
    """Ranks part if what is done while entered fails on one: others hear of it, and the next meeting is a new one."""
    try:
        yield
    except BaseException:
        group.close()
        raise


def plan_with_kernels(
    config: Config, work: Workload, group: Group, resumed: RunFolder | None = None
) -> tuple[Plan, KernelSelection]:
    """The plan that rank 0 makes, and the implementations that it is to use, on every rank; see `plan_together`.

    resumed: the folder of the run that goes on, or predicts.
    """

    def lead() -> tuple[Plan, str]:
        return make_plan(config, work, resumed), kernels_for_run(config, resumed).text()

    plan, said = plan_together(config, work, group, lead)
    return plan, KernelSelection.from_record(json.loads(said))


def plan_together(
    config: Config, work: Workload, group: Group, lead: Callable[[], tuple[Plan, str]]
) -> tuple[Plan, str]:
    """The plan that rank 0 makes, and what it says besides, on every rank; its InputError is every rank's.

    lead: what rank 0 does.
    """
    if group.size == 1:
        return lead()
    said: dict[str, Any] = {}
    part = torch.empty(work.graph.num_vertices, dtype=torch.int32)
    if group.rank == 0:
        try:
            plan, besides = lead()
            given = partition_of(plan.options)
            part = part if given is None else given
            said = {"besides": besides, "parted": given is not None, "decisions": plan.state()}
            said["machine"] = plan.machine.record() if plan.machine else None
        except InputError as error:
            said = {"mistake": str(error)}
    said = group.all_gather_object(said)[0]
    if "mistake" in said:
        raise InputError(said["mistake"])
    if said["parted"]:
        part = part.to(group.device)
        group.broadcast(part, tag="partition")
    if group.rank:
        options = make_options(config)
        options = with_partition(options, part.cpu()) if said["parted"] else options
        machine = Machine.from_record(said["machine"]) if said["machine"] else None
        plan = get_strategy(config.strategy)(work, config.workers, options, machine, said["decisions"])
    return plan, said["besides"]
