"""weft trains graph neural networks on graphs that one device cannot hold, or cannot process fast enough."""

from importlib.metadata import version

from weft import nn
from weft.core.config import Config
from weft.core.errors import InputError, RunError
from weft.data import Graph, load
from weft.engine import Run, compare, train

__version__ = version("weft")

__all__ = ["Config", "Graph", "InputError", "Run", "RunError", "__version__", "compare", "load", "nn", "train"]
