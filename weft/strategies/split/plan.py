"""The plans of mini-batch strategies: what a step of a batch does on a rank, and an evaluation on the whole graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.comm import Group
from weft.cost import Steps, Trace
from weft.data import Links
from weft.data.sampling import check_fanouts, parse_fanouts
from weft.nn import (
    Aggregate,
    ByRelation,
    FeatureTables,
    GraphOperation,
    Inputs,
    Sum,
    Total,
    Workload,
    embeddings,
    is_embedded,
    typed_rows,
)
from weft.partition import metis
from weft.runtime.kernel_selection import avoid_onednn
from weft.runtime.memory import check_fits_memory
from weft.runtime.meter import Counts, Meter
from weft.strategies.base import MemoryUse, Step
from weft.strategies.placed_view import PlacedView
from weft.strategies.split.batch_blocks import BatchBlocks
from weft.strategies.split.feature_cache import cached_tables, feature_bytes, most_read
from weft.strategies.split.pre_sampling import PreSampling, pre_sample
from weft.strategies.split.read_ahead import ahead
from weft.strategies.split.sampler import BatchSampler, SampledBatch, exchange_requests, exchange_requests_locally
from weft.strategies.split.step_trace import BatchPlan
from weft.strategies.vertex.plan import CommunicatedPlan, PlacedVertices, VertexOptions
from weft.utils.errors import InputError
from weft.utils.random import key
from weft.utils.units import format_bytes

DEFAULT_BATCH_SIZE = 1024
PLACE_BYTES = 4
"""Of every vertex, where its features are held."""
NUM_PROFILED_STEPS = 3
"""Batches of an epoch that are drawn to tell what all take; the last among them."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(VertexOptions):
    """What can be said of mini-batches."""

    task: str = "node"
    """What batches are of: of vertices (node) or links (link)."""
    negatives: int = 1
    """Pairs drawn for each link."""
    batch_size: str = ""
    """Training vertices, or links, of a batch on all ranks, or `all`; '': 1024, or all where there are fewer."""
    fanout: str = "10"
    """In-edges drawn for a vertex: one number for all hops, or one for each from the batch outward, or `all`."""
    sampling: str = "uniform"
    """How they are drawn."""
    batch_dependency: int = 1
    """Batches over which the draws change; 1: each draws anew."""
    prefetch_batches: int = 2
    """Batches that are made ahead of their step, while others train; 0: none."""
    cache_memory: int | None = None
    """Bytes of features that a rank holds for its batches; None: all are read from the graph each time."""
    seed: int = 0
    """Of what is drawn."""


