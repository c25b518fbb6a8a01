"""Plans of mini-batch strategies: steps on sampled batches, and evaluations on the whole graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.comm import Group
from weft.config.strategy_flags import BatchFlags, CacheFlags
from weft.cost import Steps, Trace
from weft.data import Links, keeps_sources
from weft.data.sampling import ALL, check_fanouts, format_fanouts, parse_fanouts, takes_all
from weft.nn import (
    Aggregate,
    ByRelation,
    Converted,
    FeatureTables,
    GraphOperation,
    Inputs,
    LaplacianSum,
    Sum,
    Total,
    Workload,
    embeddings,
    is_embedded,
    typed_rows,
)
from weft.parallel.blocks.vertex_layout import VertexLayout
from weft.parallel.exchange import PlacedView
from weft.partition import metis
from weft.runtime.kernel_selection import avoid_onednn
from weft.runtime.memory.limit import check_fits_memory
from weft.runtime.meter import Counts, Meter
from weft.strategies.base import RECOMPUTING, CandidateLinks, Step, VertexOptions
from weft.strategies.resident import ResidentPlan
from weft.strategies.split.batch_blocks import BatchBlocks
from weft.strategies.split.feature_cache import cached_tables, feature_bytes, most_read
from weft.strategies.split.pre_sampling import PreSampling, pre_sample
from weft.strategies.split.read_ahead import prepare_ahead
from weft.strategies.split.sampler import BatchSampler, SampledBatch, exchange_requests, exchange_requests_locally
from weft.strategies.split.step_trace import BatchLayout
from weft.strategies.vertex.plan import VERTEX_OPTIMISATIONS, PlacedVertices, make_vertex_blocks
from weft.utils.errors import InputError
from weft.utils.random import key
from weft.utils.units import format_bytes

DEFAULT_BATCH_SIZE = 1024
"""Training vertices or links of a batch on all ranks, unless the options say otherwise."""
PLACE_BYTES = 4
"""Bytes per vertex for its position in the feature cache."""
NUM_PROFILED_STEPS = 3
"""Number of an epoch's batches that are sampled to estimate all; the last one is among them."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(BatchFlags, CacheFlags, VertexOptions):
    """Options of mini-batch strategies."""

    task: str = "node"
    """Content of a batch: vertices (node), links (link) or labelled edges (edge)."""
    negatives: int = 1
    """Negative samples of each link."""
    loss: str = ""
    """Loss: for links, bpr needs negative samples with the source of their link."""
    seed: int = 0
    """Seed of all samples."""


