"""CUDA graphs on the CPU: what a captured pass gives PyTorch and the kernels is noted, and done again when replayed.

As on a GPU, what is captured is not done: memory that was there is put back, and what was made is no number until the
first replay. What a capture does not permit is a RuntimeError: waiting, and memory that is not the device's.
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
MADE = ("arange", "empty", "zeros", "ones", "full", "scalar_tensor", "rand", "randn", "eye", "linspace")


class Call(NamedTuple):
    """What was done once."""

    function: Callable[..., Any]
    given: tuple[Any, ...]
    named: dict[str, Any]
    made: list[Tensor]

    def again(self) -> None:
        """The same into the same memory."""
        for place, value in zip(self.made, tensors(self.function(*self.given, **self.named)), strict=True):
            if place.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                place.copy_(value)


class FakeGraph(TorchDispatchMode):
    """Captures what is done while it is entered."""

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
        masks = name in BY_MASK and any(one.dtype == torch.bool for one in tensors(args[1]))
        if name in WAITS or masks or name == "lift_fresh" or (name in MADE and kwargs.get("device") is None):
            raise RuntimeError(f"{name} is not permitted when stream is capturing")
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        for one in func._schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                self._keep(tensors(given.get(one.name)))
        return self._note(func, args, kwargs)

    def kernel(self, function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A kernel that the dispatcher does not see."""
        self._in_kernel = True
        try:
            return self._note(function, given, named)
        finally:
            self._in_kernel = False

    def _note(self, function: Callable[..., Any], given: Any, named: Any) -> Any:
        made = function(*given, **named)
        self.calls.append(Call(function, given, named, tensors(made)))
        known = {id(one.untyped_storage()) for one in tensors((given, named))}
        self._fresh |= {reference(one) for one in tensors(made) if id(one.untyped_storage()) not in known}
        return made

    def _keep(self, written: list[Tensor]) -> None:
        for one in written:
            if reference(one) not in self._fresh:
                self._before.setdefault(reference(one), (one, one.clone()))

    def undo(self) -> None:
        """Nothing has been done yet."""
        for call in self.calls:
            for one in call.made:
                if one.is_floating_point() and reference(one) in self._fresh:
                    one.detach().fill_(torch.nan)
        for one, before in self._before.values():
            one.detach().copy_(before)

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call.again()


class Kernels:
    """The CPU's kernels, noted while a graph captures."""

    def __init__(self, graph: FakeGraph) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(cpu, name)
        return lambda *given, **named: self._graph.kernel(kernel, given, named)


def capture(work: Callable[[], T]) -> tuple[FakeGraph, T]:
    """`weft.runtime.streams.capture` without a GPU."""
    graph = FakeGraph()
    with replaced(ops, "backend_of", lambda _: Kernels(graph)), graph:
        made = work()
    graph.undo()
    return graph, made


def reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
