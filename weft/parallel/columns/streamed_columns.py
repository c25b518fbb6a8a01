"""Evaluation of a graph whose rows exceed the memory: sums over edges column by column, everything else row by row.

A sum over in-neighbours treats each column on its own. NeutronTP (section 3) divides the columns among ranks; here one
process takes one block of columns after the other, as wide as its memory allows. Between two sums, rows are in files in
which a block of columns and a range of rows can both be read in order, so nothing is planned and no row is read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.nn import Aggregate, Inputs, Max, Sum, Topology, Workload
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.parallel.chunks.program.chunk_program import Segment, rows_by_port
from weft.parallel.chunks.program.tracer import ProgramTracer
from weft.parallel.chunks.run.chunk_views import RowsView, refused
from weft.parallel.row_ranges import RangedSum, row_ranges
from weft.runtime.memory.limit import memory_limit_bytes
from weft.storage.host_rows import HostRows
from weft.storage.quantized_table import FeatureTable
from weft.storage.unnamed_files import release
from weft.utils.errors import InputError
from weft.utils.units import format_bytes

MEMORY_SHARE = 0.5
"""Share of the memory for the columns that a sum reads and writes at once, in a prediction."""
FEATURE_SHARE = 0.25
"""Share for the columns of features before training, when the rows and edges of steps are in memory too."""
ALIGNED_COLUMNS = 16
"""Blocks have a multiple of this number of columns, if they have more."""


def column_segments(work: Workload, *, training: bool) -> Sequence[Segment] | None:
    """Return the segments of a model; None if it has other aggregates than sums and maxima.

    Args:
        work: The model and the graph.
        training: True for those of a training step, False for an evaluation.
    """
    if work.stats.typed.has_input or not work.stats.num_features or not work.has_graph:
        return None
    try:
        segments = ProgramTracer(work.graph, work.model, work.optimisations).program(training=training).segments
    except InputError:  # a part of the model reads more than one row at a time
        return None
    return segments if all(isinstance(segment.op, Sum | Max) for segment in segments[:-1]) else None


class ColumnFiles:
    """Rows [n, F] in unnamed files, one for each block of columns.

    Args:
        num_rows: Number of rows, n.
        widths: Number of columns of each block.
        dtype: Type of the rows.
    """

    def __init__(self, num_rows: int, widths: Sequence[int], dtype: torch.dtype) -> None:
        self.widths, self.blocks = list(widths), [HostRows(num_rows, width, dtype) for width in widths]

    def read(self, rows: slice) -> Tensor:
        """Return a range of rows, [m, F]."""
        return torch.cat([block.read(rows.start, rows.stop) for block in self.blocks], 1)

    def columns(self, columns: slice) -> Tensor:
        """Return one block of columns of all rows, [n, .]; the range must be that of a block."""
        block: HostRows = self.blocks[columns.start // self.widths[0]]
        return block.read(0, block.num_rows)

    def write(self, first: int, values: Tensor) -> None:
        """Replace rows.

        Args:
            first: First row to replace.
            values: New rows [m, F].
        """
        for block, columns in zip(self.blocks, values.split(self.widths, 1), strict=True):
            block.write(first, columns.contiguous())

    def close(self) -> None:
        """Free the space."""
        for block in self.blocks:
            block.close()


@dataclass(kw_only=True)
class Passed:
    """Rows that a segment has left for the next one, with the result of the aggregate in between."""

    segment: Segment
    """The segment."""
    boundary: Boundary
    """Boundary of a range of its rows; all ranges have the same aggregate, shared tensors and context."""
    rows: dict[int, ColumnFiles]
    """Rows that the segment has left for the next one, by port, without the graph's features."""
    result: ColumnFiles
    """Result of the aggregate."""


