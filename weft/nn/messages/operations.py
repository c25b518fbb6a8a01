"""Translation of a graph on edges into the operations of csrc/messages.h.

Each tensor with a row for each edge or target becomes a slot: a matrix in the memory of a thread, with the rows of a
tile. Views are read in place where an operation can, and else copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from torch.fx import Node

from weft.nn.messages.function import Role
from weft.nn.messages.trace import NUM_EDGES, NUM_TARGETS
from weft.nn.messages.values import Constant, RowKind, Rows, contiguous_strides

KINDS = (
    *("load_source", "load_edge", "load_target", "store_source", "store_edge", "store_target", "spread", "reduce"),
    *("combine", "choose", "reduce_columns", "copy", "fill", "matmul", "multiply_each", "total_product", "total"),
)
"""Kinds of operations, in the order of MessageKind in csrc/kernels.h."""
FUNCTIONS = (
    *("add", "subtract", "subtract_from", "multiply", "divide", "divide_into", "maximum", "minimum"),
    *("equal", "unequal", "less", "less_equal", "greater", "greater_equal"),
    *("exp", "log", "root", "sigmoid", "tanh", "absolute", "log1p", "expm1", "erf", "sine", "cosine"),
)
"""Functions, in the order of MessageFunction."""
MODES = ("whole", "constant", "per_block", "per_row")
"""Kinds of second arguments, in the order of MessageMode."""
NUM_PARAMETERS = 11
ROW_NUMBERS = 48
"""Numbers that elementwise operations read and write in the time that others take for a row of any width."""
SOURCE_TRAFFIC = {"load_source": 1, "store_source": 4}
"""Number of times that an operation reads or writes a source's row outside of the tile.

