from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.kernels import ops, torch_sparse
from weft.runtime.native import _native

ISAS = _native.supported_isas()
BACKENDS = [pytest.param(isa, marks=() if isa in (ISAS[0], ISAS[-1]) else pytest.mark.slow) for isa in ISAS]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test on every build of the native kernels."""
    yield from with_isa(request.param)


@pytest.fixture(params=[*BACKENDS, "torch_sparse"])
def sum_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test on every build of the native kernels, then with sums by PyTorch's sparse products, on the CPU."""
    if request.param == "torch_sparse":
        monkeypatch.setattr(ops, "sum_backend_of", lambda _: torch_sparse)
        yield
    else:
        yield from with_isa(request.param)


def with_isa(isa: str) -> Iterator[None]:
    """Use one build of the native kernels until the generator ends."""
    best = _native.current_isa()
    _native.set_isa(isa)
    yield
    _native.set_isa(best)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run tests on one thread: graphs are small, and waiting threads are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> None:
    torch.set_num_threads(2)  # The fixture `one_thread` of every test restores the number.


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that a test detects entries that a kernel does not write."""

    def poisoned(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)

        return wrapper

    # The first use of a device context lists the functions that it affects: these, not the poisoned ones.
    with torch.device("meta"):
        torch.empty(0)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
