"""Comparison of a PyG model with its converted form, on a small random graph.

No list of PyTorch's features that a conversion must respect would be complete. So the original and the converted model
are run side by side, and whatever they do differently is found in what they compute: logits, gradients, parameters and
buffers, over two training steps and an evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.data import Adjacency, GraphShape
from weft.nn.aggregate.aggregate import Aggregate, Rows, WholeLayer
from weft.nn.aggregate.attention import MaskKey
from weft.nn.aggregate.topology import Topology
from weft.nn.convert.source_location import first_line, line_of_code, line_of_error
from weft.nn.convert.traced_model import Converted
from weft.nn.convert.tracing import call_pyg, parameters_of
from weft.nn.graph_view import GraphView
from weft.nn.layers.phases import parameter_dtype
from weft.nn.layers.pyg_conv import PyGConv
from weft.utils.errors import InputError

NUM_VERTICES, NUM_ISOLATED = 24, 2
"""Number of vertices of the random graph, and how many of these, the last ones, have no edges."""
TOLERANCE, TOLERANCE_FLOAT32 = 1e-9, 1e-4
"""Largest difference in float64 and in float32, as a fraction of the largest number of all compared tensors of a
kind."""
LEARNING_RATE = 0.1
"""Learning rate of the SGD steps."""
ON_BY_DEFAULT = ("dropout", "dropout1d", "dropout2d", "dropout3d")
"""Functions of torch.nn.functional that drop values unless `training=False` is given."""
DROPOUT = (*ON_BY_DEFAULT, "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
"""All functions that drop values; those in place have the same names with "_" at the end."""

Call = Callable[[nn.Module, Tensor], Tensor]
"""Function that calls a model on the rows x, and returns its logits."""


class EdgeSizes(NamedTuple):
    """Data that a graph has for its edges."""

    weighted: bool
    """True if edges have weights."""
    num_features: int
    """Number of columns of the edge features; 0: none."""
    num_relations: int
    """Number of edge types; 0: none."""


class Dropped(NamedTuple):
    """One call of dropout."""

    function: str
    """Name of the function."""
    p: float
    """Probability that a number becomes zero."""
    num_values: int
    """Number of values of its argument; -1: unknown, for weights of edges in a fused kernel."""


class WithoutDropout(TorchFunctionMode):
    """Mode in which PyTorch's dropout functions return their argument, and are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Dropped] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "").rstrip("_")
        if name not in DROPOUT:
            return function(*args, **(kwargs or {}))
        values = dict(zip(("input", "p", "training"), args, strict=False)) | (kwargs or {})
        x, p = values["input"], values.get("p", 0.5)
        if values.get("training", values.get("train", name in ON_BY_DEFAULT)) and p:
            self.calls.append(Dropped(name, p, x.numel()))
        return x

    def dropped(self, model: nn.Module) -> list[Dropped]:
        """Return the calls; those of a converted model are marked, since only dropout of its views is keyed.

        Args:
            model: The model that was running.
        """
        if not isinstance(model, Converted):
            return self.calls
        return [call._replace(function=f"unkeyed {call.function}") for call in self.calls]


class ComparisonView(GraphView):
    """View of the random graph that records dropout instead of applying it.

    It calls convolutions that run as PyG's code once for each of two parts of the vertices, as two ranks would: with
    the in-edges of the part alone, and copies of the rows that these read.

    Args:
        topology: The edges.
        calls: Receives the calls of dropout.
        **options: Further arguments of `GraphView`.
    """

    def __init__(self, topology: Topology, *, calls: list[Dropped], **options: Any) -> None:
        super().__init__(topology, **options)
        self._dropped_calls = calls

    def dropout(self, x: Tensor, p: float, *, relu: bool = False) -> Tensor:
        if p:
            self._dropped_calls.append(Dropped("dropout", p, x.numel()))
        return torch.relu(x) if relu else x

    def mask_key(self, p: float) -> MaskKey | None:
        if p:
            self._dropped_calls.append(Dropped("dropout", p, -1))
        return None

    def aggregate(self, op: Aggregate, rows: Rows, steps: int = 1) -> Tensor:
        if not (isinstance(op, WholeLayer) and isinstance(op.layer, PyGConv)):
            return super().aggregate(op, rows, steps)
        x = rows[op.first]
        parts = [torch.arange(first, len(x), 2) for first in (0, 1)]
        results = [op.layer(PartView(self.topology, part, x), x[part]) for part in parts]
        return torch.cat(results)[torch.cat(parts).argsort()]