class MiniBatchPlan(CommunicatedPlan):
    """Mini-batches in training; evaluations go over the whole graph, as in `communicated`."""

    options_type: ClassVar[type[BatchOptions]] = BatchOptions
    exact = False
    evaluates_as = "communicated"
    whole_graph = (False,)
    options: BatchOptions
    splits: ClassVar[bool]
    """Whether the ranks split a batch by who owns a vertex; else each has a micro-batch of its own."""

    def solve(self, state: Any) -> None:
        super().solve(state)
        asked = self.batch_work.outline(BatchPlan.traits, training=True)
        fanouts = self.one_rank_sampler.fanouts
        if self.size > 1:
            (self._refuse_steps if self.splits else self._refuse_own)(asked)
        if any(isinstance(one, tuple) for one in fanouts) or self.options.sampling == "weighted":
            self._refuse_unscaled(asked)
        if not self.one_rank_sampler.takes_all_edges and any(
            isinstance(op.op, ByRelation) and not op.op.mean for op in asked
        ):
            raise InputError(
                f"--fanout {self.options.fanout}: edges are drawn, and the model sums them by relation: give --fanout "
                "all, or convolutions with aggr='mean'"
            )

    def check_fits(self) -> None:
        if self.options.cache_memory is not None:
            self._require_cache(self.options.cache_memory)

    def _require_cache(self, memory: int) -> None:
        """InputError for a cache that would have no effect, or that is larger than memory."""
        row_bytes = feature_bytes(self.work.graph, self.work.itemsize)
        widths = row_bytes[row_bytes > 0]
        if self.one_rank_sampler.same_every_step or not len(widths):
            why = "a batch of all is read once" if len(widths) else f"{self.work.graph.name} has no features"
            raise InputError(f"--cache-memory has no effect, since {why}: leave it out")
        if memory < (least := int(widths.min())):
            raise InputError(f"--cache-memory {memory}: the features of a vertex take {least} bytes: give as many")
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        what = f"--cache-memory {format_bytes(memory)} on {ranks_here} {'rank' if ranks_here == 1 else 'ranks'}"
        check_fits_memory(memory * ranks_here, what, "give less")

    def _refuse_steps(self, asked: Sequence[GraphOperation]) -> None:
        """InputError where weights of all steps are those of the first one's sources, which are not all here."""
        if any(isinstance(op.op, Aggregate) and not op.op.plain and len(op.hops) > 1 for op in asked):
            raise InputError(f"--strategy {self.name}: no --decoupled model with attention runs under it: leave it out")

    def _refuse_own(self, asked: Sequence[GraphOperation]) -> None:
        """InputError for what each vertex is to have once, where ranks compute it several times."""
        if any(isinstance(op.op, Total) for op in asked):
            raise InputError(
                f"--strategy {self.name}: batch norm would count a vertex once for each rank that computes it: give "
                "--strategy split, or another --norm"
            )
        if embeddings(self.work.model):
            raise InputError(
                f"--strategy {self.name}: vertices without features have rows on one rank alone: give --strategy split"
            )

    def _refuse_unscaled(self, asked: Sequence[GraphOperation]) -> None:
        """InputError for sums that would have a bias, where edges of a row are drawn with different chances."""
        weighted = self.options.sampling == "weighted"
        for op in asked:
            if (isinstance(op.op, Sum) and not op.op.weighted) or (isinstance(op.op, ByRelation) and weighted):
                flag = "--sampling weighted" if weighted else f"--fanout {self.options.fanout}"
                remedy = "--sampling uniform or labor" if weighted else "one number for each hop"
                raise InputError(f"{flag}: edges are drawn unevenly, and the model sums them evenly: give {remedy}")

    @cached_property
    def batch_work(self) -> Workload:
        """The workload of a step. What it reads is constant only where every step reads all."""
        reuse = self.work.optimisations.reuse and self.one_rank_sampler.same_every_step
        optimisations = replace(self.work.optimisations, reuse=reuse, sparse=False)
        graph = self.work.graph if self.work.has_graph else self.work.stats
        return Workload(self.work.model, graph, optimisations, num_classes=self.work.num_classes)

    @cached_property
    def sampler(self) -> BatchSampler:
        """What draws batches on the ranks."""
        return replace(self.one_rank_sampler, size=self.size, part=self.part if self.splits and self.size > 1 else None)

    @cached_property
    def one_rank_sampler(self) -> BatchSampler:
        """The same on one rank. InputError for fanouts or a batch that the graph or the model has not."""
        options, graph = self.options, self.work.graph
        sampler = BatchSampler(
            graph=graph,
            size=1,
            part=None,
            fanouts=check_fanouts(parse_fanouts(options.fanout), self.num_hops, len(graph.relations)),
            batch_size=batch_size_of(options.batch_size),
            method=options.sampling,
            dependency=options.batch_dependency,
            seed=options.seed,
            links=Links.of(graph) if options.task == "link" else None,
            num_negatives=options.negatives,
        )
        most, what = len(sampler.examples), "vertices" if sampler.links is None else "links"
        if options.batch_size and (sampler.batch_size or 0) > most:
            raise InputError(f"--batch-size {sampler.batch_size}: {graph.name} has {most} training {what}: give all")
        if options.batch_dependency > 1 and options.sampling != "labor":
            raise InputError(
                f"--batch-dependency {options.batch_dependency} has no effect on --sampling {options.sampling}: give "
                "--sampling labor, or leave it out"
            )
        if options.batch_dependency > 1 and sampler.takes_all_edges:
            raise InputError(f"--batch-dependency {options.batch_dependency}: --fanout all draws nothing: leave it out")
        if options.sampling == "weighted" and graph.in_edges.weight is None:
            raise InputError(f"--sampling weighted: {graph.name} has no edge weights: give uniform or labor")
        return sampler

    def pre_sample(self) -> PreSampling:
        """How often vertices are drawn; by one rank where batches are split, which does not change them."""
        return pre_sample(self.one_rank_sampler if self.splits else self.sampler)

    def cached_vertices(self, rank: int) -> Tensor:
        """Those whose features a rank holds for its batches, under `split` of its own alone: int64, ascending."""
        graph, memory = self.work.graph, self.options.cache_memory
        if memory is None:
            return torch.empty(0, dtype=torch.int64)
        own = (self.part == rank).nonzero().view(-1) if self.splits else torch.arange(graph.num_vertices)
        return most_read(own, self.pre_sample().reads, feature_bytes(graph, self.work.itemsize), memory)

    def sample_batch(self, epoch: int, number: int) -> list[SampledBatch]:
        """A batch of an epoch on all ranks."""
        examples = self.sampler.batches(epoch)[number]
        return exchange_requests_locally(
            [self.sampler.sample(examples, rank, epoch, number) for rank in range(self.size)]
        )

    def release(self) -> None:
        super().release()
        for name in ("sampler", "whole_sampler", "examined"):
            self.__dict__.pop(name, None)

    def trace(self, rank: int = 0, *, training: bool, epoch: int = 0, number: int = 0) -> Trace:
        """What a training step does, that of the first batch or another, or an evaluation."""
        if not training:
            return super().trace(rank, training=False)
        return self.batch(epoch, number).trace(rank, training=True)

    def batch(self, epoch: int, number: int) -> BatchPlan:
        """The plan of a step on a batch, which is drawn for it."""
        drawn, prefetched = self.sample_batch(epoch, number), self.options.prefetch_batches > 0
        return BatchPlan(
            self.batch_work, drawn, includes_sampling=not self.sampler.same_every_step, prefetched=prefetched
        )

    @property
    def num_steps(self) -> int:
        """Of an epoch."""
        sampler = self.one_rank_sampler
        return -(-len(sampler.examples) // (sampler.batch_size or len(sampler.examples)))

    @cached_property
    def profiled_steps(self) -> Sequence[tuple[BatchPlan, int]]:
        """Some steps of the first epoch, each with how many it tells of: the last, which may be shorter, of itself."""
        others, last = range(self.num_steps - 1), self.num_steps - 1
        size = max(1, -(-len(others) // (NUM_PROFILED_STEPS - 1)))
        parts = [others[first : first + size] for first in range(0, len(others), size)]
        found = [(self.batch(0, part[len(part) // 2]), len(part)) for part in parts]
        return [*found, (self.batch(0, last), 1)]

    def epoch_steps(self, rank: int = 0) -> Sequence[Steps]:
        return [Steps(batch.trace(rank, training=True), number) for batch, number in self.profiled_steps]

    def memory(self, rank: int = 0) -> int:
        return max(batch.memory(rank) for batch, _ in self.profiled_steps)

    def temporary_memory(self, rank: int) -> list[int]:
        """And what each batch does, beside those that are made ahead, the one that is being made, and their inputs."""
        there = min(self.options.prefetch_batches + 2, self.num_steps)
        batches = [batch for batch, _ in self.profiled_steps]
        kept = there * max(batch.resident_memory(rank).device for batch in batches)
        return [
            *super().temporary_memory(rank),
            *(kept + most for batch in batches for most in batch.temporary_memory(rank)),
        ]

    def resident_memory(self, rank: int, *, trains: bool = True) -> MemoryUse:
        """And the features that a rank holds for its batches, with where each vertex's are."""
        known, cached = super().resident_memory(rank, trains=trains), self.cached_vertices(rank)
        rows = int(feature_bytes(self.work.graph, self.work.itemsize)[cached].sum())
        places = PLACE_BYTES * self.work.stats.num_vertices if self.options.cache_memory is not None else 0
        return known._replace(device=known.device + rows + places)

    @property
    def step_rows(self) -> tuple[int, int]:
        rows = len(self.one_rank_sampler.examples) // (self.num_steps * self.size)
        return rows, rows

    def place(self, group: Group, *, seed: int = 0) -> PlacedBatches:
        vars(self).pop("examined", None)
        return PlacedBatches(self, group, seed=seed)


class SplitPlan(MiniBatchPlan):
    """A mini-batch is split by who owns a vertex: each is drawn, loaded and computed once (GSplit, sections 3, 4)."""

    name = "split"
    splits = True

    def solve(self, state: Any) -> None:
        super().solve(state)
        self._drawn_edges: list[int] | None = state
        if self.options.partition is None and 1 < self.size <= self.work.graph.num_vertices:
            presampled = self.pre_sample()
            part = metis(self.work.graph, self.size, 0, presampled.weights)
            self.options = replace(self.options, partition=part)
            self._drawn_edges = torch.bincount(part, presampled.edges, self.size).long().tolist()

    def state(self) -> list[int] | None:
        """Edges that presampling draws for each rank, where it made the partition."""
        return self._drawn_edges


class SampledPlan(MiniBatchPlan):
    """Data parallelism: each rank draws and computes all that its share of the batch needs (GSplit, section 2.2)."""

    name = "sampled"
    splits = False


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchStep(Step):
    """A step on a mini-batch that has been made."""

    batch: BatchBlocks


class PlacedBatches(PlacedVertices):
    """A rank's vertices, as in `communicated`, and the mini-batches that it has a share of."""

    plan: MiniBatchPlan

    def __init__(self, plan: MiniBatchPlan, group: Group, *, seed: int) -> None:
        super().__init__(plan, group, seed=seed)
        self._beside = group.host_group
        """The same ranks, for the thread that makes batches."""
        self._cached, self._tables = plan.cached_vertices(group.rank), FeatureTables(self.graph.x, self.graph.features)
        if plan.options.cache_memory is not None:
            self._tables = cached_tables(self.graph, self._cached, group.device, plan.work.row_dtype, self._beside)
        self._whole = next(self._made(0)) if plan.sampler.same_every_step else None
        if self._whole:
            group.meter.add(self._whole[1])

    @property
    def links(self) -> Links:
        return self.plan.sampler.links or super().links

    def describe(self) -> dict[str, Any]:
        """And the rows that its cache holds, and the edges of presampled batches that the partition gave it."""
        found, drawn = {"feature_cache_rows": len(self._cached)}, self.plan.state()
        return super().describe() | found | ({"presampled_edges": drawn[self.group.rank]} if drawn else {})

    def steps(self, epoch: int) -> Iterator[BatchStep]:
        if self._whole:
            yield replace(self._whole[0], epoch=epoch)
            return
        for step, counts in ahead(self._made(epoch), self.plan.options.prefetch_batches, self.group.meter):
            self.group.meter.add(counts)
            yield step

    def _made(self, epoch: int) -> Iterator[tuple[BatchStep, Counts]]:
        sampler, group = replace(self.plan.sampler), self._beside  # one for this thread
        work = self.plan.batch_work
        stage_hops = work.stage_hops(BatchPlan.traits)
        backward_hops = {hop for op in work.outline(BatchPlan.traits, training=True) if op.backward for hop in op.hops}
        for number, examples in enumerate(sampler.batches(epoch)):
            group.meter = Meter()
            group.meter.where = f"epoch {epoch}, drawing batch {number}"
            drawn = exchange_requests(sampler.sample(examples, group.rank, epoch, number), group)
            num_rows = group.all_reduce(torch.tensor(drawn.level_counts), tag="sampling").tolist()
            inputs, embedded = self._inputs(drawn.rows), self._embedded_places(drawn.rows)
            batch = BatchBlocks(drawn, num_rows, stage_hops, backward_hops, embedded, self, inputs)
            step = BatchStep(
                epoch=epoch,
                number=number,
                training=True,
                vertices=drawn.own,
                links=drawn.links,
                batch_size=len(examples),
                batch=batch,
            )
            group.meter.counts.sampled.update(drawn.counts)
            yield step, group.meter.counts

    def _inputs(self, vertices: Tensor) -> Inputs:
        """What the model begins with in a batch: the features of some vertices, read at once."""
        work, device, (x, features) = self.plan.batch_work, self.group.device, self._tables
        rows = torch.empty(len(vertices), 0) if x is None else x[vertices]
        typed = typed_rows(self.graph, vertices, device, work.dtype, features)
        return Inputs(rows=rows.to(device, work.row_dtype), optimisations=work.optimisations, typed=typed)

    def forward(self, step: Step) -> Tensor:
        if not isinstance(step, BatchStep) or self._whole:
            return super().forward(step)
        with avoid_onednn():
            return super().forward(step)

    def views(self, step: Step) -> list[PlacedView]:
        if not isinstance(step, BatchStep):
            return super().views(step)
        keys = (key(self.seed, *step.key, stage) for stage in self.stages)
        inputs = step.batch.inputs
        step.batch.rewind()
        made = zip(step.batch.exchanges, keys, strict=True)
        return [PlacedView(exchange, BatchPlan.traits, key=one, inputs=inputs) for exchange, one in made]

    def _embedded_places(self, vertices: Tensor) -> Tensor:
        """Which of the rows that the rank keeps of an embedding are those of some of its vertices: int64."""
        return self._embedded_place[vertices[self._is_embedded[vertices]]]

    @cached_property
    def _is_embedded(self) -> Tensor:
        return is_embedded(self.graph)

    @cached_property
    def _embedded_place(self) -> Tensor:
        place = torch.zeros(self.graph.num_vertices, dtype=torch.int64)
        assert isinstance(self.rows, Tensor)
        own = self.rows[self._is_embedded[self.rows]]
        place[own] = torch.arange(len(own))
        return place


def batch_size_of(text: str) -> int | None:
    """A number of at least 1, or None for all; InputError for another text."""
    if text == "all":
        return None
    if text and not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise InputError(f"--batch-size {text}: give a number from 1, or all")
    return int(text or DEFAULT_BATCH_SIZE)
