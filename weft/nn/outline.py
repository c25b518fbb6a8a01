"""What a model asks of its views, found by running it on tensors that have a shape and no data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.nn.view import GraphView, Inputs, Norm, Origin, Reduce


@dataclass(frozen=True, kw_only=True)
class GraphOperation:
    """One call of a view: `steps` products on `width` columns ('propagate', 'attend'), or a sum of rows ('total')."""

    kind: Literal["propagate", "attend", "total", "block"]
    width: int
    heads: int = 0
    steps: int = 1
    origin: Origin
    backward: bool
    """Whether a gradient flows back through it."""

    @property
    def is_product(self) -> bool:
        """Whether it multiplies by the adjacency."""
        return self.kind in ("propagate", "attend")


class OutlineView(GraphView):
    """A view that computes nothing and notes what it is asked for; it weighs and refuses as `view_type` does."""

    def __init__(self, view_type: type[GraphView], operations: list[GraphOperation], inputs: Inputs) -> None:
        self.unit_cost, self.no_block = view_type.unit_cost, view_type.no_block
        self.operations = operations
        self.inputs = inputs
        self._key = self._calls = 0
        self._dropped = None

    @property
    def num_vertices(self) -> int:
        assert self.inputs.rows is not None
        return len(self.inputs.rows)

    def propagate(
        self, x: Tensor, *, reduce: Reduce = "sum", norm: Norm = None, weighted: bool = False, steps: int = 1
    ) -> Tensor:
        del reduce, norm, weighted
        return self._note(x, "propagate", steps=steps)

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        del logit_dst, slope
        return self._note(h, "attend", steps=steps, heads=logit_src.shape[1])

    def total(self, x: Tensor) -> Tensor:
        return self._note(x, "total").sum(0)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        if self.no_block:
            raise InputError(self.no_block)
        return self._note(x, "block"), torch.empty(2, 0, dtype=torch.int64, device="meta"), len(x)

    def _drop(self, x: Tensor, key: int, p: float) -> Tensor:
        del key, p
        return x.clone()

    def _note(
        self, x: Tensor, kind: Literal["propagate", "attend", "total", "block"], *, steps: int = 1, heads: int = 0
    ) -> Tensor:
        backward = x.requires_grad and torch.is_grad_enabled()
        self.operations.append(
            GraphOperation(
                kind=kind, width=x.shape[1], heads=heads, steps=steps, origin=self.origin(x), backward=backward
            )
        )
        return x.clone()


def outline(
    model: nn.Module,
    *,
    num_vertices: int,
    num_features: int,
    training: bool,
    view_type: type[GraphView] = GraphView,
    reuse: bool = True,
) -> list[GraphOperation]:
    """The graph operations of one forward pass of `model` under views of `view_type`, in order.

    InputError, from the model, for a width that does not fit or a view that refuses.
    """
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.empty(num_vertices, num_features, dtype=dtype, device="meta")
    operations: list[GraphOperation] = []
    inputs = Inputs(rows=x, reuse=reuse)
    twin = copy.deepcopy(model).to("meta").train(training)
    with torch.set_grad_enabled(training):
        twin([OutlineView(view_type, operations, inputs) for _ in range(cast(int, model.num_stages))], x)
    return operations
