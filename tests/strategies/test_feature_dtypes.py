"""Features in 16 bits give the results of the same numbers in 32 bits, bit for bit, under every strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
from weft.data import Graph
from weft.utils.errors import InputError

STRATEGIES = {
    "single": {},
    "tensor": {"workers": 2},
    "hybrid": {"workers": 2, "partition": "random"},
    "offload": {"device_memory": "600KB"},
    "pipeline": {"workers": 2, "chunks": 3},
    "split": {"workers": 2, "batch_size": "200", "cache_memory": "20KB"},
}


def narrow(dtype: torch.dtype) -> Graph:
    """Return `digits` with features that 32 bits can hold, but 16 bits not, before they are rounded."""
    graph = weft.load("digits")
    return replace(graph, x=graph.x / 7).with_feature_dtype(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_equal_those_of_wide_features(strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    graph = narrow(dtype)
    graph.save(tmp_path / "narrow")
    stored = Graph.open(tmp_path / "narrow")
    assert stored.x.dtype == dtype
    options = {"strategy": strategy, "hidden": 8, "epochs": 2, **STRATEGIES[strategy]}
    losses, expected = (
        weft.train(each, out=tmp_path / name, **options).summary["loss"]
        for name, each in {"stored": stored, "wide": replace(graph, x=graph.x.float())}.items()
    )
    assert losses == expected


def test_a_number_beyond_the_range_is_refused() -> None:
    graph = Graph.from_edges([0], [1], x=torch.tensor([[1.0], [1e5]]))
    with pytest.raises(InputError, match=r"x\[1, 0\] is 1000000?"):
        graph.with_feature_dtype(torch.float16)
    with pytest.raises(InputError, match=r"cannot be stored as torch\.int8"):
        graph.with_feature_dtype(torch.int8)
    with pytest.raises(InputError, match="no features"):
        replace(graph, x=None).with_feature_dtype(torch.float16)
