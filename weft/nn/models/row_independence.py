"""Checks that a model couples rows only through its views, and draws no random numbers.

Any other model would return different rows on a rank, which stores only some of the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Adjacency
from weft.nn.aggregate.topology import Topology
from weft.nn.aggregate.typed_block import TypedBlock, TypeOrder
from weft.nn.convert import Unconverted
from weft.nn.graph_view import SPREAD, GraphView
from weft.nn.layers.norm import BatchNorm
from weft.nn.models.probe_model import ProbeModel, random_topology, some_vertices
from weft.nn.workload.workload import Workload
from weft.utils.errors import InputError

NUM_VERTICES, DEGREE = 12, 3
"""Number of vertices, and their average degree, of the first graph on which a model is tested."""
OTHER_VERTICES, OTHER_DEGREE = 100, 7
"""Number of vertices that the second test adds to the graph, and their average degree."""
NOISE = 1e-11
"""Largest gradient that counts as rounding noise in float64, as a fraction of the largest gradient of all
parameters."""

ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Errors that a model may raise if it cannot run on a subset of rows."""


class ProbeView(GraphView):
    """View whose totals can be replaced by those of an earlier run, so that further rows do not change them.

    Args:
        topology: The edges.
        recorded: Receives the totals of this run, if `totals` is None.
        totals: Totals of an earlier run; None: the totals of this run's rows.
        **options: Further arguments of `GraphView`.
    """

    traits, has_all_sources = SPREAD, False

    def __init__(
        self, topology: Topology, *, recorded: list[Tensor], totals: Iterator[Tensor] | None, **options: Any
    ) -> None:
        super().__init__(topology, **options)
        self._recorded, self._totals = recorded, totals

    @property
    def num_vertices(self) -> int:
        return NUM_VERTICES

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x, self.topology.edge_index, len(x)

    def typed_block(self, vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        # Not divided by type: random relations join vertices of any type.
        return self.topology.typed_block(vertex_type, num_targets, num_types, divided=False)

    def type_order(self, vertex_type: Tensor, num_types: int) -> TypeOrder:
        return TypeOrder.of(vertex_type, num_types)  # other rows have other types, with the same topology

    def total(self, x: Tensor) -> Tensor:
        if self._totals is not None:
            return next(self._totals)
        self._recorded.append(super().total(x))
        return self._recorded[-1]


@dataclass(frozen=True)
class Call:
    """Recorded call of a module."""

    name: str
    """Class of the module, and its path in the model."""
    inputs: list[Tensor]
    """Copies of the tensors among the arguments."""
    outputs: list[Tensor]
    """Copy of the result, if it is a tensor; else empty."""


def check_row_independence(
    work: Workload, *, all_rows: bool, alternative: str = "a strategy that stores all rows on one rank"
) -> None:
    """Check that a model draws no random numbers, and that its rows do not depend on which other rows are present.

    Args:
        work: The workload.
        all_rows: True if one rank stores all rows, so that rows may depend on each other.
        alternative: What to use for a model whose rows depend on each other, in the error.

    Raises:
        InputError: The model fails the check; the message names the innermost module that does.
    """
    # In evaluation and in training: 1. Run the model twice on a few vertices: a difference is random. 2. Run it on
    # these and others, which no edge joins to them and which come before or after them: a difference in their rows is
    # a dependence outside of message passing.
    if isinstance(work.model, Unconverted):  # it runs on all rows, and its random numbers depend on the view
        return
    vertices = some_vertices(work.graph, NUM_VERTICES)
    topology = random_topology(work.graph, NUM_VERTICES, DEGREE, work.dtype)
    alone = ProbeModel(work, topology, vertices)
    crowded = [] if all_rows else _with_other_rows(work, topology, vertices)
    tolerance = torch.finfo(work.row_dtype).eps ** 0.5  # sums may change by rounding with the number of rows
    for training in (False, True):  # a training step changes the statistics that an evaluation uses
        totals: list[Tensor] = []
        for probe in (alone, *(probe for probe, _ in crowded)):
            probe.model.train(training)
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            run = alone.forward(ProbeView, recorded=totals, totals=None)
            try:
                calls, calls_again = _calls(alone.model, run), _calls(alone.model, run)
            except ERRORS as error:
                if all_rows:  # it may be able to run on all rows
                    return
                raise InputError(
                    f"the model cannot run on a subset of the rows ({str(error).partition(chr(10))[0]}), but a rank "
                    f"stores no others: use {alternative}"
                ) from error
            name = _first_difference(calls, calls_again, 0.0)
            if name:
                raise InputError(
                    f"{name} returns different results when it is called again (it is random, or changes its state), "
                    "so a run could not be reproduced: for dropout, call view.dropout(x, p), or give Stack dropout=p"
                )
            for probe, first in crowded:
                run = probe.forward(ProbeView, recorded=[], totals=iter(totals))
                name = _first_difference(calls, _calls(probe.model, run), tolerance, first=first)
                if name:
                    raise InputError(
                        f"{name} mixes vertices outside of message passing: its rows change when other rows are "
                        "present, and a rank stores only some. Use weft.nn.BatchNorm(width), called with the view, "
                        f"view.total(x) for other sums over vertices, or {alternative}"
                    )


def _with_other_rows(work: Workload, topology: Topology, vertices: Tensor) -> list[tuple[ProbeModel, bool]]:
    """Return the model on some vertices and on others, which no edge joins to them.

    Args:
        work: The workload.
        topology: Edges between the vertices.
        vertices: The vertices, int64 [n].

    Returns:
        The model with the others before the vertices, and after them; True: the vertices come first.
    """
    others = some_vertices(work.graph, OTHER_VERTICES)
    other_topology = random_topology(work.graph, OTHER_VERTICES, OTHER_DEGREE, work.dtype, seed=1)
    before = _disjoint_union(other_topology, topology, first_ids=NUM_VERTICES)
    after = _disjoint_union(topology, other_topology, second_ids=NUM_VERTICES)
    return [
        (ProbeModel(work, before, torch.cat([others, vertices])), False),
        (ProbeModel(work, after, torch.cat([vertices, others])), True),
    ]


def _disjoint_union(first: Topology, second: Topology, *, first_ids: int = 0, second_ids: int = 0) -> Topology:
    """Return the disjoint union of two topologies.

    Args:
        first: The topology whose vertices come first.
        second: The other topology.
        first_ids: Number added to the original ids of the first.
        second_ids: Number added to the original ids of the second.
    """
    a, b = first.adjacency, second.adjacency
    adjacency = Adjacency(
        indptr=torch.cat([a.indptr, b.indptr[1:] + a.num_edges]),
        indices=torch.cat([a.indices, b.indices + a.num_targets]),
        num_sources=a.num_sources + b.num_sources,
        weight=_concatenated(a.weight, b.weight),
    )
    return Topology(
        adjacency,
        ids=torch.cat([first.ids + first_ids, second.ids + second_ids]),
        edge_features=_concatenated(first.edge_features, second.edge_features),
        edge_type=_concatenated(first.edge_type, second.edge_type),
        num_relations=first.num_relations,
    )


def _concatenated(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second])


