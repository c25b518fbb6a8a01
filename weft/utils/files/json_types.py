"""Dataclasses from JSON values of files, whose types are compared with the annotations of the fields."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from weft.utils.errors import cause

T = TypeVar("T")


def from_json(cls: type[T], values: Any) -> T:
    """Return a dataclass from a JSON object.

    Args:
        cls: The dataclass. Annotations of its fields are JSON types: numbers, str, bool, None, lists, dicts, and unions
            of these.
        values: The object, with a value for each field without a default.

    Raises:
        ValueError: A value is missing, has another type, or belongs to no field.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{values!r:.40} is no {cls.__name__}")
    check_types(values, get_type_hints(cls))
    try:
        return cls(**values)
    except TypeError as error:  # names of missing or surplus values
        raise ValueError(cause(error)) from error


def check_types(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Check the types of some values of a JSON object.

    Args:
        values: The object.
        kinds: Types of values by name; see `from_json`. Missing values are not reported.

    Raises:
        ValueError: A value has another type.
    """
    for name, kind in kinds.items():
        if name in values and not has_type(values[name], kind):
            raise ValueError(f"its {name} is {values[name]!r:.40}, of the wrong type")


def has_type(value: Any, kind: Any) -> bool:
    """Return True if a value from JSON is of a type. A whole number is also a float; a bool is no number.

    Args:
        value: The value.
        kind: The type, such as `dict[str, float | None]`.
    """
    arguments = get_args(kind)
    if kind is Any:
        return True
    if get_origin(kind) in (types.UnionType, Union):
        return any(has_type(value, alternative) for alternative in arguments)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(has_type(item, arguments[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(has_type(item, arguments[1]) for item in value.values())
    return type(value) is kind or (kind is float and type(value) is int)
