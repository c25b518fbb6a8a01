"""What a run learns and is scored by: sums over the rows that a rank answers for, which the ranks then add.

Or scores of all rows, which are brought together for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.comm import Group
from weft.config.config import Config
from weft.data import Graph
from weft.strategies import Step
from weft.training.custom_functions import RowLoss
from weft.training.tasks.losses import make_loss
from weft.training.tasks.row_batching import row_blocks
from weft.training.tasks.scores import Metric, make_metrics

SPLITS = ("train", "val", "test")
MetricCounts = dict[str, dict[str, Any]]
"""By split and metric: the sums over a rank's rows, or the score of all ranks' rows."""


class Task(Protocol):
    """A loss and scores of the rows that a strategy's forward pass gives, as the trainer knows them."""

    def loss(self, rows: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """This rank's part of a step's loss, [], and its gradient by the rows; the ranks' parts add up."""
        ...

    def counts(self, rows: Tensor, step: Step) -> dict[str, Any]:
        """What this rank knows of an evaluation, in values that JSON knows."""
        ...

    def scores(self, counts: list[dict[str, Any]]) -> dict[str, float | None]:
        """The scores by name, from the counts of all ranks."""
        ...


class Examples(NamedTuple):
    """What a rank learns from in a step."""

    rows: Tensor
    """int64 [k]: which of its rows."""
    y: Tensor
    """[k, ...]: their labels."""
    size: int
    """How many there are on all ranks."""


class NodeTask:
    """Learning what vertices are, of their labels, by the loss of each row; without one, by what labels these are.

    The loss is the sum over the step's training rows on this rank divided by the number of them on all ranks. All is
    done in blocks of rows, but for metrics that need the scored rows together: every rank has these then.
    rows: the vertices this rank answers for. empty: makes memory for a gradient, like the rows that it is of. device:
    where logits are, if not on the group's.
    """

    def __init__(
        self,
        graph: Graph,
        rows: slice | Tensor,
        group: Group,
        empty: Callable[[Tensor], Tensor] = torch.empty_like,
        device: torch.device | None = None,
        loss: RowLoss | None = None,
        metrics: Sequence[Metric] | None = None,
    ) -> None:
        assert graph.y is not None
        device = device or group.device
        self.group, self.empty = group, empty
        self.row_loss = make_loss(Config(), graph) if loss is None else loss
        self.metrics = make_metrics(Config(), graph) if metrics is None else metrics
        self.labelled = {split: mask for split in SPLITS if (mask := graph.labelled(split)) is not None}
        self.num_labelled = {split: int(mask.sum()) for split, mask in self.labelled.items()}
        self.chosen = {split: mask[rows].nonzero().view(-1).to(device) for split, mask in self.labelled.items()}
        self.vertices = torch.arange(graph.num_vertices)[rows]
        self.graph_y, self.y = graph.y, graph.y[rows].to(device)
        self._examples: tuple[Tensor | None, Examples] | None = None

    def examples(self, step: Step) -> Examples:
        """What this rank learns from in a step: all its labelled rows, or those of a mini-batch."""
        if self._examples is None or self._examples[0] is not step.vertices:
            self._examples = step.vertices, self._examples_of(step)
        return self._examples[1]

    def _examples_of(self, step: Step) -> Examples:
        if step.vertices is None:
            rows = self.chosen["train"]
            return Examples(rows, self.y[rows], self.num_labelled["train"])
        y = self.graph_y[step.vertices].to(self.y.device)
        return Examples(torch.arange(len(y), device=y.device), y, step.batch_size)

    def loss(self, logits: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """This rank's part of the loss, [], and its gradient [n, C] by the logits."""
        logits = logits.detach()
        grad, total = self.empty(logits), logits.new_zeros(())
        chosen, y, number = self.examples(step)
        for block, (part,) in row_blocks([chosen], logits, grad):
            rows = chosen[part] - block.start
            grad[block].zero_()
            if not len(rows):
                continue
            here = logits[block].index_select(0, rows).requires_grad_()
            loss = self.row_loss(here, cast_labels(y[part], here)).sum() / number
            (grad_here,) = torch.autograd.grad(loss, here)
            grad[block].index_copy_(0, rows, grad_here)
            total += loss.detach()
        return total, grad

    def counts(self, logits: Tensor, step: Step) -> MetricCounts:
        """Per split and metric, the sums over this rank's rows, or, where all rows are needed, the score."""
        chosen_of, y, vertices = self.chosen, self.y, self.vertices
        if step.vertices is not None:
            y, vertices = self.graph_y[step.vertices].to(logits.device), step.vertices
            chosen_of = {
                split: mask[vertices].nonzero().view(-1).to(logits.device) for split, mask in self.labelled.items()
            }
        found: MetricCounts = {split: {} for split in chosen_of}
        together = any(metric.sums is None for metric in self.metrics)
        ids = {split: mask.nonzero().view(-1) for split, mask in self.labelled.items()} if together else {}
        scored = {
            split: logits.new_zeros(number if together else 0, logits.shape[1])
            for split, number in self.num_labelled.items()
        }
        for block, parts in row_blocks(list(chosen_of.values()), logits):
            for (split, chosen), part in zip(chosen_of.items(), parts, strict=True):
                here = logits[block].index_select(0, chosen[part] - block.start)
                for metric in self.metrics:
                    if metric.sums is not None:
                        sums = metric.sums(here, cast_labels(y[chosen[part]], here)).double().cpu()
                        found[split][metric.name] = found[split].get(metric.name, 0) + sums
                if together:
                    place = torch.searchsorted(ids[split], vertices[chosen[part].cpu()])
                    scored[split][place.to(logits.device)] = here
        for split in scored if together else ():
            found[split] |= self._of_all(split, scored[split])
        return {split: {name: to_json(one) for name, one in of_split.items()} for split, of_split in found.items()}

    def _of_all(self, split: str, scored: Tensor) -> dict[str, float | None]:
        """The scores of all a split's rows, from the logits of this rank's among them; all ranks call it."""
        logits = self.group.all_reduce(scored.to(self.group.device), tag="scores")
        y = cast_labels(self.graph_y[self.labelled[split]].to(logits.device), logits)
        metrics = [metric for metric in self.metrics if metric.sums is None]
        return {metric.name: metric.score(logits, y) if len(y) else None for metric in metrics}

    def scores(self, counts: list[MetricCounts]) -> dict[str, float | None]:
        """Each metric of each split; None where it is not known, as of an empty split."""
        made = {}
        for metric in self.metrics:
            for split in SPLITS:
                parts = [rank[split][metric.name] for rank in counts if metric.name in rank.get(split, {})]
                score = combined(metric, parts) if self.num_labelled.get(split) else None
                made[f"{split}_{metric.name}"] = score if score is not None and math.isfinite(score) else None
        return made


def combined(metric: Metric, parts: list[Any]) -> float | None:
    """The score of a split, from what each rank knows."""
    if metric.sums is None:
        return None if parts[0] is None else float(parts[0])
    return metric.score(torch.stack([torch.tensor(part, dtype=torch.float64) for part in parts]).sum(0))


def cast_labels(y: Tensor, logits: Tensor) -> Tensor:
    """Labels as losses and metrics take them: classes as int64, others in the logits' type."""
    return y.to(logits.dtype) if y.is_floating_point() else y


def to_json(value: Tensor | float | None) -> Any:
    """In JSON's types."""
    return value.tolist() if isinstance(value, Tensor) else value
