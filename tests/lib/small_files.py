"""Small files of every kind, the number of damaged copies to try, and an assertion about reading them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from weft.data import Graph
from weft.utils.errors import InputError

SECONDS = timedelta(seconds=20)  # a hang is longer, and an import on a busy machine is shorter
QUICK = settings(
    max_examples=30,
    derandomize=True,
    deadline=SECONDS,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
THOROUGH = settings(QUICK, max_examples=5000, derandomize=False)


def graph() -> Graph:
    """Return a small directed graph with everything that a store can contain."""
    source, target = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 1, 1])
    mask = torch.tensor([True, False, False])
    return Graph.from_edges(
        source,
        target,
        weight=torch.ones(4),
        x=torch.arange(6.0).reshape(3, 2),
        y=torch.tensor([0, 1, -1]),
        train_mask=mask,
        edge_type=torch.tensor([0, 1, 1, 0]),
        relations=("v|a|v", "v|b|v"),
        vertex_types=("v",),
        type_offsets=(0, 3),
    )


def write_npz(path: Path) -> None:
    edges = np.array([[0, 1, 2], [1, 2, 1]], np.int32)
    csr = {"x_data": np.ones(2), "x_indices": np.array([0, 4]), "x_indptr": np.array([0, 1, 1, 2])}
    np.savez_compressed(
        path,
        edge_index=edges,
        x_shape=np.array([3, 5]),
        y=np.array([0, 1, 0]),
        train_mask=np.eye(3, dtype=bool)[0],
        edge_type=np.array([0, 1, 0]),
        num_nodes=np.array(3),
        **csr,
    )


def write_typed_npz(path: Path) -> None:
    np.savez(
        path,
        **{
            "node_types": np.array(["a", "b"]),
            "num_nodes": np.array([2, 3]),
            "edge_types": np.array(["a|r|b"]),
            "edge_index|a|r|b": np.array([[0, 1], [2, 0]]),
            "x|a": np.ones((2, 1)),
            "y": np.array([0, 1, 0]),
            "target_type": np.array("b"),
        },
    )


def assert_graph_or_one_line(read: Callable[[], object]) -> None:
    """Assert that reading succeeds, or fails with a message of one line."""
    message = "a graph"
    try:
        read()
    except InputError as error:
        message = str(error)
    assert message
    assert message.isprintable()
