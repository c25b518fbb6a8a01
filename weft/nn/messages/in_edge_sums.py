"""Sums over in-edges that a PyG convolution computes before its messages, such as the degrees of a normalization.

A rank stores all in-edges of its own vertices, but not those of other sources, whose sums messages may read as well.
So the convolution is called twice. The first call ends with the sums, and those of the rank's vertices are right. The
second call gets the sums of all sources, in place of those that it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

REDUCTIONS = ("scatter_add", "scatter_reduce", "index_add", "index_reduce")
"""Names of PyTorch's functions that reduce rows by an index; those in place have the same names with "_" at the end.

PyG's `degree`, `scatter` and `gcn_norm` call them.
"""


class InEdgeSums(NamedTuple):
    """Sums over in-edges, or other reductions, that a convolution computes before its messages."""

    calls: tuple[int, ...] = ()
    """Number of each one's call among the convolution's calls of `REDUCTIONS`, from 0."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Sizes of a row of each one."""
    learned: bool = False
    """True if they depend on the convolution's parameters."""

    @classmethod
    def before_messages(cls, conv: nn.Module, call: Callable[[], Any], num_rows: int) -> tuple[InEdgeSums, Tensor]:
        """Return the sums that a convolution computes before its messages, and their values [n, width] side by side.

        Args:
            conv: The convolution.
            call: Calls it.
            num_rows: Number of vertices n, which differs from all other sizes of the call.
        """
        with _ending_at_messages(conv), _Recorded() as recorded:
            call()
        results = {number: each for number, each in enumerate(recorded.results) if each.shape[:1] == (num_rows,)}
        sizes = tuple(tuple(each.shape[1:]) for each in results.values())
        learned = any(each.requires_grad for each in results.values())
        columns = [as_matrix(each) for each in results.values()] or [torch.empty(num_rows, 0)]
        return cls((*results,), sizes, learned), torch.cat(columns, 1)

    @property
    def width(self) -> int:
        """Number of columns of all sums side by side."""
        return sum(map(prod, self.sizes))

    def compute(self, call: Callable[[], Any]) -> Tensor:
        """Return the sums [n, width] side by side. `call`: calls the convolution, which is left after the last sum."""
        recorded = _Recorded(self.calls[-1] + 1)
        try:
            with recorded:
                call()
        except _EndOfCallError:
            pass
        return torch.cat([as_matrix(recorded.results[number]) for number in self.calls], 1)

    def replacing(self, rows: Tensor) -> TorchFunctionMode:
        """Return a context in which a call of the convolution gets other sums than it computes.

        Args:
            rows: The sums of all vertices [n, width], side by side.
        """
        parts = rows.split([prod(sizes) for sizes in self.sizes], 1)
        return _Replaced(dict(zip(self.calls, parts, strict=True)))


def as_matrix(x: Tensor) -> Tensor:
    """Return rows x [n, ...] as a matrix [n, width]."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


class _EndOfCallError(Exception):
    """Ends a call of a convolution."""


def _end_call(*_: Any, **__: Any) -> NoReturn:
    raise _EndOfCallError


@contextmanager
def _ending_at_messages(conv: nn.Module) -> Iterator[None]:
    """Leave the `with` block when the convolution begins to pass messages."""
    replaced = dict.fromkeys(("propagate", "edge_updater"), _end_call)
    conv.__dict__.update(replaced)
    try:
        yield
    except _EndOfCallError:
        pass
    finally:
        for name in replaced:
            del conv.__dict__[name]


def _is_reduction(function: Any) -> bool:
    return getattr(function, "__name__", "").rstrip("_") in REDUCTIONS


class _Recorded(TorchFunctionMode):
    """Mode that copies the results of reductions, which a convolution may change in place.

    Args:
        limit: Number of reductions after which the call of the convolution ends; None: it does not end.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.results: list[Tensor] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if _is_reduction(function):
            self.results.append(result.clone())
            if len(self.results) == self.limit:
                raise _EndOfCallError
        return result


class _Replaced(TorchFunctionMode):
    """Mode in which some reductions return other rows.

    Args:
        rows: Rows [n, .] by the number of the reduction's call.
    """

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.rows = rows
        self.num_calls = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_reduction(function):
            return function(*args, **(kwargs or {}))
        rows = self.rows.get(self.num_calls)
        self.num_calls += 1
        if rows is None:
            return function(*args, **(kwargs or {}))
        into: Tensor = args[0] if function.__name__.endswith("_") else torch.empty_like(args[0])
        return into.copy_(rows.reshape(into.shape))
