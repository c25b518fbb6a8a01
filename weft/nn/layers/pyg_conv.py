"""PyG convolutions as layers over views, without changes to the convolution."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.nn.messages import TRIAL_ERRORS, InEdgeSums, TiledConv, as_matrix, structure_of
from weft.nn.view import View
from weft.utils.errors import InputError

PADDED = ("GRUAggregation", "LSTMAggregation", "SetTransformerAggregation", "SortAggregation", "MLPAggregation")
"""Aggregations that pad neighbourhoods to the largest degree, so that their result depends on what else a rank
stores."""


ANY_WIDTH = 3
"""Number of columns of rows with which a convolution without matrices is tried."""


class RowForm(NamedTuple):
    """Sizes and type of an argument with a row for each vertex."""

    sizes: tuple[int, ...]
    """Sizes of a row."""
    dtype: torch.dtype
    """Type of the numbers, which may be integers, such as vertex types."""

    @property
    def width(self) -> int:
        """Number of columns of a row."""
        return prod(self.sizes)

    def restored(self, x: Tensor) -> Tensor:
        """Return floating-point rows x [n, width] in this form."""
        rows = x.reshape(len(x), *self.sizes)
        return rows if self.dtype.is_floating_point else rows.to(self.dtype)


OTHER_FORMS = (None, *(RowForm((width,), torch.float32) for width in (3, 2, 1)))
"""Forms in which further arguments with rows are tried before a call states them: the form of the rows (None), or
positions."""


class RowArguments:
    """Further arguments of a convolution that are rows of the vertices, such as `pos` of `conv(x, pos, edge_index)`.

    A layer gets all of them side by side. Copies of a layer share this object, since only a call tells their forms.

    Args:
        names: Names of the arguments.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.forms: tuple[RowForm, ...] = ()
        """Form of the first argument and of each of these, in the last call."""
        self.out_width = 0
        """Number of columns of the result, from a trial; 0: there was none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RowArguments:
        return self

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the rows of all arguments side by side.

        Args:
            rows: The first argument and the others, [n, .], then rows that are no arguments.
        """
        self.note_forms(rows)
        parts = [as_matrix(each).to(rows[0].dtype) for each in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def note_forms(self, rows: Sequence[Tensor]) -> None:
        """Set the forms of the arguments.

        Args:
            rows: The first argument and the others, [n, .]; further rows, which are no arguments, are ignored.
        """
        self.forms = tuple(RowForm(tuple(each.shape[1:]), each.dtype) for each in rows[: 1 + len(self.names)])

    @property
    def widths(self) -> list[int]:
        """Number of columns of the first argument and of each of these."""
        return [form.width for form in self.forms]

    def split(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the first argument, and the others by name.

        Args:
            x: The rows of all arguments side by side.
        """
        if not self.names:
            return x, {}
        first, *others = (form.restored(part) for form, part in zip(self.forms, x.split(self.widths, 1), strict=True))
        return first, dict(zip(self.names, others, strict=True))


class PyGConv(nn.Module):
    """Layer that calls a PyG convolution on a view's block: sources, of which the targets are the first, and edges.

    The convolution gets the graph's edge weights if its forward takes `edge_weight`. A convolution from PyG gets the
    edge features if it was created for some (`edge_dim`), a custom one if its forward takes `edge_attr`.

    Args:
        conv: The convolution.
        out_width: Columns of its result; 0: as many as its rows have, or with `row_names` as many as in a trial.
        reads_edge_attr: True if the model calls the convolution with edge features, which it then always gets.
        row_names: Names of further arguments with rows of the vertices.
    """

    conv: Any
    """The convolution."""
    tiled: TiledConv
    """Runs its message functions in tiles."""
    sums = InEdgeSums()
    """In-edge sums of sources that the convolution reads."""

    def __init__(
        self, conv: Any, out_width: int, *, reads_edge_attr: bool = False, row_names: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.__dict__["conv"] = conv
        self.row_arguments = RowArguments(row_names)
        self.tiled = TiledConv(conv)
        share_tensors(self, conv)
        self.out_width = out_width
        self.needs_edge_attr = reads_edge_attr or requires_edge_attr(conv)
        self.takes_pair = takes_pair(conv) and not row_names
        self.takes = frozenset(inspect.signature(conv.forward).parameters)

    def train(self, mode: bool = True) -> PyGConv:
        # In training, SuperGATConv samples edges for a loss of its own, which weft does not have.
        self.conv.train(mode and type(self.conv).__name__ != "SuperGATConv")
        self.training = mode
        return self

    def forward(self, view: View, x: Tensor) -> Tensor:
        sources, edge_index, num_targets = view.block(x)
        edge_arguments = self._edge_arguments(view, sources.shape[1])
        width = self.result_width(sources)  # the first call checks a convolution with further rows
        if sources.device.type == "meta":  # many convolutions read ids of edges, which meta tensors do not have
            weight = sources.new_empty(sources.shape[1], width)
            return sources[:num_targets] @ weight + sum(t.sum() for t in self.tensors_read(sources))
        call = partial(self._call, view, sources, num_targets, edge_index, edge_arguments)
        y = self.tiled.run(call) if sources.device.type == "cpu" else call()
        drop_results(self.conv)
        return y if self.takes_pair else y[:num_targets]

    def tensors_read(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors on which the result depends. `x`: the rows of the sources, which come first."""
        return (x, *self.parameters())

    @property
    def cost_key(self) -> Hashable:
        """Key that layers of equal cost have in common, within a model: those that share programs."""
        gradients = tuple(parameter.requires_grad for parameter in self.parameters())
        return id(self.tiled.messages), structure_of(self.conv), gradients

    def result_width(self, x: Tensor) -> int:
        """Return the number of columns of the result. `x`: its rows."""
        if self.out_width or not self.row_arguments.names:
            return self.out_width or x.shape[1]
        if not self.row_arguments.out_width:
            first, *forms = self.row_arguments.forms
            others = dict(zip(self.row_arguments.names, forms, strict=True))
            in_widths = [first.width]
            with torch.device("cpu"):  # also where tensors are created without data
                tried = Trial.of(self.conv, needs_edge_attr=self.needs_edge_attr, in_widths=in_widths, others=others)
            if tried is None or tried.sums != self.sums:
                raise reads_more(self.conv)
            self.row_arguments.out_width = tried.out_width
        return self.row_arguments.out_width

    def _call(
        self, view: Any, sources: Tensor, num_targets: int, edge_index: Tensor, edge_arguments: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the result of the convolution on a block."""
        rows, others = self._rows(view, sources, num_targets)
        result: Tensor = call_conv(self.conv, rows, others, edge_index, edge_arguments)
        return result

    def _rows(self, view: Any, sources: Tensor, num_targets: int) -> tuple[Any, dict[str, Tensor]]:
        """Return the convolution's first argument, and further rows by name."""
        del view
        if self.takes_pair:
            return (sources, sources[:num_targets]), {}
        return self.row_arguments.split(sources)

    def _edge_arguments(self, view: View, in_width: int) -> dict[str, Tensor]:
        """Return the convolution's arguments with edge weights and features."""
        arguments = {}
        if "edge_weight" in self.takes and view.edge_weight is not None:
            arguments["edge_weight"] = view.edge_weight
        if "edge_type" in self.takes and view.edge_type is not None:
            arguments["edge_type"] = view.edge_type
        if "edge_attr" in self.takes:
            features = view.edge_features
            available = 0 if features is None else features.shape[1]
            wanted = edge_width(self.conv, in_width, available) if is_from_pyg(self.conv) else available
            if self.needs_edge_attr:
                wanted = wanted or available or 1
            if wanted and features is None:
                raise InputError(
                    f"{type(self.conv).__name__} needs edge features, and the graph has none: give the graph "
                    "edge_features [edges, features], or use a convolution without them"
                )
            if wanted and wanted != available:
                raise InputError(
                    f"{type(self.conv).__name__} takes {wanted} edge features, and the graph has {available}: "
                    f"create it with edge_dim={available}"
                )
            if wanted and features is not None:
                arguments["edge_attr"] = features
        return arguments


class ConvWithSums(PyGConv):
    """Layer that calls a PyG convolution which reads sums over the in-edges of sources, such as their degrees.

    A model calls it twice: with one column (`rows_for_sums`) it returns the sums of the targets. With the sums as last
    columns of the rows, it returns the convolution's result.

    Args:
        conv: The convolution.
        out_width: Columns of its result, as in `PyGConv`.
        sums: The sums.
        **options: Further arguments of `PyGConv`.
    """

    def __init__(self, conv: Any, out_width: int, sums: InEdgeSums, **options: Any) -> None:
        super().__init__(conv, out_width, **options)
        self.sums = sums

    def rows_for_sums(self, rows: Sequence[Tensor]) -> Tensor:
        """Return rows of zeros [n, 1], by which the layer is called for the sums, and set the forms of the arguments.

        Args:
            rows: The convolution's arguments with rows [n, .].
        """
        self.row_arguments.note_forms(rows)
        return rows[0].new_zeros(len(rows[0]), 1)

    @staticmethod
    def is_call_for_sums(x: Tensor) -> bool:
        """Return whether rows are those of `rows_for_sums`. Rows that end with the sums have at least two columns."""
        return x.shape[1] == 1

    def result_width(self, x: Tensor) -> int:
        return self.sums.width if self.is_call_for_sums(x) else super().result_width(x[:, : -self.sums.width])

    def tensors_read(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().tensors_read(x) if self.sums.learned or not self.is_call_for_sums(x) else (x,)

    def _edge_arguments(self, view: View, in_width: int) -> dict[str, Tensor]:
        del in_width
        return super()._edge_arguments(view, self.row_arguments.widths[0])

    def _call(
        self, view: Any, sources: Tensor, num_targets: int, edge_index: Tensor, edge_arguments: Mapping[str, Tensor]
    ) -> Tensor:
        width = sum(self.row_arguments.widths)
        if self.is_call_for_sums(sources):
            zeros = sources.expand(-1, width)
            call = partial(super()._call, view, zeros, num_targets, edge_index, edge_arguments)
            compute = partial(self.sums.compute, call)
            sums = (
                compute()
                if self.sums.learned
                else self.tiled.constant_sums([edge_index, *edge_arguments.values()], sources.dtype, compute)
            )
            return sums.to(sources.dtype)
        rows, sums = sources.split([width, self.sums.width], 1)
        if len(sums) > num_targets:  # empty slots of a chunk have sums of 0, of which roots and powers may be infinite
            is_read = sums.new_zeros(len(sums), 1, dtype=torch.bool)
            is_read[:num_targets] = is_read[edge_index[0]] = True
            sums = sums.where(is_read, 1.0)
        with self.sums.replacing(sums):
            return super()._call(view, rows, num_targets, edge_index, edge_arguments)


def share_programs(model: nn.Module) -> None:
    """Let convolutions of equal structure share their programs, which are then traced once.

    A model on a heterogeneous graph has a convolution for each relation, and many of them are alike.
    """
    first: dict[Hashable, PyGConv] = {}
    for layer in model.modules():
        if isinstance(layer, PyGConv) and not layer.row_arguments.names:  # whose widths only a call tells
            key = type(layer), layer.out_width, layer.needs_edge_attr, layer.takes, structure_of(layer.conv)
            layer.tiled.messages = first.setdefault(key, layer).tiled.messages


def call_conv(
    conv: Any, rows: Any, others: Mapping[str, Tensor], edge_index: Tensor, edge_arguments: Mapping[str, Tensor]
) -> Any:
    """Call a convolution.

    Args:
        conv: The convolution.
        rows: Its first argument: rows [s, .], or a pair of rows of sources and targets.
        others: Further arguments with rows, by name.
        edge_index: Edges [2, E], after the rows.
        edge_arguments: Arguments with a row for each edge, by name.
    """
    if others:
        return conv(rows, edge_index=edge_index, **others, **edge_arguments)
    return conv(rows, edge_index, **edge_arguments)


def drop_results(conv: nn.Module) -> None:
    """Drop tensors that a convolution keeps from a call, such as attention, with their autograd graph.

    Args:
        conv: The convolution.
    """
    for name, value in vars(conv).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            setattr(conv, name, None)


def share_tensors(wrapper: nn.Module, module: nn.Module) -> None:
    """Give a wrapper the parameters, buffers and parts of a module, under the same names in both.

    The two share their dicts, so that moving one to another device or dtype moves the other.

    Args:
        wrapper: New module without tensors, which has the module as an attribute, but not as a part.
        module: The module.
    """
    wrapper._parameters, wrapper._buffers, wrapper._modules = module._parameters, module._buffers, module._modules
    wrapper._non_persistent_buffers_set = module._non_persistent_buffers_set


def from_pyg(
    conv: Any, *, reads_edge_attr: bool = False, in_model: bool = False, row_names: tuple[str, ...] = ()
) -> PyGConv:
    """Return a layer for weft.nn.Stack from a PyG convolution such as SAGEConv, GATv2Conv or TransformerConv.

    The layer runs under every strategy in which a rank stores all in-edges of its vertices, with the same results as on
    one device.

    Args:
        conv: The convolution.
        reads_edge_attr: True if the model calls the convolution with edge features.
        in_model: True for a layer of a converted model. The convolution may then read in-edge sums of sources, such as
            their degrees (`ConvWithSums`), and its result may have as many columns as its rows, whatever their number
            (`out_width` is 0).
        row_names: Names of further arguments with rows of the vertices, such as `pos`.

    Raises:
        InputError: See `checked_trial`.
    """
    tried = checked_trial(conv, reads_edge_attr=reads_edge_attr, in_model=in_model, row_names=row_names)
    options: dict[str, Any] = {"reads_edge_attr": reads_edge_attr, "row_names": row_names}
    if tried.sums and tried.sums.calls:
        return ConvWithSums(conv, tried.out_width, tried.sums, **options)
    return PyGConv(conv, tried.out_width, **options)


def checked_trial(
    conv: Any, *, reads_edge_attr: bool = False, in_model: bool = False, row_names: tuple[str, ...] = ()
) -> Trial:
    """Return properties of a PyG convolution, if it can run on blocks of edges.

    Args:
        conv: The convolution.
        reads_edge_attr: True if the model calls the convolution with edge features.
        in_model: True to accept in-edge sums of sources, and to return a width of 0 for a convolution whose result has
            as many columns as its rows.
        row_names: Names of further arguments with rows. Their widths, and with them the result's, are known in a call
            only: the width returned is 0.

    Raises:
        InputError: The convolution reads more of the graph than the in-edges of its targets (GCNConv: the degrees of
            sources, unless `in_model`), contains dropout or a batch norm, or depends on the largest degree.
    """
    check_parts(conv)
    name, needs_edge_attr = type(conv).__name__, reads_edge_attr or requires_edge_attr(conv)
    if row_names:
        candidates = (dict.fromkeys(row_names, form) for form in (OTHER_FORMS if in_model else ()))
        tries = (Trial.of(conv, needs_edge_attr=needs_edge_attr, others=others) for others in candidates)
        return Trial(next((tried.sums for tried in tries if tried), None), 0)
    pair, out_width = takes_pair(conv), out_width_of(conv)
    tried = None
    if not (pair and out_width and type(conv).__module__.startswith("torch_geometric.nn.conv.")):
        tried = Trial.of(conv, needs_edge_attr=needs_edge_attr)
    sums = tried.sums if tried else InEdgeSums() if pair else None
    if sums is None or (sums.calls and (pair or not in_model)):
        raise reads_more(conv)
    has_matrix = any(parameter.dim() > 1 for parameter in conv.parameters())  # else any width may run in a trial
    width = out_width or (tried.out_width if tried and has_matrix else 0)
    if not width and not (in_model and keeps_width(conv, needs_edge_attr=needs_edge_attr)):
        raise InputError(
            f"{name} has no attribute out_channels, the number of columns of its result: add it, or use "
            "weft.nn.PyGConv(conv, out_width) in a Stack"
        )
    return Trial(sums, width)


def reads_more(conv: Any) -> InputError:
    """Return the error of a convolution that reads more of the graph than the in-edges of its targets."""
    return InputError(
        f"{type(conv).__name__}{_options_of(conv)} reads more of the graph than the in-edges of a vertex, such as the "
        "degrees of its neighbours, which a rank does not store: let message() depend on x_i, x_j and edge_attr only; "
        "in a PyG model without vertex types, forward may also sum over in-edges, as gcn_norm and "
        "degree(edge_index[1]) do"
    )


def check_parts(conv: Any) -> None:
    """Check that no part of a convolution depends on which other rows a rank has.

    Args:
        conv: The convolution.

    Raises:
        InputError: It contains dropout or a batch norm, depends on the largest degree, or caches edges.
    """
    name = type(conv).__name__
    if getattr(conv, "cached", False):
        raise InputError(f"{name} with cached=True reuses the edges of its first call: remove cached=True")
    for part in conv.modules():
        p = dropout_of(part)
        if p:
            raise InputError(
                f"{name} has dropout={p}, whose masks would differ between ranks: use dropout between layers; for "
                "attention dropout, GATConv or GATv2Conv in a model for weft.nn.convert, or weft.nn.GAT"
            )
    padded = [type(part).__name__ for part in conv.modules() if type(part).__name__ in PADDED]
    if padded:
        raise InputError(
            f"{name}: {padded[0]} is not supported, because its result depends on padding, which differs between "
            "ranks: use a sum, mean, maximum or softmax"
        )
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in conv.modules()):
        raise InputError(
            f"{name} contains a batch norm, which would normalize over one rank's rows: move it between layers"
        )


def _options_of(conv: Any) -> str:
    """Return the options of a convolution from which its native form differs, as " with improved=True", or ''."""
    defaults = {"improved": False, "add_self_loops": True, "normalize": True, "cached": False}
    changed = [
        f"{name}={getattr(conv, name)}" for name, value in defaults.items() if getattr(conv, name, value) != value
    ]
    return f" with {' and '.join(changed)}" if changed else ""


def out_width_of(conv: Any) -> int:
    """Return the number of columns of a convolution's result, from its attributes or its MLP; 0 if unknown."""
    if isinstance(getattr(conv, "out_channels", None), int):
        return int(conv.out_channels * (conv.heads if getattr(conv, "concat", False) and hasattr(conv, "heads") else 1))
    linears = [part for part in getattr(conv, "nn", nn.Identity()).modules() if isinstance(part, nn.Linear)]
    return linears[-1].out_features if linears else 0


def dropout_of(part: nn.Module) -> float:
    """Return the dropout probability of a module; 0 if it has no dropout."""
    p = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    if isinstance(p, list):  # PyG's MLP, layer by layer
        p = max(p, default=0.0)
    return p if isinstance(p, int | float) else 0.0


def takes_pair(conv: nn.Module) -> bool:
    """Return whether a PyG convolution accepts a pair (x_source, x_target) as x, according to its annotation."""
    parameter = inspect.signature(conv.forward).parameters.get("x")
    annotation = "" if parameter is None else str(parameter.annotation).lower()  # "OptPairTensor" if it is a string
    return "tuple" in annotation or "pairtensor" in annotation


def keeps_width(conv: Any, *, needs_edge_attr: bool) -> bool:
    """Return whether the result of a convolution has as many columns as its rows, whatever their number.

    Args:
        conv: The convolution.
        needs_edge_attr: True if it must be called with edge features.
    """
    widths = (ANY_WIDTH, ANY_WIDTH + 1)
    tried = [Trial.of(conv, needs_edge_attr=needs_edge_attr, in_widths=[width]) for width in widths]
    return all(each is not None and each.out_width == width for each, width in zip(tried, widths, strict=True))


class Trial(NamedTuple):
    """Properties of a convolution, from running it on a few random rows and edges."""

    sums: InEdgeSums | None
    """In-edge sums of sources that a target's result depends on; None if it depends on more than these and the target's
    in-edges."""
    out_width: int
    """Number of columns of the result."""

    @classmethod
    def of(
        cls,
        conv: Any,
        *,
        needs_edge_attr: bool = False,
        in_widths: Sequence[int] = (),
        others: Mapping[str, RowForm | None] | None = None,
    ) -> Trial | None:
        """Run a convolution on random rows.

        Args:
            conv: The convolution, which is not changed.
            needs_edge_attr: True if it must be called with edge features.
            in_widths: Candidate numbers of columns of the rows; empty: those that the shapes of its parameters suggest.
            others: Form of further arguments with rows, by name; None: that of the rows.

        Returns:
            The result, or None if it fails for every candidate width.
        """
        random = torch.Generator().manual_seed(0)
        num_targets, num_vertices = 6, 13  # a number of rows that widths rarely have
        edge_index = torch.randint(num_vertices, (2, 5 * num_vertices), generator=random)
        conv = with_data(copy.deepcopy(conv)).eval()
        dtype = next((parameter.dtype for parameter in conv.parameters()), torch.float32)
        sizes = [size for parameter in conv.parameters() for size in reversed(parameter.shape[:2])]
        widths = [size // rows for rows in (1, 2, 3) for size in sizes]  # it may read both endpoints of an edge
        in_channels = getattr(conv, "in_channels", 0)  # a pair in some convolutions
        from_shapes = [in_channels, *widths] if isinstance(in_channels, int) else widths
        in_widths = in_widths or [*dict.fromkeys([*from_shapes, ANY_WIDTH])]
        tries = (
            (width, num_edge_features)
            for width in in_widths
            for num_edge_features in edge_widths(conv, width, sizes, needed=needs_edge_attr)
        )
        for width, columns in tries:
            if width < 1:
                continue
            forms = (None, *(others or {}).values())
            rows = [
                torch.randn(num_vertices, *(form.sizes if form else (width,)), dtype=dtype, generator=random)
                for form in forms
            ]
            rows = [  # integers may be indices: only 0 is valid for certain
                torch.zeros_like(x, dtype=form.dtype) if form and not form.dtype.is_floating_point else x
                for x, form in zip(rows, forms, strict=True)
            ]

            def run(edges: Tensor, first: Tensor, *rest: Tensor, columns: int = columns) -> Tensor:
                arguments = _trial_arguments(conv, edges.shape[1], columns, dtype)
                result: Tensor = call_conv(conv, first, dict(zip(others or {}, rest, strict=True)), edges, arguments)
                return result

            try:
                with torch.no_grad():
                    out_width = run(edge_index, *rows).shape[1]
                return cls(InEdgeSums.of(conv, run, rows, edge_index, num_targets), out_width)
            except TRIAL_ERRORS:
                continue
        return None


def with_data(conv: nn.Module) -> nn.Module:
    """Return a convolution moved to the CPU; parameters without data become random."""
    random = torch.Generator().manual_seed(0)
    for part in conv.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device.type == "meta":
                    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    data = data.uniform_(-1, 1, generator=random) if data.is_floating_point() else data.zero_()
                    tensors[name] = nn.Parameter(data) if isinstance(tensor, nn.Parameter) else data  # type: ignore[assignment]
    return conv.to("cpu")


def _trial_arguments(conv: Any, num_edges: int, num_edge_features: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arguments of a trial apart from rows and edges."""
    arguments = {"edge_attr": torch.ones(num_edges, num_edge_features, dtype=dtype)} if num_edge_features else {}
    takes_types = "edge_type" in inspect.signature(conv.forward).parameters
    return arguments | ({"edge_type": torch.zeros(num_edges, dtype=torch.int64)} if takes_types else {})


def is_from_pyg(conv: Any) -> bool:
    """Return whether a convolution's class is from PyG, or derives from one that is."""
    bases = (base for base in type(conv).__mro__ if base.__name__ != "MessagePassing")
    return any(base.__module__.startswith("torch_geometric.nn.conv.") for base in bases)


def requires_edge_attr(conv: Any) -> bool:
    """Return whether the forward of a custom convolution has an argument edge_attr without a default."""
    parameter = inspect.signature(conv.forward).parameters.get("edge_attr")
    return parameter is not None and parameter.default is parameter.empty and not is_from_pyg(conv)


def edge_widths(conv: Any, in_width: int, sizes: list[int], *, needed: bool) -> list[int]:
    """Return candidate numbers of edge features for a trial; 0: none.

    A custom convolution does not say: candidates are 1, the width of the rows, the sizes of its parameters, and what
    is left of these if the features follow the rows of one or both endpoints, as in `cat([x_i, x_j, edge_attr], -1)`.

    Args:
        conv: The convolution.
        in_width: Number of columns of the rows.
        sizes: Sizes of the parameters' dimensions.
        needed: True if it must be called with edge features.
    """
    stated = edge_width(conv, in_width, 0) if is_from_pyg(conv) else 0
    if stated or not needed:
        return [stated]
    left = (size - ends * in_width for ends in (1, 2) for size in sizes)
    return [*dict.fromkeys([1, in_width, *sizes, *(width for width in left if width > 0)])]


def edge_width(conv: Any, in_width: int, available: int) -> int:
    """Return the number of edge features that a PyG convolution needs; 0: none.

    The number is that of its transform of edge features, or of an option. GENConv adds untransformed features if they
    are as wide as its result.

    Args:
        conv: The convolution.
        in_width: Number of columns of the rows.
        available: Number of edge features of the graph.
    """
    name = type(conv).__name__
    mapped = getattr(conv, "lin" if name == "GINEConv" else "lin_edge", None)
    if mapped is not None:
        return int(mapped.weight.shape[1])
    if name == "GINEConv":
        return in_width
    if name == "NNConv":
        return max(available, 1)
    if name == "GENConv":
        return available if available == conv.out_channels else 0
    if name == "RGATConv":  # its dim is no width
        return conv.edge_dim or 0
    return next((n for field in ("edge_dim", "in_edge_channels", "dim") if (n := getattr(conv, field, None))), 0)
