"""Compile every Triton kernel for a GPU of compute capability 9.0, on a machine without one.

`python -m tests.lib.compile_triton CACHE`. The operations are called on CPU tensors, and each launch only compiles,
so results are meaningless.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
if len(sys.argv) > 1:
    os.environ["TRITON_CACHE_DIR"] = sys.argv[1]

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.lib.kernel_cases import attend_case, attend_edges_case, dot_case, graph, max_case, pair_case, spmm_case
from weft.data.degrees import DegreeClasses
from weft.kernels import ops
from weft.kernels import triton as kernels

WIDTH = 64


class NoGpu:
    """The part of a Triton driver that is needed to compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    compiled: dict[str, set[str]] = {}

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_it(*args: Any, **kwargs: Any) -> None:
            binary = kernel.warmup(*args, grid=grid, **kwargs)
            compiled.setdefault(kernel.__name__, set()).add(binary.hash)

        return compile_it

    driver.set_active(NoGpu())
    JITFunction.__getitem__ = launch
    ops.backend_of = lambda _: kernels
    DegreeClasses.of = partial(DegreeClasses.of, small=4, piece=8)
    adj = graph(23, 17, 70, seed=2, hub=True, index=torch.int32)
    assert len(adj.degree_classes.hubs)
    bounds = (0, WIDTH // 2, WIDTH)
    for case in (
        spmm_case(adj, WIDTH, source=True, target=True, loop=True, weighted=True),
        spmm_case(adj, WIDTH, source=False, target=False, loop=False, weighted=False),
        max_case(adj, WIDTH),
        attend_case(adj, bounds, loop=True, dropout=0.4),
        attend_case(adj, bounds),
        pair_case(adj, bounds, features=5, loop=True),
        pair_case(adj, bounds),
        dot_case(adj, bounds),
        attend_edges_case(adj, bounds, loop=True, dropout=0.4),
    ):
        case.run(ops, adj, torch.float32)
    x, rows = torch.zeros(20, WIDTH), torch.arange(20)
    for relu in (False, True):
        kernels.keyed_dropout(x, rows, 2**63 + 11, 0.3, 5, relu)
    kernels.relu_dropout_backward(x, x, 0.3)
    kernels.gather_rows(x, rows, x)
    kernels.add_rows(x, rows, x, rows)
    print(", ".join(f"{name} {len(hashes)}" for name, hashes in compiled.items()))


if __name__ == "__main__":
    main()
