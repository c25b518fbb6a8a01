"""Models over the dicts of PyG's HeteroData: rows of a vertex type are rows of all vertices, of which those are read.

While such a model is traced, x_dict and edge_index_dict hold stand-ins. What a convolution over a relation adds up or
means is one aggregate together with those of the other relations that can be made at the same time: `ByRelation`.
Rows of other types than a value's own go along, as those of isolated vertices would, and nothing reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from weft.data import GraphShape, TypedShape
from weft.nn.aggregate.aggregate import Request, WholeLayer
from weft.nn.convert.traced_steps import GraphStep, StepKind, TracedStep, TracedValue, values_in
from weft.nn.layers.phases import Boundary
from weft.nn.layers.typed_input import TypedInput
from weft.nn.view import View
from weft.utils.errors import InputError

INPUT = "rows_by_type"
"""The name of a converted model's RowsByType."""
Reduce = Literal["sum", "mean"]


def takes_types(model: nn.Module) -> bool:
    """Whether a PyG model's forward takes rows by vertex type: one that names edge_index_dict, or of `to_hetero`."""
    if isinstance(model, fx.GraphModule):
        return any(getattr(node.target, "__name__", "") == "get_dict" for node in model.graph.nodes)
    code = getattr(type(model).forward, "__code__", None)
    return code is not None and "edge_index_dict" in (*code.co_varnames, *code.co_names)


class RowsByType(TypedInput):
    """First rows [n, 1 + F] of every vertex: its type's number, and its features, filled up to F columns."""

    def __init__(self, typed: TypedShape) -> None:
        nn.Module.__init__(self)
        self.typed, self.out_width = typed, 1 + max(width for _, width in typed.featured)

    def forward(self, view: View) -> Tensor:
        typed = view.typed_rows
        none = typed.features[0][:0]
        found = [*typed.features, none.new_empty(typed.num_embedded, 0)]
        rows = torch.cat([self._filled(number, x) for number, x in enumerate(found)])
        return rows if typed.order is None else rows.index_select(0, typed.order)

    def _filled(self, number: int, x: Tensor) -> Tensor:
        """Rows of one type; fills with numbers that no norm or quotient of a row stumbles over."""
        missing = self.out_width - 1 - x.shape[1]
        fill = torch.arange(1, missing + 1, dtype=x.dtype, device=x.device) / max(missing, 1)
        return torch.cat([x.new_full((len(x), 1), number), x, fill.expand(len(x), -1)], 1)


@dataclass(frozen=True)
class FirstRows(GraphStep):
    """The rows of a model's RowsByType."""

    over_edges = False

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Tensor:
        del rows
        first = model.get_submodule(INPUT)
        found: Tensor = first(view)
        return found


@dataclass(frozen=True, kw_only=True)
class Related(GraphStep):
    """The mapped mean or sum of one relation's sources: what a `Relations` makes of several."""

    relation: int
    target: str
    """The vertex type of its targets."""
    source: int
    """The number of the vertex type of its sources."""
    reduce: Reduce
    weight: str
    """Path of the linear map."""
    widths: tuple[int, int]
    """Of the rows that it maps, and of what it gives."""


class Slot(NamedTuple):
    """Where one relation's rows stand in what a `Relations` aggregates and gives."""

    relation: int
    weight: str
    """Path of the linear map, [o, i]."""
    read: int
    """The first of its i columns."""
    made: int
    """The first of its o columns."""


@dataclass(frozen=True)
class Relations(GraphStep):
    """Means or sums over several relations at once, each mapped, side by side."""

    reduce: Reduce
    slots: tuple[Slot, ...]
    sources: tuple[int, ...]
    """The vertex type of each of the rows that it reads, by number."""
    num_relations: int
    """Of the graph."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del view
        kind, *parts = rows
        by_type = defaultdict[int, list[Tensor]](list)
        for number, part in zip(self.sources, parts, strict=True):
            by_type[number].append(part)
        x = by_number(kind, tuple(by_type), *(torch.cat(some, 1) for some in by_type.values()))
        layer = MapsByRelation(self, [model.get_submodule(slot.weight) for slot in self.slots])
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))


class MapsByRelation(nn.Module):
    """The layer of a `Relations`, whose weights are those of other modules."""

    def __init__(self, step: Relations, maps: Sequence[Any]) -> None:
        super().__init__()
        self.step = step
        self.__dict__["maps"] = maps
        self.out_width = max(slot.made + len(one.weight) for slot, one in zip(step.slots, maps, strict=True))

    def forward(self, view: View, x: Tensor) -> Tensor:
        parts = defaultdict[int, list[Tensor]](list)
        maps: Sequence[Any] = self.__dict__["maps"]
        for slot, one in zip(self.step.slots, maps, strict=True):
            height, width = one.weight.shape[1], one.weight.shape[0]
            after = (x.shape[1] - slot.read - height, self.out_width - slot.made - width)
            parts[slot.relation].append(functional.pad(one.weight.t(), (slot.made, after[1], slot.read, after[0])))
        none = x.new_zeros(x.shape[1], self.out_width)
        weight = torch.stack([sum(parts[r], start=none) for r in range(self.step.num_relations)])
        return view.relate(x, weight[:, None], reduce=self.step.reduce)


def by_number(kind: Tensor, numbers: tuple[int, ...], *parts: Tensor) -> Tensor:
    """Of rows [n, .] of several kinds, those of each vertex's own; zero where it is of none, and in missing columns."""
    widest = max(part.shape[1] for part in parts)
    rows = parts[0].new_zeros(len(kind), widest)
    for number, part in zip(numbers, parts, strict=True):
        rows = torch.where(kind == number, functional.pad(part, (0, widest - part.shape[1])), rows)
    return rows


