"""Ranks that torchrun started: they join, see that they have the same work, and get rank 0's plan of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.comm import Group, join
from weft.core.config import Config
from weft.core.errors import InputError
from weft.core.meter import Meter
from weft.cost import Machine
from weft.engine.agree import agree
from weft.engine.options import make_options, partition_of, rows_device, with_partition
from weft.engine.torchrun import under_torchrun
from weft.nn import Workload
from weft.strategies import Plan, get_strategy


def joined(call: str, config: Config, work: Workload) -> Group:
    """The ranks that torchrun started, which have the same work, or this one alone; call: see `agree`."""
    if not under_torchrun():
        return Group(device=rows_device(config))
    group = join(timeout_seconds=config.timeout, meter=Meter(), device=rows_device(config))
    with parting(group):
        agree(group, call, config, work.graph, work.model)
    return group


@contextmanager
def parting(group: Group) -> Iterator[None]:
    """Ranks part if what is done while entered fails on one: others hear of it, and the next meeting is a new one."""
    try:
        yield
    except BaseException:
        group.close()
        raise


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
            said = {"besides": besides, "parted": given is not None, "decisions": plan.decisions()}
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
