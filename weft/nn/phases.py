"""A model's row-wise segments apart from what it asks of the graph between them (HongTu, section 4: UPDATE, AGGREGATE).

A phased module runs row by row up to a `Boundary`, which says what it asks of a view and which rows go on with the
result. Its `forward` drives it to the end; a strategy that works chunk by chunk drives it for some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from torch import Tensor, nn

from weft.nn.topology import Norm, Reduce
from weft.nn.view import View

Role = Literal["source", "target", "shared"]
SOURCE, TARGET, SHARED = ({"role": role} for role in ("source", "target", "shared"))
"""Fields with a row for each source [s, .], for each target [n, .], or with a tensor that all of them share."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What rows ask of the graph. Called with a view of all of it, it gives an answer for each target."""

    @property
    def loops(self) -> bool:
        """Whether a target's own row takes part among the sources'."""
        return False

    def __call__(self, view: View, steps: int = 1) -> Tensor:
        raise NotImplementedError

    def tensors(self, role: Role) -> dict[str, Tensor]:
        """Its tensors of a role, by name."""
        named = ((spec.name, getattr(self, spec.name)) for spec in fields(self) if spec.metadata.get("role") == role)
        return {name: value for name, value in named if value is not None}

    def having(self, tensors: dict[str, Tensor]) -> Self:
        """The same question about other tensors."""
        return replace(self, **tensors)


@dataclass(frozen=True, kw_only=True)
class Propagation(Question):
    """`view.propagate`."""

    x: Tensor = field(metadata=SOURCE)
    reduce: Reduce = "sum"
    norm: Norm = None
    weighted: bool = False

    @property
    def loops(self) -> bool:
        return self.norm == "gcn"

    def __call__(self, view: View, steps: int = 1) -> Tensor:
        return view.propagate(self.x, reduce=self.reduce, norm=self.norm, weighted=self.weighted, steps=steps)


@dataclass(frozen=True, kw_only=True)
class Attention(Question):
    """`view.attend`."""

    h: Tensor = field(metadata=SOURCE)
    logit_src: Tensor = field(metadata=SOURCE)
    logit_dst: Tensor = field(metadata=TARGET)
    slope: float

    @property
    def loops(self) -> bool:
        return True

    def __call__(self, view: View, steps: int = 1) -> Tensor:
        return view.attend(self.h, self.logit_src, self.logit_dst, slope=self.slope, steps=steps)


@dataclass(frozen=True, kw_only=True)
class PairAttention(Question):
    """`view.attend_pairs`."""

    h: Tensor = field(metadata=SOURCE)
    left: Tensor | None = field(metadata=SOURCE)
    right: Tensor = field(metadata=TARGET)
    attention: Tensor = field(metadata=SHARED)
    edge_map: Tensor | None = field(metadata=SHARED)
    slope: float

    @property
    def loops(self) -> bool:
        return True

    def __call__(self, view: View, steps: int = 1) -> Tensor:
        options: dict[str, Any] = {"edge_map": self.edge_map, "slope": self.slope, "steps": steps}
        return view.attend_pairs(self.h, self.left, self.right, self.attention, **options)


@dataclass(frozen=True, kw_only=True)
class WholeLayer(Question):
    """A layer that has no phases: it is run as it is, on the rows of sources of which the targets are the first."""

    x: Tensor = field(metadata=SOURCE)
    own: Tensor = field(metadata=TARGET)
    layer: nn.Module

    def __call__(self, view: View, steps: int = 1) -> Tensor:
        y: Tensor = self.layer(view, self.x) if steps == 1 else self.layer(view, self.x, steps)
        return y


