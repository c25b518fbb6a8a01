"""A run's card: what was trained, on what, how well, and how to do it again, as a page for people."""

from __future__ import annotations

import dataclasses
import platform
import shlex
from collections.abc import Collection
from typing import Any

import torch

from weft.core.config import Config
from weft.engine.imported import is_imported
from weft.engine.saved import Description


def make_card(
    described: Description, idle: Collection[str], scores: dict[str, float | None], summary: dict[str, Any]
) -> str:
    """The card of a run, in Markdown. idle: fields of the configuration that had no effect. scores: the best ones."""
    config, graph, shape = described.config, described.graph, described.shape
    given = {name: value for name, value in changed_fields(config).items() if name not in idle}
    data = {
        "graph": config.graph,
        "vertices": f"{graph['vertices']:,}",
        "edges": f"{graph['edges']:,}",
        "features": shape.num_features,
        "edge features": shape.num_edge_features,
        "relations": shape.typed.num_relations,
        "values" if shape.label_kind == "values" else "classes": (
            f"{shape.num_classes}{' (several per vertex)' if shape.label_kind == 'labels' else ''}"
        ),
        "fingerprint": graph["fingerprint"],
    }
    model = {
        "model": described.own_model or config.model,
        "task": config.task,
        "parameters": f"{described.num_parameters:,}",
        "dtype": config.dtype,
    }
    result = {
        **{name: "none" if value is None else f"{value:.6g}" for name, value in scores.items()},
        "best epoch": summary["best_epoch"],
        "epochs": summary["epochs"],
        "last loss": f"{summary['loss']:.6g}",
    }
    versions = {"weft": described.weft, "torch": torch.__version__, "Python": platform.python_version()}
    parts = [
        f"# {model['model']} on {config.graph}",
        table("Data", data),
        table("Model", model),
        table("Configuration, where it is not the default", given),
        table("Scores of the best epoch", result),
        f"## To repeat it\n\n{repeating(described, given)}",
        table("Versions", versions),
    ]
    return "\n\n".join(parts) + "\n"


def table(title: str, rows: dict[str, Any]) -> str:
    """A section with a table of two columns."""
    lines = (f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items())
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines])


def changed_fields(config: Config) -> dict[str, Any]:
    """The fields of a configuration that are not as they are by default, but for graph and model."""
    fields = [spec for spec in dataclasses.fields(config) if spec.name not in ("graph", "model")]
    return {one.name: getattr(config, one.name) for one in fields if getattr(config, one.name) != one.default}


def repeating(described: Description, given: dict[str, Any]) -> str:
    """The command, or the call where graph or model have no name that a command knows."""
    config = described.config
    if (described.own_model and not is_imported(config.model)) or described.own_graph:
        graph = "graph" if described.own_graph else repr(config.graph)
        own = described.own_model and not is_imported(config.model)
        model = f"model=model,  # a {described.own_model}" if own else f"model={config.model!r},"
        options = "".join(f"    {name}={value!r},\n" for name, value in given.items())
        return f"```python\nweft.train(\n    {graph},\n    {model}\n{options})\n```"
    words = ["weft", "train", config.graph, f"--model={config.model}"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        words.append(flag if value is True else f"{flag}={value}")
    return "    " + shlex.join(words)
