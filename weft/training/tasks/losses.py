"""Losses of labelled rows. Each returns the loss of every row, so that ranks and batches can be summed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from weft.config.config import TaskOptions
from weft.data import GraphShape, Labels
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, RowLoss, errors_from, require_new_name
from weft.utils.errors import InputError, unknown

DEFAULT_LOSSES = {"classes": "cross_entropy", "labels": "bce", "values": "mse"}
"""Default loss for each kind of labels."""
CHECKED_ROWS = 8
"""Number of rows on which a custom loss is checked for row independence."""


def cross_entropy(logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return -log softmax(logits)_y for each row, [k].

    Args:
        logits: Logits, [k, C].
        y: Classes, int64 [k].
        weight: Weight of each class, [C]. A row's loss is multiplied by the weight of its class.
    """
    return functional.cross_entropy(logits, y, None if weight is None else weight.to(logits), reduction="none")


def bce(logits: Tensor, y: Tensor) -> Tensor:
    """Return the binary cross entropy of each row, [k]; for several labels, their mean.

    Args:
        logits: Logits, [k, C]; [k, 1] for two classes.
        y: Labels 0 or 1, [k, C], or classes 0 and 1, [k].
    """
    y = y.view(logits.shape).to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(1)


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of each row, [k].

    Args:
        outputs: Predicted values, [k, T].
        y: True values, [k] or [k, T].
    """
    return (outputs - values_of(y, outputs)).square().mean(1)


def l1(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean absolute error of each row, [k].

    Args:
        outputs: Predicted values, [k, T].
        y: True values, [k] or [k, T].
    """
    return (outputs - values_of(y, outputs)).abs().mean(1)


def huber(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the Huber loss of each row, [k]: the mean of e^2 / 2 where |e| < 1, else of |e| - 1/2.

    Args:
        outputs: Predicted values, [k, T].
        y: True values, [k] or [k, T].
    """
    return functional.huber_loss(outputs, values_of(y, outputs), reduction="none").mean(1)


LOSSES: dict[str, RowLoss] = {"cross_entropy": cross_entropy, "bce": bce, "mse": mse, "l1": l1, "huber": huber}
"""Built-in losses by name."""


def values_of(y: Tensor, outputs: Tensor) -> Tensor:
    """Return labels as values [k, T] in the dtype of the outputs.

    Args:
        y: True values, [k] or [k, T].
        outputs: Predicted values, [k, T].
    """
    return (y[:, None] if y.dim() == 1 else y).to(outputs.dtype)


def loss_name(config: TaskOptions, labels: Labels | GraphShape) -> str:
    """Return the name of the configured loss, or of the default for the kind of labels.

    Args:
        config: Options of the task.
        labels: The labels, or the shape of their graph.
    """
    return config.loss or DEFAULT_LOSSES[labels.label_kind]


def output_kind(config: TaskOptions, labels: Labels | GraphShape) -> str:
    """Return 'classes', 'labels' or 'values': the meaning of the model's outputs.

    The loss decides it; for a custom loss, the labels do.

    Args:
        config: Options of the task.
        labels: The labels, or the shape of their graph.
    """
    return "values" if loss_name(config, labels) in ("mse", "l1", "huber") else labels.label_kind


def num_logits(config: TaskOptions, labels: Labels | GraphShape) -> int | None:
    """Return the number of outputs per row that the loss needs, or None if a custom loss may accept any.

    Args:
        config: Options of the task.
        labels: The labels, or the shape of their graph.
    """
    name = loss_name(config, labels)
    if name not in LOSSES:
        return None
    if name == "cross_entropy" or labels.label_kind != "classes":
        return labels.num_classes
    return 1


def make_loss(config: TaskOptions, labels: Labels, functions: OwnFunctions = NO_FUNCTIONS) -> RowLoss:
    """Return the loss function of a run.

    Args:
        config: Options of the task.
        labels: The labels.
        functions: User-defined functions of the run.

    Raises:
        InputError: The name is unknown, or the loss does not suit the labels.
    """
    name, kind = loss_name(config, labels), labels.label_kind
    if functions.loss is not None:
        require_new_name("loss", name, LOSSES)
    elif name not in LOSSES:
        raise unknown("--loss", name, LOSSES)
    binary = kind == "labels" or (kind == "classes" and labels.num_classes <= 2)
    fits = {"cross_entropy": kind == "classes", "bce": binary}
    if not fits.get(name, True):
        raise InputError(
            f"--loss {name}: {labels.name} has {describe_labels(labels)}: give --loss {DEFAULT_LOSSES[kind]}"
        )
    if config.class_weights == "none":
        return checked_loss(functions.loss, name) if functions.loss is not None else LOSSES[name]
    if name != "cross_entropy":
        raise InputError(f"--class-weights {config.class_weights} has no effect on loss {name}: leave it out")
    return functools.partial(cross_entropy, weight=balanced_weights(labels))


def describe_labels(labels: Labels) -> str:
    """Describe labels in words, for messages."""
    several = {"classes": "classes", "labels": "labels (several each)", "values": "regression values"}
    return f"{labels.num_classes} {several[labels.label_kind]}"


def balanced_weights(labels: Labels) -> Tensor:
    """Return the weight n / (C n_c) of each class, float64 [C].

    n is the number of training rows, C that of classes, and n_c that of training rows of class c. The mean weight over
    training rows is 1.
    """
    mask, y = labels.labelled("train"), labels.y
    assert mask is not None
    assert y is not None
    counts = torch.bincount(y[mask], minlength=labels.num_classes).double()
    return counts.sum() / (labels.num_classes * counts.clamp(min=1))


def checked_loss(loss: RowLoss, name: str) -> RowLoss:
    """Wrap a custom loss to check its results: one loss for each row, which depends on that row alone.

    Args:
        loss: The custom loss.
        name: Name of the loss, for messages.
    """
    checks_done: list[bool] = []

    def checked(logits: Tensor, y: Tensor) -> Tensor:
        with errors_from(f"loss {name}"):
            losses = loss(logits, y)
        if not isinstance(losses, Tensor) or losses.shape != (len(y),):
            result = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
            raise InputError(
                f"loss {name} returns {result} for {len(y)} rows: return one loss for each row, [{len(y)}], since weft "
                "sums them over ranks and batches (reduction='none')"
            )
        if not checks_done and len(y) > 1:
            checks_done.append(True)
            require_row_independence(loss, name, logits.detach()[:CHECKED_ROWS], y[:CHECKED_ROWS])
        return losses

    return checked


def require_row_independence(loss: RowLoss, name: str, logits: Tensor, y: Tensor) -> None:
    """Check that the loss of a row does not change with the other rows.

    Args:
        loss: The custom loss.
        name: Name of the loss, for the message.
        logits: Logits of some rows, [k, C].
        y: Labels of these rows, [k] or [k, T].

    Raises:
        InputError: It changes, for instance because the loss divides by the number of rows.
    """
    half = len(y) // 2
    with errors_from(f"loss {name}"):
        with_others, alone = loss(logits, y)[:half], loss(logits[:half], y[:half])
    if not torch.allclose(with_others, alone, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise InputError(
            f"loss {name} of a row depends on other rows, and each rank has others: do not divide by their number, and "
            "do "
            "not use statistics over rows"
        )