class MiniBatchPlan(ResidentPlan):
    """Plan that trains on mini-batches and evaluates on the whole graph, as `communicated` does."""

    options_type = BatchOptions
    exact = False
    evaluates_as = "communicated"
    optimisations = VERTEX_OPTIMISATIONS
    planned_steps = (False,)
    options: BatchOptions
    layout: VertexLayout
    splits: ClassVar[bool]
    """True if the ranks split a batch by the owners of its vertices; False if each has its own micro-batch."""

    def solve(self, state: Any) -> None:
        self._profiled: list[tuple[BatchLayout, int]] = []
        super().solve(state)
        operations = self.batch_work.outline(RECOMPUTING, training=True)
        fanouts = self.one_rank_sampler.fanouts
        if self.size > 1:
            (self._check_no_repeated_attention if self.splits else self._check_recomputable)(operations)
        if any(isinstance(fanout, tuple) for fanout in fanouts) or self.options.sampling == "weighted":
            self._check_unbiased(operations)
        self._check_sums_of_all_edges(operations)
        if self.options.accumulate_grad_batches > 1:
            self._check_accumulation(operations)
        if not self.one_rank_sampler.takes_all_edges and any(
            isinstance(op.op, ByRelation) and not op.op.mean for op in operations
        ):
            raise InputError(
                f"--fanout {self.options.fanout}: the model sums the edges of each relation, which would be biased for "
                "sampled edges: give --fanout all, or convolutions with aggr='mean'"
            )

    def _check_accumulation(self, operations: Sequence[GraphOperation]) -> None:
        """Check that accumulated batches have an effect, and the results of one batch that joins them.

        Raises:
            InputError: An epoch has fewer batches, or the model has batch norm or the like, which mixes a batch's rows.
        """
        flag = f"--accumulate-grad-batches {self.options.accumulate_grad_batches}"
        if self.options.accumulate_grad_batches > self.num_steps:
            remedy = "leave it out, or give a smaller --batch-size" if self.num_steps == 1 else "give at most as many"
            batches = "1 batch" if self.num_steps == 1 else f"{self.num_steps} batches"
            raise InputError(f"{flag}: an epoch has {batches}: {remedy}")
        if any(isinstance(op.op, Total) for op in operations):
            raise InputError(
                f"{flag}: means over vertices, as in batch norm and HANConv, would be those of each batch, not of all "
                "that are accumulated: give a larger --batch-size, or a model without them (another --norm)"
            )

    def make_layout(self) -> VertexLayout:
        return VertexLayout(make_vertex_blocks(self, ratio=0.0))

    def check_fits(self) -> None:
        if self.options.cache_bytes is not None:
            self._check_cache(self.options.cache_bytes)

    def _check_cache(self, memory: int) -> None:
        """Check that the feature cache has an effect and fits in memory.

        Raises:
            InputError: It has none, or does not fit.
        """
        row_bytes = feature_bytes(self.work.graph, self.work.itemsize)
        widths = row_bytes[row_bytes > 0]
        if self.one_rank_sampler.same_every_step or not len(widths):
            reason = (
                "a batch of all vertices is read once" if len(widths) else f"{self.work.graph.name} has no features"
            )
            raise InputError(f"--cache-memory has no effect, since {reason}: leave it out")
        if memory < (least := int(widths.min())):
            raise InputError(f"--cache-memory {memory}: the features of a vertex take {least} bytes: give as many")
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        cache = f"--cache-memory {format_bytes(memory)} on {ranks_here} {'rank' if ranks_here == 1 else 'ranks'}"
        check_fits_memory(memory * ranks_here, cache, "give less")

    def _check_no_repeated_attention(self, operations: Sequence[GraphOperation]) -> None:
        """Check that no attention is applied several times: later steps would need weights of sources on other ranks.

        Raises:
            InputError: There is one.
        """
        if any(isinstance(op.op, Aggregate) and not op.op.plain and len(op.hops) > 1 for op in operations):
            raise InputError(
                f"--strategy {self.name} supports no --decoupled model with attention: leave out --decoupled"
            )

    def _check_recomputable(self, operations: Sequence[GraphOperation]) -> None:
        """Check that nothing requires each vertex to be computed once, if several ranks compute it.

        Raises:
            InputError: The model sums over vertices, or has embedding rows.
        """
        if any(isinstance(op.op, Total) for op in operations):
            raise InputError(
                f"--strategy {self.name}: means over vertices, as in batch norm and HANConv, would count a vertex once "
                "for each rank that computes it: give --strategy split, or a model without them (another --norm)"
            )
        if embeddings(self.work.model):
            raise InputError(
                f"--strategy {self.name}: embeddings of vertices without features are stored on one rank each, which "
                "it does not support: give --strategy split"
            )

    def _check_unbiased(self, operations: Sequence[GraphOperation]) -> None:
        """Check that sums are unbiased, if the edges of a row are sampled with different probabilities.

        Raises:
            InputError: A sum would be biased.
        """
        weighted = self.options.sampling == "weighted"
        for op in operations:
            is_plain_sum = isinstance(op.op, Sum | LaplacianSum) and not op.op.weighted
            if is_plain_sum or (isinstance(op.op, ByRelation) and weighted):
                flag = "--sampling weighted" if weighted else f"--fanout {self.options.fanout}"
                remedy = "--sampling uniform or labor" if weighted else "one number for each hop"
                raise InputError(
                    f"{flag}: edges are sampled with different probabilities, but the model has a sum "
                    f"without edge weights, which would be biased: give {remedy}"
                )

    def _check_sums_of_all_edges(self, operations: Sequence[GraphOperation]) -> None:
        """Check that convolutions which read in-edge sums of sources, such as degrees, get those of all in-edges.

        The edges of their messages are another sample, whose degrees the sums of a sample would not be.

        Raises:
            InputError: The in-edges of such a sum are sampled.
        """
        fanouts = [*self.one_rank_sampler.fanouts]
        stages = {
            stage: name
            for part in self.work.model.modules()
            if isinstance(part, Converted)
            for stage, name in part.stages_of_sums.items()
        }
        hops = {op.hop: stages[op.stage] for op in operations if op.reads_edges and op.stage in stages}
        sampled = {hop: name for hop, name in hops.items() if not takes_all(fanouts[-1 - hop])}
        if sampled:
            for hop in sampled:
                fanouts[-1 - hop] = ALL
            raise InputError(
                f"--fanout {self.options.fanout}: {next(iter(sampled.values()))} reads sums over in-edges, such as "
                "degrees, which would be those of another sample than its messages: give "
                f"--fanout {format_fanouts(fanouts)}"
            )

    @cached_property
    def batch_work(self) -> Workload:
        """Workload of a step. Its input rows are constant only if all steps are alike."""
        reuse = self.work.optimisations.reuse and self.one_rank_sampler.same_every_step
        optimisations = replace(self.work.optimisations, reuse=reuse, sparse=False)
        graph = self.work.graph if self.work.has_graph else self.work.stats
        return Workload(self.work.model, graph, optimisations, num_classes=self.work.num_classes)

    @cached_property
    def sampler(self) -> BatchSampler:
        """Sampler of the batches on all ranks."""
        return replace(self.one_rank_sampler, size=self.size, part=self.part if self.splits and self.size > 1 else None)

    @cached_property
    def one_rank_sampler(self) -> BatchSampler:
        """Sampler of the batches on a single rank.

        Raises:
            InputError: Fanouts or batch size do not fit the graph or the model.
        """
        options, graph = self.options, self.work.graph
        links = Links.of(graph) if options.task == "link" else None
        pairs = links.train if links else None
        if options.task == "edge" and graph.edge_labels is not None:
            pairs = graph.edge_labels.training_pairs()
        sampler = BatchSampler(
            graph=graph,
            size=1,
            part=None,
            fanouts=check_fanouts(parse_fanouts(options.fanout), self.layout.num_hops, len(graph.relations)),
            batch_size=batch_size_of(options.batch_size),
            method=options.sampling,
            accumulate=options.accumulate_grad_batches,
            dependency=options.batch_dependency,
            seed=options.seed,
            pairs=pairs,
            links=links,
            num_negatives=options.negatives,
            keep_sources=keeps_sources(options.loss),
        )
        num_examples, kind = len(sampler.examples), {"link": "links", "edge": "edges"}.get(options.task, "vertices")
        if options.batch_size and (sampler.batch_size or 0) > num_examples:
            raise InputError(
                f"--batch-size {sampler.batch_size}: {graph.name} has {num_examples} training {kind}: give all"
            )
        if options.batch_dependency > 1 and options.sampling != "labor":
            raise InputError(
                f"--batch-dependency {options.batch_dependency} has no effect on --sampling {options.sampling}: give "
                "--sampling labor, or leave it out"
            )
        if options.batch_dependency > 1 and sampler.takes_all_edges:
            raise InputError(
                f"--batch-dependency {options.batch_dependency}: --fanout all samples nothing: leave it out"
            )
        if options.sampling == "weighted" and graph.in_edges.weight is None:
            raise InputError(f"--sampling weighted: {graph.name} has no edge weights: give uniform or labor")
        return sampler

    def pre_sample(self) -> PreSampling:
        """Return the number of accesses to each vertex.

        For `split`, a single rank samples, since batches do not depend on the ranks.
        """
        return pre_sample(self.one_rank_sampler if self.splits else self.sampler)

    def cached_vertices(self, rank: int) -> Tensor:
        """Return the vertices in a rank's feature cache, int64, ascending; for `split`, only vertices that it owns."""
        graph, memory = self.work.graph, self.options.cache_bytes
        if memory is None:
            return torch.empty(0, dtype=torch.int64)
        owned = self.layout.own_rows(rank) if self.splits else torch.arange(graph.num_vertices)
        return most_read(owned, self.pre_sample().reads, feature_bytes(graph, self.work.itemsize), memory)

    def sample_batch(self, epoch: int, number: int) -> list[SampledBatch]:
        """Return a batch as sampled by each rank.

        Args:
            epoch: Number of the epoch.
            number: Number of the batch in the epoch.
        """
        examples = self.sampler.batches(epoch)[number]
        return exchange_requests_locally(
            [self.sampler.sample(examples, rank, epoch, number) for rank in range(self.size)]
        )

    def release(self) -> None:
        super().release()
        self._profiled = []

    def trace(self, rank: int = 0, *, training: bool, epoch: int = 0, number: int = 0) -> Trace:
        """Return the operations of a training step or an evaluation.

        Args:
            rank: The rank.
            training: True for a training step.
            epoch: Epoch of the training step.
            number: Number of its batch in the epoch.
        """
        if not training:
            return super().trace(rank, training=False)
        return self.batch(epoch, number).trace(rank, training=True)

    def batch(self, epoch: int, number: int) -> BatchLayout:
        """Sample a batch, and return the layout of a step on it.

        Args:
            epoch: Number of the epoch.
            number: Number of the batch in the epoch.
        """
        batches, prefetched = self.sample_batch(epoch, number), self.options.prefetch_batches > 0
        return BatchLayout(
            self.batch_work, batches, includes_sampling=not self.sampler.same_every_step, prefetched=prefetched
        )

    @property
    def num_steps(self) -> int:
        """Number of steps of an epoch, one for each batch."""
        sampler = self.one_rank_sampler
        return -(-len(sampler.examples) // (sampler.batch_size or len(sampler.examples)))

    @property
    def profiled_steps(self) -> Sequence[tuple[BatchLayout, int]]:
        """Layouts of some steps of the first epoch, each with the number of steps that it stands for.

        The last step, whose batch may be smaller, stands for itself.
        """
        if self._profiled:
            return self._profiled
        others, last = range(self.num_steps - 1), self.num_steps - 1
        size = max(1, -(-len(others) // (NUM_PROFILED_STEPS - 1)))
        parts = [others[first : first + size] for first in range(0, len(others), size)]
        steps = [(self.batch(0, part[len(part) // 2]), len(part)) for part in parts]
        self._profiled = [*steps, (self.batch(0, last), 1)]
        return self._profiled

    def epoch_steps(self, rank: int = 0) -> Sequence[Steps]:
        return [Steps(batch.trace(rank, training=True), number) for batch, number in self.profiled_steps]

    def scored_links(self, rank: int = 0) -> Sequence[CandidateLinks | None]:
        return [batch.rank_batches[rank].links for batch, _ in self.profiled_steps]

    def memory(self, rank: int = 0) -> int:
        return max(batch.step_memory(rank, training=True).most for batch, _ in self.profiled_steps)

    def temporary_memory(self, rank: int) -> list[int]:
        """Return the peak bytes that each type of step allocates.

        For a training step, this includes the batches that are prepared in advance, the one that is being prepared, and
        their inputs.
        """
        num_prepared = min(self.options.prefetch_batches + 2, self.num_steps)
        batches = [batch for batch, _ in self.profiled_steps]
        prepared = num_prepared * max(batch.resident_memory(rank).device for batch in batches)
        return [
            *super().temporary_memory(rank),
            *(prepared + num_bytes for batch in batches for num_bytes in batch.temporary_memory(rank, training=True)),
        ]

    def extra_memory(self, rank: int) -> int:
        """Return the bytes of a rank's feature cache, and of accumulated gradients.

        Args:
            rank: The rank.
        """
        row_bytes = int(feature_bytes(self.work.graph, self.work.itemsize)[self.cached_vertices(rank)].sum())
        position_bytes = PLACE_BYTES * self.work.stats.num_vertices if self.options.cache_bytes is not None else 0
        gradient_bytes = self.work.num_shared * self.work.dtype.itemsize  # set aside while the next batch is computed
        return row_bytes + position_bytes + (gradient_bytes if self.options.accumulate_grad_batches > 1 else 0)

    @property
    def step_rows(self) -> tuple[int, int]:
        rows = len(self.one_rank_sampler.examples) // (self.num_steps * self.size)
        return rows, rows

    def place(self, group: Group, *, seed: int = 0) -> PlacedBatches:
        self._profiled = []
        return PlacedBatches(self, group, seed=seed)


class SplitPlan(MiniBatchPlan):
    """Plan of `split`: every vertex of a batch is sampled, loaded and computed by its owner only (GSplit, 3 and 4)."""

    name = "split"
    splits = True

    def solve(self, state: Any) -> None:
        super().solve(state)
        self._sampled_edges: list[int] | None = state
        if self.options.partition is None and 1 < self.size <= self.work.graph.num_vertices:
            pre_sampling = self.pre_sample()
            part = metis(self.work.graph, self.size, 0, pre_sampling.weights)
            self.options = replace(self.options, partition=part)
            self.layout = self.make_layout()
            self._sampled_edges = torch.bincount(part, pre_sampling.edges, self.size).long().tolist()

    def state(self) -> list[int] | None:
        """Return the number of edges that pre-sampling sampled for each rank, if it made the partition."""
        return self._sampled_edges


class SampledPlan(MiniBatchPlan):
    """Plan of `sampled` (data parallelism): a rank samples and computes its micro-batch (GSplit, section 2.2)."""

    name = "sampled"
    splits = False


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchStep(Step):
    """Step on a mini-batch that is already sampled."""

    batch: BatchBlocks
    """Blocks, exchanges and inputs of the batch."""


class PlacedBatches(PlacedVertices):
    """A mini-batch plan on a rank: its vertices, as in `communicated`, and its part of each mini-batch.

    Args:
        plan: The plan.
        group: The ranks.
        seed: Seed of dropout.
    """

    plan: MiniBatchPlan

    def __init__(self, plan: MiniBatchPlan, group: Group, *, seed: int) -> None:
        super().__init__(plan, group, seed=seed)
        self._sampling_group = group.host_group
        """Same ranks, for the thread that prepares batches."""
        self._cached, self._tables = plan.cached_vertices(group.rank), FeatureTables(self.graph.x, self.graph.features)
        if plan.options.cache_bytes is not None:
            self._tables = cached_tables(
                self.graph, self._cached, group.device, plan.work.row_dtype, self._sampling_group
            )
        self._constant_step = next(self._prepare(0)) if plan.sampler.same_every_step else None
        """Step and counts of the only batch, if all steps are alike; else None."""
        if self._constant_step:
            group.meter.add(self._constant_step[1])

    @property
    def links(self) -> Links:
        return self.plan.sampler.links or super().links

    def describe(self) -> dict[str, Any]:
        """Return facts for the record, including the size of the feature cache and the edges of pre-sampled batches."""
        facts, edges = {"feature_cache_rows": len(self._cached)}, self.plan.state()
        return super().describe() | facts | ({"presampled_edges": edges[self.group.rank]} if edges else {})

    def steps(self, epoch: int) -> Iterator[BatchStep]:
        if self._constant_step:
            yield replace(self._constant_step[0], epoch=epoch)
            return
        for step, counts in prepare_ahead(self._prepare(epoch), self.plan.options.prefetch_batches, self.group.meter):
            self.group.meter.add(counts)
            yield step

    def _prepare(self, epoch: int) -> Iterator[tuple[BatchStep, Counts]]:
        sampler, group = replace(self.plan.sampler), self._sampling_group  # a copy for this thread
        work = self.plan.batch_work
        stage_hops = work.stage_hops(RECOMPUTING)
        backward_hops = {hop for op in work.outline(RECOMPUTING, training=True) if op.backward for hop in op.hops}
        batches, accumulate = sampler.batches(epoch), sampler.accumulate
        for number, examples in enumerate(batches):
            joined = batches[number - number % accumulate :][:accumulate]
            group.meter = Meter()
            group.meter.activity = f"epoch {epoch + 1}, sampling batch {number}"
            sampled = exchange_requests(sampler.sample(examples, group.rank, epoch, number), group)
            num_rows = group.all_reduce(torch.tensor(sampled.level_counts), tag="sampling").tolist()
            inputs, positions = self._inputs(sampled.rows), self._embedding_positions(sampled.rows)
            batch = BatchBlocks(sampled, num_rows, stage_hops, backward_hops, positions, self, inputs)
            step = BatchStep(
                epoch=epoch,
                number=number // accumulate,
                updates=examples is joined[-1],
                training=True,
                vertices=sampled.owned,
                links=sampled.links,
                batch_size=sum(map(len, joined)),
                batch=batch,
            )
            group.meter.counts.sampled.update(sampled.counts)
            yield step, group.meter.counts

    def _inputs(self, vertices: Tensor) -> Inputs:
        """Return the rows that the model begins with in a batch: the features of its vertices."""
        work, device, (x, features) = self.plan.batch_work, self.group.device, self._tables
        rows = torch.empty(len(vertices), 0) if x is None else x[vertices]
        typed = typed_rows(self.graph, vertices, device, work.dtype, features)
        return Inputs(rows=rows.to(device, work.row_dtype), optimisations=work.optimisations, typed=typed)

    def forward(self, step: Step) -> Tensor:
        if not isinstance(step, BatchStep) or self._constant_step:
            return super().forward(step)
        with avoid_onednn():
            return super().forward(step)

    def views(self, step: Step) -> list[PlacedView]:
        if not isinstance(step, BatchStep):
            return super().views(step)
        keys = (key(self.seed, *step.key, stage) for stage in self.stages)
        inputs = step.batch.inputs
        step.batch.rewind()
        stages = zip(step.batch.exchanges, keys, strict=True)
        return [PlacedView(exchange, RECOMPUTING, key=stage_key, inputs=inputs) for exchange, stage_key in stages]

    def _embedding_positions(self, vertices: Tensor) -> Tensor:
        """Return the positions of vertices among the embedding rows that the rank stores, int64."""
        return self._embedding_position[vertices[self._is_embedded[vertices]]]

    @cached_property
    def _is_embedded(self) -> Tensor:
        return is_embedded(self.graph)

    @cached_property
    def _embedding_position(self) -> Tensor:
        position = torch.zeros(self.graph.num_vertices, dtype=torch.int64)
        assert isinstance(self.rows, Tensor)
        stored = self.rows[self._is_embedded[self.rows]]
        position[stored] = torch.arange(len(stored))
        return position


def batch_size_of(text: str) -> int | None:
    """Return the batch size that a text specifies; None for `all`.

    Raises:
        InputError: The text is neither `all` nor a number of at least 1.
    """
    if text == "all":
        return None
    if text and not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise InputError(f"--batch-size {text}: give a number from 1, or all")
    return int(text or DEFAULT_BATCH_SIZE)
