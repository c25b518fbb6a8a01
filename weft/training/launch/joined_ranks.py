"""Joint work of the processes of a call: they load, check that their input is the same, and receive rank 0's plan.

All of them must call each function here. If one of them raises InputError, all do. A single process just does the work.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.cost import Machine
from weft.data import Graph
from weft.nn import Workload
from weft.storage.quantized_table import FeatureTable
from weft.strategies import Options, Plan
from weft.training.flag_checks import partition_of, with_partition
from weft.utils.errors import InputError

Result = TypeVar("Result")

PATH_FIELDS = ("graph", "partition", "machine", "choices", "scratch")
"""Fields of Config that name files, whose paths may differ between hosts."""
DIGEST_ROWS = 4096
"""Approximate number of rows of each tensor over vertices that are compared between ranks."""


def make_on_all_ranks(group: Group, make: Callable[[], Result]) -> Result:
    """Create an object in each process, such as a graph that the process loads from its host.

    If some of them fail, all raise an error that names the failed ranks.

    Args:
        group: The processes.
        make: Creates the object.

    Raises:
        InputError: `make` has raised it on a rank.
    """
    error_text = ""
    with closing_on_error(group):
        try:
            result = make()
        except InputError as error:
            error_text = str(error)
        reports = group.all_gather_object({"host": socket.gethostname(), "error": error_text})
        if text := combined_errors(reports):
            raise InputError(text)
    return result


def result_of_rank_zero(group: Group, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Compute something on rank 0, and return the result in all processes.

    Args:
        group: The processes.
        compute: Computes the result, of JSON values.

    Raises:
        InputError: `compute` has raised it. All ranks raise it.
    """
    with closing_on_error(group):
        report: dict[str, Any] = {}
        if group.rank == 0:
            try:
                report = {"result": compute()}
            except InputError as error:
                report = {"error": str(error)}
        report = group.all_gather_object(report)[0]
        if "error" in report:
            raise InputError(report["error"])
    return dict(report["result"])


def combined_errors(reports: Sequence[Mapping[str, str]]) -> str:
    """Return the errors of all ranks in one line, or an empty string. `reports` has the keys host and error."""
    ranks_by_error: dict[tuple[str, str], list[int]] = {}
    for rank, report in enumerate(reports):
        if report["error"]:
            ranks_by_error.setdefault((report["host"], report["error"]), []).append(rank)
    if len({error for _, error in ranks_by_error}) == 1 and all(report["error"] for report in reports):
        return reports[0]["error"]
    return "; ".join(
        f"on {host} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}): {error}"
        for (host, error), ranks in ranks_by_error.items()
    )


def check_consistent(group: Group, call: str, options: Mapping[str, Any], work: Workload) -> None:
    """Check that all processes do the same, and copy the weights of rank 0 to all of them.

    Args:
        group: The processes.
        call: Name of the call, such as "weft.train".
        options: All options of the call, by name.
        work: The graph of this process and its model, which is updated in place.

    Raises:
        InputError: Graph, configuration, versions, model structure or call differ. All ranks raise it; the message
            names a rank and what differs.
    """
    if group.size == 1:
        return
    facts_of_ranks = group.all_gather_object(_facts_of_rank(call, options, work.graph, work.model))
    for rank, facts in enumerate(facts_of_ranks):
        for name, value in facts_of_ranks[0].items():
            if facts[name] != value:
                raise InputError(
                    f"rank {rank} has {name} {facts[name]}, but rank 0 has {value}: "
                    "use the same calls, graph, options, model and versions on all ranks"
                )
    with torch.no_grad():
        for _, tensor in named_tensors(work.model):
            values = tensor.to(group.device, copy=True)
            group.broadcast(values, tag="weights")
            tensor.copy_(values)


def _facts_of_rank(call: str, options: Mapping[str, Any], graph: Graph, model: nn.Module) -> dict[str, str]:
    """Return the properties of a run that must be equal on all ranks, as text, by their names in the error."""
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in options.items() if name not in PATH_FIELDS}
    rows = {name: getattr(graph, name) for name in ("x", "y", "train_mask", "val_mask", "test_mask", "edge_features")}
    rows |= {} if graph.edge_labels is None else graph.edge_labels.arrays()
    layout = "".join(f"{name} {tensor.dtype} {list(tensor.shape)};" for name, tensor in named_tensors(model))
    return {
        "the call": call,
        "a graph of vertices and edges": f"{graph.num_vertices:,} and {graph.num_edges:,}",
        "a graph with fingerprint": graph.fingerprint[:16],
        **{f"rows {name} with digest": _digest(tensor) for name, tensor in rows.items()},
        **flags,
        "a model with parameters of digest": hashlib.sha256(layout.encode()).hexdigest()[:16],
        **{name: version(name) for name in ("weft", "torch")},
    }


def _digest(rows: FeatureTable | None) -> str:
    """Return a digest of evenly spaced rows of a tensor or a table of features."""
    if rows is None:
        return "none"
    sample = rows[:: max(1, len(rows) // DIGEST_ROWS)].contiguous().view(torch.uint8)
    content = f"{rows.dtype} {list(rows.shape)}".encode() + sample.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


@contextmanager
def closing_on_error(group: Group) -> Iterator[Group]:
    """Disconnect this process if the with block fails. Yields the group.

    The other ranks then notice it, and a later call in the same script connects all of them anew.
    """
    try:
        yield group
    except BaseException:
        group.close()
        raise


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers of a model, also the non-persistent ones, by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def plan_together(
    group: Group,
    work: Workload,
    strategy: type[Plan],
    options: Options,
    lead: Callable[[], tuple[Plan, dict[str, Any]]],
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of rank 0, and JSON values from it, in all processes.

    Args:
        group: The processes.
        work: The model and graph.
        strategy: Type of the plan.
        options: Options of the strategy, without a partition.
        lead: Makes the plan and the values on rank 0.

    Raises:
        InputError: `lead` has raised it. All ranks raise it.
    """
    if group.size == 1:
        return lead()
    # Rank 0 plans. Of its plan, it sends the state, the cost factors and the partition, from which the other ranks
    # create the same plan without a search.
    plans: list[Plan] = []

    def compute() -> dict[str, Any]:
        plan, values = lead()
        plans.append(plan)
        machine = asdict(plan.machine) if plan.machine else None
        has_partition = partition_of(plan.options) is not None
        return {"values": values, "state": plan.state(), "machine": machine, "has_partition": has_partition}

    message = result_of_rank_zero(group, compute)
    part = partition_of(plans[0].options) if plans else None
    if message["has_partition"]:
        part = torch.empty(work.graph.num_vertices, dtype=torch.int32) if part is None else part
        part = part.to(group.device)
        group.broadcast(part, tag="partition")
    if not plans:
        options = with_partition(options, None if part is None else part.cpu())
        machine = Machine(**message["machine"]) if message["machine"] else None
        plans.append(strategy(work, group.size, options, machine, message["state"]))
    return plans[0], message["values"]
