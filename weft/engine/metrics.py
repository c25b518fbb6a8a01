"""What a run learns and is scored by: sums over the rows that a rank answers for, which the ranks then add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from weft.comm import Group
from weft.data import Graph
from weft.engine.blocks import row_blocks
from weft.strategies import Step

SPLITS = ("train", "val", "test")
Counts = dict[str, tuple[int, int]]


class Task(Protocol):
    """A loss and scores of the rows that a strategy's forward pass gives, as the trainer knows them."""

    def loss(self, rows: Tensor, step: Step) -> tuple[float, Tensor]:
        """This rank's part of a step's loss, and its gradient by the rows; the ranks' parts add up."""
        ...

    def counts(self, rows: Tensor, step: Step) -> dict[str, Any]:
        """What this rank knows of an evaluation, in values that JSON knows."""
        ...

    def scores(self, counts: list[dict[str, Any]]) -> dict[str, float | None]:
        """The scores by name, from the counts of all ranks."""
        ...


class NodeTask:
    """Node classification: cross entropy and accuracy, or, with several labels, its binary form and micro-F1.

    The loss is the sum over the step's training rows on this rank divided by the number of them on all ranks. All is
    done in blocks of rows.
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
    ) -> None:
        assert graph.y is not None
        device = device or group.device
        self.group, self.empty = group, empty
        self.multilabel = graph.multilabel
        self.labelled = {split: mask for split in SPLITS if (mask := graph.labelled(split)) is not None}
        self.num_labelled = {split: int(mask.sum()) for split, mask in self.labelled.items()}
        self.chosen = {split: mask[rows].nonzero().view(-1).to(device) for split, mask in self.labelled.items()}
        self.score = score_of(graph)
        self.graph_y, self.y = graph.y, graph.y[rows].to(device)

    def loss(self, logits: Tensor, step: Step) -> tuple[float, Tensor]:
        """This rank's part of the loss, and its gradient [n, C] by the logits."""
        logits = logits.detach()
        grad, total = self.empty(logits), logits.new_zeros(())
        chosen, y, number = self.chosen["train"], self.y, self.num_labelled["train"]
        if step.vertices is not None:
            y = self.graph_y[step.vertices].to(logits.device)
            chosen, number = torch.arange(len(y), device=logits.device), step.batch_size
        for block, (part,) in row_blocks([chosen], logits, grad):
            rows = chosen[part] - block.start
            here = logits[block].index_select(0, rows).requires_grad_()
            loss = self._sum(here, y[chosen[part]]) / number
            (grad_here,) = torch.autograd.grad(loss, here)
            grad[block].zero_().index_copy_(0, rows, grad_here)
            total += loss.detach()
        return total.item(), grad

    def counts(self, logits: Tensor, step: Step) -> Counts:
        """Per split, the two sums whose ratio is the score: correct and all, or 2 TP and 2 TP + FP + FN."""
        chosen_of, y = self.chosen, self.y
        if step.vertices is not None:
            y, vertices = self.graph_y[step.vertices].to(logits.device), step.vertices
            chosen_of = {
                split: mask[vertices].nonzero().view(-1).to(logits.device) for split, mask in self.labelled.items()
            }
        sums = {split: self.y.new_zeros(2, dtype=torch.int64) for split in chosen_of}
        for block, parts in row_blocks(list(chosen_of.values()), logits):
            for (split, chosen), part in zip(chosen_of.items(), parts, strict=True):
                here = logits[block].index_select(0, chosen[part] - block.start)
                sums[split] += self._pair(here, y[chosen[part]])
        return {split: (int(pair[0]), int(pair[1])) for split, pair in sums.items()}

    def scores(self, counts: list[Counts]) -> dict[str, float | None]:
        """The accuracy, or micro-F1, of each split; None where it is empty."""
        return {f"{split}_{self.score}": score(counts, split) for split in SPLITS}

    def _sum(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of rows, not yet divided by their number."""
        if not self.multilabel:
            return functional.cross_entropy(logits, y, reduction="sum")
        return functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="sum") / y.shape[1]

    def _pair(self, logits: Tensor, y: Tensor) -> Tensor:
        if not self.multilabel:
            correct = logits.argmax(1) == y
            return torch.stack([correct.sum(), torch.ones_like(correct).sum()])
        predicted, true = logits > 0, y > 0.5
        return torch.stack([2 * (predicted & true).sum(), predicted.sum() + true.sum()])


def score_of(graph: Graph) -> str:
    """What node classification on a graph is scored by."""
    return "micro_f1" if graph.multilabel else "accuracy"


def score(counts: list[Counts], split: str) -> float | None:
    """The ranks' score of a split, from 0 to 1; None where the split is empty."""
    pairs = [rank[split] for rank in counts if split in rank]
    total = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / total if total else None