def _calls(model: nn.Module, run: Callable[[], Tensor]) -> list[Call]:
    """Return the calls of modules in a run, in the order in which they return."""
    calls: list[Call] = []

    def record(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        kind = type(module).__name__
        calls.append(Call(f"{kind} ({name})" if name else kind, _tensors(inputs), _tensors((output,))))

    hooks = [module.register_forward_hook(partial(record, name)) for name, module in model.named_modules()]
    run()
    for hook in hooks:
        hook.remove()
    return calls


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    return [value.detach().clone() for value in values if isinstance(value, Tensor)]


def _first_difference(calls: list[Call], others: list[Call], tolerance: float, *, first: bool = False) -> str | None:
    """Return the name of the first call whose results differ for equal inputs, or else the model if its results differ.

    Args:
        calls: Calls of the first run.
        others: Calls of the second run.
        tolerance: Largest difference, as a fraction of the largest number; 0: results must be equal.
        first: True if further rows of the second run come after the rows of the first run, False if before.
    """
    for call, other in zip(calls, others, strict=False):
        if call.inputs and call.outputs and call.inputs[0].shape[:1] != call.outputs[0].shape[:1]:
            continue  # such as the rows of all vertex types in one result, which are in another order than the inputs
        same_inputs = _same(call.inputs, other.inputs, tolerance, first)
        if same_inputs and not _same(call.outputs, other.outputs, tolerance, first):
            return call.name
    return None if _same(calls[-1].outputs, others[-1].outputs, tolerance, first) else calls[-1].name


def _same(tensors: list[Tensor], others: list[Tensor], tolerance: float, first: bool) -> bool:
    """Return whether tensors agree in their common rows; False if the shapes of these differ.

    Args:
        tensors: Tensors of the first run.
        others: Tensors of the second run, which may have more rows.
        tolerance: Largest difference, as a fraction of the largest number.
        first: True if the common rows are the first of the second run, False if the last.
    """
    for tensor, other in zip(tensors, others, strict=True):
        common = other
        if tensor.dim() and len(other) > len(tensor):
            common = other[: len(tensor)] if first else other[len(other) - len(tensor) :]
        if common.shape != tensor.shape:
            return False
        if tensor.is_floating_point():
            largest = tensor.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if tensor.numel() else 0.0
            if not torch.allclose(tensor, common, rtol=0, atol=tolerance * largest, equal_nan=True):
                return False
        elif not torch.equal(tensor, common):
            return False
    return True


def idle_parameters(work: Workload) -> list[str]:
    """Return the names of parameters without effect, such as a bias before a batch norm, of a float32 model.

    Their gradient is only rounding noise, which a run in float64 on a few vertices shows.
    """
    if work.dtype != torch.float32 or not any(isinstance(part, BatchNorm) for part in work.model.modules()):
        return []
    precise = Workload(copy.deepcopy(work.model).double(), work.graph, work.optimisations)
    vertices = some_vertices(work.graph, NUM_VERTICES)
    probe = ProbeModel(precise, random_topology(work.graph, NUM_VERTICES, DEGREE, torch.float64), vertices)
    try:
        logits = probe.forward(ProbeView, recorded=[], totals=None)()
        logits.backward(torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits))
    except ERRORS:  # the model only runs in float32
        return []
    size = {name: p.grad.abs().max().item() for name, p in probe.model.named_parameters() if p.grad is not None}
    return [name for name, largest in size.items() if 0 < largest < NOISE * max(size.values())]
