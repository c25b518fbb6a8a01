"""A step of a convolution over edges, and the tensors that it reads."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Role = Literal["source", "target", "edge", "shared"]
"""Rows of a tensor: one for each source, for each target, for each edge, or none."""


class Read(NamedTuple):
    """A tensor that a message function reads."""

    name: str
    """Argument of the function."""
    role: Role
    """Rows of the tensor."""

    @property
    def by_edge(self) -> bool:
        """True if the function reads a row for each edge."""
        return self.role in ("source", "edge") or (self.role == "target" and self.name.endswith("_i"))


class MessageFunction(NamedTuple):
    """A step of a convolution over edges, and what it reads."""

    conv: Any
    """The convolution."""
    by_edge: bool
    """True if the result has a row for each edge (`edge_update`), False for one of each target (`propagate`)."""
    reads: tuple[Read, ...]
    """The tensors that it reads."""
    others: tuple[tuple[str, Any], ...]
    """Names and values of its other arguments."""
