"""How a run is made again: its command, or the call."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.config import Config


def changed_fields(config: Config) -> dict[str, Any]:
    """The fields of a configuration that are not as they are by default, but for graph and model."""
    fields = [spec for spec in dataclasses.fields(config) if spec.name not in ("graph", "model")]
    return {one.name: getattr(config, one.name) for one in fields if getattr(config, one.name) != one.default}


def repeating(config: Config, given: dict[str, Any], *, own_model: str, own_graph: bool) -> tuple[str, str]:
    """The language, `sh` or `python`, and the command; the call where graph or model have no name that a command knows.

    given: the fields to say. own_model: the class of a module of one's own, if it is one. own_graph: see Description.
    """
    own = bool(own_model) and ":" not in config.model  # with one, the name says where it is defined
    if own or own_graph:
        graph = "graph" if own_graph else repr(config.graph)
        model = f"model=model,  # a {own_model}" if own else f"model={config.model!r},"
        options = "".join(f"    {name}={value!r},\n" for name, value in given.items())
        return "python", f"weft.train(\n    {graph},\n    {model}\n{options})"
    words = ["weft", "train", config.graph, f"--model={config.model}"]
    return "sh", shlex.join([*words, *map("=".join, flags(given))])


def flags(given: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The words of the command line that say some fields of a configuration: a flag, and its value if it takes one."""
    for name, value in given.items():
        flag = name.replace("_", "-")
        yield (f"--{flag}" if value else f"--no-{flag}",) if isinstance(value, bool) else (f"--{flag}", str(value))
