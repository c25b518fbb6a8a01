"""Results without data of what models do most, for which PyTorch works in Python, up to a hundred times as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def shaped(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The result of an operation on tensors without data; None: of this one PyTorch is to find out."""
    shape = SHAPES.get(func)
    return shape(*args) if shape and is_plain(args[0]) else None


def is_plain(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers without data."""
    return isinstance(x, Tensor) and x.is_meta and x.is_floating_point()


def of_first(x: Tensor, *_: Any) -> Tensor:
    """Number by number, of one tensor, or of two that one made of the other."""
    return x.new_empty(x.shape)


def of_both(x: Tensor, y: Any, *_: Any) -> Tensor | None:
    """Number by number, of two tensors that are alike, or of one and a number."""
    alike = is_plain(y) and y.shape in (x.shape, ()) and x.dtype == y.dtype
    return x.new_empty(x.shape) if alike else None


def of_map(bias: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Tensor | None:
    """A product to which a row is added."""
    alike = bias.dtype == x.dtype and bias.shape == weight.shape[1:]
    return torch.mm(x, weight) if alike else None


SHAPES: dict[Any, Callable[..., Tensor | None]] = {
    aten.addmm.default: of_map,
    aten.relu.default: of_first,
    aten.elu.default: of_first,
    aten.elu_backward.default: of_first,
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), of_both),
}
