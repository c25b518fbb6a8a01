"""Translation of ATen operations, one by one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from weft.nn.messages.function import Role
from weft.nn.messages.operations import SharedRow, TileOperation, Translation, Translator
from weft.nn.messages.parts import LIFTS, REDUCTIONS, VIEWS, rows_of
from weft.nn.messages.trace import aten, outputs_of
from weft.nn.messages.values import Constant, Index, RowKind, Rows, Transposed, contiguous_strides

COMPARISONS = {
    "eq": "equal",
    "ne": "unequal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
BINARY = {
    aten.add: "add",
    aten.sub: "subtract",
    aten.mul: "multiply",
    aten.div: "divide",
    aten.maximum: "maximum",
    aten.minimum: "minimum",
    **{getattr(aten, name): function for name, function in COMPARISONS.items()},
}
"""Functions of two values. A condition is 1 or 0."""
CONDITIONS = {
    aten.logical_and: "multiply",
    aten.bitwise_and: "multiply",
    aten.logical_or: "maximum",
    aten.bitwise_or: "maximum",
}
"""Functions of two conditions."""
UNARY = {
    aten.exp: "exp",
    aten.log: "log",
    aten.sqrt: "root",
    aten.sigmoid: "sigmoid",
    aten.tanh: "tanh",
    aten.abs: "absolute",
    aten.log1p: "log1p",
    aten.expm1: "expm1",
    aten.erf: "erf",
    aten.sin: "sine",
    aten.cos: "cosine",
}
"""Functions of one value."""
BY_CONSTANT = {
    aten.neg: ("multiply", -1.0),
    aten.reciprocal: ("divide_into", 1.0),
    aten.bitwise_not: ("subtract_from", 1.0),
    aten.logical_not: ("equal", 0.0),
    aten.relu: ("maximum", 0.0),
}
"""Functions of a value and a constant."""
SAME = (aten.alias, aten.detach, aten.clone, aten.lift_fresh_copy)
"""Operations that return their argument."""


def translate(module: GraphModule, roles: Sequence[Role], results: Sequence[Role]) -> Translation:
    """Return a graph as operations.

    Args:
        module: The graph. Its inputs are tensors, and the target of each edge.
        roles: Role of each tensor.
        results: Role of each output.

    Raises:
        NotImplementedError: There is no operation for a node.
    """
    to, roles_left = Translator(), iter(roles)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            role = next(roles_left, None)
            to.values[node] = Index() if role is None else to.load(node, role)
        elif node.op == "get_attr":
            to.values[node] = to.without_rows(node)
        elif node.op == "call_function":
            to.values[node] = translate_call(to, node)
    for output, role in zip(outputs_of(module), results, strict=True):
        to.store(output, role)
    return to.translation


def translate_call(to: Translator, node: Node) -> Any:
    """Return the value of a call.

    Args:
        to: The translator, which gets the operations.
        node: The call.

    Raises:
        NotImplementedError: There is no operation for it.
    """
    values = [to.value_of(each) for each in node.all_input_nodes]
    if any(isinstance(each, Index) for each in values):
        return _cross(to, node) if node.target in (*LIFTS, *REDUCTIONS) else Index()
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet is aten.permute and isinstance(values[0], Rows):
        return _permute(to, *node.args)  # type: ignore[arg-type]
    if not node.all_input_nodes and packet in (aten.scalar_tensor, aten.full):
        number: Any = node.args[1 if packet is aten.full else 0]
        return Constant(float(number), tuple(node.meta["val"].shape[1:]))
    if not rows_of(node) and not any(isinstance(each, Rows) for each in values):
        return to.without_rows(node)
    if packet not in HANDLERS:
        raise NotImplementedError(f"no operation for {node.target}")
    return HANDLERS[packet](to, node, *node.args, **node.kwargs)


def result_of(node: Node) -> tuple[RowKind, tuple[int, ...]]:
    """Return what the rows of a node's result are for, and the sizes of a row."""
    return "target" if rows_of(node) == "target" else "edge", tuple(node.meta["val"].shape[1:])


