"""Constant features of which linear transforms read only the nonzeros, also those in the code of PyG."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from weft.data import Adjacency, version_of
from weft.kernels import spmm
from weft.utils.dtypes import sum_dtype

NONZERO_COST = 8
"""Cost of a nonzero in a linear transform of sparse features, in entries of a dense one (measured: 2 to 5)."""


class SparseRows(Tensor):
    """Constant rows [n, F], of which `torch.nn.functional.linear` reads only the nonzeros.

    All other operations see an ordinary tensor, and return one. On the meta device, only the number of nonzeros is
    known.
    """

    density: float
    """Fraction of the entries that are not zero."""
    version: int
    """Version of the rows whose nonzeros are read; rows that were changed in place since are ordinary ones."""
    on_product: Callable[[SparseRows, int], None] | None = None
    """Function of these rows and of the number of columns of a product, by which a plan counts it."""

    @classmethod
    def of(cls, x: Tensor, density: float, on_product: Callable[[SparseRows, int], None] | None = None) -> Tensor:
        """Return rows x with their nonzeros; x itself if linear transforms are to read all entries.

        Args:
            x: Constant rows [n, F].
            density: Fraction of their entries that are not zero, or 1 to read all entries.
            on_product: Function by which a plan counts the products.
        """
        if density >= 1:
            return x
        rows = x.as_subclass(cls)
        rows.density, rows.on_product, rows.version = density, on_product, version_of(rows)
        if x.is_meta:  # kept from before the step, so it must not count
            _ = rows.nonzeros
        return rows

    @cached_property
    def nonzeros(self) -> Adjacency:
        """Edges from columns to rows, weighted by the nonzeros, in the type in which they are summed."""
        if self.is_meta:
            edges = Adjacency.without_data(self.shape[1], len(self), self.num_nonzeros)
            return edges.with_weight(self.new_empty(self.num_nonzeros, dtype=sum_dtype(self.dtype)))
        return Adjacency.from_dense(self).cast(sum_dtype(self.dtype))

    @property
    def num_nonzeros(self) -> int:
        """Number of nonzeros, by the density."""
        return round(self.density * self.numel())

    def transformed(self, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """Return `x W^T + added` [n, o].

        Args:
            weight: W, [o, F].
            added: Rows [n, o], or a bias [o]; None: nothing is added.
        """
        if self.on_product is not None:
            self.on_product(self, len(weight))
        y = spmm(self.nonzeros, weight.t(), weighted=True)
        return (y if added is None else y.add_(added)).to(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear:
                x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
                if isinstance(x, cls) and weight.dim() == 2 and version_of(x) == x.version:
                    return x.transformed(weight, bias)
            return func(*args, **(kwargs or {}))


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return the arguments of `torch.nn.functional.linear` in their order."""
    return input, weight, bias
