"""Sums over in-edges that a PyG convolution computes before its messages, such as the degrees of a normalization.

A rank stores all in-edges of its own vertices, but not those of other sources, whose sums messages may read as well.
So the convolution is called twice. The first call ends with the sums, and those of the rank's vertices are right. The
second call gets the sums of all sources, in place of those that it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

REDUCTIONS = ("scatter_add", "scatter_reduce", "index_add", "index_reduce", "bincount")
"""Names of PyTorch's functions that reduce rows by an index; those in place have the same names with "_" at the end.

PyG's `degree`, `scatter` and `gcn_norm` call them.
"""
READ_BY_PYTHON = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__")
"""Names of tensor methods that return values which PyTorch cannot follow."""
MAGNITUDES = (0, 1, 1e3, 1e6)
"""Magnitudes of sums, such as degrees, by which a trial finds whether a convolution reads them."""
TRIAL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""Errors of a convolution that cannot run on the arguments of a trial."""


class InEdgeSums(NamedTuple):
    """Sums over in-edges, or other reductions, that a convolution computes before its messages."""

    calls: tuple[int, ...] = ()
    """Number of the call that computes each sum, from 0, among the convolution's calls of `REDUCTIONS`."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Sizes of a vertex's row of each sum; () for a number, such as a degree."""
    learned: bool = False
    """True if the sums depend on the convolution's parameters."""

    @classmethod
    def of(
        cls,
        conv: nn.Module,
        run: Callable[..., Tensor],
        rows: Sequence[Tensor],
        edge_index: Tensor,
        num_targets: int,
    ) -> InEdgeSums | None:
        """Find the sums of sources that a target's result depends on.

        Args:
            conv: The convolution.
            run: Function of the edges and the rows that calls it.
            rows: Random rows of all vertices.
            edge_index: Random edges [2, E] between them.
            num_targets: Number of targets, which are the first vertices.

        Returns:
            The sums; None if a result depends on more of the graph than the in-edges of the target and these sums.
        """
        # 1. Run the convolution on all edges, and on the in-edges of the targets.
        # 2. Find the sums before its messages. Without any, the results of the targets must be equal.
        # 3. Check that the in-edges of a vertex suffice for its sums.
        # 4. Replace the sums of sources, and if step 3 failed those of targets, by numbers of several magnitudes, since
        #    a convolution may read only whether a degree exceeds a threshold. If no result changes, none is read.
        # 5. Otherwise sums must not depend on rows or on each other, and the results must be right with them.
        is_target = edge_index[1] < num_targets
        in_edges, other_edges = edge_index[:, is_target], edge_index[:, ~is_target]
        with torch.enable_grad():
            (sums, values, depends), (first_sums, first, _), (last_sums, last, _) = (
                cls._before_messages(conv, partial(run, edges), rows) for edges in (edge_index, in_edges, other_edges)
            )

        @torch.no_grad()
        def results(edges: Tensor) -> Tensor:
            return run(edges, *rows)[:num_targets]

        def are_right(read: Tensor) -> bool:
            with sums.replacing(read):
                return _is_close(results(in_edges), expected)

        expected = results(edge_index)
        is_same = _is_close(results(in_edges), expected)
        if not sums.calls:
            return sums if is_same else None
        are_local = first_sums == last_sums == sums and _is_close(
            torch.cat([first[:num_targets], last[num_targets:]]), values
        )
        random = torch.Generator().manual_seed(0)

        def matter(magnitude: float) -> bool:
            read = (magnitude * torch.rand(values.shape, generator=random)).to(values.dtype)
            if are_local:
                read[:num_targets] = values[:num_targets]
            try:
                return not are_right(read)
            except TRIAL_ERRORS:  # such as of a degree that is an index
                return True

        if is_same and not any(map(matter, MAGNITUDES)):
            return cls()
        return sums if are_local and not depends and are_right(values) else None

    @classmethod
    def _before_messages(
        cls, conv: nn.Module, call: Callable[..., Any], rows: Sequence[Tensor]
    ) -> tuple[InEdgeSums, Tensor, bool]:
        """Find the sums that a convolution computes before its messages.

        Args:
            conv: The convolution.
            call: Function of the rows that calls it.
            rows: Rows of all vertices [n, .], where n differs from all other sizes of the call.

        Returns:
            The sums, their values [n, width] side by side, and True if a sum depends on the rows or on another sum.
        """
        with _ending_at_messages(conv), _Recorded(rows=rows) as recorded:
            call(*rows)
        results = {number: each for number, each in enumerate(recorded.results) if each.shape[:1] == rows[0].shape[:1]}
        sizes = tuple(tuple(each.shape[1:]) for each in results.values())
        learned = any(each.requires_grad for each in results.values())
        columns = [as_matrix(each) for each in results.values()] or [rows[0].new_empty(len(rows[0]), 0)]
        depends = not recorded.dependent.isdisjoint(results)
        return cls((*results,), sizes, learned), torch.cat(columns, 1).detach(), depends

    @property
    def width(self) -> int:
        """Number of columns of all sums side by side."""
        return sum(map(prod, self.sizes))

    def compute(self, call: Callable[[], Any]) -> Tensor:
        """Return the sums [n, width] side by side.

        Args:
            call: Calls the convolution. The call ends after the last sum.
        """
        recorded = _Recorded(self.calls[-1] + 1)
        try:
            with recorded:
                call()
        except _EndOfCallError:
            pass
        return torch.cat([as_matrix(recorded.results[number]) for number in self.calls], 1)

    def replacing(self, rows: Tensor) -> TorchFunctionMode:
        """Return a context in which a call of the convolution uses these sums instead of those that it computes.

        Args:
            rows: The sums of all vertices [n, width], side by side.
        """
        parts = rows.split([prod(sizes) for sizes in self.sizes], 1)
        return _Replaced(dict(zip(self.calls, parts, strict=True)))