def _cross(to: Translator, node: Node) -> Rows:
    """Return the value of an operation from targets to edges, or from edges to targets."""
    sizes, args = tuple(node.meta["val"].shape[1:]), node.args
    first: Any = args[0]
    dimension: Any = 0 if node.target in (aten.index.Tensor, aten.index_put.default) else args[1]
    if dimension % first.meta["val"].dim() != 0:
        raise NotImplementedError("an index of columns")
    start = to.value_of(first)
    if node.target in LIFTS:
        if not isinstance(start, Rows) or start.kind != "target" or start.sizes != sizes:
            raise NotImplementedError("an index of other values than those of targets")
        return to.emit("spread", "edge", sizes, a=to.in_slot(start, "target", sizes).slot)
    function = "add"
    if node.target is aten.scatter_reduce.two:
        function = {"sum": "add", "amax": "maximum", "amin": "minimum"}.get(str(args[4]), "")
        if not function or node.kwargs.get("include_self", True) or start != Constant(0.0, sizes):
            raise NotImplementedError(f"a reduction by {args[4]}")
    if node.target is aten.index_put.default and args[3:4] != (True,):
        raise NotImplementedError("an assignment by index")
    messages = to.in_slot(to.value_of([each for each in args if isinstance(each, Node)][-1]), "edge", sizes)
    total = to.emit("reduce", "target", sizes, function=function, a=messages.slot)
    return total if start == Constant(0.0, sizes) else to.combine("add", total, start, "target", sizes)


def _binary(function: str, to: Translator, node: Node, left: Any, right: Any, *, alpha: float = 1) -> Rows:
    rows, sizes = result_of(node)
    first, second = to.value_of(left), to.value_of(right)
    if alpha != 1:
        second = (
            Constant(alpha * second.number)
            if isinstance(second, Constant)
            else to.combine("multiply", second, Constant(alpha), rows, sizes)
        )
    if isinstance(first, Constant) and isinstance(second, Constant):
        first = to.in_slot(first, rows, sizes)
    return to.combine(function, first, second, rows, sizes)


def _of_conditions(function: str, to: Translator, node: Node, left: Any, right: Any) -> Rows:
    if any(isinstance(each, Node) and each.meta["val"].dtype != torch.bool for each in (left, right)):
        raise NotImplementedError(f"{node.target} of numbers")
    return _binary(function, to, node, left, right)


def _unary(function: str, to: Translator, node: Node, x: Node) -> Rows:
    return to.apply(function, to.value_of(x), *result_of(node))


def _by_constant(function: str, number: float, to: Translator, node: Node, x: Node) -> Rows:
    return to.combine(function, to.value_of(x), Constant(number), *result_of(node))


