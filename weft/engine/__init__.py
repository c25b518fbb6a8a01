"""Runs: how ranks start, the training loop, checkpoints, records; and what comes after them."""

from weft.engine.compare import ablate, compare
from weft.engine.forecast import plan
from weft.engine.placed_model import PlacedModel, place
from weft.engine.prediction import predict
from weft.engine.run import Run, train
from weft.engine.saved import load_model

__all__ = ["PlacedModel", "Run", "ablate", "compare", "load_model", "place", "plan", "predict", "train"]
