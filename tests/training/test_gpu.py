"""Runs on a GPU: losses equal the CPU's, repeated runs are the same bits, and offload stays within its limit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.lib.running import losses, train
from weft.kernels import ops
from weft.utils.errors import InputError

GRAPH = "sbm:vertices=600,degree=8,features=24,classes=4"
EPOCHS = 20
OPTIONS: dict[str, Any] = {"hidden": 32, "epochs": EPOCHS, "quiet": True}
BATCHES: dict[str, Any] = {"strategy": "split", "batch_size": "64", "fanout": "5,5", "prefetch_batches": 2}
CHUNKS: dict[str, Any] = {"chunks": 8, "device_memory": "4MB"}
WAYS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "offload": {"strategy": "offload"},
    "offload-pinned": {"strategy": "offload", **CHUNKS},
    "offload-files": {"strategy": "offload", **CHUNKS, "scratch": "."},
    "tensor-pinned": {"strategy": "tensor", "device_memory": "150KB", "layers": 4, "epochs": 4},
    "pipeline": {"strategy": "pipeline", "workers": 2, **CHUNKS},
    "split": BATCHES,
    "split-of-two": {"workers": 2, **BATCHES},
}
"""Options by way of training. On a machine with one GPU, two workers share it and exchange rows through the host."""
ROUNDED = 16 * 2**-8
"""Relative tolerance in bfloat16: 8 roundings in each of 2 layers, each of which another order of sums may change.

See test_low_precision_runs.py.
"""
TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "bfloat16": ROUNDED}
CASES = [
    *product(("single", "offload"), ("gcn", "sage", "gin", "gat", "gatv2"), ("float64", "float32")),
    *product(list(WAYS)[2:-2], ("gcn", "gat"), ("float32",)),
    # Not in float32, where the CPU itself differs by 3e-3 from float64: Adam amplifies the sign of tiny gradients.
    *product(("split", "split-of-two"), ("gcn", "gat"), ("float64",)),
    *product(("single", "split", "split-of-two"), ("gcn", "gat"), ("bfloat16",)),
]
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize(("way", "model", "dtype"), CASES)
def test_losses_are_the_cpus(way: str, model: str, dtype: str, tmp_path: Path) -> None:
    """Losses equal the CPU's, with dropout, whose masks are the same bits."""
    results = [run(tmp_path / device, way, model, device=device, dtype=dtype) for device in ("cpu", "cuda")]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance if dtype == "float64" else 0)


@gpu
@needs_gpu
@pytest.mark.parametrize(("way", "model"), [*product(WAYS, ("gcn", "gat")), ("single", "gatv2"), ("offload", "gatv2")])
def test_two_runs_have_the_same_bits(way: str, model: str, tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, way, model, device="cuda") for name in ("one", "two"))
    assert first == second


@gpu
@needs_gpu
@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_a_captured_run_has_the_bits_of_one_that_is_not(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"device": "cuda", "norm": "batch", "input_dropout": 0.2}
    ways = {"captured": {}, "launched": {"disable": "capture"}}
    captured, launched = (run(tmp_path / name, "single", model, **options, **more) for name, more in ways.items())
    assert captured == launched
    assert "could not capture" not in capsys.readouterr().err
    stages = [set(weft.Run.open(tmp_path / name).summary["ranks"][0]["stages"]) for name in ways]
    assert stages == [{"captured", "update"}, {"encode", "loss", "update"}]


@gpu
@needs_gpu
def test_memory_stays_below_the_limit(tmp_path: Path) -> None:
    """Offload allocates at most --device-memory, counting freed memory that a stream may still use; it refuses less."""
    with pytest.raises(InputError, match="device-memory"):
        run(tmp_path / "refused", "offload", "gcn", device="cuda", device_memory="1KB")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    run(tmp_path / "within", "offload", "gcn", device="cuda", device_memory="4MB")
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before <= 4_000_000


@gpu
@needs_gpu
@pytest.mark.parametrize("way", ["single", "offload-pinned"])
def test_sums_without_triton_are_the_cpus(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = run(tmp_path / "cpu", way, "gcn", device="cpu", dtype="float64", dropout=0.0)
    monkeypatch.setattr(ops, "triton_backend", lambda: None)
    cuda = run(tmp_path / "cuda", way, "gcn", device="cuda", dtype="float64", dropout=0.0)
    torch.testing.assert_close(cuda, cpu, rtol=1e-9, atol=1e-9)


@gpu
@needs_gpu
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_hybrid_measures_kernels_on_the_gpu(model: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 2, "strategy": "hybrid", "workers": 2, "measure": True}
    begin = train(GRAPH, model, device="cuda", out=tmp_path / "run", **options).records[0]
    assert begin["measured"] == ["kernels", "network"]
    assert min(begin["machine"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("way", "dtype"), sorted({(way, dtype) for way, _, dtype in CASES}))
def test_every_way_runs_on_the_cpu(way: str, dtype: str, tmp_path: Path) -> None:
    """All options are valid, which can be checked without a GPU."""
    assert len(run(tmp_path / "run", way, "gcn", device="cpu", dtype=dtype, epochs=2)) == 2


def run(folder: Path, way: str, model: str, **options: Any) -> list[float]:
    """Train, and return the losses."""
    settings = {**OPTIONS, **WAYS[way], **options}
    if "scratch" in settings:
        folder.mkdir()
        settings["scratch"] = str(folder.parent)
    if settings.get("dtype") == "bfloat16":
        # In narrower rows, rounding that changes the sign of one input of ReLU changes all later epochs.
        settings["hidden"] = 64
        # The tolerance is that of one pass. Adam amplifies rounding: in mini-batches, the CPU's own losses are within
        # 3 % of float64's for ten epochs, and 6.5 % from them by the 20th.
        settings["epochs"] = min(10, settings["epochs"])
    finished: weft.Run = train(GRAPH, model, out=folder, **settings)
    return losses(finished.folder)
