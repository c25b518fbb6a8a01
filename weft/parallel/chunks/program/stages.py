"""The stages of a pass over a program: what each loads, which rows it allocates, and which it frees.

A stage runs a segment, or a step of the aggregate before it, on all chunks. Stages are compiled once: the pass runs
them, the trace sums the bytes that they move, and the memory estimate the rows that they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from weft.parallel.chunks.program.chunk_program import ChunkProgram, Segment, differentiable_ports, needs_backward
from weft.parallel.chunks.run.slots import Way


class Buffer(NamedTuple):
    """Rows on the host that a stage allocates and that this stage or a later one frees."""

    kind: Literal["rows", "logits", "intermediate", "result", "saved", "grads", "step grads"]
    """Role of the rows.

    - rows: what a segment leaves.
    - logits: what the last segment leaves.
    - intermediate: result of an aggregate step that another step reads.
    - result, saved: result of the aggregate, and what is saved with it for the backward pass.
    - grads: gradients of "rows".
    - step grads: gradients of "intermediate".
    """
    segment: int
    """Number of the segment that leaves the rows, or precedes the aggregate."""
    number: int
    """Number of the port, of the step, or of the saved tensor."""
    num_rows: int
    """Number of rows."""
    width: int
    """Number of columns."""

    @property
    def in_sum_dtype(self) -> bool:
        """True if they are stored in the type of sums: gradients, to which several chunks add, and logits."""
        return self.kind in ("logits", "grads", "step grads")


@dataclass(frozen=True, kw_only=True)
class AggregateStep:
    """A step of the aggregate after a segment, forward or backward, and what each of its chunks loads."""

    segment: Segment
    """Segment whose boundary requests the aggregate."""
    step: int
    """Number of the step."""
    resumes: bool
    """True if the next segment runs with the step, so the rows that the boundary passes on are loaded."""
    values: bool
    """True if the rows at sources are read."""
    edges: Way
    """Edge arrays that are loaded."""
    saved: bool = False
    """True if the result is loaded, because the forward pass has saved it."""

    @classmethod
    def forward(cls, segment: Segment, step: int) -> AggregateStep:
        """Return a step of the forward pass.

        Args:
            segment: Segment whose boundary requests the aggregate.
            step: Number of the step.
        """
        return cls(segment=segment, step=step, resumes=step == segment.steps - 1, values=True, edges="forward")

    @classmethod
    def backward(cls, segment: Segment, step: int, *, saved: bool, retained: bool, on_cpu: bool) -> AggregateStep:
        """Return a step of the backward pass.

        Args:
            segment: Segment whose boundary requests the aggregate.
            step: Number of the step.
            saved: The plan saves the result.
            retained: The autograd graph of the next segment was kept, with the rows and the result that it read.
            on_cpu: The device is the CPU. On a GPU, the gradient of attention reads the edges in both directions.
        """
        # needed: the next segment is run again, and its backward reads the result. values: the aggregate is computed
        # again, because its gradient depends on the source rows or because the result is needed.
        last = step == segment.steps - 1
        saved = saved and last
        needed = last and segment.needs_result and not saved and not retained
        values = not segment.op.linear or needed
        edges: Way = "both" if values else "back"
        if not segment.op.linear and saved and on_cpu:
            edges = "back"
        return cls(segment=segment, step=step, resumes=last and not retained, values=values, edges=edges, saved=saved)

    @property
    def is_last(self) -> bool:
        """True for the last step of the aggregate."""
        return self.step == self.segment.steps - 1

    @property
    def target_ports(self) -> list[int]:
        """Ports whose rows are loaded for the chunk's targets."""
        segment = self.segment
        ports = {*(segment.targets.values() if self.values else ()), *(segment.rows.values() if self.resumes else ())}
        return sorted(ports)

    @property
    def source_ports(self) -> dict[int, list[str]]:
        """Ports read at sources, each with the names of the aggregate's tensors; without an earlier step's result."""
        names_of: dict[int, list[str]] = {}
        for name, port in self.segment.sources.items():
            if not (self.step and name == self.segment.op.first):
                names_of.setdefault(port, []).append(name)
        return names_of


