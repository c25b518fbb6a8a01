"""weft trains graph neural networks on graphs that one device cannot hold, or cannot process fast enough."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import nn, partition
    from weft.cli.extensions import register
    from weft.config.config import Config
    from weft.data import Graph, load
    from weft.experiments.compare import ablate, compare
    from weft.experiments.runs import Runs, report, runs
    from weft.experiments.sweep import sweep
    from weft.prediction.prediction import predict
    from weft.training import PlacedModel, Run, load_model, place, plan, train
    from weft.utils.errors import InputError, RunError

__version__ = version("weft")

__all__ = [
    "Config",
    "Graph",
    "InputError",
    "PlacedModel",
    "Run",
    "RunError",
    "Runs",
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
    "register",
    "report",
    "runs",
    "sweep",
    "train",
]

HOMES = {
    "Config": "weft.config.config",
    "InputError": "weft.utils.errors",
    "RunError": "weft.utils.errors",
    "Graph": "weft.data",
    "load": "weft.data",
    "PlacedModel": "weft.training",
    "Run": "weft.training",
    "ablate": "weft.experiments.compare",
    "compare": "weft.experiments.compare",
    "load_model": "weft.training",
    "place": "weft.training",
    "plan": "weft.training",
    "Runs": "weft.experiments.runs",
    "predict": "weft.prediction.prediction",
    "register": "weft.cli.extensions",
    "report": "weft.experiments.runs",
    "runs": "weft.experiments.runs",
    "sweep": "weft.experiments.sweep",
    "train": "weft.training",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line answers --help without PyTorch."""
    if name in ("nn", "partition"):
        return import_module(f"weft.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
