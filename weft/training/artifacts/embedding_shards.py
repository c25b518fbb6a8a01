"""Tensors of which a rank has only its embedded rows, made whole for checkpoints and results, and placed again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.comm import Group
from weft.nn import embeddings
from weft.strategies import Placed
from weft.training.optimizer import numbered_parameters


def row_names(tensors: dict[str, Tensor], strategy: Placed, optimizer: Optimizer, num_rows: int) -> list[str]:
    """Those of a checkpoint's tensors that have a row for each of `num_rows` embedded vertices, by name.

    They are embeddings, now and at the best score, and what the optimiser knows of each of their entries.
    """
    found = []
    numbers = {id(parameter): number for number, parameter in enumerate(numbered_parameters(optimizer))}
    for name, parameter in embeddings(strategy.model).items():
        prefix, shape = f"optimizer.{numbers.get(id(parameter))}.", (num_rows, *parameter.shape[1:])
        found += [when for when in (f"model.{name}", f"best.{name}") if when in tensors]
        found += [key for key, value in tensors.items() if key.startswith(prefix) and value.shape == shape]
    return found


def gather(tensors: dict[str, Tensor], strategy: Placed, optimizer: Optimizer) -> dict[str, Tensor]:
    """The same tensors with all rows of what ranks have only some of; on rank 0 alone. All ranks call it."""
    names = row_names(tensors, strategy, optimizer, len(strategy.embedded))
    whole = {name: gather_rows(tensors[name], strategy.embedded, strategy.group) for name in names}
    return tensors | whole


def place(tensors: dict[str, Tensor], strategy: Placed, optimizer: Optimizer) -> dict[str, Tensor]:
    """Whole tensors with the rows that this rank keeps."""
    names = row_names(tensors, strategy, optimizer, strategy.graph.typed.num_embedded)
    return tensors | {name: tensors[name].index_select(0, strategy.embedded.to(tensors[name].device)) for name in names}


def restore_rows(best: dict[str, Tensor], strategy: Placed) -> None:
    """Puts rank 0's whole embeddings into the best weights of every rank."""
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
    """The whole [k, width] on rank 0, where every rank has `part` of its rows, int64; elsewhere, none of them."""
    counts = [int(report["rows"]) for report in group.all_gather_object({"rows": len(rows)})]
    first = group.rank == 0
    width = part.shape[1]

    def send(values: Tensor, columns: int) -> Tensor:
        sent = [values.numel()] + [0] * (group.size - 1)
        received = [count * columns if first else 0 for count in counts]
        return group.all_to_all(values.reshape(-1), sent, received, tag="checkpoint")

    places, values = send(rows.to(group.device), 1), send(part, width)
    if not first:
        return part[:0]
    return torch.empty_like(values).view(-1, width).index_copy_(0, places, values.view(-1, width))
