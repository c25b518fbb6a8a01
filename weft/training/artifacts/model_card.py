"""A run's card: what was trained, on what, how well, and how to do it again, as a page for people."""

from __future__ import annotations

import platform
from collections.abc import Collection
from typing import Any

import torch

from weft.reporting.rerun import changed_fields, repeating
from weft.training.artifacts.saved_model import Description


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
        f"## To repeat it\n\n{_to_repeat(described, given)}",
        table("Versions", versions),
    ]
    return "\n\n".join(parts) + "\n"


def table(title: str, rows: dict[str, Any]) -> str:
    """A section with a table of two columns."""
    lines = (f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items())
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines])


def _to_repeat(described: Description, given: dict[str, Any]) -> str:
    language, text = repeating(described.config, given, own_model=described.own_model, own_graph=described.own_graph)
    said = f"```python\n{text}\n```" if language == "python" else f"    {text}"
    return f"{said}\n\nWith `--choices choices.json`, the file beside this one, bit for bit on the same machine."
