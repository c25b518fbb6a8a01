"""A program on edges: operations with places in the memory of a thread, and its run on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from weft.nn.messages.aten_operations import translate
from weft.nn.messages.edges import SortedEdges
from weft.nn.messages.function import Role
from weft.nn.messages.operations import FUNCTIONS, KINDS, NUM_PARAMETERS, SharedRow, TileOperation, Translation
from weft.nn.messages.trace import call, outputs_of
from weft.runtime.kernel_call import TileSizes, work_counters
from weft.runtime.native import _native

TILE_BYTES = 1 << 18
"""Bytes of the values of a tile, in the cache of a core."""
MIN_TILE, MAX_TILE = 16, 512
"""Smallest and largest number of edges of a tile."""
TILES_OF_TARGET = 8
"""A target with more than this many tiles of edges runs in parts, which compute again what reductions read."""
PADDING = 64
"""Numbers that kernels may read or write after a slot or a tensor without rows."""
ONCE = ("reduce", "store_source", "store_edge", "store_target", "total", "total_product")
"""Operations that add to a result, or write one."""


class EdgeProgram:
    """A graph on edges that runs in tiles.

    Args:
        module: The graph. Its inputs are tensors, and the target of each edge.
        roles: Role of each tensor.
        results: Role of each output.

    Raises:
        NotImplementedError: There is no operation for a node.
    """

    def __init__(self, module: GraphModule, roles: Sequence[Role], results: Sequence[Role]) -> None:
        self.module, self.roles, self.outputs = module, list(roles), outputs_of(module)
        self.inputs = [node for node in module.graph.nodes if node.op == "placeholder"][: len(roles)]
        self.translation = translate(module, roles, results)
        operations = self.translation.operations
        self.places = Places(self.translation)
        of_edges = [op for op in operations if op.rows == "edge"]
        self.flops_per_edge = sum(op.flops for op in of_edges)
        """FLOPs of products for each edge."""
        self.numbers_per_edge = sum(op.numbers for op in of_edges)
        """Numbers that operations read and write in the tile for each edge."""
        self.source_numbers_per_edge = sum(op.source_numbers for op in of_edges)
        """Numbers of source rows that operations read and write outside of the tile for each edge."""
        levels = _levels(operations)
        with_edges = {
            level for op, level in zip(operations, levels, strict=True) if op.rows == "edge" or op.kind == "reduce"
        }
        self.levels = torch.tensor([level in with_edges for level in range(max(levels, default=0) + 1)])
        """Whether an operation on edges has this number of reductions before it, bool [levels]."""
        staged = [op for op in operations if op.kind == "store_source"]
        self.staged_width = _ids([op.width for op in staged])
        self.staged_tensor = _ids([op.out for op in staged])
        self.code = _ids([_encode(op, level, staged) for op, level in zip(operations, levels, strict=True)])
        self.constants = torch.tensor([op.constant for op in operations], dtype=torch.float64)

    def run(self, edges: SortedEdges, num_sources: int, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the program on all edges.

        Args:
            edges: The edges.
            num_sources: Number of sources.
            inputs: The tensors, with a row for each source, target or edge.

        Returns:
            The outputs; None for those without a gradient.

        Raises:
            IndexError: A tensor has another shape, or an edge joins rows that do not exist.
        """
        translation, like = self.translation, inputs[0]
        num_rows = {"source": num_sources, "target": edges.num_targets, "edge": edges.num_edges}
        edges.check(num_sources)
        for role, tensor, node in zip(self.roles, inputs, self.inputs, strict=True):
            wanted = node.meta["val"].shape
            wanted = wanted if role == "shared" else (num_rows[role], *wanted[1:])
            if tuple(tensor.shape) != tuple(wanted):
                raise IndexError(
                    f"a tensor of {role} rows has the shape {list(tensor.shape)} in place of {list(wanted)}"
                )
        for counter in work_counters:
            of_edges = edges.num_edges * like.element_size()
            tiles = TileSizes(self.numbers_per_edge * of_edges, self.source_numbers_per_edge * of_edges, num_sources)
            counter.add_tiles(self.flops_per_edge * edges.num_edges, tiles)
        values: dict[Node, Any] = dict(zip(self.inputs, inputs, strict=True))
        self._evaluate(translation.before, values)
        results: list[Tensor | None] = []
        for output in translation.outputs:
            if output is None or output.role == "shared":
                results.append(None)
            else:
                make = like.new_zeros if output.role == "source" else like.new_empty  # others are written once
                results.append(make(num_rows[output.role], *output.sizes))
        tensors = [self._flat(each, values, results, like.dtype) for each in translation.tensors]
        totals = like.new_zeros(translation.num_totals)
        self._run_tiles(edges, tensors, totals)
        for total in translation.totals:
            values[total.node] = totals[total.first :][: total.node.meta["val"].numel()].view(total.shape)
        self._evaluate(translation.after, values)
        return [
            values[node].view(output.sizes) if output is not None and output.role == "shared" else result
            for node, output, result in zip(self.outputs, translation.outputs, results, strict=True)
        ]

    def _run_tiles(self, edges: SortedEdges, tensors: list[Tensor], totals: Tensor) -> None:
        tile = TILE_BYTES // max(self.places.width * totals.element_size(), 1)
        tile = min(max(tile, MIN_TILE), MAX_TILE)
        capacity = tile * (TILES_OF_TARGET if len(self.levels) > 1 else 1)
        offsets, memory = self.places.at(capacity)
        _native.run_messages(
            self.code,
            self.constants,
            offsets,
            memory,
            tensors,
            edges.indptr,
            edges.sources,
            edges.order,
            tile,
            capacity,
            self.levels,
            self.staged_width,
            self.staged_tensor,
            totals,
            torch.get_num_threads(),
        )

    def _flat(
        self, tensor: Node | SharedRow | int, values: dict[Node, Any], results: list[Tensor | None], dtype: torch.dtype
    ) -> Tensor:
        """Return the numbers of a tensor of the program as a vector."""
        if isinstance(tensor, int):
            result = results[tensor]
            assert result is not None
            return result.view(-1)
        if isinstance(tensor, SharedRow):
            row: Tensor = values[tensor.node].detach().to(dtype)
            if tensor.sizes is not None:
                row = row.broadcast_to((1, *tensor.sizes) if row.dim() > len(tensor.sizes) else tensor.sizes)
            return F.pad(row.reshape(-1), (0, PADDING))
        whole: Tensor = values[tensor].detach().contiguous()
        return whole.view(-1)

    def _evaluate(self, nodes: Sequence[Node], values: dict[Node, Any]) -> None:
        """Compute nodes without rows."""
        for node in nodes:
            if node.op == "get_attr":
                values[node] = getattr(self.module, str(node.target))
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = call(node, args, kwargs)