@dataclass(frozen=True, kw_only=True)
class PassStage:
    """A segment run on all chunks, a step of the aggregate before it, or the last step and the segment at once."""

    number: int
    """Number of the segment that runs, now or after the last step of the aggregate."""
    runs: bool
    """True if the segment runs in this stage."""
    step: AggregateStep | None = None
    """The aggregate step; None if the segment runs range by range without an aggregate."""
    makes: tuple[Buffer, ...] = ()
    """Rows that the stage allocates."""
    frees: tuple[Buffer, ...] = ()
    """Rows that are freed when all chunks are done."""


class PassStages(NamedTuple):
    """The stages of a pass in the order in which a single rank runs them."""

    once: tuple[PassStage, ...]
    """Stages that run once before the first pass; they compute the aggregate of constant features."""
    forward: tuple[PassStage, ...]
    """Stages of the forward pass."""
    backward: tuple[PassStage, ...]
    """Stages of the backward pass; empty for evaluation."""


class Sizes(Protocol):
    """Properties of a rank that its stages depend on; see `RankChunks`."""

    @property
    def saved_hops(self) -> frozenset[int]: ...
    @property
    def in_memory(self) -> bool: ...
    @property
    def reads_features(self) -> bool: ...
    @property
    def on_cpu(self) -> bool: ...
    def num_rows(self, hop: int) -> int: ...
    def num_source_rows(self, hop: int) -> int: ...


def compile_stages(program: ChunkProgram, sizes: Sizes, *, training: bool) -> PassStages:
    """Return the stages of a training step, or of an evaluation.

    Args:
        program: The model cut into segments.
        sizes: Properties of the rank.
        training: Return the stages of a training step.
    """
    compiler = _Compiler(program.segments, sizes, training=training)
    once = compiler.once() if program.segments[0].constant else ()
    first = 1 if program.segments[0].constant else 0
    forward = [stage for number in range(first, len(program.segments)) for stage in compiler.forward(number)]
    return PassStages(tuple(once), tuple(forward), tuple(compiler.backward() if training else ()))


