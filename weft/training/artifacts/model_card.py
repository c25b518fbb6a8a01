"""Model card of a run: what was trained, on what data, how well, and how to repeat it, as a page for people."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection
from typing import Any

import torch

from weft.reporting.rerun import rerun_command
from weft.training.artifacts.saved_model import Description
from weft.utils.errors import printable

SPECIAL = re.compile(r"[\\`*\[\]<>|&]")
"""Characters with a meaning in Markdown. An underscore within a word has none."""


def make_card(
    description: Description, idle: Collection[str], scores: dict[str, float | None], summary: dict[str, Any]
) -> str:
    """Return the model card of a run, in Markdown.

    It says what was trained on what data, with which scores, and how to repeat it.

    Args:
        description: Description of model and graph.
        idle: Fields of the configuration that had no effect.
        scores: Scores of the best epoch.
        summary: Summary of the run.
    """
    config, graph, shape = description.config, description.graph, description.shape
    changed = config.non_defaults(("graph", "model", *idle))
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
        "model": description.own_model or config.model,
        "task": config.task,
        "parameters": f"{description.num_parameters:,}",
        "dtype": config.dtype,
    }
    result = {
        **{name: "none" if value is None else f"{value:.6g}" for name, value in scores.items()},
        "best epoch": summary["best_epoch"] + 1,
        "epochs": summary["epochs"],
        "last loss": f"{summary['loss']:.6g}",
    }
    versions = {"weft": description.weft, "torch": torch.__version__, "Python": platform.python_version()}
    parts = [
        f"# {as_text(model['model'])} on {as_text(config.graph)}",
        table("Data", data),
        table("Model", model),
        table("Configuration, where it differs from the defaults", changed),
        table("Scores of the best epoch", result),
        f"## How to repeat this run\n\n{_to_repeat(description, changed)}",
        table("Versions", versions),
    ]
    return "\n\n".join(parts) + "\n"


def table(title: str, rows: dict[str, Any]) -> str:
    """Return a section with a table of two columns, in Markdown.

    Args:
        title: Title of the section.
        rows: Second column by first column.
    """
    lines = (f"| {as_text(name)} | {as_text(value)} |" for name, value in rows.items())
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines])


def as_text(value: Any) -> str:
    """Return Markdown that shows a value as it is, in one line, without HTML, links or control characters."""
    return SPECIAL.sub(r"\\\g<0>", printable(str(value)))


def _to_repeat(description: Description, changed: dict[str, Any]) -> str:
    """Return the call or command that repeats the run, as a code block."""
    config, own_graph = description.config, description.own_graph
    language, text = rerun_command(
        config.graph, config.model, changed, own_model=description.own_model, own_graph=own_graph
    )
    block = f"```python\n{text}\n```" if language == "python" else f"    {text}"
    return (
        f"{block}\n\nAdd `--choices choices.json` (the file next to this one) to get the same numbers, bit for bit, on "
        "the same machine."
    )
