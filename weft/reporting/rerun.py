"""Command or Python call that repeats a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any


def rerun_command(
    graph: str, model: str, fields: dict[str, Any], *, own_model: str, own_graph: bool
) -> tuple[str, str]:
    """Return the command that repeats a run, or a Python call if the command line cannot name the graph or the model.

    A Python call also replaces a command with control characters, which it contains as escapes.

    Args:
        graph: Name of the graph.
        model: Name of the model.
        fields: Other options to set, by name.
        own_model: Class of a custom module. Empty: the configuration names the model.
        own_graph: True if the graph was an object.

    Returns:
        The language, "sh" or "python", and the command or the call.
    """
    is_object = bool(own_model) and ":" not in model  # "module:Class" names a custom module on the command line
    command = shlex.join(["weft", "train", graph, f"--model={model}", *map("=".join, flags(fields))])
    if is_object or own_graph or not command.isprintable():
        graph = "graph" if own_graph else repr(graph)
        model = f"model=model,  # a {own_model}" if is_object else f"model={model!r},"
        options = "".join(f"    {name}={value!r},\n" for name, value in fields.items())
        return "python", f"weft.train(\n    {graph},\n    {model}\n{options})"
    return "sh", command


def flags(fields: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the flag of each field of a configuration, with its value if it takes one."""
    for name, value in fields.items():
        flag = name.replace("_", "-")
        yield (f"--{flag}" if value else f"--no-{flag}",) if isinstance(value, bool) else (f"--{flag}", str(value))