class PartView:
    """Part of a view that a convolution running as PyG's code reads, on a rank that stores some of the vertices.

    Args:
        topology: The edges of the whole graph.
        part: The rank's vertices, int64, ascending.
        x: Rows of all vertices.
    """

    def __init__(self, topology: Topology, part: Tensor, x: Tensor) -> None:
        source, target = topology.edge_index
        edges = torch.isin(target, part).nonzero().view(-1)
        halo = source[edges].unique()
        self._halo = x[halo[~torch.isin(halo, part)]]
        sources = torch.cat([part, halo[~torch.isin(halo, part)]])
        position = torch.empty(len(x), dtype=torch.int64).index_copy(0, sources, torch.arange(len(sources)))
        self._edge_index = position[torch.stack([source, target])[:, edges]]
        weight, features = topology.adjacency.weight, topology.edge_features
        self.edge_weight = None if weight is None else weight[edges]
        self.edge_features = None if features is None else features[edges]

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the rows of the sources, of which x are the first, the edges, and the number of rows of x."""
        return torch.cat([x, self._halo]), self._edge_index, len(x)


@dataclass
class Outcome:
    """Numbers that a model has computed, by their description."""

    logits: dict[str, Tensor] = field(default_factory=dict)
    """Logits of each pass."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the input and of each parameter, in each training step."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers after each pass."""
    dropped: dict[bool, list[Dropped]] = field(default_factory=dict)
    """Calls of dropout in training (True) and in evaluation (False)."""


def random_edges(sizes: EdgeSizes) -> Topology:
    """Return random edges with self-loops, repeated edges, and isolated vertices.

    Args:
        sizes: Data of the edges.
    """
    random, connected = torch.Generator().manual_seed(0), NUM_VERTICES - NUM_ISOLATED
    edges = torch.randint(connected, (2, 3 * NUM_VERTICES), generator=random)
    edges = edges[:, edges[0] != edges[1]]
    loops = torch.arange(0, connected, 5)
    source, target = torch.cat([edges, edges[:, :6], torch.stack([loops, loops])], dim=1)
    count = len(source)
    return Topology(
        Adjacency.from_edges(
            source,
            target,
            num_sources=NUM_VERTICES,
            num_targets=NUM_VERTICES,
            weight=0.5 + torch.rand(count, generator=random).double() if sizes.weighted else None,
        ),
        edge_features=torch.randn(count, sizes.num_features, generator=random).double() if sizes.num_features else None,
        edge_type=torch.randint(sizes.num_relations, (count,), generator=random) if sizes.num_relations else None,
        num_relations=sizes.num_relations,
    )


def check_same_results(
    model: nn.Module, converted: Converted, edge_inputs: frozenset[str], shape: GraphShape | None
) -> None:
    """Check that a converted model computes the same numbers as the original.

    Both run in float64, on copies: two steps of SGD in training mode, then an evaluation. Dropout is left out, but its
    calls must be the same. The state of PyTorch's random numbers is restored.

    Args:
        model: The original.
        converted: Its converted form.
        edge_inputs: Optional arguments of forward that the graph has.
        shape: Shape of the graph; None: sizes at which the original runs are found from its parameters.

    Raises:
        InputError: The results differ, or the comparison cannot run. The message names the line, and what to do.
    """
    name = type(model).__name__
    with torch.random.fork_rng(devices=[]):
        try:
            x, topology = _inputs(model, edge_inputs, shape)
            original_logits = partial(_call_original, topology, edge_inputs)
            expected = _run(_copied(model), original_logits, x, [])
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{line_of_error(error)}: {name} cannot be compared with its converted form, as it fails on a random "
                f"graph of {NUM_VERTICES} vertices in float64 ({first_line(error)}): use --strategy single, which runs "
                "it as it is, or convert it with unchecked=True"
            ) from error
        difference = _difference(expected, _outcome_of(converted, topology, x))
        if not difference and parameter_dtype(model) == torch.float32:
            difference = _difference_in_float32(model, converted, edge_inputs, topology, x)
        if not difference:
            return
        if _difference(expected, _run(_copied(model), original_logits, x, [])):
            raise InputError(
                f"{line_of_code(type(model).forward)}: {name} draws random numbers, of which only those of dropout are "
                "the same on all ranks: use nn.Dropout or functional.dropout, or --strategy single, which runs the "
                "model as it is"
            )
        line = _differing_line(model, converted, original_logits, _view_logits(topology, []), x)
    raise InputError(
        f"{line}: {name} would compute other numbers than in PyG ({difference}): write this without the feature that "
        "the conversion ignores, use --strategy single, which runs the model as it is, or a layer of weft.nn"
    )


def _outcome_of(converted: Converted, topology: Topology, x: Tensor) -> Outcome:
    """Return what a converted model computes."""
    calls: list[Dropped] = []
    try:
        return _run(_copied(converted), _view_logits(topology, calls), x, calls)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{line_of_error(error)}: the converted model fails where the original does not ({first_line(error)}): use "
            "--strategy single, which runs the model as it is"
        ) from error


def _difference_in_float32(
    model: nn.Module, converted: Converted, edge_inputs: frozenset[str], topology: Topology, x: Tensor
) -> str:
    """Return what differs between evaluations in float32, or ''. Automatic mixed precision has no effect on float64."""
    adjacency, features, dtype = topology.adjacency, topology.edge_features, torch.float32
    topology = Topology(
        adjacency.with_weight(None if adjacency.weight is None else adjacency.weight.to(dtype)),
        edge_features=None if features is None else features.to(dtype),
        edge_type=topology.edge_type,
        num_relations=topology.num_relations,
    )
    with torch.no_grad(), WithoutDropout():
        y = _view_logits(topology, [])(_copied(converted, dtype).eval(), x.to(dtype))
        try:
            expected = _call_original(topology, edge_inputs, _copied(model, dtype).eval(), x.to(dtype))
        except (RuntimeError, ValueError, TypeError):  # a model that only runs in float64
            return ""
    gap = (y - expected).abs().max().item()
    return f"logits in float32 by {gap:.2g}" if gap > TOLERANCE_FLOAT32 * expected.abs().max().item() else ""


def _inputs(model: nn.Module, edge_inputs: frozenset[str], shape: GraphShape | None) -> tuple[Tensor, Topology]:
    """Return random rows and edges of the sizes that a model takes.

    Raises:
        Exception: The model fails at every size; the error of the first.
    """
    if shape is not None:
        sizes = EdgeSizes(shape.weighted, shape.num_edge_features, shape.typed.num_relations)
        return _random_rows(shape.num_features), random_edges(sizes)
    required = {parameter.name for parameter in parameters_of(model) if parameter.default is parameter.empty}
    has = {name: name in edge_inputs | required for name in ("edge_weight", "edge_attr", "edge_type")}
    num_relations = max([getattr(module, "num_relations", 0) for module in model.modules()]) or 1
    channels = [getattr(module, "in_channels", 0) for module in model.modules()]
    dims = [dim for parameter in model.parameters() for dim in reversed(parameter.shape)]
    dims += [dim // parts for parts in (2, 3) for dim in dims]  # a layer may read both endpoints of an edge
    widths = [*dict.fromkeys(dim for dim in (*channels, *dims) if isinstance(dim, int) and dim > 0)] or [1]
    first_error: Exception | None = None
    reference = _copied(model).eval()
    for edge_width in dict.fromkeys([1, *widths]) if has["edge_attr"] else [0]:
        topology = random_edges(EdgeSizes(has["edge_weight"], edge_width, num_relations if has["edge_type"] else 0))
        for width in widths:
            x = _random_rows(width)
            try:
                with torch.no_grad():
                    if len(_call_original(topology, edge_inputs, reference, x)) == NUM_VERTICES:
                        return x, topology
            except Exception as error:
                first_error = first_error or error
    raise first_error or InputError(f"{type(model).__name__} returns no row for each vertex")


def _random_rows(width: int) -> Tensor:
    return torch.randn(NUM_VERTICES, width, generator=torch.Generator().manual_seed(1)).double()


def _call_original(topology: Topology, edge_inputs: frozenset[str], model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of an original, which is called with those of the edges' tensors that it takes."""
    edges = (topology.edge_index, topology.adjacency.weight, topology.edge_features, topology.edge_type)
    return call_pyg(model, edge_inputs, x, *edges)


