"""Division of a message function: what runs on sources and targets before the edges, on edges, and on targets after.

A linear transform of the row of a source costs as much for each source as for each edge, so it runs before the edges.
So does each part of a linear transform of concatenated rows. A linear transform of messages that are then summed runs
after the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.nn.messages.function import Role
from weft.nn.messages.trace import NUM_EDGES, NUM_TARGETS, MessageTrace, aten, call, outputs_of

Origin = Literal["constant", "index", "shared", "source", "target", "edge", "mixed", "reduced"]
"""Dependence of a value: on nothing, the targets of edges, tensors without rows, rows of one role, rows of several
roles, or sums over edges."""

LIFTS = (aten.index_select.default, aten.gather.default, aten.index.Tensor)
"""Operations that give each edge the row of its target."""
REDUCTIONS = (
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.index_add.default,
    aten.index_put.default,
)
"""Operations that reduce the rows of the edges of each target."""
VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze)
"""Operations that change only the sizes of a row."""
ROW_BY_ROW = (
    *(*VIEWS, aten.expand, aten.repeat, aten.permute, aten.select, aten.slice, aten.slice_scatter, aten.alias),
    *(aten.split_with_sizes, aten.cat, aten.sum, aten.amax, aten.mean, aten.var_mean, aten.mm, aten.bmm, aten.detach),
    *(aten.clone, aten._to_copy, aten.copy, aten.full_like, aten.lift_fresh_copy, operator.getitem),
)
"""Operations besides the elementwise ones whose rows do not depend on each other, unless they are over rows."""


class Input(NamedTuple):
    """An input of the program on edges."""

    role: Role
    """Rows of the input."""
    value: Node
    """Node of the trace that computes it."""


class MessageParts(NamedTuple):
    """The parts of a message function, in the order in which they run."""

    before: list[Node]
    """Nodes of the trace that run on sources, on targets, or once."""
    inputs: list[Input]
    """Inputs of the program: results of `before`."""
    program: GraphModule
    """Graph on edges. Its inputs are `inputs` and the target of each edge."""
    results: list[Node]
    """Nodes of the trace that the program computes."""
    after: list[Node]
    """Nodes of the trace that run on targets, on the program's results."""
    result: Node
    """Node of the trace that is the function's result."""
    origins: dict[Node, Origin]
    """Origin of each node."""

    @property
    def read_after(self) -> set[Node]:
        """Nodes that are read after the program."""
        return {self.result, *(read for node in self.after for read in self.reads(node))}

    def reads(self, node: Node) -> Iterator[Node]:
        """Yield the nodes whose values a node reads, also through constants, which are computed for each reader.

        Args:
            node: The node.
        """
        for read in node.all_input_nodes:
            if self.origins[read] == "constant":
                yield from self.reads(read)
            else:
                yield read


def rows_of(node: Node) -> Literal["edge", "target", ""]:
    """Return what the rows of a node's tensor are for; '' if it has none.

    Raises:
        NotImplementedError: Rows are not the tensor's first dimension.
    """
    value = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if any(size >= NUM_TARGETS for size in shape[1:]):
        raise NotImplementedError("a tensor whose rows are not its first dimension")
    if shape[:1] == (NUM_EDGES,):
        return "edge"
    if shape[:1] == (NUM_TARGETS,):
        return "target"
    if shape and shape[0] >= NUM_TARGETS:
        raise NotImplementedError("a tensor with several rows for each edge")
    return ""


def origins_of(trace: MessageTrace) -> dict[Node, Origin]:
    """Return the origin of each node of a trace.

    Raises:
        NotImplementedError: A value depends on all edges, or its rows are not its first dimension.
    """
    of_inputs: list[Origin] = [*trace.roles, "index"]
    inputs, origins = iter(of_inputs), dict[Node, Origin]()
    for node in trace.module.graph.nodes:
        if node.op == "placeholder":
            origins[node] = next(inputs)
        elif node.op == "call_function":
            origins[node] = _origin_of_call(node, origins)
    return origins


