"""Extensions of weft: functions and classes that a user's module registers under names, which flags then accept."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from weft.utils.errors import InputError, cause, check_word

Extension = TypeVar("Extension", bound=Callable[..., Any])
KINDS = ("dataset", "loss", "metric", "partition", "strategy")


def register(kind: str) -> Callable[[Extension], Extension]:
    """Return a decorator that registers a function or class under its name, as a value of flags and arguments.

    Args:
        kind: "loss": function that returns the loss of each row, [k], from logits [k, C] and labels. "metric": function
            that returns a number from logits and labels. "partition": function that returns the part of each vertex,
            [N], from a graph and the number of parts. "dataset": function without arguments that returns a Graph.
            "strategy": plan class, registered under its attribute `name`.

    Raises:
        InputError: The kind does not exist, or weft has a strategy or partition method of this name.
    """
    check_word("kind of extension", kind, KINDS)

    def add(extension: Extension) -> Extension:
        from weft.data.io.datasets import REGISTERED as DATASETS
        from weft.partition import METHODS, custom_method
        from weft.strategies import STRATEGIES
        from weft.training.custom_functions import REGISTERED as FUNCTIONS

        name = str(extension.name if kind == "strategy" else extension.__name__)  # type: ignore[attr-defined]
        registries: dict[str, dict[str, Any]] = {"dataset": DATASETS, "partition": METHODS, "strategy": STRATEGIES}
        registry = (registries | FUNCTIONS)[kind]
        if getattr(registry.get(name), "__module__", "").startswith("weft."):
            raise InputError(f"weft.register: weft has a {kind} named {name}: rename yours")
        registry[name] = custom_method(extension) if kind == "partition" else extension
        return extension

    return add


def import_extension(module: str) -> None:
    """Import a module of `--import`, from Python's path or the current folder.

    Args:
        module: Name of the module.

    Raises:
        InputError: It cannot be imported, or raises an exception.
    """
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # the path of a command does not contain the current folder
    try:
        importlib.import_module(module)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"--import {module}: cannot be imported ({cause(error)}): correct the name or the module"
        ) from error
