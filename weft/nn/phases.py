"""A layer's middle phase as a value: what it asks of a view, so that its row phases can run apart from it.

A strategy that works chunk by chunk runs the rows' part of a model up to a `Pause`, answers what it asks for over all
chunks, and goes on with the rows that the pause kept (HongTu, section 4: AGGREGATE and UPDATE).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from weft.nn.aggregate import Request, WholeLayer
from weft.nn.view import View


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Where the rows' part of a model waits for an answer.

    stage: whose view is asked, `steps` times, one result being aggregated by the next. rows: [n, .] of each vertex, and
    shared: of all, that go on with the answer, by name; note: what besides, the same for all rows. learn: is called
    once with the answer, if given.
    """

    request: Request
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
        a = view.aggregate(*asked.request, steps)
        return self.after(view, asked.note, None if asked.own is None else view.targets(asked.own), a)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a layer asks, and the rows [n, .] and the note that it wants back with the answer."""

    request: Request
    own: Tensor | None = None
    note: Any = None


def phases_of(layer: nn.Module) -> PhasedLayer | None:
    """The layer, if its phases are all that its call does: not with a `forward` or hooks of somebody's own."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if isinstance(layer, PhasedLayer) and type(layer).forward is PhasedLayer.forward and not any(hooks):
        return layer
    return None


def ask(layer: nn.Module, view: View, x: Tensor) -> Asked:
    """What any layer asks: one without phases is an aggregate itself."""
    phased = phases_of(layer)
    whole = Asked(request=Request(WholeLayer(layer), {"x": x, "own": x}))
    return whole if phased is None else phased.before(view, x)


def go_on(layer: nn.Module, view: View, asked: Any, own: Tensor | None, a: Tensor) -> Tensor:
    """The rows that any layer makes of an answer."""
    phased = phases_of(layer)
    return a if phased is None else phased.after(view, asked, own, a)