@dataclass(frozen=True, kw_only=True)
class Total(Question):
    """`view.total`: one answer for all, the sum of the rows."""

    x: Tensor = field(metadata=TARGET)

    def __call__(self, view: View, steps: int = 1) -> Tensor:
        del steps
        return view.total(self.x)


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Where the rows of a module wait for the graph: what they ask, and what goes on with the result."""

    question: Question
    steps: int = 1
    """How often the view is asked, each result being the next question's x or h."""
    stage: int = 0
    """Whose view is asked."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Rows [n, .] that go on with the result, by name."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that all rows share and that go on with the result, by name."""
    context: Any = None
    """What else goes on with the result: no tensor, and the same for all rows."""
    on_result: Callable[[Tensor], None] | None = None
    """Called with the result, once in a forward pass."""

    def request(self, view: View) -> BoundaryState:
        """Asks a view of all rows; an aggregate leaves the rows of its targets, a total leaves all."""
        result = self.question(view, self.steps)
        if self.on_result is not None:
            self.on_result(result)
        whole = isinstance(self.question, Total)
        rows = self.rows if whole else {name: view.targets(values) for name, values in self.rows.items()}
        return BoundaryState(result=result, rows=rows, shared=self.shared, context=self.context)


@dataclass(frozen=True, kw_only=True)
class BoundaryState:
    """What a module goes on with behind a boundary."""

    result: Tensor
    """What the view gave: rows [n, .], or [F] for a total."""
    rows: dict[str, Tensor]
    """The boundary's rows; behind an aggregate, those of its targets."""
    shared: dict[str, Tensor]
    """The boundary's."""
    context: Any = None
    """The boundary's."""


class PhasedLayer(nn.Module):
    """A layer in phases, each row by row: to a boundary, from there to the next one, at last to its rows."""

    def begin(self, view: View, x: Tensor) -> Boundary | Tensor:
        """From the rows x [n, in_width] to the first boundary, or to the rows [n, out_width]."""
        raise NotImplementedError

    def resume(self, view: View, state: BoundaryState) -> Boundary | Tensor:
        """From a boundary's result to the next boundary, or to the rows [n, out_width]."""
        raise NotImplementedError

    def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
        reached = self.begin(view, x)
        while isinstance(reached, Boundary):
            state = replace(reached, steps=steps).request(view)
            del reached  # what is asked is let go before the rows go on
            reached = self.resume(view, state)
        return reached


class PhasedModel(nn.Module):
    """A model in phases, as a layer is, with a view for each of its stages."""

    num_stages: int

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        """From the features x [n, in_width] to the first boundary, or to the logits [n, out_width]."""
        raise NotImplementedError

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        """From a boundary's result to the next boundary, or to the logits [n, out_width]."""
        raise NotImplementedError

    def forward(self, views: Sequence[View], x: Tensor) -> Tensor:
        reached = self.begin(views, x)
        while isinstance(reached, Boundary):
            state = reached.request(views[reached.stage])
            del reached  # as above
            reached = self.resume(views, state)
        return reached


def phases_of(module: nn.Module) -> PhasedLayer | PhasedModel | None:
    """The module, if its phases are all that its call does: not with a `forward` or hooks of somebody's own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    drivers = (PhasedLayer.forward, PhasedModel.forward)
    if isinstance(module, PhasedLayer | PhasedModel) and type(module).forward in drivers and not any(hooks):
        return module
    return None


def begin(module: nn.Module, views: Any, x: Tensor) -> Boundary | Tensor:
    """The first phase of any module, under its view or views: one without phases is called."""
    phased = phases_of(module)
    reached: Boundary | Tensor = module(views, x) if phased is None else phased.begin(views, x)
    return reached


def begin_layer(layer: nn.Module, view: View, x: Tensor) -> Boundary | Tensor:
    """The first phase of a layer that may need the graph: one without phases is a question itself."""
    if phases_of(layer) is None:
        return Boundary(question=WholeLayer(x=x, own=x, layer=layer))
    return begin(layer, view, x)


def resume(module: nn.Module, views: Any, state: BoundaryState) -> Boundary | Tensor:
    """The next phase of any module: the result is all that one without phases gives."""
    phased = phases_of(module)
    return state.result if phased is None else phased.resume(views, state)
