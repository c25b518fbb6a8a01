"""Losses of the rows that a task learns from: each gives every row's own, so that ranks and batches add up."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from weft.config.config import Config
from weft.data import Graph, GraphShape
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, RowLoss, errors_from, require_new_name
from weft.utils.errors import InputError, unknown

DEFAULT = {"classes": "cross_entropy", "labels": "bce", "values": "mse"}
"""The loss of each kind of labels."""
SOME_ROWS = 8  # on which a loss of one's own is tried


def cross_entropy(logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """-log softmax(logits)_y of each row [k], times the weight [C] of its class."""
    return functional.cross_entropy(logits, y, None if weight is None else weight.to(logits), reduction="none")


def bce(logits: Tensor, y: Tensor) -> Tensor:
    """The binary cross entropy of each row [k], a mean over labels [k, C]; of classes 0 and 1 [k], of one logit."""
    y = y.view(logits.shape).to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(1)


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of each row [k]."""
    return (outputs - values_of(y, outputs)).square().mean(1)


def l1(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean absolute error of each row [k]."""
    return (outputs - values_of(y, outputs)).abs().mean(1)


def huber(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean of e^2 / 2 where |e| < 1, else |e| - 1/2, of each row [k]."""
    return functional.huber_loss(outputs, values_of(y, outputs), reduction="none").mean(1)


LOSSES: dict[str, RowLoss] = {"cross_entropy": cross_entropy, "bce": bce, "mse": mse, "l1": l1, "huber": huber}


def values_of(y: Tensor, outputs: Tensor) -> Tensor:
    """Labels as values [k, T] in the outputs' type."""
    return (y[:, None] if y.dim() == 1 else y).to(outputs.dtype)


def loss_name(config: Config, graph: Graph | GraphShape) -> str:
    """The loss that a configuration names, or that of the graph's labels."""
    return config.loss or DEFAULT[graph.label_kind]


def output_kind(config: Config, graph: Graph | GraphShape) -> str:
    """What the logits are: 'classes', 'labels' or 'values', by the loss; by the labels where that is a person's own."""
    return "values" if loss_name(config, graph) in ("mse", "l1", "huber") else graph.label_kind


def num_logits(config: Config, graph: Graph | GraphShape) -> int | None:
    """What a model must give for a vertex; None: whatever the loss, which is a person's own, can take."""
    name = loss_name(config, graph)
    if name not in LOSSES:
        return None
    if name == "cross_entropy" or graph.label_kind != "classes":
        return graph.num_classes
    return 1


def make_loss(config: Config, graph: Graph, own: OwnFunctions = NO_FUNCTIONS) -> RowLoss:
    """Each row's loss. InputError for an unknown name, and one that is not for the graph's labels."""
    name, kind = loss_name(config, graph), graph.label_kind
    if own.loss is not None:
        require_new_name("loss", name, LOSSES)
    elif name not in LOSSES:
        raise unknown("--loss", name, LOSSES)
    binary = kind == "labels" or (kind == "classes" and graph.num_classes <= 2)
    fits = {"cross_entropy": kind == "classes", "bce": binary}
    if not fits.get(name, True):
        raise InputError(f"--loss {name}: {graph.name} has {describe_labels(graph)}: give --loss {DEFAULT[kind]}")
    if config.class_weights == "none":
        return checked_loss(own.loss, name) if own.loss is not None else LOSSES[name]
    if name != "cross_entropy":
        raise InputError(f"--class-weights {config.class_weights} has no effect on loss {name}: leave it out")
    return functools.partial(cross_entropy, weight=balanced_weights(graph))


def describe_labels(graph: Graph) -> str:
    """What a graph's labels are, in words."""
    several = {"classes": "classes", "labels": "labels, several for a vertex", "values": "values of a regression"}
    return f"{graph.num_classes} {several[graph.label_kind]}"


def balanced_weights(graph: Graph) -> Tensor:
    """n / (C n_c) for each of C classes, of whose n training vertices it has n_c: float64 [C], of mean 1 over them."""
    mask, y = graph.labelled("train"), graph.y
    assert mask is not None
    assert y is not None
    counts = torch.bincount(y[mask], minlength=graph.num_classes).double()
    return counts.sum() / (graph.num_classes * counts.clamp(min=1))


def checked_loss(loss: RowLoss, name: str) -> RowLoss:
    """A person's loss, whose results are looked at: InputError unless there is one for each row, of that row alone."""
    known: list[bool] = []

    def checked(logits: Tensor, y: Tensor) -> Tensor:
        with errors_from(f"loss {name}"):
            losses = loss(logits, y)
        if not isinstance(losses, Tensor) or losses.shape != (len(y),):
            what = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
            raise InputError(
                f"loss {name} gives {what} for {len(y)} rows: return each row's own loss, [{len(y)}], which ranks and "
                "batches add up (reduction='none')"
            )
        if not known and len(y) > 1:
            known.append(True)
            require_row_independence(loss, name, logits.detach()[:SOME_ROWS], y[:SOME_ROWS])
        return losses

    return checked


def require_row_independence(loss: RowLoss, name: str, logits: Tensor, y: Tensor) -> None:
    """InputError where the loss of some rows [k] changes with the rows beside them."""
    half = len(y) // 2
    with errors_from(f"loss {name}"):
        beside, alone = loss(logits, y)[:half], loss(logits[:half], y[:half])
    if not torch.allclose(beside, alone, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise InputError(
            f"loss {name} of a row depends on the rows beside it, which are others on each rank: divide by no count, "
            "and take no statistics of the rows"
        )