def _view_logits(topology: Topology, calls: list[Dropped]) -> Call:
    """Return a function that calls a converted model on views of the random graph.

    Args:
        topology: The edges.
        calls: Receives the calls of dropout.
    """

    def logits(converted: nn.Module, x: Tensor) -> Tensor:
        num_stages: Any = converted.num_stages
        result: Tensor = converted([ComparisonView(topology, calls=calls) for _ in range(num_stages)], x)
        return result

    return logits


def _copied(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a copy of a model, an original with the hooks of its parameters, which deepcopy leaves out."""
    copied = copy.deepcopy(model).to(dtype)
    if isinstance(model, Converted):  # in a run, its parameters have no hooks
        return copied
    for parameter, original in zip(copied.parameters(), model.parameters(), strict=True):
        for hook in (original._backward_hooks or {}).values():
            parameter.register_hook(hook)
        for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
            parameter.register_post_accumulate_grad_hook(hook)
    return copied


def _run(model: nn.Module, call: Call, x: Tensor, calls: list[Dropped]) -> Outcome:
    """Return what a model computes; the model is changed.

    Args:
        model: The model.
        call: Calls it.
        x: Rows [n, F].
        calls: List to which `call` adds calls of dropout; those of PyTorch's functions are added here.
    """
    outcome = Outcome()
    model.train()
    for step in ("the first step", "the second step"):
        inputs = x.clone().requires_grad_()
        with WithoutDropout() as mode:
            y = call(model, inputs)
        outcome.dropped[True] = [*calls, *mode.dropped(model)]
        calls.clear()
        outcome.logits[f"logits in {step}"] = y.detach()
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        if y.requires_grad:
            ((y * weights).sum() + (y * y).mean()).backward()
        grads = {"input": inputs.grad} | {name: parameter.grad for name, parameter in model.named_parameters()}
        outcome.gradients |= {
            f"gradient of {name} in {step}": grad.clone() for name, grad in grads.items() if grad is not None
        }
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LEARNING_RATE * parameter.grad)
                    parameter.grad = None
        outcome.state |= {f"{name} after {step}": value.detach().clone() for name, value in _state(model)}
    model.eval()
    with torch.no_grad(), WithoutDropout() as mode:
        outcome.logits["logits in evaluation"] = call(model, x)
    outcome.dropped[False] = [*calls, *mode.dropped(model)]
    outcome.state |= {f"{name} after evaluation": value.clone() for name, value in _state(model)}
    return outcome


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _difference(expected: Outcome, outcome: Outcome) -> str:
    """Return what differs between two outcomes, or ''."""
    for training, mode in ((True, "training"), (False, "evaluation")):
        before, after = (_sorted(each.dropped[training]) for each in (expected, outcome))
        counts = [call.num_values for call in after if call.num_values >= 0]
        if [call[:2] for call in before] != [call[:2] for call in after] or not _contains(before, counts):
            return f"dropout in {mode}: {_listed(before)} in PyG, {_listed(after)} in weft"
    for kind in ("logits", "gradients", "state"):
        tensors, others = getattr(expected, kind), getattr(outcome, kind)
        largest = max((value.abs().max().item() for value in tensors.values() if _finite(value)), default=1.0)
        for name, value in tensors.items():
            other = others.get(name)
            if other is None and kind == "gradients" and not value.any():
                continue  # no gradient, instead of zeros
            if other is None or other.shape != value.shape:
                return f"{name}: shape {tuple(value.shape)} in PyG, {None if other is None else tuple(other.shape)}"
            if not torch.allclose(
                other.double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True
            ):
                gap = (other.double() - value.double()).abs().max().item()
                return f"{name} by {gap:.2g}"
        extra = [name for name, value in others.items() if name not in tensors and value.any()]
        if extra:
            return f"{extra[0]}: none in PyG"
    return ""


def _finite(value: Tensor) -> bool:
    return bool(value.numel()) and bool(value.double().isfinite().all())


def _sorted(calls: Iterable[Dropped]) -> list[Dropped]:
    return sorted(calls)


def _contains(calls: list[Dropped], counts: list[int]) -> bool:
    """Return whether each of some counts is that of another call."""
    available = [call.num_values for call in calls]
    for count in counts:
        if count not in available:
            return False
        available.remove(count)
    return True


def _listed(calls: list[Dropped]) -> str:
    return ", ".join(f"{call.function}({call.p:g})" for call in calls) or "none"


def _differing_line(model: nn.Module, converted: Converted, original: Call, views: Call, x: Tensor) -> str:
    """Return the line of the first convolution whose result differs, or else that of the model's forward."""
    results: list[Tensor] = []
    reference, converted = _copied(model).train(), copy.deepcopy(converted).double().train()
    hooks = [
        module.register_forward_hook(lambda _, __, result: results.append(result))
        for module in reference.modules()
        if hasattr(module, "propagate")
    ]
    with torch.no_grad(), WithoutDropout(), torch.random.fork_rng(devices=[]):
        original(reference, x)
        for hook in hooks:
            hook.remove()
        lines = {step.name: step.line for step in converted.programs[True].steps}
        for number, (result, name) in enumerate(zip(results, converted.programs[True].layers, strict=False), 1):
            try:
                y = views(converted.up_to(number), x)
            except (RuntimeError, ValueError, IndexError):
                break
            if y.shape != result.shape or not torch.allclose(y, result, rtol=TOLERANCE, atol=TOLERANCE):
                return lines.get(name, "") or line_of_code(type(model).forward)
    return line_of_code(type(model).forward)
