"""A case under a strategy, and what every exact strategy must show: the numbers of `single`, its trace's counts."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.lib.cases import Case
from tests.lib.ranks import on_ranks
from weft.comm import Group
from weft.core.meter import Counts
from weft.core.optimisations import Optimisations
from weft.cost import Trace
from weft.engine.metrics import NodeTask
from weft.nn import GraphOperation, Inputs, MapFlops, Workload, embeddings
from weft.nn.workload import MapsKey, OutlineKey
from weft.partition import make_book
from weft.strategies import Placed, ResidentPlaced, get_strategy
from weft.strategies.offload.plan import OffloadPlan

REFERENCES = "WEFT_TEST_REFERENCES"
"""The environment's name of the folder of references, which all processes of a session share."""
TOLERANCE = 1e-9


class Given(dict[str, Any]):
    """What is said to any strategy: those of its options that it has, and the machine, where it decides by that."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options)

    def plan(self, name: str, work: Workload, size: int = 1, decisions: Any = None) -> Any:
        kind = get_strategy(name)
        known = {spec.name for spec in fields(kind.options_type)}
        options = kind.options_type(**{one: value for one, value in self.items() if one in known})
        return kind(work, size, options, self.get("machine") if "probe" in kind.flags else None, decisions)


NOTHING = Given()


@dataclass(frozen=True)
class Planned:
    """What ranks are told of a plan that was made before them, as by the launcher: they need not find it out each."""

    decisions: Any
    outlines: dict[OutlineKey, tuple[GraphOperation, ...]]
    maps: dict[MapsKey, tuple[MapFlops, ...]]

    @classmethod
    def of(cls, case: Case, name: str, given: Given, size: int) -> Planned:
        work = workload(case)
        plan = given.plan(name, work, size)
        if isinstance(plan, OffloadPlan):  # whose traces leave nothing behind; what is foreseen, no rank needs
            return cls(plan._cuts(), work.outlines, work.maps)
        for rank, training in product(range(size), (True, False)):
            plan.trace(rank, training=training)
        return cls(plan.decisions(), work.outlines, work.maps)

    def workload(self, case: Case) -> Workload:
        """That of the case, of which what is known here is found out."""
        work = workload(case)
        work.outlines.update(self.outlines)
        work.maps.update(self.maps)
        return work


class Session:
    """A case under a strategy: what can be seen of it. traced: whether its trace is made, before it is placed."""

    def __init__(
        self,
        case: Case,
        strategy: str,
        group: Group,
        given: Given = NOTHING,
        planned: Planned | None = None,
        *,
        traced: bool = False,
    ) -> None:
        self.case, self.group = case, group
        work = planned.workload(case) if planned else workload(case)
        self.graph = work.graph
        self.plan = given.plan(strategy, work, group.size, planned.decisions if planned else None)
        self._traces = {
            training: self.plan.trace(group.rank, training=training) for training in ((True, False) if traced else ())
        }
        self.strategy: Placed = self.plan.place(group, seed=7)
        self.model = self.strategy.model
        self.task = NodeTask(self.graph, self.strategy.rows, group, self.strategy.empty_rows, self.strategy.rows_device)
        self.meter = group.meter

    def step(self, epoch: int) -> tuple[Tensor, float]:
        """One training step without the optimiser's: logits of this rank's rows and its part of the loss."""
        self.model.zero_grad()
        with self.meter.during("train"):
            (step,) = self.strategy.steps(epoch)
            logits = self.strategy.forward(step)
            loss, grad = self.task.loss(logits, step)
            self.strategy.backward(logits, grad)
        return logits.detach(), loss.item()

    def rows(self, *, training: bool) -> slice | Tensor:
        """The vertices whose logits this rank gives in a step."""
        (step,) = self.strategy.steps(0) if training else (self.strategy.evaluation(0),)
        return self.strategy.rows if step.vertices is None else step.vertices

    @property
    def inputs(self) -> Inputs:
        """The constant features of a resident strategy's training steps."""
        assert isinstance(self.strategy, ResidentPlaced)
        (step,) = self.strategy.steps(0)
        return self.strategy.share(step).inputs

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def input_gradient(self) -> Tensor | None:
        """The gradient of the loss by all features, summed over the ranks, which are not taken for constant here.

        None from a strategy that is not resident, which only does to running statistics what the others do.
        """
        self.model.train()
        self.model.zero_grad()
        if self.graph.x is None:
            return torch.empty(0)
        (step,) = self.strategy.steps(0)
        if not isinstance(self.strategy, ResidentPlaced):
            self.strategy.forward(step)
            return None
        share = self.strategy.share(step)
        assert share.inputs.rows is not None
        x = share.inputs.rows.clone().requires_grad_()
        logits = self.model(self.strategy.views(step), x)
        _, grad = self.task.loss(logits, step)
        logits.backward(grad)
        assert x.grad is not None
        whole = x.new_zeros(self.graph.num_vertices, x.shape[1])
        whole[share.input_rows] = x.grad
        total = self.group.all_reduce(whole, tag="test")
        return total[self.graph.ids.argsort()] if self.graph.ids is not None else total

    def restore(self, gradients: dict[str, Tensor]) -> None:
        """Gives the parameters the gradients that a step left."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients.get(name)

    def losses(self, steps: int, first: float) -> list[float]:
        """This rank's part of the losses of Adam steps; first: that of `step(0)`, whose gradients are there."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02, weight_decay=1e-3)
        losses = [first]
        for epoch in range(1, steps):
            optimizer.step()
            losses.append(self.step(epoch)[1])
        return losses

    def all_losses(self, steps: int, first: float) -> Tensor:
        """The same, summed over the ranks, float64 [steps]."""
        parts = [report["losses"] for report in self.group.all_gather_object({"losses": self.losses(steps, first)})]
        return torch.tensor(parts, dtype=torch.float64).sum(0)

    def evaluation(self) -> Tensor:
        with self.meter.during("eval"):
            return self.strategy.forward(self.strategy.evaluation(0))

    def trace(self, *, training: bool) -> Trace:
        """What this rank is to do in a training step, or in an evaluation."""
        return self._traces[training]