def _origin_of_call(node: Node, origins: dict[Node, Origin]) -> Origin:
    read = {origins[each] for each in node.all_input_nodes} - {"constant", "shared"}
    rows = rows_of(node)
    if node.target in REDUCTIONS and rows == "target" and "index" in read:
        return "reduced"
    if node.target in LIFTS and rows == "edge" and "index" in read:
        if node.meta["val"].shape[1:] != node.all_input_nodes[0].meta["val"].shape[1:]:
            raise NotImplementedError("an index of some columns")
        return "target" if read == {"target", "index"} else "mixed"
    packet = getattr(node.target, "overloadpacket", node.target)
    if "index" in read:
        if read == {"index"} and packet in (*VIEWS, aten.expand, aten.alias, aten.clone):
            return "index"
        raise NotImplementedError(f"{node.target} of the numbers of targets")
    if not read:
        with_rows = rows or any(origins[each] == "constant" for each in node.all_input_nodes)
        return "constant" if with_rows else "shared"
    if not rows:
        raise NotImplementedError(f"{node.target} over all rows")
    if packet not in ROW_BY_ROW and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        raise NotImplementedError(f"no operation for {node.target}")
    by_rows = {rows_of(each) for each in node.all_input_nodes} - {""}
    if by_rows != {rows}:
        raise NotImplementedError(f"{node.target} from rows of edges and of targets")
    if rows == "target":
        return "target" if read == {"target"} else "reduced"
    return next(iter(read)) if len(read) == 1 and "reduced" not in read else "mixed"


def divide(trace: MessageTrace) -> MessageParts:
    """Divide a trace into parts.

    Args:
        trace: The trace, whose graph is changed.

    Raises:
        NotImplementedError: The function cannot run edge by edge.
    """
    move_linear(trace)
    origins = origins_of(trace)
    (result,) = outputs_of(trace.module)
    nodes = [node for node in trace.module.graph.nodes if node.op != "output"]
    in_program = _program_nodes(nodes, origins)
    for node in reversed(nodes):  # the program's inputs are numbers, so it computes the conditions that it reads
        if node.op == "call_function" and rows_of(node) and _is_condition(node) and in_program & {*node.users}:
            in_program.add(node)
    after = [node for node in nodes if origins[node] == "reduced" and node not in in_program]
    results = [node for node in nodes if node in in_program and (node is result or {*after} & {*node.users})]
    runs = _ancestors(results, lambda node: node in in_program or origins[node] in ("constant", "index"))
    inputs = [
        Input(origin, node)
        for node in nodes
        if (origin := origins[node]) in ("shared", "source", "target", "edge")
        and node not in in_program
        and runs & {*node.users}
    ]
    index = next(node for node in nodes if origins[node] == "index")
    before = [
        node
        for node in nodes
        if origins[node] in ("constant", "shared", "source", "target")
        or (node.op == "placeholder" and node is not index)
    ]
    program = _make_program(trace, inputs, index, [node for node in nodes if node in runs], results)
    return MessageParts(before, inputs, program, results, after, result, origins)


