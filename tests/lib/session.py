"""Run a case under a strategy and check it: results equal those of `single`, counts equal those of the trace."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.lib.cases import Case
from tests.lib.environment import REFERENCES
from tests.lib.ranks import on_ranks
from weft.comm import Group
from weft.config.optimisations import Optimisations
from weft.cost import Trace
from weft.data import Graph
from weft.nn import DenseFlops, GraphOperation, Inputs, Workload, embeddings
from weft.nn.workload.workload import DenseFlopsKey, OutlineKey
from weft.partition import make_book
from weft.runtime.kernel_call import TileSizes, work_counters
from weft.runtime.meter import Counts
from weft.strategies import Placed, ResidentPlaced, get_strategy
from weft.strategies.offload.chunked_plan import ChunkedPlan
from weft.training.tasks.metrics import NodeTask

TOLERANCE = 1e-9
STEPS = 5
"""Adam steps of a case in full depth. An error in a moment shows in the second step, in weight decay maybe later."""
RESULTS = ("logits", "losses", "evaluation", "input_gradient")


class Given(dict[str, Any]):
    """Options for any strategy, which takes those that it has, and the machine if it plans by its prices."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options)

    def plan(self, name: str, work: Workload, size: int = 1, decisions: Any = None) -> Any:
        kind = get_strategy(name)
        names = {spec.name for spec in fields(kind.options_type)}
        options = kind.options_type(**{option: value for option, value in self.items() if option in names})
        return kind(work, size, options, self.get("machine") if "machine" in kind.flags else None, decisions)


NOTHING = Given()


@dataclass(frozen=True)
class Planned:
    """State of a plan that ranks receive, as from the launcher, so that they need not compute it."""

    decisions: Any
    outlines: dict[OutlineKey, tuple[GraphOperation, ...]]
    maps: dict[DenseFlopsKey, tuple[DenseFlops, ...]]

    @classmethod
    def of(cls, case: Case, name: str, options: Given, size: int) -> Planned:
        work = workload(case)
        plan = options.plan(name, work, size)
        if isinstance(plan, ChunkedPlan):  # whose traces cache nothing that ranks need
            return cls(plan._cuts(), work.outlines, work.dense_flops)
        for rank, training in product(range(size), (True, False)):
            plan.trace(rank, training=training)
        return cls(plan.state(), work.outlines, work.dense_flops)

    def workload(self, case: Case) -> Workload:
        """Return the workload of the case, with the outlines and FLOPs that are already computed."""
        work = workload(case)
        work.outlines.update(self.outlines)
        work.dense_flops.update(self.maps)
        return work


class Session:
    """A case under a strategy. traced: whether to trace the plan, which must happen before it is placed."""

    def __init__(
        self,
        case: Case,
        strategy: str,
        group: Group,
        options: Given = NOTHING,
        planned: Planned | None = None,
        *,
        traced: bool = False,
    ) -> None:
        self.case, self.group = case, group
        work = planned.workload(case) if planned else workload(case)
        self.graph = work.graph
        self.plan = options.plan(strategy, work, group.size, planned.decisions if planned else None)
        self._traces = {
            training: self.plan.trace(group.rank, training=training) for training in ((True, False) if traced else ())
        }
        self.strategy: Placed = self.plan.place(group, seed=7)
        self.model = self.strategy.model
        self.task = NodeTask(self.graph, self.strategy.rows, group, self.strategy.empty_rows, self.strategy.rows_device)
        self.meter = group.meter

    def step(self, epoch: int) -> tuple[Tensor, float]:
        """Run one training step without the optimizer; return logits of this rank's rows and its part of the loss."""
        self.model.zero_grad()
        with self.meter.during("train"):
            (step,) = self.strategy.steps(epoch)
            logits = self.strategy.forward(step)
            loss, grad = self.task.loss(logits, step)
            self.strategy.backward(logits, grad)
        return logits.detach(), loss.item()

    def rows(self, *, training: bool) -> slice | Tensor:
        """Return the vertices whose logits this rank computes in a step."""
        (step,) = self.strategy.steps(0) if training else (self.strategy.evaluation(0),)
        return self.strategy.rows if step.vertices is None else step.vertices

    @property
    def inputs(self) -> Inputs:
        """Constant features in the training steps of a resident strategy."""
        assert isinstance(self.strategy, ResidentPlaced)
        (step,) = self.strategy.steps(0)
        return self.strategy.step_inputs(step).inputs

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def input_gradient(self) -> Tensor | None:
        """Return the gradient of the loss with respect to all features, summed over the ranks.

        A strategy that is not resident returns None, after a forward pass that updates running statistics.
        """
        self.model.train()
        self.model.zero_grad()
        if self.graph.x is None:
            return torch.empty(0)
        (step,) = self.strategy.steps(0)
        if not isinstance(self.strategy, ResidentPlaced):
            self.strategy.forward(step)
            return None
        step_inputs = self.strategy.step_inputs(step)
        assert step_inputs.inputs.rows is not None
        x = step_inputs.inputs.rows.clone().requires_grad_()
        logits = self.model(self.strategy.views(step), x)
        _, grad = self.task.loss(logits, step)
        logits.backward(grad)
        whole = x.new_zeros(self.graph.num_vertices, x.shape[1])
        if x.grad is not None:  # None if the model reads the features under torch.no_grad
            whole[step_inputs.input_rows] = x.grad
        total = self.group.all_reduce(whole, tag="test")
        return total[self.graph.ids.argsort()] if self.graph.ids is not None else total

    def restore(self, gradients: dict[str, Tensor]) -> None:
        """Set the gradients of the parameters to those of an earlier step."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients.get(name)

    def losses(self, steps: int, first: float) -> list[float]:
        """Return this rank's part of the losses of Adam steps.

        first: loss of `step(0)`, whose gradients the parameters already have.
        """
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02, weight_decay=1e-3)
        losses = [first]
        for epoch in range(1, steps):
            optimizer.step()
            losses.append(self.step(epoch)[1])
        return losses

    def all_losses(self, steps: int, first: float) -> Tensor:
        """Return the losses of Adam steps summed over the ranks, float64 [steps]."""
        parts = [report["losses"] for report in self.group.all_gather_object({"losses": self.losses(steps, first)})]
        return torch.tensor(parts, dtype=torch.float64).sum(0)

    def evaluation(self) -> Tensor:
        with self.meter.during("eval"):
            return self.strategy.forward(self.strategy.evaluation(0))

    def trace(self, *, training: bool) -> Trace:
        """Return the trace of this rank's training step, or of its evaluation."""
        return self._traces[training]