class Places:
    """Places of slots in the memory of a thread.

    Slots that are not read any more are used again, but for results of reductions, which the parts of a target share.

    Args:
        translation: The operations.
    """

    def __init__(self, translation: Translation) -> None:
        operations = translation.operations
        last = {slot: number for number, op in enumerate(operations) for slot in op.reads}
        reduced = {op.out for op in operations if op.kind == "reduce"}
        place_of: dict[int, int] = {}
        widths, free = list[int](), list[int]()  # columns of each place; places that are free
        for number, op in enumerate(operations):
            if op.writes_slot and op.out not in place_of:
                wanted = translation.widths[op.out]
                fitting = [place for place in free if widths[place] == wanted and op.out not in reduced]
                if fitting:
                    place_of[op.out] = fitting[0]
                    free.remove(fitting[0])
                else:
                    place_of[op.out] = len(widths)
                    widths.append(wanted)
            free += [place_of[slot] for slot in {*op.reads} if last[slot] == number and slot not in reduced]
        self._places = _ids([place_of[slot] for slot in range(len(translation.widths))])
        self._columns = _ids([0, *widths]).cumsum(0)

    @property
    def width(self) -> int:
        """Number of columns of all places."""
        return int(self._columns[-1])

    def at(self, num_rows: int) -> tuple[Tensor, int]:
        """Return the first number of each slot, and the number of numbers, if each place has so many rows.

        Args:
            num_rows: Number of rows.
        """
        first = self._columns * num_rows + torch.arange(len(self._columns)) * PADDING
        return first[self._places], int(first[-1])


def _ids(numbers: Sequence[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _encode(op: TileOperation, level: int, staged: list[TileOperation]) -> list[int]:
    """Return the numbers of a MessageOperation in csrc/kernels.h."""
    out = staged.index(op) if op.kind == "store_source" else op.out
    function = FUNCTIONS.index(op.function) if op.function else 0
    kind = [KINDS.index(op.kind), function, level, int(op.kind in ONCE), int(op.rows == "edge")]
    parameters = [*op.parameters, *[0] * (NUM_PARAMETERS - len(op.parameters))]
    return [*kind, op.width, out, op.a, op.b, op.c, *parameters]


def _levels(operations: Sequence[TileOperation]) -> list[int]:
    """Return for each operation the largest number of reductions, one after the other, before it."""
    of_slot: dict[int, int] = {}
    levels = []
    for op in operations:
        levels.append(max((of_slot[slot] for slot in op.reads), default=0))
        if op.writes_slot:
            of_slot[op.out] = max(of_slot.get(op.out, 0), levels[-1] + (op.kind == "reduce"))
    return levels
