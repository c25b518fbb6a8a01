"""Losses of links (`--loss` with `--task link`), from the scores of links and of their negative samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from weft.config.config import TaskOptions
from weft.utils.errors import unknown


def link_bce(scores: Tensor) -> Tensor:
    """Return the sum over links of the mean binary cross entropy of a link and its negative samples, [].

    Args:
        scores: Scores of p links, then of their K negative samples, [1 + K, p].
    """
    labels = torch.zeros_like(scores)
    labels[0] = 1
    return functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / len(scores)


def link_bpr(scores: Tensor) -> Tensor:
    """Return the sum over links of the mean of -log sigmoid(s - s'), [], over the scores s' of its negative samples.

    Source: Rendle et al. 2009, Bayesian personalized ranking.

    Args:
        scores: Scores s of p links, then of their K negative samples, [1 + K, p].
    """
    return functional.softplus(scores[1:] - scores[0]).sum() / (len(scores) - 1)


LINK_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"bce": link_bce, "bpr": link_bpr}
"""Losses of links by name; the first is the default."""


def make_link_loss(options: TaskOptions) -> Callable[[Tensor], Tensor]:
    """Return the loss of links: the sum over links, [], from scores [1 + K, p].

    Args:
        options: Options of the task.

    Raises:
        InputError: There is no loss of this name.
    """
    name = options.loss or next(iter(LINK_LOSSES))
    if name not in LINK_LOSSES:
        raise unknown("--loss", name, LINK_LOSSES)
    return LINK_LOSSES[name]
