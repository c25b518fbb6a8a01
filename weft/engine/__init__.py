"""Runs: how ranks start, the training loop, checkpoints, records."""

from weft.engine.compare import ablate, compare
from weft.engine.run import Run, train

__all__ = ["Run", "ablate", "compare", "train"]
