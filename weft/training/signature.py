"""Signatures that list options by name, for completion in notebooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from weft.config.config import OPTIONS

Function = TypeVar("Function", bound=Callable[..., Any])


def listing(arguments: type) -> Callable[[Function], Function]:
    """Return a decorator that lists options and their defaults in a function's signature, instead of `**options`.

    Editors and type checkers read `**options: Unpack[...]` themselves; IPython and `help` read the signature.

    Args:
        arguments: The TypedDict of the options.
    """

    def list_options(function: Function) -> Function:
        signature, keyword = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        others = [item for item in signature.parameters.values() if item.kind != inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, keyword, default=OPTIONS[name].default if name in OPTIONS else ())
            for name in arguments.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
        return function

    return list_options
