"""A layer's middle phase as a value: what it asks of a view, so that its row phases can run apart from it.

A strategy that works chunk by chunk runs the rows' part of a model up to a `Pause`, answers what it asks for over all
chunks, and goes on with the rows that the pause kept (HongTu, section 4: AGGREGATE and UPDATE).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, Self

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
        del steps
        y: Tensor = self.layer(view, self.x)
        return y


@dataclass(frozen=True, kw_only=True)
class Total(Question):
    """`view.total`: one answer for all, the sum of the rows."""

    x: Tensor = field(metadata=TARGET)

    def __call__(self, view: View, steps: int = 1) -> Tensor:
        del steps
        return view.total(self.x)


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Where the rows' part of a model waits for an answer.

    stage: whose view is asked, `steps` times, one answer being the next question's x or h. rows: [n, .] of each vertex,
    and shared: of all, that go on with the answer, by name; note: what besides, the same for all rows. learn: is called
    once with the answer, if given.
    """

    question: Question
    stage: int
    steps: int = 1
    rows: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    note: Any = None
    learn: Callable[[Tensor], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What goes on after a pause: the answer, what the pause kept, and its note."""

    answer: Tensor
    rows: dict[str, Tensor]
    shared: dict[str, Tensor]
    note: Any = None


class Phased(Protocol):
    """A model whose rows' part can be run from pause to pause."""

    num_stages: int

    def resume(self, number: int, views: Any, x: Tensor, after: Resumed | None) -> Pause | Tensor:
        """Its `number`-th part, up to the next pause or to the logits; part 0 begins with the features x."""
        ...


class PhasedLayer(nn.Module):
    """A layer as three phases: rows ask (`before`), the view answers, rows go on (`after`)."""

    def before(self, view: View, x: Tensor) -> Asked:
        """What the rows x [n, in_width] ask."""
        raise NotImplementedError

    def after(self, view: View, asked: Any, own: Tensor | None, a: Tensor) -> Tensor:
        """The rows [n, out_width], from the answer a, own rows of the targets and the note of what was asked."""
        raise NotImplementedError

    def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
        asked = self.before(view, x)
        a = asked.question(view, steps)
        return self.after(view, asked.note, None if asked.own is None else view.targets(asked.own), a)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a layer asks, and the rows [n, .] and the note that it wants back with the answer."""

    question: Question
    own: Tensor | None = None
    note: Any = None


def phases_of(layer: nn.Module) -> PhasedLayer | None:
    """The layer, if its phases are all that its call does: not with a `forward` or hooks of somebody's own."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if isinstance(layer, PhasedLayer) and type(layer).forward is PhasedLayer.forward and not any(hooks):
        return layer
    return None


def ask(layer: nn.Module, view: View, x: Tensor) -> Asked:
    """What any layer asks: one without phases is a question itself."""
    phased = phases_of(layer)
    return Asked(question=WholeLayer(x=x, own=x, layer=layer)) if phased is None else phased.before(view, x)


def go_on(layer: nn.Module, view: View, asked: Any, own: Tensor | None, a: Tensor) -> Tensor:
    """The rows that any layer makes of an answer."""
    phased = phases_of(layer)
    return a if phased is None else phased.after(view, asked, own, a)
