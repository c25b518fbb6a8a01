"""Generates weft/training/arguments.py from the declared options: python -m tests.lib.arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from weft.config.config import PLACEMENT_FIELDS, Config
from weft.training.placed_model import LOOP_FIELDS

PATH = Path(__file__).parents[2] / "weft" / "training" / "arguments.py"
HEADER = '''"""Keyword arguments of `weft.train` and its like, for editors and mypy; see `Config` for their meaning.

Generated from the fields of `Config` by `python -m tests.lib.arguments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from weft.training.custom_functions import Callback, MakeOptimizer, MakeScheduler, RowLoss, RowsMetric
'''
TYPES = {
    "batch_size": "int | str",
    "fanout": "int | str",
    "loss": "str | RowLoss",
    "metrics": "str | RowsMetric | Sequence[str | RowsMetric]",
    "optimizer": "str | MakeOptimizer",
    "scheduler": "str | MakeScheduler",
    "callbacks": "Sequence[Callback]",
}
"""Types of the arguments that may be functions, or numbers or a word."""


def text() -> str:
    """Return the text of the file."""
    specs = {spec.name: spec for spec in dataclasses.fields(Config) if spec.name not in ("graph", "model")}
    types = {name: type_of(spec) for name, spec in specs.items()} | TYPES
    chosen = {"strategy", "machine"}  # `compare` has no argument `strategy`, and `plan` has a `machine` of its own
    loop = {*LOOP_FIELDS, "loss", "callbacks"}
    placement = set(PLACEMENT_FIELDS) - chosen
    steps = types.keys() - loop - placement - chosen
    place_types = {**types, "loss": "str"}
    classes = [
        ("SharedPlacementArguments", "TypedDict", "Arguments that say where to compute.", placement, types),
        ("PredictArguments", "SharedPlacementArguments", "Arguments of `weft.predict`.", chosen, types),
        ("StepArguments", "SharedPlacementArguments", "Arguments of a training step.", steps, types),
        ("PlaceArguments", "StepArguments", "Arguments of `weft.place`.", {"loss", *chosen}, place_types),
        ("PlanArguments", "StepArguments", "Arguments of `weft.plan`.", loop, types),
        ("CompareArguments", "PlanArguments", "Arguments of `weft.compare`.", {"machine"}, types),
        ("TrainArguments", "CompareArguments", "Arguments of `weft.train`.", {"strategy"}, types),
    ]
    return HEADER + "".join(
        class_text(name, base, title, {field: kinds[field] for field in types if field in names})
        for name, base, title, names, kinds in classes
    )


def type_of(spec: dataclasses.Field[object]) -> str:
    """Return the annotation of an option, which names its valid values if they are listed."""
    choices = ", ".join(f'"{choice}"' for choice in spec.metadata["choices"])
    return f"Literal[{choices}]" if choices else str(spec.type)


def class_text(name: str, base: str, title: str, types: dict[str, str]) -> str:
    """Return the text of a class.

    Args:
        name: Name of the class.
        base: Name of its base class.
        title: Its docstring.
        types: Annotations of its fields by name.
    """
    fields = "".join(f"    {field}: {kind}\n" for field, kind in types.items())
    return f'\n\nclass {name}({base}, total=False):\n    """{title}"""\n\n{fields}'


if __name__ == "__main__":
    PATH.write_text(text())
