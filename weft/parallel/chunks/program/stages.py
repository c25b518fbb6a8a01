"""What a pass over a program does, compiled once: stage by stage, what is brought, which rows are made and freed.

The pass runs the stages chunk by chunk, the trace adds up what they move, and the forecast what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from weft.parallel.chunks.program.chunk_program import ChunkProgram, Segment, differentiable, goes_back
from weft.parallel.chunks.run.slots import Way


class Buffer(NamedTuple):
    """Rows that a stage makes, and that it or a later one frees."""

    kind: Literal["rows", "between", "result", "kept", "grads", "step grads"]
    """What a segment left; what a step of the aggregate behind it made, its kept result and what is kept beside it; the
    gradients of the rows, and of what a step but the first reads."""
    segment: int
    place: int
    """The port, the step, or the number of what is kept."""
    num_rows: int
    width: int


@dataclass(frozen=True, kw_only=True)
class AggregateStep:
    """A step of the aggregate behind a segment, forward or backward, and what each of its chunks brings."""

    segment: Segment
    step: int
    goes_on: bool
    """Whether rows of the targets go on with the results."""
    values: bool
    """Whether the rows at sources are read."""
    edges: Way
    kept: bool = False
    """Whether the results are there, since the forward pass has kept them."""

    @classmethod
    def forward(cls, segment: Segment, step: int) -> AggregateStep:
        """That of a forward pass."""
        return cls(segment=segment, step=step, goes_on=step == segment.steps - 1, values=True, edges="forward")

    @classmethod
    def backward(cls, segment: Segment, step: int, *, kept: bool, retained: bool, on_cpu: bool) -> AggregateStep:
        """That of a backward pass.

        kept: whether results are kept. retained: whether the segment behind stayed as it was run, with what it read of
        results and rows. on_cpu: whether that is the device; on a GPU attention's gradient walks edges both ways.
        """
        last = step == segment.steps - 1
        kept = kept and last
        needed = last and segment.needs_result and not kept and not retained
        values = not segment.op.linear or needed
        edges: Way = "both" if values else "back"
        if not segment.op.linear and kept and on_cpu:
            edges = "back"
        return cls(segment=segment, step=step, goes_on=last and not retained, values=values, edges=edges, kept=kept)

    @property
    def is_last(self) -> bool:
        """Whether it is the last step."""
        return self.step == self.segment.steps - 1

    @property
    def own_ports(self) -> list[int]:
        """The ports of which the targets' rows are read."""
        segment = self.segment
        ports = {*(segment.targets.values() if self.values else ()), *(segment.rows.values() if self.goes_on else ())}
        return sorted(ports)

    @property
    def source_ports(self) -> dict[int, list[str]]:
        """The ports that it reads at sources, and as which of its tensors; what an earlier step made is apart."""
        found: dict[int, list[str]] = {}
        for name, port in self.segment.sources.items():
            if not (self.step and name == self.segment.op.first):
                found.setdefault(port, []).append(name)
        return found


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A segment run on all chunks, or a step of the aggregate before it made for them, or both at once."""

    number: int
    """Of the segment that runs, or will when the aggregate is made."""
    runs: bool
    """Whether it runs."""
    step: AggregateStep | None = None
    """None: nothing is aggregated before it runs, range by range."""
    makes: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    """When all chunks are done."""


class PassStages(NamedTuple):
    """The stages of a pass, in the order in which one rank alone runs them."""

    once: tuple[Stage, ...]
    """Before the first pass: the result that is made of constants."""
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]


class Sizes(Protocol):
    """What stages depend on beside a program; see `RankChunks`."""

    @property
    def kept(self) -> frozenset[int]: ...
    @property
    def in_memory(self) -> bool: ...
    @property
    def reads_features(self) -> bool: ...
    @property
    def on_cpu(self) -> bool: ...
    def num_rows(self, hop: int) -> int: ...
    def num_held(self, hop: int) -> int: ...


def compile_stages(program: ChunkProgram, sizes: Sizes, *, training: bool) -> PassStages:
    """The stages of a training step, or of an evaluation, whose backward pass has none."""
    made = _Compiler(program.segments, sizes, training=training)
    once = made.once() if program.segments[0].constant else ()
    first = 1 if program.segments[0].constant else 0
    forward = [stage for number in range(first, len(program.segments)) for stage in made.forward(number)]
    return PassStages(tuple(once), tuple(forward), tuple(made.backward() if training else ()))


class _Compiler:
    def __init__(self, segments: Sequence[Segment], sizes: Sizes, *, training: bool) -> None:
        self.segments, self.sizes, self.training = segments, sizes, training

    def once(self) -> Iterator[Stage]:
        """What is made of constants: nothing but the result and the rows that go on with it is kept."""
        segment, sizes = self.segments[0], self.sizes
        rows = self._rows(0)
        yield Stage(number=0, runs=True, makes=rows)
        yield from self._steps(0)
        between = self._between(0)
        result = Buffer("result", 0, 0, sizes.num_rows(segment.hop + segment.steps), segment.width)
        over = tuple(one for one in rows if one.place not in segment.rows.values())
        left = between[-1:] if segment.op.linear else between
        last = AggregateStep(segment=segment, step=segment.steps - 1, goes_on=False, values=True, edges="forward")
        yield Stage(number=1, runs=False, step=last, makes=(result,), frees=(*left, *over))

    def forward(self, number: int) -> Iterator[Stage]:
        """Segment `number`, and the aggregate before it."""
        before, rows = self._aggregated(number), self._rows(number)
        if before is None:
            yield Stage(number=number, runs=True, makes=rows)
            return
        yield from self._steps(number - 1)
        last = AggregateStep.forward(before, before.steps - 1)
        yield Stage(number=number, runs=True, step=last, makes=(*rows, *self._kept(number)))

    def backward(self) -> Iterator[Stage]:
        """From the last segment to the first that has a gradient."""
        for number in reversed(range(len(self.segments))):
            stages = list(self._back(number))
            yield from stages
            if not number or not goes_back(self.segments[number - 1]):
                return

    def _back(self, number: int) -> Iterator[Stage]:
        """Segment `number` and the aggregate before it."""
        sizes, last = self.sizes, number == len(self.segments) - 1
        into = () if not number or self.segments[number - 1].constant else self._grads(number - 1)
        out = () if last else self._grads(number)  # the gradient of the logits is the caller's
        before = self._aggregated(number)
        if before is None:
            yield Stage(number=number, runs=True, makes=into, frees=out)
            return
        kept, read = before.hop in sizes.kept, tuple[Buffer, ...]()
        for place in reversed(range(before.steps)):
            step = AggregateStep.backward(before, place, kept=kept, retained=sizes.in_memory, on_cpu=sizes.on_cpu)
            given, read = read, self._step_grads(number - 1, place)
            makes = (*into, *read) if step.is_last else read
            frees = given if place else (*given, *out)
            yield Stage(number=number, runs=step.is_last, step=step, makes=makes, frees=frees)

    def _aggregated(self, number: int) -> Segment | None:
        """The segment before one, if the aggregate behind it is made in each pass."""
        before = self.segments[number - 1] if number else None
        return before if before is not None and before.aggregates and not before.constant else None

    def _rows(self, number: int) -> tuple[Buffer, ...]:
        """What a segment leaves, but for features that are read where the graph has them."""
        segment, sizes = self.segments[number], self.sizes
        held = sizes.num_held(segment.hop) if segment.aggregates else sizes.num_rows(segment.hop)
        return tuple(
            Buffer("rows", number, port, held, live.width)
            for port, live in enumerate(segment.live)
            if not (live.features and sizes.reads_features)
        )

    def _grads(self, number: int) -> tuple[Buffer, ...]:
        wanted = differentiable(self.segments[number])
        return tuple(one._replace(kind="grads") for one in self._rows(number) if one.place in wanted)

    def _between(self, number: int) -> tuple[Buffer, ...]:
        """What the steps of the aggregate behind a segment make, but the last one."""
        segment, held = self.segments[number], self.sizes.num_held
        return tuple(
            Buffer("between", number, step, held(segment.hop + step + 1), segment.width)
            for step in range(segment.steps - 1)
        )

    def _steps(self, number: int) -> Iterable[Stage]:
        """These steps; of sums nothing but the last result is needed backward."""
        segment, between = self.segments[number], self._between(number)
        for step, made in enumerate(between):
            frees = between[step - 1 : step] if step and segment.op.linear else ()
            over = AggregateStep.forward(segment, step)
            yield Stage(number=number + 1, runs=False, step=over, makes=(made,), frees=frees)

    def _kept(self, number: int) -> tuple[Buffer, ...]:
        """The results before a segment, and what is kept beside them, if they are kept."""
        before, num_rows = self.segments[number - 1], self.sizes.num_rows(self.segments[number].hop)
        if not self.training or before.hop not in self.sizes.kept:
            return ()
        beside = (Buffer("kept", number - 1, i, num_rows, width) for i, width in enumerate(before.kept_widths))
        return (Buffer("result", number - 1, 0, num_rows, before.width), *beside)

    def _step_grads(self, number: int, step: int) -> tuple[Buffer, ...]:
        """The gradient of what a step reads that an earlier one made."""
        segment = self.segments[number]
        if not step or not segment.differentiable:
            return ()
        return (Buffer("step grads", number, step, self.sizes.num_held(segment.hop + step), segment.width),)