def _is_condition(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _make_program(
    trace: MessageTrace, inputs: Sequence[Input], index: Node, nodes: Sequence[Node], results: Sequence[Node]
) -> GraphModule:
    """Return a graph of some nodes of a trace.

    Args:
        trace: The trace.
        inputs: Inputs of the graph, besides the target of each edge.
        index: The target of each edge.
        nodes: The nodes.
        results: Those that the graph returns.
    """
    program, values = Graph(), dict[Node, Node]()

    def add_input(name: str, value: Tensor) -> Node:
        node = program.placeholder(name)
        node.meta["val"] = value
        return node

    samples = [each.value.meta["val"] for each in inputs]
    with trace.mode:
        rows = [
            sample.new_empty(NUM_TARGETS, *sample.shape[1:]) if each.role == "target" else sample
            for each, sample in zip(inputs, samples, strict=True)
        ]
    placeholders = [add_input(f"input_{number}", value) for number, value in enumerate(rows)]
    values[index] = add_input("index", index.meta["val"])
    for each, placeholder, sample in zip(inputs, placeholders, samples, strict=True):
        values[each.value] = placeholder
        if each.role == "target" and rows_of(each.value) == "edge":
            values[each.value] = program.call_function(aten.index_select.default, (placeholder, 0, values[index]))
            values[each.value].meta["val"] = sample
    for node in nodes:
        if node not in values:
            values[node] = program.node_copy(node, values.__getitem__)
    program.output([values[node] for node in results])
    return GraphModule(trace.module, program)


def _program_nodes(nodes: Sequence[Node], origins: dict[Node, Origin]) -> set[Node]:
    """Return the nodes that run in tiles: values of edges, their reductions, and what edges read of these."""
    starts = [
        node
        for node in nodes
        if node.op == "call_function" and (origins[node] in ("mixed", "edge") or node.target in REDUCTIONS)
    ]
    read = _ancestors(starts, lambda node: origins[node] in ("mixed", "edge", "reduced"))
    return {node for node in read if node.op == "call_function"}


def _ancestors(nodes: Sequence[Node], include: Callable[[Node], bool]) -> set[Node]:
    """Return nodes and all that they depend on, as far as `include` says."""
    reached, stack = set[Node](), [node for node in nodes if include(node)]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += [each for each in node.all_input_nodes if include(each)]
    return reached


def move_linear(trace: MessageTrace) -> None:
    """Move linear transforms from edges to vertices in a graph, where results stay the same but for rounding.

    Args:
        trace: The trace, whose graph is changed.
    """
    graph = trace.module.graph
    for node in list(graph.nodes):
        if node.target is aten.mm.default and rows_of(node) == "edge":
            _split(trace, node)
    origins = origins_of(trace)
    for node in list(graph.nodes):
        if node.target is aten.scatter_add.default and origins[node] == "reduced":
            _transform_after_sum(trace, node, origins)
    graph.eliminate_dead_code()


def _split(trace: MessageTrace, product: Node) -> None:
    """Replace the product of concatenated or added rows and a matrix by the sum of the products of the rows."""
    rows, matrix = product.args
    assert isinstance(rows, Node)
    assert isinstance(matrix, Node)
    add = _Inserter(trace, product)
    terms: list[tuple[Node, Any]]
    is_tower = rows.target is aten.select.int and rows.args[1] == 1  # of rows [n, towers, F], as in PNAConv
    joined: Any = rows.args[0] if is_tower else rows
    if joined.target is aten.cat.default and joined.args[1:] in ((-1,), (joined.meta["val"].dim() - 1,)):
        parts, first = joined.args[0], 0
        terms = []
        for each in parts:
            part = add(aten.select.int, each, *rows.args[1:]) if is_tower else each
            width = part.meta["val"].shape[1]
            slice_of = add(aten.slice.Tensor, matrix, 0, first, first + width)
            terms.append((add(aten.mm.default, part, slice_of), aten.add.Tensor))
            first += width
    elif rows.target in (aten.add.Tensor, aten.sub.Tensor) and _is_split_worthwhile(trace, rows):
        terms = [
            (add(aten.mm.default, rows.args[0], matrix), aten.add.Tensor),
            (add(aten.mm.default, rows.args[1], matrix), rows.target),
        ]
    else:
        return
    total = terms[0][0]
    for term, combine in terms[1:]:
        total = add(combine, total, term)
    product.replace_all_uses_with(total)
    for term, _ in terms:
        _split(trace, term)


def _is_split_worthwhile(trace: MessageTrace, total: Node) -> bool:
    """Return whether both terms of a sum depend on rows of one endpoint of an edge alone."""
    if any(not isinstance(each, Node) or each.meta["val"].shape != total.meta["val"].shape for each in total.args):
        return False
    origins = origins_of(trace)
    return not total.kwargs and all(origins[each] in ("source", "target") for each in total.args)  # type: ignore[index]


def _transform_after_sum(trace: MessageTrace, reduction: Node, origins: dict[Node, Origin]) -> None:
    """Transform the sums of messages in place of the messages, if nothing else reads the transformed ones."""
    start, dimension, index, messages = reduction.args
    assert isinstance(messages, Node)
    is_zero = isinstance(start, Node) and start.target is aten.full.default and start.args[1] == 0
    if dimension != 0 or not is_zero or messages.meta["val"].dim() != 2:
        return
    bias = None
    if messages.target is aten.add.Tensor and not messages.kwargs:
        product, bias = messages.args
        if not isinstance(product, Node) or product.target is not aten.mm.default:
            product, bias = bias, product
        if not isinstance(bias, Node) or origins[bias] != "shared" or bias.meta["val"].dim() != 1:
            return
    else:
        product = messages
    if (
        not isinstance(product, Node)
        or product.target is not aten.mm.default
        or origins[product] not in ("mixed", "edge")
    ):
        return
    rows, matrix = product.args
    assert isinstance(rows, Node)
    if len(product.users) > 1 or len(messages.users) > 1:
        return
    width = rows.meta["val"].shape[1]
    if origins[rows] == "edge" and product.meta["val"].shape[1] < width:
        return
    add = _Inserter(trace, reduction)
    whole = _index_of(index)
    assert whole is not None
    spread = add(aten.expand.default, add(aten.view.default, whole, [-1, 1]), [NUM_EDGES, width])
    like = rows.meta["val"]
    zeros = add(aten.full.default, [NUM_TARGETS, width], 0, dtype=like.dtype, device=like.device)
    total = add(aten.mm.default, add(aten.scatter_add.default, zeros, 0, spread, rows), matrix)
    if bias is not None:
        none = add(aten.full.default, [NUM_TARGETS], 0, dtype=like.dtype, device=like.device)
        ones = add(aten.full.default, [NUM_EDGES], 1, dtype=like.dtype, device=like.device)
        degree = add(aten.view.default, add(aten.scatter_add.default, none, 0, whole, ones), [-1, 1])
        total = add(aten.add.Tensor, total, add(aten.mul.Tensor, degree, bias))
    reduction.replace_all_uses_with(total)


def _index_of(node: Any) -> Node | None:
    """Return the input of which a node is a view."""
    while isinstance(node, Node) and node.op != "placeholder":
        node = node.args[0]
    return node if isinstance(node, Node) else None


class _Inserter:
    """Inserts nodes before another one, with the shapes of their results."""

    def __init__(self, trace: MessageTrace, before: Node) -> None:
        self.trace, self.before = trace, before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        graph = self.trace.module.graph
        with graph.inserting_before(self.before):
            node = graph.call_function(target, args, kwargs)
        with self.trace.mode, torch.no_grad():
            values = map_arg((args, kwargs), lambda each: each.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return node


class Evaluation:
    """Runs nodes of a trace on tensors, in which rows have other numbers than in the trace.

    Args:
        parts: The parts of the traced function.
        num_sources: Number of sources.
        num_targets: Number of targets.
    """

    def __init__(self, parts: MessageParts, num_sources: int, num_targets: int) -> None:
        self.parts, self.num_sources, self.num_targets = parts, num_sources, num_targets
        self.values: dict[Node, Any] = {}
        """Values by node."""

    def run(self, nodes: Sequence[Node], needed: Collection[Node]) -> None:
        """Compute the values of nodes, whose inputs have values, and drop each one after its last reader.

        Args:
            nodes: The nodes in their order.
            needed: Nodes whose values stay.
        """
        last = {read: node for node in nodes for read in self.parts.reads(node)}
        for node in nodes:
            if node in self.values or self.parts.origins[node] == "constant":
                continue
            if node.target in LIFTS and self.parts.origins[node] == "target":
                self.values[node] = self.values[node.all_input_nodes[0]]  # a row of each target, which edges read later
            else:
                self.values[node] = self._call(node, self.parts.origins[node])
            for read in self.parts.reads(node):
                if last[read] is node and read not in needed:
                    self.values.pop(read, None)

    def _call(self, node: Node, origin: Origin) -> Any:
        """Return the value of a node, computed for rows of an origin."""

        def value(read: Node) -> Any:
            return self._call(read, origin) if self.parts.origins[read] == "constant" else self.values[read]

        args, kwargs = map_arg((node.args, node.kwargs), value)
        return call(node, self._sized(args, origin), self._sized(kwargs, origin))

    def _sized(self, argument: Any, origin: Origin) -> Any:
        """Return an argument in which sizes of the trace are replaced by actual ones."""
        if isinstance(argument, dict):
            return {name: self._sized(each, origin) for name, each in argument.items()}
        if isinstance(argument, list | tuple):
            return type(argument)(self._sized(each, origin) for each in argument)
        if isinstance(argument, int) and argument == NUM_TARGETS:
            return self.num_targets
        if isinstance(argument, int) and argument == NUM_EDGES:
            return self.num_sources if origin == "source" else self.num_targets
        return argument
