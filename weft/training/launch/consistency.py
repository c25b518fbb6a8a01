"""What ranks that were started apart, as by torchrun on several hosts, must have in common before they work."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.metadata import version

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.config.config import Config
from weft.data import Graph
from weft.training.rank import named_tensors
from weft.utils.errors import InputError

PLACES = ("graph", "partition", "probe", "choices", "scratch")
"""Fields of a configuration that name files, which each host may have elsewhere."""
SOME_ROWS = 4096  # of each tensor over vertices that are compared


def check_consistent(group: Group, call: str, config: Config, graph: Graph, model: nn.Module) -> None:
    """Sees to it that all ranks do the same: from the same graph, configuration, versions and weights, rank 0's.

    call: what is done, such as "weft.train". InputError on every rank if they do not, which names one and what differs.
    """
    everyone = group.all_gather_object(_described(call, config, graph, model))
    for rank, told in enumerate(everyone):
        for what, value in everyone[0].items():
            if told[what] != value:
                raise InputError(
                    f"rank {rank} has {what} {told[what]}, and rank 0 {value}: "
                    "let all ranks make the same calls, with the same graph, options, model and versions"
                )
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            values = tensor.to(group.device, copy=True)
            group.broadcast(values, tag="weights")
            tensor.copy_(values)


def _described(call: str, config: Config, graph: Graph, model: nn.Module) -> dict[str, str]:
    """What must be the same on all ranks, by the words that an error has for it."""
    options = {
        f"--{name.replace('_', '-')}": str(value) for name, value in asdict(config).items() if name not in PLACES
    }
    rows = {name: getattr(graph, name) for name in ("x", "y", "train_mask", "val_mask", "test_mask", "edge_features")}
    layout = "".join(f"{name} {tensor.dtype} {list(tensor.shape)};" for name, tensor in named_tensors(model))
    return {
        "the call": call,
        "a graph of vertices and edges": f"{graph.num_vertices:,} and {graph.num_edges:,}",
        "a graph with fingerprint": graph.fingerprint[:16],
        **{f"rows {name} with digest": _digest(tensor) for name, tensor in rows.items()},
        **options,
        "a model with parameters of digest": hashlib.sha256(layout.encode()).hexdigest()[:16],
        **{name: version(name) for name in ("weft", "torch")},
    }


def _digest(rows: Tensor | None) -> str:
    """That of some rows, evenly spaced."""
    if rows is None:
        return "none"
    some = rows[:: max(1, len(rows) // SOME_ROWS)].contiguous()
    text = f"{rows.dtype} {list(rows.shape)}".encode() + some.numpy().tobytes()
    return hashlib.sha256(text).hexdigest()[:16]
