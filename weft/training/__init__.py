"""Runs: how ranks start, the training loop, checkpoints, records; and what comes after them."""

from weft.training.artifacts.saved_model import load_model
from weft.training.placed_model import PlacedModel, place
from weft.training.planning.plan_call import plan
from weft.training.run import Run, train

__all__ = ["PlacedModel", "Run", "load_model", "place", "plan", "train"]