def _same(to: Translator, _: Node, x: Node, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    return to.value_of(x)


def _convert(to: Translator, node: Node, x: Node, *args: Any, **kwargs: Any) -> Any:
    """Return a value in another type: all numbers of a program have one type, and a condition is 1 or 0."""
    del args, kwargs
    before, after = (each.meta["val"].dtype for each in (x, node))
    if after != before and not (before == torch.bool and after.is_floating_point):
        raise NotImplementedError(f"a conversion from {before} to {after}")
    return to.value_of(x)


def _copy(to: Translator, node: Node, _: Node, source: Node, *args: Any) -> Any:
    """Return numbers that replace those of a tensor."""
    _convert(to, node, source, *args)  # it checks the types
    return _expand(to, node, source)


def _clamp(to: Translator, node: Node, x: Node, low: Any = None, high: Any = None) -> Any:
    value = to.value_of(x)
    for function, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            value = to.combine(function, value, to.value_of(bound), *result_of(node))
    return value


def _power(to: Translator, node: Node, x: Node, exponent: float) -> Rows:
    rows, sizes = result_of(node)
    value = to.in_slot(to.value_of(x), rows, sizes)
    if abs(exponent) == 0.5:
        result = to.apply("root", value, rows, sizes)
    elif exponent in (-3, -2, -1, 1, 2, 3, 4):
        result = value
        for _ in range(abs(int(exponent)) - 1):
            result = to.combine("multiply", result, value, rows, sizes)
    else:
        raise NotImplementedError(f"a power of {exponent}")
    return to.combine("divide_into", result, Constant(1.0), rows, sizes) if exponent < 0 else result


def _sign(to: Translator, node: Node, x: Node) -> Rows:
    positive, negative = (_by_constant(function, 0.0, to, node, x) for function in ("greater", "less"))
    return to.combine("subtract", positive, negative, *result_of(node))


def _where(to: Translator, node: Node, condition: Node, yes: Any, no: Any) -> Rows:
    rows, sizes = result_of(node)
    values = [to.value_of(each) for each in (yes, no)]
    if all(isinstance(value, Constant) for value in values):  # an operation has one constant
        values[1] = to.in_slot(values[1], rows, sizes)
    are_constant = [isinstance(value, Constant) for value in values]
    slots = [
        0 if is_constant else to.in_slot(value, rows, sizes).slot
        for value, is_constant in zip(values, are_constant, strict=True)
    ]
    constant = next((value.number for value in values if isinstance(value, Constant)), 0.0)
    first = to.in_slot(to.value_of(condition), rows, sizes).slot
    parameters = tuple(map(int, are_constant))
    fields: dict[str, Any] = {"a": first, "b": slots[0], "c": slots[1], "parameters": parameters}
    return to.emit("choose", rows, sizes, constant=constant, **fields)


def _view(to: Translator, node: Node, x: Node, *_: Any) -> Any:
    value, (rows, sizes) = to.value_of(x), result_of(node)
    if isinstance(value, Constant):
        return value._replace(sizes=sizes)
    return value.reshaped(sizes) or to.in_slot(value, rows, value.sizes).reshaped(sizes)


def _expand(to: Translator, node: Node, x: Node, *_: Any, **__: Any) -> Any:
    value, sizes = to.value_of(x), tuple(node.meta["val"].shape[1:])
    if isinstance(value, Node):  # it is expanded by the operation that reads it
        return value
    return value._replace(sizes=sizes) if isinstance(value, Constant) else value.expanded(sizes)


def _repeat(to: Translator, node: Node, x: Node, times: list[int]) -> Any:
    if any(count > 1 and size > 1 for count, size in zip(times, x.meta["val"].shape, strict=True)):
        raise NotImplementedError("a repeated dimension")
    return _expand(to, node, x)


def _permute(to: Translator, x: Node, order: list[int]) -> Rows | Transposed:
    value: Rows = to.value_of(x)
    if order == [1, 0]:
        return Transposed(value)
    if order[0] != 0:
        raise NotImplementedError("a permutation of rows")
    sizes, strides = (tuple(each[axis - 1] for axis in order[1:]) for each in (value.sizes, value.strides))
    return replace(value, sizes=sizes, strides=strides)


def _axis(dimension: int, value: Any) -> int:
    """Return the dimension of a row for one of a tensor."""
    axis = dimension % (len(value.sizes) + 1) - 1
    if axis < 0:
        raise NotImplementedError("an operation over rows")
    return axis


def _select(to: Translator, _: Node, x: Node, dimension: int, index: int) -> Rows:
    value: Rows = to.value_of(x)
    return value.narrowed(_axis(dimension, value), index, None)


def _slice(
    to: Translator, node: Node, x: Node, dimension: int = 0, start: int | None = None, _: Any = None, step: int = 1
) -> Any:
    value, sizes = to.value_of(x), tuple(node.meta["val"].shape[1:])
    if node.meta["val"].shape == x.meta["val"].shape:
        return value
    if isinstance(value, Constant):
        return value._replace(sizes=sizes)
    axis = _axis(dimension, value)
    return value.narrowed(axis, start or 0, sizes[axis], step)


def _split(to: Translator, _: Node, x: Node, sizes: list[int], dimension: int = 0) -> list[Rows]:
    value: Rows = to.value_of(x)
    axis = _axis(dimension, value)
    return [value.narrowed(axis, sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def _cat(to: Translator, node: Node, tensors: list[Node], dimension: int = 0) -> Rows:
    rows, sizes = result_of(node)
    axis, slot, first = _axis(dimension, Constant(0.0, sizes)), to.new_slot(prod(sizes)), 0
    for tensor in tensors:
        part_sizes = tuple(tensor.meta["val"].shape[1:])
        _write(to, to.in_slot(to.value_of(tensor), rows, part_sizes), slot, sizes, axis, first)
        first += part_sizes[axis]
    return Rows(rows, slot, sizes, contiguous_strides(sizes))


def _slice_scatter(
    to: Translator,
    node: Node,
    x: Node,
    part: Node,
    dimension: int = 0,
    start: int | None = None,
    _: Any = None,
    step: int = 1,
) -> Rows:
    rows, sizes = result_of(node)
    if step != 1:
        raise NotImplementedError("a slice with a step")
    if part.meta["val"].shape == x.meta["val"].shape:
        return to.in_slot(to.value_of(part), rows, sizes)
    axis, slot = _axis(dimension, Constant(0.0, sizes)), to.new_slot(prod(sizes))
    first = start or 0
    first = max(first + sizes[axis], 0) if first < 0 else first
    _write(to, to.in_slot(to.value_of(x), rows, sizes), slot, sizes, axis, 0)
    _write(to, to.in_slot(to.value_of(part), rows, tuple(part.meta["val"].shape[1:])), slot, sizes, axis, first)
    return Rows(rows, slot, sizes, contiguous_strides(sizes))


def _write(to: Translator, part: Rows, slot: int, sizes: tuple[int, ...], axis: int, first: int) -> None:
    """Copy a value into a slot of rows of other sizes, from an item of a dimension on.

    Args:
        to: The translator.
        part: The value, in a slot of its own.
        slot: The slot.
        sizes: Sizes of its rows.
        axis: The dimension.
        first: Number of the item.
    """
    inner, width = prod(part.sizes[axis:]), prod(sizes)
    for number in range(prod(sizes[:axis])):
        after = number * prod(sizes[axis:]) + first * prod(sizes[axis + 1 :])
        parameters = part.width, width, number * inner, after, 1, 1, inner, 0, 0, 1, 0
        to.translation.operations.append(
            TileOperation("copy", part.kind, width, slot, a=part.slot, parameters=parameters)
        )


def _reduce(
    function: str, to: Translator, node: Node, x: Node, dims: Any = None, keep: bool = False, **_: Any
) -> Rows | Node:
    rows, sizes = result_of(x)
    dims = [dims] if isinstance(dims, int) else dims or range(len(sizes) + 1)
    axes = sorted(each % (len(sizes) + 1) - 1 for each in dims)
    over_rows = axes[0] == -1
    axes = axes[over_rows:]
    value = to.in_slot(to.value_of(x), rows, sizes)
    if axes:
        value = to.reduce_axes(function, value, axes)
    if over_rows:
        if function != "add":
            raise NotImplementedError("an extremum over rows")
        return to.total(node, "total", rows, value.width, a=value.slot)
    left = value.sizes if keep else tuple(size for axis, size in enumerate(value.sizes) if axis not in axes)
    return replace(value, sizes=left, strides=contiguous_strides(left))


def _mean(to: Translator, node: Node, x: Node, dims: Any = None, keep: bool = False, **_: Any) -> Rows:
    rows, sizes = result_of(node)
    share = prod(sizes) / prod(x.meta["val"].shape[1:])
    return to.combine("multiply", _reduce("add", to, node, x, dims, keep), Constant(share), rows, sizes)


def _var_mean(
    to: Translator, node: Node, x: Node, dims: Any = None, *, correction: float = 1, keepdim: bool = False
) -> list[Any]:
    rows, sizes = result_of(x)
    if keepdim is False:
        raise NotImplementedError("a variance without its dimensions")
    count = prod(sizes) / prod(node.meta["val"][0].shape[1:])
    left = tuple(node.meta["val"][0].shape[1:])
    mean = to.combine("multiply", _reduce("add", to, node, x, dims, True), Constant(1 / count), rows, left)
    away = to.combine("subtract", to.value_of(x), mean, rows, sizes)
    axes = sorted(_axis(each, Constant(0.0, sizes)) for each in dims)
    squares = to.reduce_axes("add", to.combine("multiply", away, away, rows, sizes), axes)
    return [to.combine("multiply", squares, Constant(1 / (count - correction)), rows, left), mean]


def _matmul(to: Translator, node: Node, left: Node, right: Node) -> Rows | Node:
    first, second = to.value_of(left), to.value_of(right)
    if isinstance(first, Transposed):
        rows, inner = first.value.kind, first.value.sizes
        a, b = to.in_slot(first.value, rows, inner), to.in_slot(second, rows, tuple(right.meta["val"].shape[1:]))
        return to.total(node, "total_product", rows, b.width, a=a.slot, b=b.slot, parameters=(a.width, b.width))
    if not isinstance(second, Node):
        raise NotImplementedError("a product of rows")
    rows, sizes = result_of(node)
    a = to.in_slot(first, rows, tuple(left.meta["val"].shape[1:]))
    return to.emit("matmul", rows, sizes, a=a.slot, b=to.tensor(SharedRow(second, None)), parameters=(a.width,))


def _matmul_each(to: Translator, node: Node, left: Node, right: Node) -> Rows:
    rows, sizes = result_of(node)
    a, b = (to.in_slot(to.value_of(each), rows, tuple(each.meta["val"].shape[1:])) for each in (left, right))
    return to.emit("multiply_each", rows, sizes, a=a.slot, b=b.slot, parameters=(*a.sizes, b.sizes[1]))


def _fill(to: Translator, node: Node, _: Any, number: float, **__: Any) -> Constant:
    del to
    return Constant(float(number), tuple(node.meta["val"].shape[1:]))


HANDLERS: dict[Any, Callable[..., Any]] = {
    **{op: partial(_binary, function) for op, function in BINARY.items()},
    **{op: partial(_of_conditions, function) for op, function in CONDITIONS.items()},
    **{op: partial(_unary, function) for op, function in UNARY.items()},
    **{op: partial(_by_constant, *arguments) for op, arguments in BY_CONSTANT.items()},
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(VIEWS, _view),
    aten._to_copy: _convert,
    aten.copy: _copy,
    aten.clamp: _clamp,
    aten.pow: _power,
    aten.rsqrt: lambda to, node, x: _power(to, node, x, -0.5),
    aten.sign: _sign,
    aten.where: _where,
    aten.expand: _expand,
    aten.repeat: _repeat,
    aten.select: _select,
    aten.slice: _slice,
    aten.split_with_sizes: _split,
    operator.getitem: lambda to, _, parts, number: to.value_of(parts)[number],
    aten.cat: _cat,
    aten.slice_scatter: _slice_scatter,
    aten.sum: partial(_reduce, "add"),
    aten.amax: partial(_reduce, "maximum"),
    aten.mean: _mean,
    aten.var_mean: _var_mean,
    aten.mm: _matmul,
    aten.bmm: _matmul_each,
    **dict.fromkeys((aten.full, aten.full_like), _fill),
}
"""Translations by operation."""
