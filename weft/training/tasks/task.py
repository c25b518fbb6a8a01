"""What `--task` says: how a graph, a model and a loss are made for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from weft.config.config import Config, is_imported
from weft.data import (
    Graph,
    GraphShape,
    forward_relations,
    require_links,
    require_trainable,
    with_held_out_links,
    with_inverse_relations,
)
from weft.nn import LinkModel, convert, from_config, make_decoder, parameter_dtype
from weft.nn.convert import is_pyg
from weft.strategies import Placed
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions
from weft.training.tasks.imported_model import imported_model
from weft.training.tasks.link_prediction import LinkTask
from weft.training.tasks.losses import make_loss, num_logits
from weft.training.tasks.metrics import NodeTask, Task
from weft.training.tasks.scores import make_metrics, metric_names
from weft.utils.random import key


def graph_for_task(graph: Graph, config: Config) -> Graph:
    """The graph as the task wants it: for links, without the edges that it is tested by.

    InputError for a graph that lacks what the task needs.
    """
    if config.task == "link":
        if graph.val_links is None and graph.test_links is None:
            graph = with_held_out_links(graph, config.seed)
        require_links(graph)
        if config.inverse_relations and forward_relations(graph) == graph.relations:
            graph = with_inverse_relations(graph)  # after edges were held out
    require_trainable(graph, features=not graph.vertex_types, labels=config.task == "node")
    return graph


def requested_model(model: nn.Module | None, config: Config) -> nn.Module | str | None:
    """Return a person's module, where there is one, or where the configuration that they gave says it is defined."""
    return config.model if model is None and is_imported(config.model) else model


def task_model(model: nn.Module | str | None, shape: GraphShape, config: Config) -> nn.Module:
    """The model that the task trains: a person's, converted if it is PyG's, or the configuration's.

    For links, with a decoder. model: a string is a name that the person gave, and is imported if it says where a class
    is defined. The name in the configuration never is, since a file may have given it.
    """
    width = (num_logits(config, shape) or shape.num_classes) if config.task == "node" else config.hidden
    if isinstance(model, str) and is_imported(model):
        model = imported_model(model, shape, width, config)
    elif not isinstance(model, nn.Module):
        config = config if model is None else replace(config, model=model)
        model = from_config(config, shape.num_features, width, shape.num_edge_features, shape.typed)
    if is_pyg(model):
        model = convert(model, given=edge_inputs(shape), shape=shape)
    if config.task == "node" or isinstance(model, LinkModel):
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(config.seed, DECODER) >> 1)
        decoder = make_decoder(config.decoder, max(shape.num_forward_relations, 1), config.hidden)
    return LinkModel(model, decoder.to(parameter_dtype(model)))


def edge_inputs(shape: GraphShape) -> list[str]:
    """What a graph knows of its edges, by the names that PyG has for it."""
    known = {
        "edge_weight": shape.weighted,
        "edge_attr": shape.num_edge_features,
        "edge_type": shape.typed.num_relations,
    }
    return [name for name, value in known.items() if value]


def validation_score(graph: Graph, config: Config) -> str | None:
    """The score that chooses the best weights, by name; None where nothing validates."""
    marked = graph.labelled("val") if config.task == "node" else graph.val_links
    validated = marked is not None and len(marked) > 0 and (config.task == "link" or bool(marked.any()))
    return f"val_{metric_names(config, graph)[0]}" if validated else None


DECODER = 1
"""Part of the key of the decoder's first parameters."""


def make_task(config: Config, strategy: Placed, own: OwnFunctions = NO_FUNCTIONS) -> Task:
    """The task of the rows that a strategy gives this rank."""
    graph, group, model = strategy.graph, strategy.group, strategy.model
    if config.task == "node":
        loss, metrics = make_loss(config, graph, own), make_metrics(config, graph, own)
        return NodeTask(graph, strategy.rows, group, strategy.empty_rows, strategy.rows_device, loss, metrics)
    assert isinstance(model, LinkModel)
    return LinkTask(config, strategy.links, model.decoder, strategy.rows, group, strategy.empty_rows)