def _is_close(rows: Tensor, others: Tensor) -> bool:
    return torch.allclose(rows, others, rtol=1e-4, atol=1e-6)


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

    It also follows which tensors are computed from some rows, or from the results of earlier reductions.

    Args:
        limit: Number of reductions after which the call of the convolution ends; None: it does not end.
        rows: The rows.
    """

    def __init__(self, limit: int | None = None, rows: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.limit = limit
        self.results: list[Tensor] = []
        self.dependent: set[int] = set()
        """Numbers of the reductions that depend on the rows, or on an earlier reduction."""
        self._followed = {id(each): each for each in rows}  # kept alive, so that no other tensor gets its id
        self._read_by_python = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.limit is None:
            self._follow(function, result, args, kwargs or {})
        if _is_reduction(function):
            self.results.append(result.clone())
            if len(self.results) == self.limit:
                raise _EndOfCallError
        return result

    def _follow(self, function: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Follow the result of a function if it depends on the tensors that are followed."""
        name = getattr(function, "__name__", "")
        only_shape = name.startswith("new_") or name.endswith("_like")  # of the first argument
        read = [*tensors_in(args[1:] if only_shape else args), *tensors_in([*kwargs.values()])]
        depends = self._read_by_python or any(id(each) in self._followed for each in read)
        self._read_by_python |= depends and name in READ_BY_PYTHON
        if depends and _is_reduction(function):
            self.dependent.add(len(self.results))
        if depends or _is_reduction(function):
            changed = args[:1] if name == "__setitem__" else [result]
            self._followed |= {id(each): each for each in tensors_in(changed)}


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


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
        rows = None
        if _is_reduction(function):
            rows = self.rows.get(self.num_calls)
            self.num_calls += 1
        with nullcontext() if rows is None else torch.no_grad():  # no gradient flows to rows that are replaced
            result = function(*args, **(kwargs or {}))
        return result if rows is None else result.copy_(rows.reshape(result.shape))
