"""CUDA graphs emulated on the CPU: the calls of a captured pass are recorded, and repeated when it is replayed.

As on a GPU, a capture computes nothing: memory that existed before is restored, and new tensors are NaN until the first
replay. Operations that a capture does not permit raise a RuntimeError: synchronization, and tensors outside the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.planted import replaced
from tests.lib.streams import tensors
from weft.kernels import cpu, ops

T = TypeVar("T")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "bincount")
BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")
CREATED = ("arange", "empty", "zeros", "ones", "full", "scalar_tensor", "rand", "randn", "eye", "linspace")


class Call(NamedTuple):
    """One recorded call of an operation or a kernel."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    def again(self) -> None:
        """Repeat the call and write its results into the tensors of the first call."""
        for result, value in zip(self.results, tensors(self.function(*self.args, **self.kwargs)), strict=True):
            if result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                result.copy_(value)


class FakeGraph(TorchDispatchMode):
    """Records the operations that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._fresh: set[StorageWeakRef] = set()
        self._before: dict[StorageWeakRef, tuple[Tensor, Tensor]] = {}
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_kernel:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        masks = name in BY_MASK and any(index.dtype == torch.bool for index in tensors(args[1]))
        if name in WAITS or masks or name == "lift_fresh" or (name in CREATED and kwargs.get("device") is None):
            raise RuntimeError(f"{name} is not permitted when stream is capturing")
        values = dict(zip((parameter.name for parameter in func._schema.arguments), args, strict=False)) | kwargs
        for parameter in func._schema.arguments:
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                self._save(tensors(values.get(parameter.name)))
        return self._record(func, args, kwargs)

    def kernel(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record a kernel, which PyTorch's dispatcher does not see."""
        self._in_kernel = True
        try:
            return self._record(function, args, kwargs)
        finally:
            self._in_kernel = False

    def _record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        self.calls.append(Call(function, args, kwargs, tensors(result)))
        old_storages = {id(tensor.untyped_storage()) for tensor in tensors((args, kwargs))}
        self._fresh |= {
            reference(tensor) for tensor in tensors(result) if id(tensor.untyped_storage()) not in old_storages
        }
        return result

    def _save(self, written: list[Tensor]) -> None:
        for tensor in written:
            if reference(tensor) not in self._fresh:
                self._before.setdefault(reference(tensor), (tensor, tensor.clone()))

    def undo(self) -> None:
        """Undo the recorded calls: restore old tensors, and set new ones to NaN until the first replay."""
        for call in self.calls:
            for tensor in call.results:
                if tensor.is_floating_point() and reference(tensor) in self._fresh:
                    tensor.detach().fill_(torch.nan)
        for tensor, before in self._before.values():
            tensor.detach().copy_(before)

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call.again()


class Kernels:
    """The CPU's kernels, recorded while a graph captures."""

    def __init__(self, graph: FakeGraph) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(cpu, name)
        return lambda *args, **kwargs: self._graph.kernel(kernel, args, kwargs)


def capture(work: Callable[[], T]) -> tuple[FakeGraph, T]:
    """Capture like `weft.runtime.streams.capture`, without a GPU; return the graph and the result of `work`."""
    graph = FakeGraph()
    with replaced(ops, "backend_of", lambda _: Kernels(graph)), graph:
        result = work()
    graph.undo()
    return graph, result


def reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
