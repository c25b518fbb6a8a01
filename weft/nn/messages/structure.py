"""Structure of a module: what its code depends on, besides the numbers in its tensors."""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
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


IGNORED = frozenset({"propagate", "edge_updater", "forward_naive", "inspector"})
"""Methods that `TiledConv` replaces in a convolution while it runs, and what PyG has found in the source of a class."""
IGNORED_ENDINGS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called", "_user_args")
"""Endings of names of attributes that PyTorch and PyG keep for each module; a convolution with hooks runs as in PyG."""
LARGE = 1 << 16
"""Numbers in a container, and objects around a module, beyond which only the identity of an object counts."""


class ById:
    """An object of which nothing is known, which equals only itself. It stays alive, so that its id is its own.

    Args:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def structure_of(module: nn.Module) -> Hashable:
    """Return the structure of a module.

    Modules of equal structure compute the same function of their parameters, buffers and arguments, and of other
    tensors among their attributes. An object of an unknown class is compared by its attributes, or by its identity if
    it has none.
    """
    parts = [*module.modules(), *module.parameters(), *module.buffers()]
    numbers = {id(part): number for number, part in enumerate(parts)}
    return tuple((type(part), _of_class(type(part)), _of_part(part, numbers)) for part in module.modules())


def _of_part(module: nn.Module, numbers: dict[int, int]) -> Hashable:
    """Return the attributes of a module, but for those that its class or a call sets, see IGNORED."""
    return tuple(
        (name, _describe(value, numbers))
        for name, value in vars(module).items()
        if name not in IGNORED and not name.endswith(IGNORED_ENDINGS)
    )


def describe(value: Any) -> Hashable:
    """Return a value as a part of a dictionary key."""
    return _describe(value, {})


def _of_class(kind: type) -> Hashable:
    """Return the plain attributes of a class and of its bases, but for those of PyTorch and PyG."""
    kinds = (each for each in kind.__mro__ if each.__module__.split(".")[0] not in ("torch", "torch_geometric"))
    plain = [(name, value) for each in kinds for name, value in vars(each).items() if isinstance(value, PLAIN)]
    return tuple((name, type(value), repr(value)) for name, value in plain if not name.startswith("__"))


def _describe(value: Any, numbers: dict[int, int]) -> Hashable:
    """Return the value of an attribute as a part of a dictionary key.

    Args:
        value: The value.
        numbers: Number of each part, parameter and buffer of the module, and of each object that was described, by its
            id.
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
    size = value.size if isinstance(value, np.ndarray) else len(value) if isinstance(value, Collection) else 0
    if max(size, len(numbers)) > LARGE:
        return ById(value)
    if isinstance(value, np.ndarray):
        return np.ndarray, value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, bytes | bytearray):
        return type(value), bytes(value)
    numbers[id(value)] = len(numbers)
    content: Any = ()
    if isinstance(value, Mapping):
        content = tuple((_describe(key, numbers), _describe(each, numbers)) for key, each in value.items())
    elif isinstance(value, Set):
        content = frozenset(_describe(each, numbers) for each in value)
    elif isinstance(value, Sequence):
        content = tuple(_describe(each, numbers) for each in value)
    elif isinstance(value, MethodType):
        content = _describe(value.__func__, numbers), _describe(value.__self__, numbers)
    elif isinstance(value, partial):
        content = tuple(_describe(each, numbers) for each in (value.func, value.args, value.keywords))
    slots = [name for name in copyreg._slotnames(type(value)) if hasattr(value, name)]  # type: ignore[attr-defined]
    attributes = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    if isinstance(value, nn.Module) or not (content or attributes or isinstance(value, Collection)):
        return ById(value)
    return type(value), content, tuple((name, _describe(each, numbers)) for name, each in attributes.items())
