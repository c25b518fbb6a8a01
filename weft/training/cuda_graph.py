"""The forward and backward pass of a training step; of a small graph on a GPU, recorded and repeated as a CUDA graph.

There the kernels are shorter than what the host takes to launch them one by one, and a CUDA graph is launched at once.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from weft.comm import Group
from weft.config.config import Config
from weft.kernels import triton_backend
from weft.runtime.clock import HostClock
from weft.runtime.kernel_selection import used
from weft.runtime.streams import Captured, capture
from weft.strategies import Placed, Step
from weft.training.custom_functions import NOTHING_OWN, OwnFunctions
from weft.training.tasks.metrics import Task
from weft.training.tasks.row_batching import block_bytes
from weft.utils.random import KeyTable

MOST_EDGES = 1_000_000
"""Of a graph whose pass is captured: in larger ones launches do not count, and memory does, which a capture keeps."""
OURS = ("weft.nn.", "torch.nn.")
"""Modules that do in each step what they did in the one before: others may count on the host, or draw."""


class TrainingPass:
    """Forward and backward pass of a training step."""

    def __init__(self, strategy: Placed, task: Task) -> None:
        self.strategy, self.task = strategy, task

    @property
    def group(self) -> Group:
        return self.strategy.group

    def __call__(self, step: Step) -> Tensor:
        """This rank's part of the loss, []; the parameters, which have none, get their gradients."""
        timer = self.group.meter.timer
        with timer("encode"):
            rows = self.strategy.forward(step)
        with timer("loss"):
            loss, grad = self.task.loss(rows, step)
        with timer("encode"):
            self.strategy.backward(rows, grad)
        return loss


class Recording(NamedTuple):
    """A pass that can be repeated."""

    step: Step
    captured: Captured
    loss: Tensor
    """Which the pass writes each time, as it does the gradients."""
    grads: list[Tensor | None]
    """By parameter."""
    edges: int
    """Edges x width aggregated."""


class CapturedPass(TrainingPass):
    """The pass of a GPU, the second of which is captured: the first makes what is made once, and compiles kernels.

    A pass that cannot be captured is done as it was, with a warning.
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
        known, captured, loss, grads, edges = self.recording
        assert step.vertices is known.vertices
        self._masks.fill(self.strategy.seed, *step.key)
        with self.group.meter.timer("captured"):
            captured.replay()
        self.group.meter.aggregate(edges, 1)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        return loss

    def _record(self, step: Step) -> None:
        """Captures a pass, which is not done by that."""
        meter = self.group.meter
        clock, before = meter.clock, meter.counts.edges
        meter.use(HostClock())  # a GPU's stamps would be captured
        try:
            captured, loss = capture(lambda: super(CapturedPass, self).__call__(replace(step, masks=self._masks)))
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            print(f"weft: warning: no CUDA graph of this step could be captured ({line})", file=sys.stderr, flush=True)
            for parameter in self.parameters:
                parameter.grad = None
            return
        finally:
            meter.use(clock)
            edges, meter.counts.edges = meter.counts.edges - before, before
        self.recording = Recording(step, captured, loss, [parameter.grad for parameter in self.parameters], edges)


def make_pass(config: Config, strategy: Placed, task: Task, own: OwnFunctions = NOTHING_OWN) -> TrainingPass:
    """The pass of the steps that a configuration asks for."""
    return (CapturedPass if is_captured(config, strategy, own) else TrainingPass)(strategy, task)


def is_captured(config: Config, strategy: Placed, own: OwnFunctions = NOTHING_OWN) -> bool:
    """Whether all steps are one pass of the same kernels on the same memory, and a small one."""
    work, graph, device = strategy.work, strategy.graph, strategy.group.device
    return (
        device.type == "cuda"
        and work.optimisations.capture
        and (config.strategy, config.task, config.timeline, own.loss) == ("single", "node", 0, None)
        and used("sum") == {"triton"}  # cuSPARSE's wait for the GPU
        and triton_backend() is not None
        and graph.num_edges <= MOST_EDGES
        and graph.num_vertices * graph.num_classes * work.itemsize <= block_bytes(device)
        and all(f"{type(module).__module__}.".startswith(OURS) for module in strategy.model.modules())
    )