@cache
def built(case: Case) -> tuple[Graph, nn.Module]:
    """Return graph and model of a case without `case.without`; cached, so do not change them."""
    assert not case.without
    return case.build()


@cache
def workload(case: Case) -> Workload:
    """Return the workload of a case, with the outlines and FLOPs that other plans have computed."""
    graph, model = built(replace(case, without=""))
    return Workload(model, graph, Optimisations.without(case.without))


@dataclass(frozen=True)
class Reference:
    """Results of `single` for all vertices of a case, in the original order, with all optimisations but pruning."""

    logits: Tensor
    losses: Tensor
    """Loss of each step, float64 [1] in core depth, [STEPS] in full depth."""
    gradients: dict[str, Tensor]
    evaluation: Tensor
    input_gradient: Tensor
    """Gradient of the loss with respect to the features [N, F]; [0] in core depth."""

    @classmethod
    def of(cls, case: Case, *, full: bool) -> Reference:
        whole = Session(replace(case, order="none", without="reach"), "single", Group())
        logits, loss = whole.step(0)
        gradients, losses, input_gradient = whole.gradients(), [loss], torch.empty(0)
        if full:
            of_inputs = whole.input_gradient()
            assert of_inputs is not None
            input_gradient = of_inputs
        evaluation = whole.evaluation()
        if full:
            whole.restore(gradients)
            losses = whole.losses(STEPS, loss)
        return cls(logits, torch.tensor(losses, dtype=torch.float64), gradients, evaluation, input_gradient)

    @classmethod
    def read(cls, path: Path) -> Reference:
        tensors = load_file(path)
        rest = {name: tensors.pop(name) for name in RESULTS}
        return cls(**rest, gradients={name.removeprefix("gradient of "): value for name, value in tensors.items()})

    def write(self, path: Path) -> None:
        """Write all or nothing, since other processes may read the file, or write it too."""
        tensors = {f"gradient of {name}": value for name, value in self.gradients.items()}
        tensors |= {name: getattr(self, name) for name in RESULTS}
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            save_file({name: value.detach().contiguous() for name, value in tensors.items()}, file.name)
        Path(file.name).rename(path)


def reference(case: Case, *, full: bool = False) -> Reference:
    """Return the reference of a case, computed once for all processes of a session."""
    if REFERENCES not in os.environ:
        return Reference.of(case, full=full)
    key = hashlib.sha256(repr((case, full)).encode()).hexdigest()
    path = Path(os.environ[REFERENCES]) / f"{key}.safetensors"
    if not path.exists():
        Reference.of(case, full=full).write(path)
    return Reference.read(path)


def check_on_ranks(size: int, case: Case, name: str, options: Given = NOTHING, *, full: bool = False) -> None:
    """Run `check_case` on `size` ranks. If there are several, rank 0 makes the plan of all, and the reference.

    Ranks are forked with the models of the quick cases, which this process would have to convert first.
    """
    planned = on_ranks(size, _plan, case, name, options, full)[0] if size > 1 else None
    on_ranks(size, _check_rank, case, name, options, planned, full)


