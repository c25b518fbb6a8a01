"""weft trains graph neural networks on graphs that one device cannot hold, or cannot process fast enough."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import nn, partition
    from weft.core.config import Config
    from weft.core.errors import InputError, RunError
    from weft.data import Graph, load
    from weft.engine import (  # type: ignore[no-redef]  # mypy takes compare for its module
        PlacedModel,
        Run,
        ablate,
        compare,
        load_model,
        place,
        plan,
        predict,
        train,
    )

__version__ = version("weft")

__all__ = [
    "Config",
    "Graph",
    "InputError",
    "PlacedModel",
    "Run",
    "RunError",
    "__version__",
    "ablate",
    "compare",
    "load",
    "load_model",
    "nn",
    "partition",
    "place",
    "plan",
    "predict",
    "train",
]

HOMES = {
    "Config": "weft.core.config",
    "InputError": "weft.core.errors",
    "RunError": "weft.core.errors",
    "Graph": "weft.data",
    "load": "weft.data",
    "PlacedModel": "weft.engine",
    "Run": "weft.engine",
    "ablate": "weft.engine",
    "compare": "weft.engine",
    "load_model": "weft.engine",
    "place": "weft.engine",
    "plan": "weft.engine",
    "predict": "weft.engine",
    "train": "weft.engine",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: so the command line answers --help, and prepares its process, without PyTorch."""
    if name in ("nn", "partition"):
        return import_module(f"weft.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
