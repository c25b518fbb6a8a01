"""Runs on a GPU: the CPU's losses, the same bits twice, and offload within its limit. Never run yet: there was none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.engine.running import losses, train
from weft.core.errors import InputError

GRAPH = "sbm:vertices=600,degree=8,features=24,classes=4"
EPOCHS = 20
OPTIONS: dict[str, Any] = {"hidden": 32, "epochs": EPOCHS, "quiet": True}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("strategy", ["single", "offload"]),
]


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
def test_losses_are_the_cpus(strategy: str, model: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """With dropout, whose masks are the same bits."""
    found = [run(tmp_path / device, model, strategy, device=device, dtype=dtype) for device in ("cpu", "cuda")]
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2"])
def test_two_runs_have_the_same_bits(strategy: str, model: str, tmp_path: Path) -> None:
    one, two = (run(tmp_path / name, model, strategy, device="cuda") for name in ("one", "two"))
    assert one == two


def test_memory_stays_below_the_limit(strategy: str, tmp_path: Path) -> None:
    """Or one line says the least that would do."""
    if strategy == "single":
        pytest.skip("has no limit")
    with pytest.raises(InputError, match="device-memory"):
        run(tmp_path / "refused", "gcn", strategy, device="cuda", device_memory="1KB")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(tmp_path / "within", "gcn", strategy, device="cuda", device_memory="4MB")
    assert torch.cuda.max_memory_allocated() - before <= 4_000_000


def run(folder: Path, model: str, strategy: str, **options: Any) -> list[float]:
    """The losses of a run."""
    made: weft.Run = train(GRAPH, model, out=folder, strategy=strategy, **OPTIONS, **options)
    return losses(made.folder)