def _plan(group: Group, case: Case, name: str, options: Given, full: bool) -> Planned | None:
    if group.rank:
        return None
    reference(case, full=full)
    return Planned.of(case, name, options, group.size)


def _check_rank(group: Group, case: Case, name: str, options: Given, planned: Planned | None, full: bool) -> None:
    check_case(group, case, name, options, planned, full=full)


def check_case(
    group: Group,
    case: Case,
    name: str,
    options: Given = NOTHING,
    planned: Planned | None = None,
    *,
    full: bool = False,
) -> Session:
    """Compare a strategy with `single`, and its counts with its trace.

    Core depth checks logits, gradients, loss and counts of one training step and one evaluation. Full depth also checks
    the gradient of the features, FLOPs, kernel calls, and the losses of `STEPS` steps of Adam.
    """
    expected, placed = reference(case, full=full), Session(case, name, group, options, planned, traced=True)
    ids = placed.strategy.topology.ids

    placed.meter.take("train")
    with Flops() if full else nullcontext() as flops:
        logits, loss = placed.step(0)
    check_trace(placed, flops, training=True)
    check_close(logits, expected.logits[ids[placed.rows(training=True)]], f"{case}: logits")
    gradients = placed.gradients()
    assert gradients.keys() == expected.gradients.keys(), (
        f"{case}: other parameters have gradients: {gradients.keys() ^ expected.gradients.keys()}"
    )
    for parameter, gradient in expected.gradients.items():
        if parameter in embeddings(placed.model):  # single's rows are in the order of the original ids
            gradient = gradient[placed.strategy.embedded]
        check_close(gradients[parameter], gradient, f"{case}: gradient of {parameter}")
    if full and (input_gradient := placed.input_gradient()) is not None:
        check_close(input_gradient, expected.input_gradient, f"{case}: gradient of the features")

    placed.meter.take("eval")
    with Flops() if full else nullcontext() as flops:
        evaluation = placed.evaluation()
    check_close(evaluation, expected.evaluation[ids[placed.rows(training=False)]], f"{case}: evaluation")
    check_trace(placed, flops, training=False)

    placed.restore(gradients)
    steps = STEPS if full else 1
    check_close(placed.all_losses(steps, loss), expected.losses, f"{case}: losses")
    return placed


def check_trace(placed: Session, flops: Flops | None, *, training: bool) -> None:
    """Compare the counts with the trace; if `flops` is not None, also FLOPs and kernel calls."""
    trace = placed.trace(training=training)
    check_counts(placed.meter.take("train" if training else "eval"), trace, placed.case)
    calls = [call for operation in trace.operations for call in operation.calls]
    assert all(min(call.sizes, default=0) >= 0 for call in calls), f"{placed.case}: a call of a negative size"
    if flops is not None:
        check_flops(flops, trace, placed.case)
        check_calls(trace, placed.case)


def check_counts(counts: Counts, trace: Trace, case: Case) -> None:
    assert counts.edges == trace.edges, f"{case}: {counts.edges} edges x width, the trace says {trace.edges}"
    for kind in ("collectives", "bytes_sent", "bytes_received", "to_device", "to_host"):
        counted, promised = getattr(counts, kind), getattr(trace, kind)
        assert counted == promised, f"{case}: {kind} {dict(counted)}, the trace says {dict(promised)}"


class Flops(TorchDispatchMode):
    """Counter of FLOPs by the formulas of PyTorch's FlopCounterMode, without its slow counts per module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __enter__(self) -> Flops:
        work_counters.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        work_counters.remove(self)
        super().__exit__(*error)

    def add_tiles(self, flops: int, tiles: TileSizes) -> None:
        del tiles
        self.total += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def check_calls(trace: Trace, case: Case) -> None:
    """Check that the kernel calls, from which a step's time is estimated, sum to the trace's FLOPs and edges."""
    for operation in trace.operations:
        edges = flops = 0
        for call in operation.calls:
            if call.kernel in ("linear", "linear_weights"):
                flops += 2 * math.prod(call.sizes) * call.number
            elif call.kernel == "product":
                flops += call.sizes[0] * call.number
            elif operation.kind == "aggregate":
                edges += call.sizes[0] * call.sizes[4] * call.number
        assert edges == operation.edges, f"{case}: calls with {edges} edges x width in {operation}"
        assert flops == operation.flops, f"{case}: calls with {flops} flops in {operation}"


def check_flops(counted: Flops, trace: Trace, case: Case) -> None:
    assert counted.total == trace.flops, f"{case}: {counted.total} flops, the trace says {trace.flops}"


def check_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compare every element with the tolerance that all exact strategies must meet."""
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}\n{text}")


def part_by(method: str, case: Case, size: int) -> Tensor:
    """Return the part of every vertex of a case's graph."""
    graph = case.build_graph() if isinstance(case, Case) else case.build()[0]
    return make_book(graph, min(size, graph.num_vertices), method=method).part