class _Compiler:
    """Derives the stages of a pass from its segments."""

    def __init__(self, segments: Sequence[Segment], sizes: Sizes, *, training: bool) -> None:
        self.segments, self.sizes, self.training = segments, sizes, training

    def once(self) -> Iterator[PassStage]:
        """Yield the stages that compute constants. Only the result and the rows passed on with it stay allocated."""
        segment, sizes = self.segments[0], self.sizes
        rows = self._rows(0)
        yield PassStage(number=0, runs=True, makes=rows)
        yield from self._steps(0)
        intermediates = self._intermediates(0)
        result = Buffer("result", 0, 0, sizes.num_rows(segment.hop + segment.steps), segment.width)
        unused = tuple(buffer for buffer in rows if buffer.number not in segment.rows.values())
        consumed = intermediates[-1:] if segment.op.linear else intermediates
        last = AggregateStep(segment=segment, step=segment.steps - 1, resumes=False, values=True, edges="forward")
        yield PassStage(number=1, runs=False, step=last, makes=(result,), frees=(*consumed, *unused))

    def forward(self, number: int) -> Iterator[PassStage]:
        """Yield the forward stages of a segment and of the aggregate before it."""
        before, rows = self._aggregated(number), self._rows(number)
        if before is None:
            yield PassStage(number=number, runs=True, makes=rows)
            return
        yield from self._steps(number - 1)
        last = AggregateStep.forward(before, before.steps - 1)
        yield PassStage(number=number, runs=True, step=last, makes=(*rows, *self._saved(number)))

    def backward(self) -> Iterator[PassStage]:
        """Yield the stages from the last segment to the first one that has a gradient."""
        for number in reversed(range(len(self.segments))):
            stages = list(self._back(number))
            yield from stages
            if not number or not needs_backward(self.segments[number - 1]):
                return

    def _back(self, number: int) -> Iterator[PassStage]:
        """Yield the backward stages of a segment and of the aggregate before it."""
        sizes, last = self.sizes, number == len(self.segments) - 1
        into = () if not number or self.segments[number - 1].constant else self._grads(number - 1)
        out = () if last else self._grads(number)  # the gradient of the logits is the caller's
        before = self._aggregated(number)
        if before is None:
            yield PassStage(number=number, runs=True, makes=into, frees=out)
            return
        saved, next_grads = before.hop in sizes.saved_hops, tuple[Buffer, ...]()
        for index in reversed(range(before.steps)):
            step = AggregateStep.backward(before, index, saved=saved, retained=sizes.in_memory, on_cpu=sizes.on_cpu)
            step_grads, next_grads = next_grads, self._step_grads(number - 1, index)
            makes = (*into, *next_grads) if step.is_last else next_grads
            frees = step_grads if index else (*step_grads, *out)
            yield PassStage(number=number, runs=step.is_last, step=step, makes=makes, frees=frees)

    def _aggregated(self, number: int) -> Segment | None:
        """Return the previous segment, if each pass computes an aggregate between it and this one."""
        before = self.segments[number - 1] if number else None
        return before if before is not None and before.aggregates and not before.constant else None

    def _rows(self, number: int) -> tuple[Buffer, ...]:
        """Return the rows that a segment leaves, without features that are read where the graph stores them."""
        segment, sizes, last = self.segments[number], self.sizes, number == len(self.segments) - 1
        num_rows = sizes.num_source_rows(segment.hop) if segment.aggregates else sizes.num_rows(segment.hop)
        return tuple(
            Buffer("logits" if last else "rows", number, port, num_rows, live.width)
            for port, live in enumerate(segment.live)
            if not (live.features and sizes.reads_features)
        )

    def _grads(self, number: int) -> tuple[Buffer, ...]:
        wanted = differentiable_ports(self.segments[number])
        return tuple(buffer._replace(kind="grads") for buffer in self._rows(number) if buffer.number in wanted)

    def _intermediates(self, number: int) -> tuple[Buffer, ...]:
        """Return the results of all steps but the last of the aggregate after a segment."""
        segment, num_source_rows = self.segments[number], self.sizes.num_source_rows
        return tuple(
            Buffer("intermediate", number, step, num_source_rows(segment.hop + step + 1), segment.width)
            for step in range(segment.steps - 1)
        )

    def _steps(self, number: int) -> Iterable[PassStage]:
        """Yield the stages of all steps but the last. For sums, only the last result is needed in the backward pass."""
        segment, intermediates = self.segments[number], self._intermediates(number)
        for step, buffer in enumerate(intermediates):
            frees = intermediates[step - 1 : step] if step and segment.op.linear else ()
            forward_step = AggregateStep.forward(segment, step)
            yield PassStage(number=number + 1, runs=False, step=forward_step, makes=(buffer,), frees=frees)

    def _saved(self, number: int) -> tuple[Buffer, ...]:
        """Return the result of the aggregate before a segment and what is saved with it, if it is saved."""
        before, num_rows = self.segments[number - 1], self.sizes.num_rows(self.segments[number].hop)
        if not self.training or before.hop not in self.sizes.saved_hops:
            return ()
        saved = (Buffer("saved", number - 1, i, num_rows, width) for i, width in enumerate(before.saved_widths))
        return (Buffer("result", number - 1, 0, num_rows, before.width), *saved)

    def _step_grads(self, number: int, step: int) -> tuple[Buffer, ...]:
        """Return the gradients of an earlier step's result that a step reads."""
        segment = self.segments[number]
        if not step or not segment.differentiable:
            return ()
        return (Buffer("step grads", number, step, self.sizes.num_source_rows(segment.hop + step), segment.width),)
