"""Finds a caller's mistake before ranks start or anything is written."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from weft.core.config import Config
from weft.core.errors import InputError
from weft.data import Graph
from weft.nn import outline
from weft.strategies import GraphShape, get_strategy


def check(config: Config, graph: Graph, model: nn.Module, *, launched: bool) -> None:
    """InputError for what a run of `model` on `graph` cannot do; `launched`: in processes of their own."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; give --device cpu, or install a CUDA build of torch")
    if graph.x is None:
        raise InputError(f"{graph.name} has features by vertex type: no model of this version takes them")
    if config.patience and (graph.val_mask is None or not graph.val_mask.any()):
        raise InputError(f"--patience {config.patience}: {graph.name} has no validation vertices; leave it out")
    shape = GraphShape.of(graph)
    strategy = get_strategy(config.strategy)
    outline(
        model,
        num_vertices=shape.num_vertices,
        num_features=shape.num_features,
        num_edge_features=shape.num_edge_features,
        weighted=shape.weighted,
        num_classes=graph.num_classes,
        training=True,
        view_type=strategy.view_type,
    )
    strategy.trace(model, shape, rank=0, size=config.workers, training=True)
    if launched:
        if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
            raise InputError(
                "the model uses one parameter in two places, which local ranks cannot: start it by torchrun"
            )
        try:
            pickle.dumps(copy.deepcopy(model).to("meta"))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise InputError(
                f"the model cannot be sent to local ranks ({error}): define its parts in a module"
            ) from error
