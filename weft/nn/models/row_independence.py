"""Whether a model's rows depend on each other, or on chance, past its views: then no rank could run it on its rows."""

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
from weft.nn.graph_view import SPREAD, GraphView
from weft.nn.layers.norm import BatchNorm
from weft.nn.models.probe_model import ProbeModel, random_topology, some_vertices
from weft.nn.workload.workload import Workload
from weft.utils.errors import InputError

NUM_VERTICES, DEGREE = 12, 3
BESIDE_VERTICES, BESIDE_DEGREE = 100, 7
NOISE = 1e-11  # of the largest gradient

ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


class ProbeView(GraphView):
    """A view whose totals can be those of another run, so that rows beside its own do not count.

    totals: what these are. num_vertices: of how many rows; both None: the totals of its rows, noted in `noted`.
    """

    traits = SPREAD

    def __init__(
        self, topology: Topology, *, noted: list[Tensor], totals: Iterator[Tensor] | None, **rest: Any
    ) -> None:
        super().__init__(topology, **rest)
        self._noted, self._totals = noted, totals

    @property
    def num_vertices(self) -> int:
        return NUM_VERTICES

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x, self.topology.edge_index, len(x)

    def total(self, x: Tensor) -> Tensor:
        if self._totals is not None:
            return next(self._totals)
        self._noted.append(super().total(x))
        return self._noted[-1]


@dataclass(frozen=True)
class Call:
    """A module's call, when it has returned."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def check_row_independence(work: Workload, *, together: bool) -> None:
    """InputError for a model that draws random numbers of its own, or whose rows depend on which others are there.

    It is run on a few vertices, again, and beside others that no edge joins them to; the error names the innermost
    module that gives other rows for the same ones. together: one rank has all rows at once, so that they may depend on
    each other.
    """
    vertices = some_vertices(work.graph, NUM_VERTICES)
    few = random_topology(work.graph, NUM_VERTICES, DEGREE, work.dtype)
    totals: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        sample = ProbeModel(work, few, vertices)
        run = sample.forward(ProbeView, noted=totals, totals=None)
        try:
            calls, again = _calls(sample.model, run), _calls(sample.model, run)
        except ERRORS as error:
            if together:  # what it wants of its rows may hold of all of them
                return
            raise InputError(
                f"the model cannot run on some of the rows ({str(error).partition(chr(10))[0]}), and a rank has no "
                "others: take --strategy single"
            ) from error
        name = _first_other(calls, again, 0.0)
        if name:
            raise InputError(
                f"{name} gives other numbers when called again (it is random, or changes itself), so a run could not "
                "be repeated: for dropout, call view.dropout(x, p), or give Stack dropout=p"
            )
        if together:
            return
        beside = some_vertices(work.graph, BESIDE_VERTICES)
        more = random_topology(work.graph, BESIDE_VERTICES, BESIDE_DEGREE, work.dtype, seed=1)
        sample = ProbeModel(work, _side_by_side(more, few), torch.cat([beside, vertices]))
        run = sample.forward(ProbeView, noted=[], totals=iter(totals))
        by_rounding = torch.finfo(work.row_dtype).eps ** 0.5  # what sums may change by with the number of rows
        name = _first_other(calls, _calls(sample.model, run), by_rounding)
    if name:
        raise InputError(
            f"{name} gives a row other numbers beside other rows, and a rank has only some of them: for batch norm use "
            "weft.nn.BatchNorm(width), called with the view, for other sums over rows view.total(x), or take "
            "--strategy single"
        )


def _side_by_side(first: Topology, second: Topology) -> Topology:
    """Two topologies as one that no edge joins; the second's vertices come last, and keep their ids."""
    a, b = first.adjacency, second.adjacency
    adjacency = Adjacency(
        indptr=torch.cat([a.indptr, b.indptr[1:] + a.num_edges]),
        indices=torch.cat([a.indices, b.indices + a.num_targets]),
        num_sources=a.num_sources + b.num_sources,
        weight=_joined(a.weight, b.weight),
    )
    return Topology(
        adjacency,
        ids=torch.cat([first.ids + b.num_targets, second.ids]),
        edge_features=_joined(first.edge_features, second.edge_features),
        edge_type=_joined(first.edge_type, second.edge_type),
        num_relations=first.num_relations,
    )


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second])


def _calls(model: nn.Module, run: Callable[[], Tensor]) -> list[Call]:
    """The calls of modules in a run, in the order in which they return."""
    calls: list[Call] = []

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        kind = type(module).__name__
        calls.append(Call(f"{kind} ({name})" if name else kind, _tensors(inputs), _tensors((output,))))

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()]
    run()
    for hook in hooks:
        hook.remove()
    return calls


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    return [value.detach().clone() for value in values if isinstance(value, Tensor)]


def _first_other(calls: list[Call], others: list[Call], share: float) -> str | None:
    """The first call with other results from the same inputs, or the model's, if any are other."""
    for call, other in zip(calls, others, strict=False):
        if _same(call.inputs, other.inputs, share) and not _same(call.outputs, other.outputs, share):
            return call.name
    return None if _same(calls[-1].outputs, others[-1].outputs, share) else calls[-1].name


def _same(some: list[Tensor], others: list[Tensor], share: float) -> bool:
    """Whether tensors have the same last rows, but for a share of the largest number; not where shapes differ."""
    for one, other in zip(some, others, strict=True):
        last = other[len(other) - len(one) :] if one.dim() and len(other) > len(one) else other
        if last.shape != one.shape:
            return False
        if one.is_floating_point():
            largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if one.numel() else 0.0
            if not torch.allclose(one, last, rtol=0, atol=share * largest, equal_nan=True):
                return False
        elif not torch.equal(one, last):
            return False
    return True


def idle_parameters(work: Workload) -> list[str]:
    """Names of the parameters that a batch norm behind them takes all effect from, such as a bias; of float32 models.

    Their gradient is rounding noise, which shows beside the others in float64. Found on a few vertices.
    """
    if work.dtype != torch.float32 or not any(isinstance(part, BatchNorm) for part in work.model.modules()):
        return []
    precise = Workload(copy.deepcopy(work.model).double(), work.graph, work.optimisations)
    vertices = some_vertices(work.graph, NUM_VERTICES)
    sample = ProbeModel(precise, random_topology(work.graph, NUM_VERTICES, DEGREE, torch.float64), vertices)
    try:
        logits = sample.forward(ProbeView, noted=[], totals=None)()
        logits.backward(torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits))
    except ERRORS:  # made for float32 alone
        return []
    size = {name: p.grad.abs().max().item() for name, p in sample.model.named_parameters() if p.grad is not None}
    return [name for name, largest in size.items() if 0 < largest < NOISE * max(size.values())]
