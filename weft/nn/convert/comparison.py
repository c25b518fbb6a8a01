"""Comparison of a PyG model with its converted form, on a small random graph.

No list of PyTorch's features that a conversion must respect would be complete. So the original and the converted model
are run side by side, and whatever they do differently is found in what they compute: logits, gradients, parameters and
buffers, over two training steps and an evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from weft.nn.convert.comparison_view import Dropped, WithoutDropout
from weft.nn.convert.random_graph import NUM_VERTICES, RandomGraph
from weft.nn.convert.source_location import first_line, line_of_code, line_of_error
from weft.nn.convert.traced_model import Converted
from weft.nn.layers.phases import parameter_dtype
from weft.utils.errors import InputError

TOLERANCE, TOLERANCE_FLOAT32 = 1e-9, 1e-4
"""Largest difference in float64 and in float32, as a fraction of the largest number of all compared tensors of a
kind."""
LEARNING_RATE = 0.1
"""Learning rate of the SGD steps."""


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


def check_same_results(
    model: nn.Module, converted: Converted, make_graph: Callable[[], RandomGraph], alternative: str
) -> None:
    """Check that a converted model computes the same numbers as the original.

    Both run in float64, on copies: two steps of SGD in training mode, then an evaluation. Dropout is left out, but its
    calls must be the same. The state of PyTorch's random numbers is restored.

    Args:
        model: The original.
        converted: Its converted form.
        make_graph: Function that returns the graph on which they run.
        alternative: What else to do with the model, in errors.

    Raises:
        InputError: The results differ, or the comparison cannot run. The message names the line, and what to do.
    """
    name = type(model).__name__
    with torch.random.fork_rng(devices=[]):
        try:
            graph = make_graph()
            expected = _run(_copied(model), graph)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{line_of_error(error)}: {name} cannot be compared with its converted form, as it fails on a random "
                f"graph of {NUM_VERTICES} vertices in float64 ({first_line(error)}): {alternative}, or convert it "
                "with unchecked=True"
            ) from error
        try:
            copied = _copied(converted)
            difference = _difference(expected, _run(copied, graph))
            assert isinstance(copied, Converted)
            converted.with_leading_dim |= copied.with_leading_dim
            if not difference and parameter_dtype(model) == torch.float32:
                difference = _difference_in_float32(model, converted, graph.with_dtype(torch.float32))
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{line_of_error(error)}: the converted model fails where the original does not ({first_line(error)}): "
                f"{alternative}"
            ) from error
        if not difference:
            return
        if _difference(expected, _run(_copied(model), graph)):
            raise InputError(
                f"{line_of_code(type(model).forward)}: {name} draws random numbers, of which only those of dropout are "
                f"the same on all ranks: use nn.Dropout or functional.dropout; or {alternative}"
            )
        line = _differing_line(model, converted, graph)
    raise InputError(
        f"{line}: {name} would compute other numbers than in PyG ({difference}): write this without the feature that "
        f"the conversion ignores; or {alternative}"
    )


def _difference_in_float32(model: nn.Module, converted: Converted, graph: RandomGraph) -> str:
    """Return what differs between evaluations in float32, or ''. Automatic mixed precision has no effect on float64."""
    with torch.no_grad(), WithoutDropout():
        y = _logits(_copied(converted, torch.float32).eval(), graph, graph.x, [])
        try:
            expected = graph.call_original(_copied(model, torch.float32).eval(), graph.x)
        except (RuntimeError, ValueError, TypeError):  # a model that only runs in float64
            return ""
    gap = (y - expected).abs().max().item()
    is_same = gap <= TOLERANCE_FLOAT32 * expected.abs().max().item()  # False for NaN
    return "" if is_same or not _finite(expected) else f"logits in float32 by {gap:.2g}"


def _logits(model: nn.Module, graph: RandomGraph, x: Tensor, dropped: list[Dropped]) -> Tensor:
    """Return the logits of an original or a converted model.

    Args:
        model: The model.
        graph: The graph.
        x: Rows [n, F].
        dropped: Receives the calls of dropout in a converted model's views.
    """
    if isinstance(model, Converted):
        return graph.call_converted(model, x, dropped)
    return graph.call_original(model, x)


def _copied(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a copy of a model, an original with the hooks of its parameters, which deepcopy leaves out."""
    copied = copy.deepcopy(model).to("cpu", dtype)
    if isinstance(model, Converted):  # in a run, its parameters have no hooks
        return copied
    for parameter, original in zip(copied.parameters(), model.parameters(), strict=True):
        for hook in (original._backward_hooks or {}).values():
            parameter.register_hook(hook)
        for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
            parameter.register_post_accumulate_grad_hook(hook)
    return copied


def _run(model: nn.Module, graph: RandomGraph) -> Outcome:
    """Return what a model computes; the model is changed."""
    outcome, x = Outcome(), graph.x
    model.train()
    for step in ("the first step", "the second step"):
        inputs = x.clone().requires_grad_()
        dropped: list[Dropped] = []
        with WithoutDropout() as mode:
            y = _logits(model, graph, inputs, dropped)
        outcome.dropped[True] = graph.comparable(dropped + mode.dropped(model))
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
    dropped = []
    with torch.no_grad(), WithoutDropout() as mode:
        outcome.logits["logits in evaluation"] = _logits(model, graph, x, dropped)
    outcome.dropped[False] = graph.comparable(dropped + mode.dropped(model))
    outcome.state |= {f"{name} after evaluation": value.clone() for name, value in _state(model)}
    return outcome


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _difference(expected: Outcome, outcome: Outcome) -> str:
    """Return what differs between two outcomes, or ''."""
    for training, mode in ((True, "training"), (False, "evaluation")):
        before, after = expected.dropped[training], outcome.dropped[training]
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


def _differing_line(model: nn.Module, converted: Converted, graph: RandomGraph) -> str:
    """Return the line of the first convolution whose result differs, or else that of the model's forward."""
    results: list[Tensor] = []
    reference, copied = _copied(model).train(), copy.deepcopy(converted).double().train()
    for module in reference.modules():
        if hasattr(module, "propagate"):
            module.register_forward_hook(lambda _, __, result: results.append(result))
    program = copied.programs[True]
    lines = {step.name: step.line for step in program.steps}
    with torch.no_grad(), WithoutDropout():
        graph.call_original(reference, graph.x)
        for number, (result, name) in enumerate(zip(results, program.layers, strict=False), 1):
            try:
                y = graph.call_converted(copied.up_to(number), graph.x, [])
            except (RuntimeError, ValueError, IndexError):
                break
            if y.shape != result.shape or not torch.allclose(y, result, rtol=TOLERANCE, atol=TOLERANCE):
                return lines.get(name) or line_of_code(type(model).forward)
    return line_of_code(type(model).forward)