def logits_by_number(kind: Tensor, numbers: tuple[int, ...], *parts: Tensor) -> Tensor:
    """As `by_number`, of rows that are equally wide."""
    widths = [part.shape[1] for part in parts]
    if len({*widths}) > 1:
        raise InputError(f"the model gives rows of {widths} columns by vertex type: return those of the labelled type")
    return by_number(kind, numbers, *parts)


def columns_of(rows: Tensor, first: int, width: int) -> Tensor:
    """Some columns of rows."""
    return rows[:, first : first + width]


def edges_of(*_: Any) -> Any:
    """Stands for the edges of one relation among fx's nodes."""
    raise NotImplementedError


class Types(NamedTuple):
    """What a graph's types are to a model that is traced."""

    names: tuple[str, ...]
    """Of the vertex types with features."""
    relations: tuple[str, ...]
    typed: TypedShape

    @classmethod
    def of(cls, shape: GraphShape | None, model: str) -> Types:
        """Those of a graph. InputError where it has none."""
        if shape is None or not shape.featured_types or not shape.relations:
            raise InputError(
                f"{model} takes rows by vertex type, and the graph has none with features of their own: give "
                "weft.train the model and a graph of HeteroData, or weft.nn.convert "
                "shape=GraphShape.of(graph.by_type())"
            )
        return cls(shape.featured_types, shape.relations, shape.typed)

    @property
    def widths(self) -> dict[str, int]:
        """Features of each type."""
        return {name: width for name, (_, width) in zip(self.names, self.typed.featured, strict=True)}


TYPE, RELATION = "type", "relation"
"""What a node is marked with: the vertex type whose rows it has; the relation whose edges it stands for."""


def type_of(value: Any) -> str | None:
    """The vertex type whose rows a value of a traced model has."""
    return value.node.meta.get(TYPE) if isinstance(value, fx.Proxy) else None


class RelationScope(Protocol):
    """What a rule writes its steps with."""

    def over_relation(self, weight: str, reduce: Reduce, x: Any) -> Any:
        """The sources' rows x by the relation that the convolution goes over, reduced and mapped."""
        ...


def sage(scope: RelationScope, conv: Any, x: Any, own: Any) -> Any:
    """Hamilton, Ying, Leskovec 2017, algorithm 1, between two kinds of vertices."""
    if conv.project:
        x = torch.relu(conv.lin(x))
    y = plus_bias(scope.over_relation("lin_l", REDUCE[conv.aggr], x), conv.lin_l)
    y = y + conv.lin_r(own) if conv.root_weight else y
    return functional.normalize(y, p=2.0, dim=-1) if conv.normalize else y


def graph(scope: RelationScope, conv: Any, x: Any, own: Any) -> Any:
    """Morris et al. 2019, eq. 3, between two kinds of vertices."""
    return plus_bias(scope.over_relation("lin_rel", REDUCE[conv.aggr], x), conv.lin_rel) + conv.lin_root(own)


def plus_bias(y: Any, linear: Any) -> Any:
    return y if linear.bias is None else y + linear.bias


RULES: dict[str, Callable[..., Any]] = {"SAGEConv": sage, "GraphConv": graph}
"""By the name of PyG's class."""
REDUCE: dict[str, Reduce] = {"mean": "mean", "sum": "sum", "add": "sum"}
"""By the name of PyG's aggregation."""


def together(steps: list[TracedStep], kinds: dict[str, StepKind], num_relations: int) -> list[TracedStep]:
    """The steps, with those of relations that can be made at the same time as one."""
    depth: dict[str, int] = {}
    at = defaultdict[int, list[TracedStep]](list)
    for step in steps:
        read = max((depth.get(name, 0) for name in values_in(step.args, step.kwargs)), default=0)
        depth[step.name] = read + isinstance(step.does, Related)
        at[read].append(step)
    found: list[TracedStep] = []
    for number in sorted(at):
        found += [step for step in at[number] if not isinstance(step.does, Related)]
        for reduce in ("mean", "sum"):
            some = [step for step in at[number] if isinstance(step.does, Related) and step.does.reduce == reduce]
            if some:
                found += _joined(some, reduce, f"relations_{number}_{reduce}", kinds, num_relations)
    return found


def _joined(
    some: list[TracedStep], reduce: Reduce, name: str, kinds: dict[str, StepKind], num_relations: int
) -> list[TracedStep]:
    """One step for those of several relations, and what each of them gives, as columns of it."""
    read: dict[tuple[int, str], int] = {}
    widths, made, slots = defaultdict[int, int](int), defaultdict[str, int](int), list[Slot]()
    parts: list[TracedStep] = []
    for step in some:
        does, (x, kind) = step.does, step.args
        assert isinstance(does, Related)
        source, (height, width) = (does.source, x.name), does.widths
        if source not in read:
            read[source] = widths[does.source]
            widths[does.source] += height
        begin = made[does.target]
        made[does.target] += width
        slots.append(Slot(does.relation, does.weight, read[source], begin))
        parts.append(replace(step, does=columns_of, args=(TracedValue(name), begin, width)))
    made_of = Relations(reduce, tuple(slots), tuple(number for number, _ in read), num_relations)
    args = (kind, *(TracedValue(one) for _, one in read))
    kinds[name] = "rows"
    return [TracedStep(name=name, does=made_of, args=args, kwargs={}, line=some[0].line), *parts]