def block_widths(width: int, num_rows: int, itemsize: int, what: str, share: float = MEMORY_SHARE) -> list[int]:
    """Return the number of columns of each block into which rows are divided: few blocks, about as wide.

    Args:
        width: Number of columns.
        num_rows: Number of rows of a block that are in memory at once.
        itemsize: Bytes of a number.
        what: Subject of the error message.
        share: Share of the memory that a block may fill.

    Raises:
        InputError: Less than one column fits in the memory.
    """
    column_bytes, memory = num_rows * itemsize, share * memory_limit_bytes()
    most = int(memory // max(column_bytes, 1))
    if not most:
        needed = format_bytes(int(column_bytes / share))
        raise InputError(f"{what}: the sums of one column need {needed} of memory: use a larger machine")
    if most > ALIGNED_COLUMNS:
        most -= most % ALIGNED_COLUMNS
    num_blocks = -(-width // most)
    even = -(-width // max(num_blocks, 1))
    even = min(most, -(-even // ALIGNED_COLUMNS) * ALIGNED_COLUMNS)
    return [min(even, width - first) for first in range(0, width, even)] if width else []


def rows_at_once(op: Aggregate, steps: int, num_sources: int, num_targets: int) -> int:
    """Return the number of rows of a block of columns that are in memory at once while it is aggregated.

    Args:
        op: The aggregate.
        steps: Number of times that it is applied.
        num_sources: Number of rows that it reads.
        num_targets: Number of rows of its result.
    """
    # A maximum has positions too; several steps have the rows of two steps.
    return num_sources if isinstance(op, Sum) and steps == 1 else num_sources + 2 * num_targets


def aggregated(op: Aggregate, topology: Topology, x: Tensor, steps: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of targets with the aggregates [m, F] of source rows.

    Args:
        op: A sum or a maximum.
        topology: The edges.
        x: Source rows [s, F].
        steps: Number of times that it is applied.
    """
    num_targets = topology.adjacency.num_targets
    if isinstance(op, Sum) and steps == 1:
        ranged = RangedSum(op=op, topology=topology)
        for rows in row_ranges(num_targets, x.shape[1] * x.itemsize):
            yield rows, ranged.of_targets(rows, x)
    else:
        yield slice(0, num_targets), op.run(topology, op.prepare(topology, {op.first: x}), steps)


def write_aggregates(
    op: Aggregate, topology: Topology, steps: int, read: Callable[[slice], Tensor], into: ColumnFiles
) -> None:
    """Aggregate rows, block of columns by block of columns.

    Args:
        op: A sum or a maximum.
        topology: The edges.
        steps: Number of times that it is applied.
        read: Function that returns some columns of all source rows, [s, .].
        into: Files of the result [n, F]; they may be those that `read` reads.
    """
    first = 0
    for block in into.blocks:
        x = read(slice(first, first + block.width))
        for rows, part in aggregated(op, topology, x, steps):
            block.write(rows.start, part)
        del x, part  # before the next columns are read
        first += block.width


def feature_widths(work: Workload, num_rows: int) -> list[int]:
    """Return the number of columns of each block in which features are aggregated before training.

    Args:
        work: The model and the graph.
        num_rows: Number of rows of a block that are in memory at once.
    """
    return block_widths(work.stats.num_features, num_rows, work.itemsize, work.graph.name, FEATURE_SHARE)


def aggregated_features(work: Workload, op: Aggregate, topology: Topology, vertices: Tensor) -> Tensor:
    """Return a sum or maximum [n, F] of the features of many vertices in a mapped file, computed column by column.

    The features are read once, in order, for each block of columns.

    Args:
        work: The model and the graph.
        op: The aggregate.
        topology: The edges.
        vertices: Vertex of each source, int64 [s].

    Raises:
        InputError: Less than one column fits in the memory.
        RunError: If the folder for temporary files has too little free space.
    """
    table, num_targets, itemsize = cast(FeatureTable, work.graph.x), topology.adjacency.num_targets, work.itemsize
    num_rows = rows_at_once(op, 1, len(vertices), num_targets)
    files = ColumnFiles(num_targets, feature_widths(work, num_rows), work.row_dtype)
    position = torch.full((len(table),), -1, dtype=torch.int32)
    position[vertices] = torch.arange(len(vertices), dtype=torch.int32)

    def read(columns: slice) -> Tensor:
        x = torch.empty(len(vertices), columns.stop - columns.start, dtype=work.row_dtype)
        for rows in row_ranges(len(table), table[:1].nbytes):
            places = position[rows]
            wanted = (places >= 0).nonzero().view(-1)
            x[places[wanted].long()] = table[wanted + rows.start, columns].to(work.row_dtype)
            release(table)
        return x

    write_aggregates(op, topology, 1, read, files)
    if len(files.blocks) == 1:
        return files.blocks[0].tensor()
    joined = HostRows(num_targets, table.shape[1], work.row_dtype)
    for rows in row_ranges(num_targets, table.shape[1] * itemsize):
        joined.write(rows.start, files.read(rows))
    files.close()
    return joined.tensor()


class StreamedColumns:
    """Evaluates a model on all vertices of a graph, on the CPU.

    Args:
        work: The model and the graph.
        segments: Result of `column_segments`.
        model: The model with the weights to use.
        topology: Topology of the whole graph.
        group: The only rank, whose meter counts the edges.

    Raises:
        InputError: Less than one column fits in the memory.
    """

    def __init__(
        self, work: Workload, segments: Sequence[Segment], model: nn.Module, topology: Topology, group: Group
    ) -> None:
        self.work, self.segments, self.topology, self.group = work, segments, topology, group
        self.model, self.num_rows = cast(PhasedModel, model), work.graph.num_vertices
        aggregates = [(segment.op, segment.steps) for segment in segments[:-1]]
        self.rows_at_once = max((rows_at_once(*each, self.num_rows, self.num_rows) for each in aggregates), default=1)
        self._widths(1)  # raises the error before anything is computed

    @torch.no_grad()
    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits [m, C] of one range of rows after the other."""
        passed: Passed | None = None
        for segment in self.segments[:-1]:
            passed = self._aggregated(segment, *self._advance(segment, passed))
        for rows in self._ranges(self.segments[-1].live[0].width):
            reached = self._run(rows, passed)
            assert isinstance(reached, Tensor)
            yield rows, reached

    def _advance(self, segment: Segment, passed: Passed | None) -> tuple[Boundary, dict[int, ColumnFiles]]:
        """Run a segment on all rows; return the boundary that it reached, and the rows that it left, by port.

        What a range of rows leaves replaces in the files what it has read, where the widths are the same.
        """
        spare = [passed.result, *passed.rows.values()] if passed else []
        left: dict[int, ColumnFiles] = {}
        for port, live in enumerate(segment.live):
            if not live.features:
                replaced = next((files for files in spare if files.widths == self._widths(live.width)), None)
                left[port] = replaced or self._files(live.width)
                spare = [files for files in spare if files is not replaced]
        boundary: Boundary | None = None
        for rows in self._ranges(max(live.width for live in segment.live)):
            reached = self._run(rows, passed)
            assert isinstance(reached, Boundary)
            of_ports = rows_by_port(reached, segment)
            for port, files in left.items():
                files.write(rows.start, of_ports[port])
            boundary = reached
            if segment.only_features:
                break
        for files in spare:
            files.close()
        assert boundary is not None
        return boundary, left

    def _aggregated(self, segment: Segment, boundary: Boundary, left: dict[int, ColumnFiles]) -> Passed:
        """Compute the aggregate after a segment, block of columns by block of columns."""
        op, steps, port = segment.op, segment.steps, segment.sources[segment.op.first]
        # The result replaces the rows that are aggregated, unless the next segment reads these too.
        source = left.get(port) if port in segment.rows.values() else left.pop(port, None)
        result = source if source is not None and port not in left else self._files(segment.width)
        read = self._features if source is None else source.columns
        write_aggregates(op, self.topology, steps, read, result)
        self.group.meter.aggregate(self.topology.adjacency.num_edges * steps, segment.width)
        return Passed(segment=segment, boundary=boundary, rows=left, result=result)

    def _run(self, rows: slice, passed: Passed | None) -> Boundary | Tensor:
        """Run a segment on a range of rows."""
        inputs = Inputs(optimisations=self.work.optimisations)
        if passed is None:
            inputs.rows = self._feature_rows(rows)
        ids = self.topology.ids_of(torch.arange(rows.start, rows.stop))
        views = [
            RowsView(self.topology, ids, self.num_rows, key=0, calls=0, inputs=inputs, embedded=refused)
            for _ in range(self.model.num_stages)
        ]
        if passed is None:
            return self.model.begin(views, cast(Tensor, inputs.rows))
        boundary, state = passed.boundary, dict[str, Any]()
        for name, port in passed.segment.rows.items():
            files = passed.rows.get(port)
            state[name] = self._feature_rows(rows) if files is None else files.read(rows)
        return self.model.resume(
            views,
            BoundaryState(
                result=passed.result.read(rows), rows=state, shared=boundary.shared, context=boundary.context
            ),
        )

    def _feature_rows(self, rows: slice) -> Tensor:
        """Return the features of a range of vertices."""
        features = self.work.features(rows, self.group.device)
        release(cast(FeatureTable, self.work.graph.x))
        return features

    def _features(self, columns: slice) -> Tensor:
        """Return a block of columns of the features of all vertices."""
        table = cast(FeatureTable, self.work.graph.x)
        x = torch.empty(self.num_rows, columns.stop - columns.start, dtype=self.work.row_dtype)
        for rows in self._ranges(table.shape[1]):
            x[rows] = table[rows, columns]
            release(table)
        return x

    def _ranges(self, width: int) -> Iterator[slice]:
        """Return the ranges of rows with `width` columns."""
        return row_ranges(self.num_rows, width * self.work.itemsize)

    def _files(self, width: int) -> ColumnFiles:
        """Return files for rows of all vertices with `width` columns."""
        return ColumnFiles(self.num_rows, self._widths(width), self.work.row_dtype)

    def _widths(self, width: int) -> list[int]:
        """Return the number of columns of each block of rows with `width` columns."""
        return block_widths(width, self.rows_at_once, self.work.itemsize, self.work.graph.name)
