"""Embeddings whose rows are distributed over the ranks: gathered for checkpoints and results, and distributed again.

The same holds for their entries in the optimizer's state.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.comm import Group
from weft.nn import embeddings
from weft.strategies import Placed
from weft.training.optimizer import numbered_parameters


def row_names(tensors: dict[str, Tensor], strategy: Placed, optimizer: Optimizer, num_rows: int) -> list[str]:
    """Return the names of the tensors that have a row for each embedded vertex.

    These are the embeddings, now and at the best score, and the optimizer's state for them, such as Adam's moments.

    Args:
        tensors: Tensors of a checkpoint by name.
        strategy: The model and graph, placed on this rank by a strategy.
        optimizer: The optimizer.
        num_rows: Number of rows of such a tensor: those of this rank, or all.
    """
    names = []
    numbers = {id(parameter): number for number, parameter in enumerate(numbered_parameters(optimizer))}
    for name, parameter in embeddings(strategy.model).items():
        prefix, shape = f"optimizer.{numbers.get(id(parameter))}.", (num_rows, *parameter.shape[1:])
        names += [key for key in (f"model.{name}", f"best.{name}") if key in tensors]
        names += [key for key, value in tensors.items() if key.startswith(prefix) and value.shape == shape]
    return names


def gather(tensors: dict[str, Tensor], strategy: Placed, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors with all rows of distributed embeddings on rank 0, and without any on other ranks.

    All ranks must call it.

    Args:
        tensors: Tensors of a checkpoint by name, with this rank's rows.
        strategy: The model and graph, placed on this rank by a strategy.
        optimizer: The optimizer.
    """
    names = row_names(tensors, strategy, optimizer, len(strategy.embedded))
    whole = {name: gather_rows(tensors[name], strategy.embedded, strategy.group) for name in names}
    return tensors | whole


def place(tensors: dict[str, Tensor], strategy: Placed, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors with this rank's rows of distributed embeddings.

    Args:
        tensors: Tensors of a checkpoint by name, with all rows.
        strategy: The model and graph, placed on this rank by a strategy.
        optimizer: The optimizer.
    """
    names = row_names(tensors, strategy, optimizer, strategy.graph.typed.num_embedded)
    return tensors | {name: tensors[name].index_select(0, strategy.embedded.to(tensors[name].device)) for name in names}


def restore_rows(best: dict[str, Tensor], strategy: Placed) -> None:
    """Copy all rows of rank 0's embeddings into the best weights of every rank. All ranks must call it.

    Args:
        best: The best weights by name, updated in place. Rank 0 has all rows.
        strategy: The model and graph, placed on this rank by a strategy.
    """
    group = strategy.group
    for name, parameter in embeddings(strategy.model).items():
        whole = (
            best[name]
            if group.rank == 0
            else best[name].new_empty(strategy.graph.typed.num_embedded, parameter.shape[1])
        )
        group.broadcast(whole, tag="model")
        best[name] = whole


def gather_rows(part: Tensor, rows: Tensor, group: Group) -> Tensor:
    """Return a tensor with the rows of all ranks on rank 0, and an empty one on other ranks.

    All ranks must call it.

    Args:
        part: This rank's rows, [n, width].
        rows: Positions of these rows in the result, int64 [n].
        group: The ranks.
    """
    counts = [int(report["rows"]) for report in group.all_gather_object({"rows": len(rows)})]
    is_first = group.rank == 0
    width = part.shape[1]

    def send(values: Tensor, columns: int) -> Tensor:
        sent = [values.numel()] + [0] * (group.size - 1)
        received = [count * columns if is_first else 0 for count in counts]
        return group.all_to_all(values.reshape(-1), sent, received, tag="checkpoint")

    positions, values = send(rows.to(group.device), 1), send(part, width)
    if not is_first:
        return part[:0]
    return torch.empty_like(values).view(-1, width).index_copy_(0, positions, values.view(-1, width))
