"""What a model asks of its views, found by running it on tensors that have a shape and no data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.savings import ALL_SAVINGS, Savings
from weft.data import Adjacency
from weft.nn.dense import linear
from weft.nn.pyg import PyGConv
from weft.nn.topology import Norm, Reduce, Topology
from weft.nn.view import GraphView, Inputs, Origin


@dataclass(frozen=True, kw_only=True)
class GraphOperation:
    """One call of a view: `steps` products on `width` columns ('propagate', 'attend'), or a sum of rows ('total')."""

    kind: Literal["propagate", "attend", "total", "block"]
    width: int
    heads: int = 0
    steps: int = 1
    origin: Origin = "rows"
    """Where the rows of 'propagate' or 'block' come from: constant features, those under dropout, or any rows."""
    backward: bool
    """Whether a gradient flows back through it."""
    weighted: bool = False
    """Whether it uses the weights of the edges."""
    layer: str = ""
    """The kind of the layer that asked."""

    @property
    def is_product(self) -> bool:
        """Whether it multiplies by the adjacency."""
        return self.kind in ("propagate", "attend")

    @property
    def reads_edges(self) -> bool:
        """Whether it goes over the edges, by a product or by the layer itself."""
        return self.is_product or self.kind == "block"


class OutlineView(GraphView):
    """A view that computes nothing and notes what it is asked for; it weighs and refuses as `view_type` does."""

    def __init__(
        self,
        view_type: type[GraphView],
        topology: Topology,
        inputs: Inputs,
        operations: list[GraphOperation],
        running: list[str],
    ) -> None:
        self.unit_cost, self.no_block = view_type.unit_cost, view_type.no_block
        self.sparse_first = view_type.sparse_first
        self.topology, self.inputs = topology, inputs
        self.operations, self._running = operations, running
        self._key = self._calls = 0
        self._dropped = None

    @property
    def num_vertices(self) -> int:
        assert self.inputs.rows is not None
        return len(self.inputs.rows)

    def propagate(
        self, x: Tensor, *, reduce: Reduce = "sum", norm: Norm = None, weighted: bool = False, steps: int = 1
    ) -> Tensor:
        del norm
        weighted = weighted and reduce != "max"
        return self._note(x, "propagate", steps=steps, origin=self.origin(x), weighted=weighted)

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        del slope
        y = h + logit_src.sum() + logit_dst.sum()  # a shape, and what gradients flow to
        return self._note(y, "attend", steps=steps, heads=logit_src.shape[1])

    def total(self, x: Tensor) -> Tensor:
        return self._note(x, "total").sum(0)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        if self.no_block:
            raise InputError(self.no_block)
        return self._note(x, "block", origin=self.origin(x)), self.topology.edge_index, len(x)

    @property
    def edge_weight(self) -> Tensor | None:
        if self.operations and self.operations[-1].kind == "block":
            self.operations[-1] = replace(self.operations[-1], weighted=True)
        return super().edge_weight

    def linear(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        return linear(x, weight, added)

    def _drop(self, x: Tensor, key: int, p: float, relu: bool) -> Tensor:
        del key, p, relu
        return x.clone()

    def _note(
        self,
        x: Tensor,
        kind: Literal["propagate", "attend", "total", "block"],
        *,
        steps: int = 1,
        heads: int = 0,
        origin: Origin = "rows",
        weighted: bool = False,
    ) -> Tensor:
        self.operations.append(
            GraphOperation(
                kind=kind,
                width=x.shape[1],
                heads=heads,
                steps=steps,
                origin=origin,
                backward=x.requires_grad and torch.is_grad_enabled(),
                weighted=weighted,
                layer=self._running[-1],
            )
        )
        return x.clone()


def outline(
    model: nn.Module,
    *,
    num_vertices: int,
    num_features: int,
    num_edge_features: int = 0,
    weighted: bool = False,
    training: bool,
    view_type: type[GraphView] = GraphView,
    savings: Savings = ALL_SAVINGS,
    sparse_first: bool = False,
    num_classes: int | None = None,
) -> list[GraphOperation]:
    """The graph operations of one forward pass of `model` under views of `view_type`, in order.

    weighted: whether the graph has edge weights. InputError for a model that is none, that cannot take rows of
    num_features, that does not give num_classes logits, or that asks for what the view refuses or the graph lacks.
    """
    if not isinstance(getattr(model, "num_stages", None), int):
        raise InputError("the model does not say how many views it takes: set its num_stages, or use weft.nn.Stack")
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.empty(num_vertices, num_features, dtype=dtype, device="meta")
    operations: list[GraphOperation] = []
    inputs = Inputs(rows=x, savings=savings, sparse_first=sparse_first)
    twin = copy.deepcopy(model).to("meta").train(training)
    topology, running = no_edges(num_edge_features, weighted, dtype), name_running(twin)
    views = [OutlineView(view_type, topology, inputs, operations, running) for _ in range(cast(int, model.num_stages))]
    try:
        with torch.set_grad_enabled(training), torch.device("meta"):
            logits = twin(views, x)
    except (RuntimeError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"the model cannot take rows of {num_features} features ({reason}): mend its widths"
        ) from error
    if num_classes is not None and logits.shape[1:] != (num_classes,):
        raise InputError(
            f"the model gives {list(logits.shape[1:])} logits a vertex, the graph has {num_classes} classes"
        )
    return operations


def no_edges(num_edge_features: int, weighted: bool, dtype: torch.dtype) -> Topology:
    """A topology without data that has the features and weights that a graph has."""
    none = torch.empty(0, dtype=torch.int64, device="meta")
    weight = torch.empty(0, dtype=dtype, device="meta") if weighted else None
    features = torch.empty(0, num_edge_features, dtype=dtype, device="meta") if num_edge_features else None
    return Topology(Adjacency(indptr=none.new_empty(1), indices=none, num_sources=0, weight=weight), None, features)


def name_running(model: nn.Module) -> list[str]:
    """The kinds of the model's modules that are running, innermost last; changes as they do."""
    running: list[str] = []

    def enter(kind: str) -> Callable[..., None]:
        return lambda *_: running.append(kind)

    def leave(*_: object) -> None:
        running.pop()

    for part in model.modules():
        part.register_forward_pre_hook(enter(type(part.conv if isinstance(part, PyGConv) else part).__name__))
        part.register_forward_hook(leave)
    return running
