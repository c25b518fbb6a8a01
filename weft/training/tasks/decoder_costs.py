"""Work and memory that a task on edges adds to a plan: its decoder, and the pairs that it scores."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.autotune import RankEstimate
from weft.config.config import TaskOptions
from weft.cost import Operation, Steps, Trace
from weft.data import EdgeLabels, Links, keeps_sources
from weft.nn import Decoder, LinkModel
from weft.nn.workload.flops import FlopCounter
from weft.runtime.kernel_call import KernelCall, merged
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies import CandidateLinks, Plan
from weft.training.tasks.edge_prediction import EdgeAssignment
from weft.training.tasks.link_prediction import MAX_PAIRS, LinkAssignment, pair_scores
from weft.training.tasks.ranking import MAX_SCORES
from weft.training.tasks.scores import compares_ranks, values_of_k
from weft.training.tasks.top_targets import TOP_METRICS

LINK_BYTES = 24
"""Bytes of a link, a pair or a labelled edge as a row of an int64 tensor."""
LOCATED_BYTES = LINK_BYTES + 32
"""Bytes of a pair with row positions, and of its rows in the two matrices that select its endpoints."""
ADJOINT_BYTES = 16
"""Further bytes of a pair in a training step: its entries in the transposes of these matrices."""


class DecoderCosts:
    """Costs of a task on edges under a plan, which has only those of the encoder.

    Args:
        options: The task's options.
        seed: Seed of the negative samples.
        plan: The plan of a workload whose model is a `LinkModel`.
    """

    def __init__(self, options: TaskOptions, seed: int, plan: Plan) -> None:
        self.options, self.plan, work = options, plan, plan.work
        assert isinstance(work.model, LinkModel)
        self.decoder, self.width, self.itemsize = work.model.decoder, work.num_outputs, work.dtype.itemsize
        self.assignment: EdgeAssignment | LinkAssignment
        """Pairs of each rank in training steps."""
        self.evaluation: EdgeAssignment | LinkAssignment
        """Pairs of each rank in evaluations."""
        owner, size, labels = owner_of_rows(plan, training=True), plan.size, work.graph.labels(options.task)
        if isinstance(labels, EdgeLabels):
            self.assignment = EdgeAssignment(owner=owner, size=size, labels=labels)
            self.evaluation = replace(self.assignment, owner=owner_of_rows(plan, training=False))
        else:
            self.assignment = self.evaluation = LinkAssignment(
                owner=owner,
                size=size,
                links=Links.of(work.graph),
                seed=seed,
                num_negatives=options.negatives,
                keep_sources=keeps_sources(options.loss),
                num_eval_negatives=options.eval_negatives,
            )

    def add_to(self, rank: int, estimate: RankEstimate) -> RankEstimate:
        """Return the estimate of a rank with the costs of the task.

        Args:
            rank: The rank.
            estimate: Estimate of the rank from the plan.
        """
        num_rows = int((self.assignment.owner == rank).sum())
        zeros = KernelCall("pass", (num_rows * self.width * self.itemsize,))  # the gradient of all rows
        steps = [
            Steps(Trace(operations=(*trace.operations, *self.operations(rank, links))), number)
            for (trace, number), links in zip(estimate.steps, self.plan.scored_links(rank), strict=True)
        ]
        return replace(
            estimate,
            steps=steps,
            untraced_calls=[zeros, *(call for call in estimate.untraced_calls if call.kernel == "update")],
            memory=estimate.memory._replace(device=estimate.memory.device + self.memory(rank)),
        )

    def operations(self, rank: int, links: CandidateLinks | None = None, epoch: int = 0) -> list[Operation]:
        """Return the operations of the task in a training step.

        Args:
            rank: The rank.
            links: Pairs of a mini-batch; None: all training pairs of the rank.
            epoch: Epoch of the step, on which negative samples depend.
        """
        row_bytes = self.width * self.itemsize
        if links is None:
            pairs, exchanges = self._training_pairs(rank, epoch), self._exchanges(rank, epoch)
        else:
            pairs, exchanges = links.pairs, ()
            if links.route is not None:
                sent, received = (row_bytes * sum(counts) for counts in (links.route.sent, links.route.received))
                rows = Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received)
                exchanges = (rows, rows.adjoint())
        counter = FlopCounter()
        num_columns = self._run(len(pairs), counter, training=True)
        num_endpoints = len(pairs[:, :2].unique())
        calls = [
            *(call for position_calls in counter.calls.values() for call in position_calls),
            KernelCall("gather", (num_endpoints, row_bytes), 2),  # rows of the endpoints, and their gradients
            KernelCall("gather", (len(pairs), row_bytes), 4),  # sources and targets of the pairs, and their gradients
            KernelCall("loss", (len(pairs), num_columns)),
        ]
        return [Operation(kind="dense", flops=counter.total, calls=merged(calls)), *exchanges]

    def memory(self, rank: int) -> int:
        """Return the peak bytes of the task on a rank: ids of pairs, rows of their endpoints, and a block's tensors.

        Args:
            rank: The rank.
        """
        assignment, num_vertices = self.evaluation, len(self.evaluation.owner)
        if isinstance(assignment, LinkAssignment):
            links, pairs = assignment.links, self._held_out
            scored = pairs[assignment.assigned(pairs, rank)]
            num_true = len(links.edges) + len(links.val) + len(links.test)
            # Vertex ids: owner, row of each vertex, and rows by rank. Links: training links, all links, their codes.
            lasting = 8 * 3 * num_vertices + LINK_BYTES * (len(links.train) + len(links.edges)) + 2 * 8 * num_true
        else:
            scored = assignment.labels.pairs(assignment.edges(rank))
            lasting = 8 * 2 * num_vertices + 8 * len(scored)
        lasting += LOCATED_BYTES * len(scored)
        steps = [self._step_memory(*self._scored(rank, links), training=True) for links in self.plan.scored_links(rank)]
        num_fetched = len(assignment.missing(scored, rank)[0])
        evaluation = self._step_memory(scored, num_fetched, training=False) + self._ranking_memory()
        return lasting + max(*steps, evaluation)

    def _scored(self, rank: int, links: CandidateLinks | None) -> tuple[Tensor, int]:
        """Return the pairs of a rank in a training step, and the number of rows that it fetches for them.

        Args:
            rank: The rank.
            links: Pairs of a mini-batch; None: all training pairs of the rank.
        """
        if links is None:
            pairs = self._training_pairs(rank)
            return pairs, len(self.assignment.missing(pairs, rank)[0])
        return links.pairs, sum(links.route.received) if links.route else 0

    def _step_memory(self, pairs: Tensor, num_fetched: int, *, training: bool) -> int:
        """Return the peak bytes of a training step or evaluation, with the pairs if it is a training step.

        Args:
            pairs: The pairs that the rank scores.
            num_fetched: Number of rows that it fetches from other ranks.
            training: True for a training step.
        """
        row_bytes, block, peak = self.width * self.itemsize, pairs[:MAX_PAIRS], TensorPeak()
        num_columns = self._run(len(block), peak, training=training)
        # Rows of the endpoints, and in training the gradients by source and target; rows of other ranks.
        rows = (1 + 2 * training) * len(block[:, :2].unique()) + (1 + training) * num_fetched
        ids = (LOCATED_BYTES + ADJOINT_BYTES + LINK_BYTES) * len(pairs) if training else 0
        outputs = 0 if training else 2 * len(pairs) * num_columns * self.itemsize
        return peak.most + rows * row_bytes + ids + outputs

    def _ranking_memory(self) -> int:
        """Return the bytes of a block of scores with which an evaluation ranks all vertices; 0 if it does not."""
        metrics, options = self.options.metrics, self.options
        if options.task != "link":
            return 0
        ranks_all = compares_ranks(metrics) and not options.eval_negatives
        scores = MAX_SCORES if ranks_all or values_of_k(metrics, *TOP_METRICS) else 0
        return scores // self.plan.size * (self.itemsize + 2)  # and two masks

    def _training_pairs(self, rank: int, epoch: int = 0) -> Tensor:
        """Return the pairs [p, 3] of a rank in a step on all training pairs."""
        assignment = self.assignment
        return assignment.train(rank, epoch) if isinstance(assignment, LinkAssignment) else assignment.train(rank)

    def _exchanges(self, rank: int, epoch: int) -> Sequence[Operation]:
        """Return the exchanges of a step on all training pairs."""
        assignment, sizes = self.assignment, (rank, self.width, self.itemsize)
        if isinstance(assignment, LinkAssignment):
            return assignment.trace(*sizes, epoch=epoch, ranked=False).operations
        return assignment.trace(*sizes).operations

    @cached_property
    def _held_out(self) -> Tensor:
        """All pairs that evaluations of links score."""
        assert isinstance(self.assignment, LinkAssignment)
        return self.assignment.held_out()

    def _run(self, num_pairs: int, observer: AbstractContextManager[Any], *, training: bool) -> int:
        """Run the decoder on pairs without data, with its backward pass, and return the columns of its result.

        Args:
            num_pairs: Number of pairs.
            observer: Counter of FLOPs or memory.
            training: True for a training step.
        """
        decoder = copy.deepcopy(self.decoder).to("meta").train(training)
        dtype, num_features = self.plan.work.dtype, 0
        if isinstance(self.assignment, EdgeAssignment):
            num_features = self.assignment.labels.num_features
        with torch.device("meta"), torch.set_grad_enabled(training), observer:
            source, target = (torch.empty(num_pairs, self.width, dtype=dtype, requires_grad=training) for _ in range(2))
            if isinstance(decoder, Decoder):
                scores = pair_scores(decoder, source, target, torch.empty(num_pairs, dtype=torch.int64))[:, None]
            else:
                scores = decoder(source, target, torch.empty(num_pairs, num_features))
            if training:
                scores.backward(torch.empty_like(scores))
        return scores.shape[1]


def owner_of_rows(plan: Plan, *, training: bool) -> Tensor:
    """Return the rank that has each vertex's row of the model's result in a step, int64 [N]; -1 if none has it.

    Args:
        plan: The plan.
        training: True for a training step.
    """
    owner = torch.full((plan.work.stats.num_vertices,), -1)
    for rank in range(plan.size):
        owner[plan.own_rows(rank, training=training)] = rank
    return owner
