"""Keyword arguments of `weft.train` and its like, for editors and mypy; see `Config` for their meaning.

Generated from the fields of `Config` by `python -m tests.lib.arguments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from weft.training.custom_functions import Callback, MakeOptimizer, MakeScheduler, RowLoss, RowsMetric


class SharedPlacementArguments(TypedDict, total=False):
    """Arguments that say where to compute."""

    workers: int
    partition: str
    device: Literal["cpu", "cuda"]
    nn_device: Literal["auto", "device", "host"]
    disable: str
    choices: str
    cache_memory: int | str
    cache_ratio: float
    device_memory: int | str
    chunks: int
    scratch: str
    timeout: float


class PredictArguments(SharedPlacementArguments, total=False):
    """Arguments of `weft.predict`."""

    strategy: str
    machine: str


class StepArguments(SharedPlacementArguments, total=False):
    """Arguments of a training step."""

    split: int
    normalize_features: bool
    random_features: int
    random_classes: int
    inverse_relations: bool
    order: Literal["none", "degree", "bfs"]
    task: Literal["node", "link", "edge"]
    decoder: Literal["dot", "distmult"]
    negatives: int
    eval_negatives: int
    class_weights: Literal["none", "balanced"]
    metrics: str | RowsMetric | Sequence[str | RowsMetric]
    unchecked: bool
    decoupled: bool
    layers: int
    hidden: int
    heads: int
    edge_attention: bool
    attention_dropout: float
    bases: int
    blocks: int
    one_hot: bool
    dropout: float
    input_dropout: float
    norm: Literal["none", "layer", "batch"]
    residual: bool
    seed: int
    dtype: Literal["float32", "float64", "bfloat16"]
    intermediates: Literal["auto", "keep", "recompute"]
    refresh_every: int
    staleness: float
    batch_size: int | str
    accumulate_grad_batches: int
    fanout: int | str
    sampling: Literal["uniform", "labor", "weighted"]
    batch_dependency: int
    prefetch_batches: int


class PlaceArguments(StepArguments, total=False):
    """Arguments of `weft.place`."""

    loss: str
    strategy: str
    machine: str


class PlanArguments(StepArguments, total=False):
    """Arguments of `weft.plan`."""

    loss: str | RowLoss
    epochs: int
    optimizer: str | MakeOptimizer
    lr: float
    weight_decay: float
    momentum: float
    clip_norm: float
    scheduler: str | MakeScheduler
    scheduler_epochs: int
    lr_factor: float
    warmup_epochs: int
    eval_every: int
    patience: int
    until: str
    measure: bool
    timeline: int
    tensorboard: bool
    checkpoint_every: int
    callbacks: Sequence[Callback]


class CompareArguments(PlanArguments, total=False):
    """Arguments of `weft.compare`."""

    machine: str


class TrainArguments(CompareArguments, total=False):
    """Arguments of `weft.train`."""

    strategy: str