@cache
def workload(case: Case) -> Workload:
    """That of a case, with what plans of other strategies have found out of it. Placing it leaves it as it is."""
    graph, model = case.build()
    return Workload(model, graph, Optimisations.without(case.without))


@dataclass(frozen=True)
class Reference:
    """What `single` gives for all vertices of a case, as they were first numbered, with every other optimisation."""

    logits: Tensor
    evaluation: Tensor
    input_gradient: Tensor
    losses: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, case: Case) -> Reference:
        whole = Session(replace(case, order="none", without="reach"), "single", Group())
        logits, loss = whole.step(0)
        gradients, input_gradient = whole.gradients(), whole.input_gradient()
        assert input_gradient is not None
        evaluation = whole.evaluation()
        whole.restore(gradients)
        losses = torch.tensor(whole.losses(case.steps, loss), dtype=torch.float64)
        return cls(logits, evaluation, input_gradient, losses, gradients)

    @classmethod
    def read(cls, path: Path) -> Reference:
        tensors = load_file(path)
        rest = {name: tensors.pop(name) for name in ("logits", "evaluation", "input_gradient", "losses")}
        return cls(**rest, gradients={name.removeprefix("gradient of "): value for name, value in tensors.items()})

    def write(self, path: Path) -> None:
        """Whole or not at all, since others may read, or write the same."""
        tensors = {f"gradient of {name}": value for name, value in self.gradients.items()}
        tensors |= {name: getattr(self, name) for name in ("logits", "evaluation", "input_gradient", "losses")}
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            save_file({name: value.detach().contiguous() for name, value in tensors.items()}, file.name)
        Path(file.name).rename(path)


def reference(case: Case) -> Reference:
    """The reference of a case, computed once a session."""
    if REFERENCES not in os.environ:
        return Reference.of(case)
    path = Path(os.environ[REFERENCES]) / f"{hashlib.sha256(repr(case).encode()).hexdigest()}.safetensors"
    if not path.exists():
        Reference.of(case).write(path)
    return Reference.read(path)


def check_on_ranks(size: int, case: Case, name: str, given: Given = NOTHING) -> None:
    """`check_case` on `size` ranks, which find the reference, and the plan where there are several."""
    reference(case)
    planned = Planned.of(case, name, given, size) if size > 1 else None
    on_ranks(size, _check_rank, case, name, given, planned)


def _check_rank(group: Group, case: Case, name: str, given: Given, planned: Planned | None) -> None:
    check_case(group, case, name, given, planned)


def check_case(group: Group, case: Case, name: str, given: Given = NOTHING, planned: Planned | None = None) -> Session:
    """Logits, every gradient, losses and scores of `name` equal single's; its counts equal its trace."""
    expected, placed = reference(case), Session(case, name, group, given, planned, traced=True)
    ids = placed.strategy.topology.ids

    placed.meter.take("train")
    with Flops() as flops:
        logits, loss = placed.step(0)
    check_counts(placed.meter.take("train"), placed.trace(training=True), case)
    check_flops(flops, placed.trace(training=True), case)
    check_calls(placed.trace(training=True), case)
    check_close(logits, expected.logits[ids[placed.rows(training=True)]], f"{case}: logits")
    gradients = placed.gradients()
    assert gradients.keys() == expected.gradients.keys(), f"{case}: other parameters have gradients"
    for parameter, gradient in expected.gradients.items():
        if parameter in embeddings(placed.model):  # single's rows are in the order of the original ids
            gradient = gradient[placed.strategy.embedded]
        check_close(gradients[parameter], gradient, f"{case}: gradient of {parameter}")
    input_gradient = placed.input_gradient()
    if input_gradient is not None:
        check_close(input_gradient, expected.input_gradient, f"{case}: gradient of the features")

    placed.meter.take("eval")
    with Flops() as flops:
        evaluation = placed.evaluation()
    check_close(evaluation, expected.evaluation[ids[placed.rows(training=False)]], f"{case}: evaluation")
    check_counts(placed.meter.take("eval"), placed.trace(training=False), case)
    check_flops(flops, placed.trace(training=False), case)
    check_calls(placed.trace(training=False), case)

    placed.restore(gradients)
    check_close(placed.all_losses(case.steps, loss), expected.losses, f"{case}: losses of Adam steps")
    return placed


def check_counts(counts: Counts, trace: Trace, case: Case) -> None:
    assert counts.edges == trace.edges, f"{case}: {counts.edges} edges x width, the trace says {trace.edges}"
    for kind in ("collectives", "bytes_sent", "bytes_received", "to_device", "to_host"):
        counted, promised = getattr(counts, kind), getattr(trace, kind)
        assert counted == promised, f"{case}: {kind} {dict(counted)}, the trace says {dict(promised)}"


class Flops(TorchDispatchMode):
    """What PyTorch's FlopCounterMode counts, by its formulas, but not by module, which takes most of its time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def check_calls(trace: Trace, case: Case) -> None:
    """The calls of kernels, by which a step is priced, are those of the trace's flops and edges."""
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
    """Every element, by the tolerance that every exact strategy is held to."""
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}\n{text}")


def part_by(method: str, case: Case, size: int) -> Tensor:
    """The part of every vertex of a case's graph."""
    graph, _ = case.build()
    return make_book(graph, min(size, graph.num_vertices), method=method).part
