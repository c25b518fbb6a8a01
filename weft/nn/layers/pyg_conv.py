"""PyG's convolutions as layers, unchanged."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.nn.view import View
from weft.utils.errors import InputError

PADDED = ("GRUAggregation", "LSTMAggregation", "SetTransformerAggregation", "SortAggregation", "MLPAggregation")
"""Aggregations whose result depends on the largest degree around, and so on what else a rank has."""


class PyGConv(nn.Module):
    """A PyG convolution over a view's block: sources, of which the targets are the first, and edges between them.

    It gets the graph's edge weights if its forward takes `edge_weight`. A convolution of PyG's gets the edge features
    if it was made for some (`edge_dim`), a custom one if its forward takes `edge_attr`.

    Args:
        conv: The convolution.
        out_width: Columns of its result.
        reads_edge_attr: Whether the model calls it with edge features, which it then gets in any case.
    """

    def __init__(self, conv: Any, out_width: int, *, reads_edge_attr: bool = False) -> None:
        super().__init__()
        self.conv, self.out_width = conv, out_width
        self.needs_edge_attr = reads_edge_attr or requires_edge_attr(conv)
        self.register_state_dict_post_hook(name_as_pyg)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(name_as_wrapped)  # type: ignore[no-untyped-call]
        self.takes_pair = takes_pair(conv)
        self.takes = frozenset(inspect.signature(conv.forward).parameters)

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, edge_index, num_targets = view.block(x)
        known = self._known(view, sources.shape[1])
        if sources.device.type == "meta":  # many convolutions look at the edges, which have no values there
            map_ = sources.new_empty(sources.shape[1], self.out_width)
            return sources[:num_targets] @ map_ + sum(t.sum() for t in (sources, *self.parameters()))
        if self.takes_pair:
            y: Tensor = self.conv((sources, sources[:num_targets]), edge_index, **known)
            return y
        whole: Tensor = self.conv(sources, edge_index, **known)
        return whole[:num_targets]

    def _known(self, view: View, in_width: int) -> dict[str, Tensor]:
        """What the convolution is given of the edges, by the name of its argument."""
        known = {}
        if "edge_weight" in self.takes and view.edge_weight is not None:
            known["edge_weight"] = view.edge_weight
        if "edge_attr" in self.takes:
            features = view.edge_features
            found = 0 if features is None else features.shape[1]
            wanted = edge_width(self.conv, in_width, found) if is_pygs(self.conv) else found
            if self.needs_edge_attr:
                wanted = wanted or found or 1
            if wanted and features is None:
                raise InputError(
                    f"{type(self.conv).__name__} needs edge features, and the graph has none: give the graph "
                    "edge_features [edges, features], or take a convolution without"
                )
            if wanted and wanted != found:
                raise InputError(
                    f"{type(self.conv).__name__} takes {wanted} edge features, and the graph has {found}: "
                    f"make it with edge_dim={found}"
                )
            if wanted and features is not None:
                known["edge_attr"] = features
        return known


def name_as_pyg(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG001
    """Tensors of a PyG convolution are saved under its own names."""
    for name in [one for one in state if one.startswith(prefix + "conv.")]:
        state[prefix + name.removeprefix(prefix + "conv.")] = state.pop(name)


def name_as_wrapped(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """And found by these."""
    for name in [name for name, _ in [*layer.conv.named_parameters(), *layer.conv.named_buffers()]]:
        if prefix + name in state:
            state[prefix + "conv." + name] = state.pop(prefix + name)


def from_pyg(conv: Any, *, reads_edge_attr: bool = False) -> PyGConv:
    """A layer for weft.nn.Stack from a PyG convolution such as SAGEConv, GATv2Conv or TransformerConv.

    It runs under every strategy that gives a rank all in-edges of its vertices, with the numbers of one device.
    reads_edge_attr: whether the model calls it with edge features.

    Raises InputError for a convolution that reads more of the graph than that (GCNConv: the degrees of sources), and
    for dropout or a batch norm of its own, which would depend on the number of ranks.
    """
    name = type(conv).__name__
    if getattr(conv, "cached", False):
        raise InputError(f"{name} with cached=True keeps the first edges that it sees: leave cached out")
    needs_edge_attr = reads_edge_attr or requires_edge_attr(conv)
    tried = None if takes_pair(conv) and out_width_of(conv) else Trial.of(conv, needs_edge_attr=needs_edge_attr)
    if not takes_pair(conv) and not (tried and tried.reads_sources_alone):
        raise InputError(
            f"{name} reads more of the graph than the rows of in-neighbours, such as their degrees, and a rank has a "
            "part of it: give weft.nn.convert the model (it has GCNConv, GCN2Conv, APPNP, SGConv), or take one that "
            "takes (x_source, x_target)"
        )
    for part in conv.modules():
        p = dropout_of(part)
        if p:
            raise InputError(
                f"{name} has dropout={p} of its own, drawn anew by every rank: have it between layers, or "
                "of attention give weft.nn.convert a model of GATConv or GATv2Conv, or take those of weft.nn"
            )
    padded = [type(part).__name__ for part in conv.modules() if type(part).__name__ in PADDED]
    if padded:
        raise InputError(
            f"{name} has a {padded[0]}, whose result depends on the largest degree that a rank sees: take a sum, mean, "
            "maximum or softmax"
        )
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in conv.modules()):
        raise InputError(f"{name} has a batch norm of its own, which a rank would take over its rows: have it outside")
    width = out_width_of(conv) or (tried.out_width if tried else 0)
    if not width:
        raise InputError(f"{name} names no out_channels: use weft.nn.PyGConv(conv, out_width)")
    return PyGConv(conv, width, reads_edge_attr=reads_edge_attr)


def out_width_of(conv: Any) -> int:
    """The columns of a convolution's result, as it says them or its maps do; 0 where neither does."""
    if isinstance(getattr(conv, "out_channels", None), int):
        return int(conv.out_channels * (conv.heads if getattr(conv, "concat", False) and hasattr(conv, "heads") else 1))
    maps = [part for part in getattr(conv, "nn", nn.Identity()).modules() if isinstance(part, nn.Linear)]
    return maps[-1].out_features if maps else 0


