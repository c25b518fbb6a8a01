"""Structure of a module: what its code depends on, besides the numbers in its tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types of attributes that are compared by their text, in which 1, 1.0 and True differ."""
BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)
"""Types of attributes of which each value is only equal to itself."""


IGNORED = ("propagate", "edge_updater", "forward_naive")
"""Methods that `TiledConv` replaces in a convolution while it runs."""


class Identity:
    """An object of which nothing is known, which equals only itself. It stays alive, so that its id is its own.

    Args:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def structure_of(module: nn.Module) -> Hashable:
    """Return the structure of a module.

    Modules of equal structure compute the same function of their parameters, buffers and arguments, and of other
    tensors among their attributes. An object of an unknown class is compared by its attributes, or by its identity.
    """
    parts = [*module.modules(), *module.parameters(), *module.buffers()]
    numbers = {id(part): number for number, part in enumerate(parts)}
    attributes = ({name: each for name, each in vars(part).items() if name not in IGNORED} for part in module.modules())
    return tuple(
        (type(part), _describe(of_part, numbers)) for part, of_part in zip(module.modules(), attributes, strict=True)
    )


def _describe(value: Any, numbers: Mapping[int, int]) -> Hashable:
    """Return the value of an attribute as a part of a dictionary key.

    Args:
        value: The value.
        numbers: Number of each part, parameter and buffer of the module, and of each object around it, by its id.
    """
    if id(value) in numbers:
        of_tensor = (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else ()
        return numbers[id(value)], *of_tensor
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.dtype
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, BY_IDENTITY):
        return value
    if isinstance(value, Mapping):
        return tuple((_describe(key, numbers), _describe(each, numbers)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(_describe(each, numbers) for each in value)
    if isinstance(value, list | tuple):
        return type(value), tuple(_describe(each, numbers) for each in value)
    if type(value).__module__ == "torch_geometric.inspector":  # what PyG has found in the source of the class
        return type(value).__qualname__
    if isinstance(value, np.ndarray):
        return np.ndarray, value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, MethodType | partial):
        parts = (value.__func__, value.__self__) if isinstance(value, MethodType) else value.__reduce__()[2]
        return type(value), _describe(parts, numbers)
    if not hasattr(value, "__dict__") or isinstance(value, nn.Module):
        return Identity(value)
    return type(value), _describe(vars(value), {**numbers, id(value): len(numbers)})
