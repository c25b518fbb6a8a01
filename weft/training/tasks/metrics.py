"""Tasks as the training loop uses them, and the node task.

Most metrics are computed from sums, which each rank computes over its rows and the ranks add. For the others, all
scored rows are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.comm import Group
from weft.config.config import TaskOptions
from weft.data import Labels
from weft.strategies import Step
from weft.training.custom_functions import RowLoss
from weft.training.tasks.losses import make_loss
from weft.training.tasks.row_batching import row_blocks
from weft.training.tasks.scores import SPLITS, Metric, make_metrics

MetricCounts = dict[str, dict[str, Any]]
"""Results of an evaluation by split and metric: sums over a rank's rows, or the score over all ranks' rows."""


class Task(Protocol):
    """Loss and scores of the rows that the forward pass of a strategy returns."""

    def loss(self, rows: Tensor, step: Step, span: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return the part of a step's loss of some rows, [], and its gradient with respect to these.

        The parts of all rows of all ranks add up.

        Args:
            rows: Output rows of the model on this rank.
            step: The step.
            span: Range of these rows among those of the rank, if the loss is that of vertices; None: all rows.
        """
        ...

    def counts(self, rows: Tensor, step: Step) -> dict[str, Any]:
        """Return this rank's results of an evaluation, as JSON values.

        Args:
            rows: Output rows of the model on this rank.
            step: The step.
        """
        ...

    def scores(self, counts: list[dict[str, Any]]) -> dict[str, float | None]:
        """Return the scores by name, given the results of all ranks."""
        ...

    def details(self, counts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what a report shows next to the scores, as JSON values by split and name; see `report_metrics`.

        Args:
            counts: Results of all ranks.
        """
        ...


class Examples(NamedTuple):
    """Training rows of a rank in one step."""

    rows: Tensor
    """Indices of the training rows among the rank's rows, int64 [k]."""
    y: Tensor
    """Labels of `rows`, [k, ...]."""
    size: int
    """Number of training rows of the optimizer step on all ranks."""


class NodeTask:
    """Task that trains a model to predict the labels of vertices.

    The loss is the sum over this rank's training rows of a step, divided by the number of training rows on all ranks.
    Rows are processed in blocks, except for metrics that need all scored rows at once; these are gathered on every
    rank.

    Args:
        labels: Labels of vertices, or of other rows.
        rows: Vertices of this rank's rows.
        group: The ranks.
        empty: Allocates the gradient of a tensor of rows, in the same kind of memory.
        device: Device of the logits. Default: the device of the group.
        loss: Loss of each row. Default: by the kind of labels.
        metrics: The metrics. Default: by the kind of labels.
    """

    def __init__(
        self,
        labels: Labels,
        rows: slice | Tensor,
        group: Group,
        empty: Callable[[Tensor], Tensor] = torch.empty_like,
        device: torch.device | None = None,
        loss: RowLoss | None = None,
        metrics: Sequence[Metric] | None = None,
    ) -> None:
        assert labels.y is not None
        device = device or group.device
        self.group, self.empty = group, empty
        self.row_loss = make_loss(TaskOptions(), labels) if loss is None else loss
        self.metrics = make_metrics(TaskOptions(), labels) if metrics is None else metrics
        self.labelled = {split: mask for split in SPLITS if (mask := labels.labelled(split)) is not None}
        self.num_labelled = {split: int(mask.sum()) for split, mask in self.labelled.items()}
        self.labelled_rows = {split: mask[rows].nonzero().view(-1).to(device) for split, mask in self.labelled.items()}
        self.rows = rows
        self.all_y, self.y = labels.y, labels.y[rows].to(device)
        self._examples: tuple[Tensor | None, Examples] | None = None

    def examples(self, step: Step) -> Examples:
        """Return the training rows of this rank in a step: all that it has, or those of a mini-batch."""
        if self._examples is None or self._examples[0] is not step.vertices:
            self._examples = step.vertices, self._examples_of(step)
        return self._examples[1]

    def _examples_of(self, step: Step) -> Examples:
        if step.vertices is None:
            rows = self.labelled_rows["train"]
            return Examples(rows, self.y[rows], self.num_labelled["train"])
        rows = self.labelled["train"][step.vertices].nonzero().view(-1)
        y, size = self.all_y[step.vertices[rows]], step.batch_size or self.num_labelled["train"]
        return Examples(rows.to(self.y.device), y.to(self.y.device), size)

    def loss(self, logits: Tensor, step: Step, span: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return the part of the loss of some rows, [], and its gradient with respect to the logits, [n, C].

        Args:
            logits: Logits of rows of this rank, [n, C].
            step: The step.
            span: Range of these rows among those of the rank; None: all.
        """
        logits = logits.detach()
        grad, total = self.empty(logits), logits.new_zeros(())
        row_ids, y, number = self.examples(step)
        if span is not None:
            first, end = bounds_of(row_ids, span)
            row_ids, y = row_ids[first:end] - span.start, y[first:end]
        for block, (part,) in row_blocks([row_ids], logits, grad):
            rows = row_ids[part] - block.start
            grad[block].zero_()
            if not len(rows):
                continue
            block_logits = logits[block].index_select(0, rows).requires_grad_()
            loss = self.row_loss(block_logits, cast_labels(y[part], block_logits)).sum() / number
            (block_grad,) = torch.autograd.grad(loss, block_logits)
            grad[block].index_copy_(0, rows, block_grad)
            total += loss.detach()
        return total, grad

    def counts(self, logits: Tensor, step: Step) -> MetricCounts:
        """Return the results of each split and metric; see `counts_of`.

        Args:
            logits: Logits of this rank's rows, [n, C].
            step: The step, which for mini-batch strategies says which vertices the rows are.
        """
        return self.counts_of([(slice(0, len(logits)), logits)], step)

    @torch.no_grad()
    def counts_of(self, ranges: Iterable[tuple[slice, Tensor]], step: Step) -> MetricCounts:
        """Return the results of each split and metric: sums over this rank's rows, or the score over all rows.

        Args:
            ranges: Ranges of this rank's rows with their logits [m, C]; at least one.
            step: The step, which for mini-batch strategies says which vertices the rows are.
        """
        row_ids_of, y, vertices = self.labelled_rows, self.y, self.rows
        if step.vertices is not None:
            y, vertices = self.all_y[step.vertices].to(y.device), step.vertices
            row_ids_of = {
                split: mask[vertices].nonzero().view(-1).to(y.device) for split, mask in self.labelled.items()
            }
        results: MetricCounts = {split: {} for split in row_ids_of}
        gathers = any(metric.sums is None for metric in self.metrics)
        vertex_ids = {split: mask.nonzero().view(-1) for split, mask in self.labelled.items()} if gathers else {}
        scored: dict[str, Tensor] = {}
        # 1. Walk over blocks of rows: add their sums, and collect logits for metrics that need all rows.
        # 2. Add up the collected logits of all ranks, and compute these metrics.
        for span, logits in ranges:
            if gathers and not scored:
                scored = {split: logits.new_zeros(count, logits.shape[1]) for split, count in self.num_labelled.items()}
            in_span = [ids[slice(*bounds_of(ids, span))] for ids in row_ids_of.values()]
            for block, parts in row_blocks([ids - span.start for ids in in_span], logits):
                for split, ids_of_span, part in zip(row_ids_of, in_span, parts, strict=True):
                    row_ids = ids_of_span[part]
                    block_logits = logits[block].index_select(0, row_ids - (span.start + block.start))
                    for metric in self.metrics:
                        if metric.sums is not None and split in metric.splits:
                            sums = metric.sums(block_logits, cast_labels(y[row_ids], block_logits)).double().cpu()
                            results[split][metric.name] = results[split].get(metric.name, 0) + sums
                    if gathers:
                        ids = row_ids.cpu()
                        ids = ids + (vertices.start or 0) if isinstance(vertices, slice) else vertices[ids]
                        position = torch.searchsorted(vertex_ids[split], ids)
                        scored[split][position.to(logits.device)] = block_logits
        for split, rows in scored.items():
            results[split] |= self._of_all(split, rows)
        return {
            split: {name: to_json(value) for name, value in of_split.items()} for split, of_split in results.items()
        }

    def _of_all(self, split: str, scored: Tensor) -> dict[str, Any]:
        """Return the scores over all rows of a split, for metrics that need all rows. All ranks must call it.

        Only rank 0 computes what is for a report, since it writes the record.

        Args:
            split: The split.
            scored: Logits of all its rows, with zeros in the rows of other ranks.
        """
        logits = self.group.all_reduce(scored.to(self.group.device), tag="scores")
        y = cast_labels(self.all_y[self.labelled[split]].to(logits.device), logits)
        metrics = [
            metric
            for metric in self.metrics
            if metric.sums is None and split in metric.splits and not (metric.for_report and self.group.rank)
        ]
        return {metric.name: metric.score(logits, y) if len(y) else None for metric in metrics}

    def scores(self, counts: list[MetricCounts]) -> dict[str, float | None]:
        """Return the score of each metric and split. None: unknown, for instance for an empty split."""
        scores = {}
        for metric in self.metrics:
            for split in metric.splits if not metric.for_report else ():
                score = self._score(metric, split, counts)
                scores[f"{split}_{metric.name}"] = float(score) if score is not None and math.isfinite(score) else None
        return scores

    def details(self, counts: list[MetricCounts]) -> dict[str, dict[str, Any]]:
        """Return the results for a report by split and metric; see `Task.details`."""
        details: dict[str, dict[str, Any]] = {}
        for metric in self.metrics:
            for split in metric.splits if metric.for_report else ():
                if (result := self._score(metric, split, counts)) is not None:
                    details.setdefault(split, {})[metric.name] = result
        return details

    def _score(self, metric: Metric, split: str, counts: list[MetricCounts]) -> Any:
        """Return the score of a metric over a split. None: unknown.

        Args:
            metric: The metric.
            split: The split.
            counts: Results of all ranks: sums, or the same score from each.
        """
        parts = [rank[split][metric.name] for rank in counts if metric.name in rank.get(split, {})]
        if not self.num_labelled.get(split):
            return None
        if metric.sums is None:
            return parts[0]
        return metric.score(torch.stack([torch.tensor(part, dtype=torch.float64) for part in parts]).sum(0))


def bounds_of(row_ids: Tensor, span: slice) -> list[int]:
    """Return the positions of the first row in a range, and of the first one after it.

    Args:
        row_ids: Rows, int64 [k], ascending.
        span: The range.
    """
    bounds: list[int] = torch.searchsorted(row_ids, row_ids.new_tensor([span.start, span.stop])).tolist()
    return bounds


def cast_labels(y: Tensor, logits: Tensor) -> Tensor:
    """Return labels in the dtype that losses and metrics expect: classes as int64, others as the logits.

    Args:
        y: The labels.
        logits: The logits.
    """
    return y.to(logits.dtype) if y.is_floating_point() else y


def to_json(value: Tensor | float | None) -> Any:
    """Return a tensor as nested lists, and other values unchanged."""
    return value.tolist() if isinstance(value, Tensor) else value
