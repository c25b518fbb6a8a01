"""Forward and backward pass of a training step, recorded as a CUDA graph if the graph is small and on a GPU.

For a small graph, the kernels of a step take less time than the host needs to launch them one by one. A CUDA graph
launches all of them at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from weft.comm import Group
from weft.kernels import triton_backend
from weft.runtime.clock import HostClock
from weft.runtime.kernel_selection import kernels_in_use
from weft.runtime.streams import Captured, capture
from weft.strategies import Placed, Step
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions
from weft.training.tasks.metrics import NodeTask, Task
from weft.training.tasks.row_batching import block_bytes
from weft.utils.log import LOGGER
from weft.utils.random import KeyTable

MAX_EDGES = 5_000_000
"""Largest number of edges of a graph whose pass is captured. A captured pass keeps its memory; on an H100, launches no
longer limit a pass over 12 million edges (docs/gpu.md)."""
REPEATABLE_MODULES = ("weft.nn.", "torch.nn.")
"""Packages whose modules run the same kernels in each step. Other modules may have state on the host, such as a step
counter, or draw random numbers, which a replay would not update."""


class TrainingPass:
    """Forward and backward pass of a training step.

    Args:
        strategy: The model and graph, placed on this rank by a strategy.
        task: Computes the loss and its gradient from the model's output rows.
    """

    def __init__(self, strategy: Placed, task: Task) -> None:
        self.strategy, self.task = strategy, task

    @property
    def group(self) -> Group:
        return self.strategy.group

    def __call__(self, step: Step) -> Tensor:
        """Run the pass of a step: set the gradients of all parameters, which must have none, and return the loss.

        Returns:
            This rank's part of the loss, a scalar tensor [].
        """
        return self.strategy.train(step, lambda rows, span: self.task.loss(rows, step, span))


class Recording(NamedTuple):
    """Captured pass that can be replayed, with the tensors that it writes."""

    step: Step
    """Step whose pass was captured. Later steps must have the same vertices."""
    captured: Captured
    loss: Tensor
    """Loss, which each replay overwrites. Replays overwrite the gradients as well."""
    grads: list[Tensor | None]
    """Gradient of each parameter, in the order of `model.parameters()`."""
    edges: int
    """Edges x width that the pass aggregates."""


class CapturedPass(TrainingPass):
    """Training pass on a GPU whose second execution is captured as a CUDA graph and then replayed.

    The first execution allocates what lasts and compiles kernels. If the capture fails, a warning is printed and all
    steps run without a CUDA graph.

    Args:
        strategy: The model and graph, placed on this rank by a strategy.
        task: Computes the loss and its gradient from the model's output rows.
    """

    def __init__(self, strategy: Placed, task: Task) -> None:
        super().__init__(strategy, task)
        self.parameters = list(strategy.model.parameters())
        self.recording: Recording | None = None
        self._masks = KeyTable(strategy.group.device)
        self._passes = 0

    def __call__(self, step: Step) -> Tensor:
        self._passes += 1
        if self._passes == 2:
            self._record(step)
        if self.recording is None:
            return super().__call__(step)
        recorded, captured, loss, grads, edges = self.recording
        assert step.vertices is recorded.vertices
        self._masks.fill(self.strategy.seed, *step.key)
        with self.group.meter.timer("captured"):
            captured.replay()
        self.group.meter.aggregate(edges, 1)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        return loss

    def _record(self, step: Step) -> None:
        """Capture the pass of a step. The capture itself computes nothing."""
        meter = self.group.meter
        clock, edges_before = meter.clock, meter.counts.edges
        meter.set_clock(HostClock())  # a GPU's stamps would be captured
        try:
            captured, loss = capture(lambda: super(CapturedPass, self).__call__(replace(step, masks=self._masks)))
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            LOGGER.warning(f"could not capture the step as a CUDA graph; it runs without ({line})")
            for parameter in self.parameters:
                parameter.grad = None
            return
        finally:
            meter.set_clock(clock)
            edges, meter.counts.edges = meter.counts.edges - edges_before, edges_before
        self.recording = Recording(step, captured, loss, [parameter.grad for parameter in self.parameters], edges)


def make_pass(strategy: Placed, task: Task, functions: OwnFunctions = NO_FUNCTIONS, *, timeline: int) -> TrainingPass:
    """Return the training pass for a run, captured as a CUDA graph if `is_captured` says so.

    Args:
        strategy: The model and graph, placed on this rank by a strategy.
        task: Computes the loss and its gradient from the model's output rows.
        functions: User-defined functions of the run.
        timeline: Number of epochs whose operations are recorded.
    """
    way = CapturedPass if is_captured(strategy, task, functions, timeline=timeline) else TrainingPass
    return way(strategy, task)


def is_captured(strategy: Placed, task: Task, functions: OwnFunctions, *, timeline: int) -> bool:
    """Return True if all steps launch the same kernels on the same memory, and the graph is small.

    Args:
        strategy: The model and graph, placed on this rank by a strategy.
        task: Computes the loss. Losses of edges and links are not captured.
        functions: User-defined functions of the run. A custom loss is not captured.
        timeline: Number of epochs whose operations are recorded. Steps are captured only if it is 0.
    """
    work, graph, device = strategy.work, strategy.graph, strategy.group.device
    return (
        device.type == "cuda"
        and work.optimisations.capture
        and strategy.capturable
        and isinstance(task, NodeTask)
        and functions.loss is None
        and not timeline
        and kernels_in_use("sum") == {"triton"}  # cuSPARSE's wait for the GPU
        and triton_backend() is not None
        and graph.num_edges <= MAX_EDGES
        and graph.num_vertices * graph.num_classes * work.itemsize <= block_bytes(device)
        and all(f"{type(module).__module__}.".startswith(REPEATABLE_MODULES) for module in strategy.model.modules())
    )