Gradients of sources are written for each edge, read again, and added to the row of the source.
"""
SWAPPED = {
    **{name: name for name in ("add", "multiply", "maximum", "minimum", "equal", "unequal")},
    "subtract": "subtract_from",
    "divide": "divide_into",
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
}
"""The function whose arguments are exchanged."""


class SharedRow(NamedTuple):
    """A tensor without rows as an operation reads it."""

    node: Node
    """Node that computes it."""
    sizes: tuple[int, ...] | None
    """Sizes of the row to which it is expanded; None: as it is."""


class TileOperation(NamedTuple):
    """An operation, see MessageOperation in csrc/kernels.h."""

    kind: str
    """Kind of the operation, see KINDS."""
    rows: RowKind
    """Whether the rows of the result are for edges or for targets."""
    width: int
    """Columns of its result."""
    out: int
    """Slot, tensor or first total that it writes."""
    function: str = ""
    """The function of a reduction or combination."""
    a: int = 0
    """First slot or tensor that it reads."""
    b: int = 0
    """Second one."""
    c: int = 0
    """Third one."""
    parameters: tuple[int, ...] = ()
    """Parameters by kind."""
    constant: float = 0.0
    """Constant argument."""

    @property
    def reads(self) -> list[int]:
        """The slots that it reads."""
        p = self.parameters
        if self.kind.startswith("load_") or self.kind == "fill" or (self.kind == "copy" and p[-1]):
            return []
        if self.kind == "choose":
            return [self.a, *(slot for slot, is_constant in zip((self.b, self.c), p, strict=True) if not is_constant)]
        reads_second = self.kind in ("multiply_each", "total_product") or (
            self.kind == "combine" and MODES[p[0]] in ("whole", "per_block")
        )
        return [self.a, self.b] if reads_second else [self.a]

    @property
    def writes_slot(self) -> bool:
        """True if it writes a slot, False for a tensor or totals."""
        return not self.kind.startswith(("store_", "total"))

    @property
    def flops(self) -> int:
        """FLOPs of products for each of its rows."""
        p = self.parameters
        factors = {
            "matmul": (p[:1], self.width),
            "multiply_each": (p, 1),
            "total_product": (p, 1),
        }.get(self.kind)
        return 2 * prod(factors[0]) * factors[1] if factors else 0

    @property
    def numbers(self) -> int:
        """Numbers that count as read and written in the tile for each of its rows."""
        return 2 * self.width + ROW_NUMBERS

    @property
    def source_numbers(self) -> int:
        """Numbers of source rows that are read and written outside of the tile, for each of its rows."""
        return SOURCE_TRAFFIC.get(self.kind, 0) * self.width


class RowTotal(NamedTuple):
    """A sum over all rows."""

    node: Node
    """Node that it is the value of."""
    first: int
    """Position of its first number among the totals."""
    shape: tuple[int, ...]
    """Shape of the tensor."""


class Output(NamedTuple):
    """A tensor that a program writes."""

    role: Role
    """Rows of the tensor; 'shared': it is computed from totals."""
    sizes: tuple[int, ...]
    """Sizes of a row."""


@dataclass
class Translation:
    """A graph as operations."""

    operations: list[TileOperation] = field(default_factory=list)
    """The operations in their order."""
    widths: list[int] = field(default_factory=list)
    """Columns of each slot."""
    tensors: list[Node | SharedRow | int] = field(default_factory=list)
    """The tensors: an input, a tensor without rows, or the number of an output."""
    totals: list[RowTotal] = field(default_factory=list)
    """Sums over all rows."""
    before: list[Node] = field(default_factory=list)
    """Nodes without rows that are computed before, from inputs."""
    after: list[Node] = field(default_factory=list)
    """Nodes without rows that are computed after, from totals."""
    outputs: list[Output | None] = field(default_factory=list)
    """The outputs of the graph; None: no gradient."""

    @property
    def num_totals(self) -> int:
        """Numbers of all totals."""
        return sum(prod(total.shape) for total in self.totals)


class Translator:
    """Collects the operations of a graph, and the values of its nodes."""

    def __init__(self) -> None:
        self.translation = Translation()
        self.values: dict[Node, Any] = {}
        """Value of each node so far: Rows, Constant, Index, or for one without rows the node itself."""
        self._slots: dict[TileOperation, int] = {}

    def load(self, node: Node, role: Role) -> Rows | Node:
        """Return the value of an input.

        Args:
            node: The input.
            role: Its role.
        """
        if role == "shared":
            return self.without_rows(node)
        kind: RowKind = "target" if role == "target" else "edge"
        return self.emit(f"load_{role}", kind, tuple(node.meta["val"].shape[1:]), a=self.tensor(node))

    def store(self, node: Node | None, role: Role) -> None:
        """Write the next output.

        Args:
            node: The output; None: there is no gradient.
            role: Its role.

        Raises:
            NotImplementedError: It has no rows, and is a constant.
        """
        number = len(self.translation.outputs)
        if node is None or role == "shared":
            if node is not None and isinstance(self.values[node], Constant):
                raise NotImplementedError("a constant gradient")
            self.translation.outputs.append(None if node is None else Output(role, tuple(node.meta["val"].shape)))
            return
        kind: RowKind = "target" if role == "target" else "edge"
        sizes = tuple(node.meta["val"].shape[1:])
        value = self.in_slot(self.values[node], kind, sizes)
        self.translation.tensors.append(number)
        tensor = len(self.translation.tensors) - 1
        self.translation.operations.append(TileOperation(f"store_{role}", kind, value.width, tensor, a=value.slot))
        self.translation.outputs.append(Output(role, sizes))

    def value_of(self, argument: Any) -> Any:
        """Return the value of an argument: of a node, or a number as a constant.

        Args:
            argument: The argument.

        Raises:
            NotImplementedError: It is neither, or the number of edges or targets.
        """
        if isinstance(argument, Node):
            return self.values[argument]
        if isinstance(argument, bool | int | float) and argument not in (NUM_EDGES, NUM_TARGETS):
            return Constant(float(argument))
        raise NotImplementedError(f"an argument {argument!r}")

    def without_rows(self, node: Node) -> Node:
        """Note a node that is computed before or after the edges, and return it as its value.

        Args:
            node: The node.
        """
        translation = self.translation
        reads_totals = any(self.is_after(each) for each in node.all_input_nodes)
        (translation.after if reads_totals else translation.before).append(node)
        return node

    def is_after(self, node: Node) -> bool:
        """Return whether a node without rows is computed after the edges."""
        return node in self.translation.after or any(node is total.node for total in self.translation.totals)

    def tensor(self, tensor: Node | SharedRow) -> int:
        """Return the number of a tensor.

        Args:
            tensor: The tensor.

        Raises:
            NotImplementedError: It is a sum over all rows.
        """
        if isinstance(tensor, SharedRow) and self.is_after(tensor.node):
            raise NotImplementedError("a sum over all rows that rows read")
        if tensor not in self.translation.tensors:
            self.translation.tensors.append(tensor)
        return self.translation.tensors.index(tensor)

    def emit(self, kind: str, rows: RowKind, sizes: tuple[int, ...], **fields: Any) -> Rows:
        """Add an operation with a slot for its result, unless there is the same one, and return the result.

        Args:
            kind: Kind of the operation.
            rows: What its rows are for.
            sizes: Sizes of a row of the result.
            **fields: Other fields of `TileOperation`.
        """
        operation = TileOperation(kind, rows, prod(sizes), -1, **fields)
        if operation not in self._slots:
            self._slots[operation] = self.new_slot(operation.width)
            self.translation.operations.append(operation._replace(out=self._slots[operation]))
        return Rows(rows, self._slots[operation], sizes, contiguous_strides(sizes))

    def new_slot(self, width: int) -> int:
        """Return a new slot with some columns."""
        self.translation.widths.append(width)
        return len(self.translation.widths) - 1

    def in_slot(self, value: Any, rows: RowKind, sizes: tuple[int, ...]) -> Rows:
        """Return a value expanded to rows of given sizes, in a slot of its own width and in order.

        Args:
            value: The value.
            rows: What the rows are for.
            sizes: Sizes of a row.

        Raises:
            NotImplementedError: Its rows are for something else.
        """
        if isinstance(value, Constant):
            return self.emit("fill", rows, sizes, constant=value.number)
        from_tensor = isinstance(value, Node)
        if from_tensor:
            slot, width = self.tensor(SharedRow(value, sizes)), 0  # the same row for all
            value = Rows(rows, slot, sizes, contiguous_strides(sizes))
        elif not isinstance(value, Rows) or value.kind != rows:
            raise NotImplementedError("rows of edges and of targets in one operation")
        else:
            width = self.translation.widths[value.slot]
            value = value.expanded(sizes)
        rows_of_slot: Rows = value
        if not from_tensor and rows_of_slot.width == width and rows_of_slot.is_contiguous:
            return rows_of_slot
        block_sizes, strides = rows_of_slot.three_dimensions()
        head = width, value.width, value.offset, 0
        parameters = *head, *block_sizes, *strides, int(from_tensor)
        return self.emit("copy", rows, sizes, a=value.slot, parameters=parameters)

    def combine(self, function: str, left: Any, right: Any, rows: RowKind, sizes: tuple[int, ...]) -> Rows:
        """Return a function of two values.

        Args:
            function: Name of the function.
            left: First value.
            right: Second value.
            rows: What the rows of the result are for.
            sizes: Sizes of a row of the result.
        """
        left, right = (each.expanded(sizes) if isinstance(each, Rows) else each for each in (left, right))
        if not isinstance(left, Rows) or (left.is_broadcast and isinstance(right, Rows) and not right.is_broadcast):
            left, right, function = right, left, SWAPPED[function]
        first = self.in_slot(left, rows, sizes)
        if function == "multiply" and isinstance(right, Constant) and right.number == 1:
            return first
        mode, block, second = "whole", first.width, 0
        if isinstance(right, Constant):
            mode = "constant"
        elif isinstance(right, Node):
            mode, second = "per_row", self.tensor(SharedRow(right, sizes))
        elif right.block > 1:
            compact = right.without_blocks()
            mode, block, second = "per_block", right.block, self.in_slot(compact, rows, compact.sizes).slot
        else:
            second = self.in_slot(right, rows, sizes).slot
        constant = right.number if isinstance(right, Constant) else 0.0
        parameters = MODES.index(mode), block
        fields: dict[str, Any] = {"a": first.slot, "b": second, "parameters": parameters, "constant": constant}
        return self.emit("combine", rows, sizes, function=function, **fields)

    def apply(self, function: str, value: Any, rows: RowKind, sizes: tuple[int, ...]) -> Rows:
        """Return a function of one value.

        Args:
            function: Name of the function.
            value: The value.
            rows: What the rows of the result are for.
            sizes: Sizes of a row.
        """
        value = self.in_slot(value, rows, sizes)
        parameters = MODES.index("constant"), value.width
        return self.emit("combine", rows, sizes, function=function, a=value.slot, parameters=parameters)

    def reduce_axes(self, function: str, value: Rows, axes: Sequence[int]) -> Rows:
        """Reduce dimensions of rows, which stay with size 1.

        Args:
            function: Name of the function.
            value: The value, in a slot of its own.
            axes: The dimensions, ascending.
        """
        if list(axes) != list(range(axes[0], axes[-1] + 1)):
            for axis in axes:
                value = self.reduce_axes(function, value, [axis])
            return value
        first, end, sizes = axes[0], axes[-1] + 1, value.sizes
        parameters = prod(sizes[:first]), prod(sizes[first:end]), prod(sizes[end:])
        left = tuple(1 if axis in axes else size for axis, size in enumerate(sizes))
        return self.emit("reduce_columns", value.kind, left, function=function, a=value.slot, parameters=parameters)

    def total(self, node: Node, kind: str, rows: RowKind, width: int, **fields: Any) -> Node:
        """Add an operation that sums over all rows, and return the node as a value without rows.

        Args:
            node: Node that the sum is the value of.
            kind: Kind of the operation.
            rows: What the rows are for.
            width: Columns of the sum.
            **fields: Other fields of `TileOperation`.
        """
        first = self.translation.num_totals
        self.translation.totals.append(RowTotal(node, first, tuple(node.meta["val"].shape)))
        self.translation.operations.append(TileOperation(kind, rows, width, first, **fields))
        return node
