"""Structure of a module: what its code depends on, besides the numbers in its tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types of attributes that are compared by their text, in which 1, 1.0 and True differ."""
BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)
"""Types of attributes of which each value is only equal to itself."""


def structure_of(module: nn.Module) -> Hashable:
    """Return the structure of a module, or None if it has an attribute of which nothing is known.

    Modules of equal structure compute the same function of their parameters, buffers and arguments.
    """
    parts = [*module.modules(), *module.parameters(), *module.buffers()]
    numbers = {id(part): number for number, part in enumerate(parts)}
    try:
        return tuple((type(part), _describe(vars(part), numbers)) for part in module.modules())
    except NotImplementedError:
        return None


def _describe(value: Any, numbers: Mapping[int, int]) -> Hashable:
    """Return the value of an attribute as a part of a dictionary key.

    Args:
        value: The value.
        numbers: Number of each part, parameter and buffer of the module, by its id.

    Raises:
        NotImplementedError: It is of another type.
    """
    if id(value) in numbers:
        of_tensor = (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else ()
        return numbers[id(value)], *of_tensor
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
    raise NotImplementedError(type(value).__name__)