def dropout_of(part: nn.Module) -> float:
    """The dropout that a module draws by itself."""
    p = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    if isinstance(p, list):  # PyG's MLP, layer by layer
        p = max(p, default=0.0)
    return p if isinstance(p, int | float) else 0.0


def takes_pair(conv: nn.Module) -> bool:
    """Whether a PyG convolution takes (x_source, x_target) for x."""
    parameter = inspect.signature(conv.forward).parameters.get("x")
    return parameter is not None and "Tuple" in str(parameter.annotation)


class Trial(NamedTuple):
    """What a convolution does, found by running it on a few random rows and edges."""

    reads_sources_alone: bool
    """Whether a target's row is the same where in-edges of other vertices are missing."""
    out_width: int

    @classmethod
    def of(cls, conv: Any, *, needs_edge_attr: bool = False) -> Trial | None:
        """None where it cannot be run on rows of any width that its parameters' first two dimensions tell."""
        random = torch.Generator().manual_seed(0)
        targets, num_vertices = 6, 12
        edge_index = torch.randint(num_vertices, (2, 5 * num_vertices), generator=random)
        few = edge_index[:, edge_index[1] < targets]
        conv = copy.deepcopy(conv).to("cpu").eval()
        dtype = next((one.dtype for one in conv.parameters()), torch.float32)
        sizes = [size for one in conv.parameters() for size in reversed(one.shape[:2])]
        widths = [size // rows for rows in (1, 2, 3) for size in sizes]  # a map may read both ends of an edge
        in_channels = getattr(conv, "in_channels", 0)  # a pair in some convolutions
        in_widths = dict.fromkeys([in_channels, *widths] if isinstance(in_channels, int) else widths)
        tries = ((width, n) for width in in_widths for n in edge_widths(conv, width, sizes, needed=needs_edge_attr))
        for width, columns in tries:
            if width < 1:
                continue
            x = torch.randn(num_vertices, width, dtype=dtype, generator=random)
            graphs = [(edges, x.new_ones(edges.shape[1], columns)) for edges in (edge_index, few)]
            try:
                with torch.no_grad():
                    whole, part = (conv(x, edges, **({"edge_attr": f} if columns else {})) for edges, f in graphs)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                continue
            return cls(torch.allclose(whole[:targets], part[:targets], rtol=1e-4, atol=1e-6), whole.shape[1])
        return None


def is_pygs(conv: Any) -> bool:
    """Return whether a convolution is one of PyG's, or of a class derived from one."""
    bases = (base for base in type(conv).__mro__ if base.__name__ != "MessagePassing")
    return any(base.__module__.startswith("torch_geometric.nn.conv.") for base in bases)


def requires_edge_attr(conv: Any) -> bool:
    """Return whether a custom convolution's forward has an argument edge_attr without a default."""
    parameter = inspect.signature(conv.forward).parameters.get("edge_attr")
    return parameter is not None and parameter.default is parameter.empty and not is_pygs(conv)


def edge_widths(conv: Any, in_width: int, sizes: list[int], *, needed: bool) -> list[int]:
    """Return the widths of edge features to try a convolution with; 0: without any.

    A custom one does not tell: one column, as many as rows have, and the sizes of its parameters are tried.
    """
    stated = edge_width(conv, in_width, 0) if is_pygs(conv) else 0
    if stated or not needed:
        return [stated]
    return [*dict.fromkeys([1, in_width, *sizes])]


def edge_width(conv: Any, in_width: int, found: int) -> int:
    """How many features of an edge a convolution asks for, 0 for none, on rows of in_width and `found` edge features.

    It says so by a map of them, or by an option; GENConv adds them as they are where they are as wide as its result.
    """
    name = type(conv).__name__
    mapped = getattr(conv, "lin" if name == "GINEConv" else "lin_edge", None)
    if mapped is not None:
        return int(mapped.weight.shape[1])
    if name == "GINEConv":
        return in_width
    if name == "NNConv":
        return max(found, 1)
    if name == "GENConv":
        return found if found == conv.out_channels else 0
    return next((n for field in ("edge_dim", "in_edge_channels", "dim") if (n := getattr(conv, field, None))), 0)
