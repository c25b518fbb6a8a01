"""A model and a graph placed by a strategy, for a training loop of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.config.config import Config
from weft.data import Graph
from weft.nn import embeddings
from weft.strategies import Placed, Step
from weft.training.artifacts.embedding_shards import gather_rows
from weft.training.custom_functions import OwnFunctions, extract_functions
from weft.training.flag_checks import refuse_foreign_flags
from weft.training.input_checks import check
from weft.training.launch.joined_ranks import join_ranks, make_on_all_ranks, closing_on_error, plan_with_kernels
from weft.training.launch.torchrun import on_present_ranks, under_torchrun
from weft.training.rank import use_kernels_of_rank_zero
from weft.training.run import parse_call, custom_class, prepared_workload
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.task import make_task
from weft.utils.errors import InputError

OF_THE_LOOP = (
    *("epochs", "optimizer", "lr", "weight_decay", "momentum", "clip_norm", "scheduler", "scheduler_epochs"),
    *("lr_factor", "warmup_epochs", "eval_every", "patience", "until", "timeline", "checkpoint_every", "measure"),
)
"""Fields of a configuration that a loop of one's own decides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What a rank learns from in one step."""

    rows: Tensor
    """int64 [k]: which of its logits have a label to learn from."""
    y: Tensor
    """[k, ...]: those labels."""
    size: int
    """How many there are on all ranks: what a sum of losses is divided by."""
    step: Step


PENALTY = -1
"""Stands for a call while the gradient of a penalty is computed."""


class PlacedModel:
    """A model on this rank's part of a graph.

        with weft.place(graph, model, strategy="hybrid") as placed:
            optimizer = torch.optim.Adam(placed.model.parameters(), lr=0.01)
            for epoch in range(100):
                for batch in placed.batches(epoch):
                    optimizer.zero_grad()
                    logits = placed(batch)
                    loss = cross_entropy(logits[batch.rows], batch.y, reduction="sum") / batch.size
                    placed.backward(loss)
                    optimizer.step()
                scores = placed.evaluate()

    A loss is trained by `placed.backward(loss)`, not by `loss.backward()`, which raises InputError: the logits come
    from other ranks, or from chunks, whose backward pass only `placed` knows.

    model: the rank's own copy, whose parameters are the same on all ranks. rank, size: this rank, and how many there
    are. vertices: int64 [n], those that the rank answers for. Every rank makes the same calls.
    """

    def __init__(self, config: Config, placed: Placed, group: Group, own: OwnFunctions) -> None:
        self.placed, self.group, self.model = placed, group, placed.model
        self.graph, self.rank, self.size = placed.graph, group.rank, group.size
        self.vertices = torch.arange(self.graph.num_vertices)[placed.rows]
        task = make_task(config, placed, own)
        assert isinstance(task, NodeTask)
        self.task = task
        self._made: tuple[Tensor, Tensor] | None = None
        self._calls = 0
        """Number of `__call__`s so far."""
        self._reaching = 0
        """The call whose logits a loss may depend on now; 0: none."""
        self._versions: list[int] = []
        """PyTorch's counts of changes of the parameters, at the first `backward`."""
        self._unchanged_epochs = 0
        """Calls of `batches` since then in which these were the same."""

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The steps of an epoch: one for the whole graph, or one for each mini-batch of `split` and `sampled`.

        Warns where no parameter changes in three epochs with a `backward`, as with an optimizer of another model.
        """
        if self._versions == [parameter._version for parameter in self.model.parameters()]:
            self._unchanged_epochs += 1
        if self._unchanged_epochs == 3:
            warnings.warn(
                "no parameter of placed.model has changed since the first placed.backward: make the optimizer of "
                "placed.model.parameters(), not of the model that weft.place was given",
                stacklevel=2,
            )
        for step in self.placed.steps(epoch):
            yield Batch(**self.task.examples(step)._asdict(), step=step)

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [n, C] of the rows that this rank answers for in a step, of which a loss is to be made."""
        made = self.placed.forward(batch.step)
        logits = made.detach().requires_grad_()
        self._calls += 1
        logits.register_hook(partial(self._require_reaching, self._calls))
        self._made = made, logits
        return logits

    def backward(self, loss: Tensor, penalty: Tensor | None = None) -> None:
        """Add to every parameter's `grad` the gradient of the sum of all ranks' losses, and of the penalty.

        Call it in the place of `loss.backward()`, which would end at the logits and give no parameter a gradient.

        Args:
            loss: This rank's part of the loss, a function of the logits that the last `placed(batch)` gave.
            penalty: A function of the parameters alone, such as an L2 penalty, which every rank computes and which
                counts once. A rank has some rows of an embedding, so it has to be a sum over rows.

        Raises:
            InputError: There are no logits since the last call, the loss does not depend on them, or it depends on
                those of an earlier batch or directly on the parameters; or the penalty depends on logits.
        """
        if self._made is None:
            raise InputError("backward: there are no logits since the last one: call placed(batch) before")
        (made, logits), self._made = self._made, None
        parameters = [*self.model.parameters()]
        before = [parameter.grad for parameter in parameters]
        self._versions = self._versions or [parameter._version for parameter in parameters]
        try:
            self.model.zero_grad(set_to_none=True)
            if loss.requires_grad:
                self._reaching = self._calls
                loss.backward()
            elif len(logits):
                raise InputError("backward: the loss does not depend on the logits that placed(batch) gave")
            if any(parameter.grad is not None for parameter in parameters):
                raise InputError(
                    "backward: the loss depends directly on parameters, and that term would count once for each rank: "
                    "pass it as penalty: placed.backward(loss, penalty=...)"
                )
            grad = self.placed.empty_rows(made)
            grad.zero_() if logits.grad is None else grad.copy_(logits.grad)
            self.placed.backward(made, grad)
            if penalty is not None:
                self._reaching = PENALTY
                penalty.backward()
        except BaseException:
            self.model.zero_grad(set_to_none=True)
            raise
        finally:
            self._reaching = 0
            for parameter, gradient in zip(parameters, before, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _require_reaching(self, call: int, _: Tensor) -> None:
        """InputError where a backward pass reaches logits whose gradient goes no further."""
        if self._reaching == PENALTY:
            raise InputError("backward: the penalty depends on the logits: put that term into the loss")
        if not self._reaching:
            raise InputError(
                "a backward pass from the logits of placed(batch) ends there, and gives the parameters no gradient: "
                "call placed.backward(loss) instead of loss.backward()"
            )
        if call != self._reaching:
            raise InputError(
                "backward: the loss depends on the logits of an earlier batch: call placed.backward for each batch; "
                "gradients add up until optimizer.zero_grad()"
            )

    @torch.no_grad()
    def logits(self) -> Tensor:
        """The logits [n, C] of the rank's vertices that are scored, exact: whole neighbourhoods, without dropout."""
        return self.placed.forward(self.placed.evaluation(0)).detach()

    def evaluate(self) -> dict[str, float | None]:
        """The scores of all ranks' vertices, by name, such as val_accuracy; see `--metrics`."""
        step = self.placed.evaluation(0)
        counts = self.task.counts(self.placed.forward(step), step)
        return self.task.scores(self.group.all_gather_object(counts))

    def gather(self, rows: Tensor) -> Tensor | None:
        """All ranks' rows [N, ...] on rank 0, by the vertices' original ids, from each one's [n, ...]; else None."""
        ids = self.vertices if self.graph.ids is None else self.graph.ids[self.vertices]
        whole = rows.new_zeros(self.graph.num_vertices, *rows.shape[1:])
        whole[ids.to(rows.device)] = rows
        whole = self.group.all_reduce(whole, tag="gather")
        return None if self.rank else whole

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, with the embedded rows of all ranks on rank 0: what `load_state_dict` takes."""
        state: dict[str, Tensor] = self.model.state_dict()
        rows = {name: gather_rows(state[name], self.placed.embedded, self.group) for name in embeddings(self.model)}
        return state | rows

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Gives the model tensors that rank 0's `state_dict` gave, which every rank has."""
        rows = {name: state[name][self.placed.embedded.to(state[name].device)] for name in embeddings(self.model)}
        self.model.load_state_dict(state | rows)

    def __enter__(self) -> PlacedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()


def place(graph: Graph | str | Path, model: nn.Module | str = "gcn", **options: Any) -> PlacedModel:
    """A model on this rank's part of a graph, under a strategy, for a training loop of one's own; see PlacedModel.

    graph, model: as of `weft.train`. options: fields of weft.Config that say what is computed and where: strategy,
    partition, device_memory, batch_size, metrics, seed, ... In a script under torchrun, it joins the ranks that are
    there, which begin with rank 0's weights; otherwise there is one rank.
    InputError for a mistake of the caller, such as an option that the loop decides.
    """
    own, options = extract_functions(options)
    config, whole, module = parse_call(graph, model, options, "weft.place")
    for spec in fields(config):
        if spec.name in OF_THE_LOOP and getattr(config, spec.name) != spec.default:
            raise InputError(f"{spec.name} has no effect on a loop of your own, which decides it: leave it out")
    if own.callbacks or own.loss or own.optimizer or own.scheduler:
        raise InputError("a loop of your own calls its loss, optimizer, scheduler and callbacks itself: leave them out")
    if config.task != "node":
        raise InputError(f"task {config.task}: weft.place is for the node task: give weft.train the task")
    if config.workers > 1 and not under_torchrun():
        raise InputError(f"workers={config.workers}: start the script by torchrun --nproc-per-node {config.workers}")
    config = on_present_ranks(config)
    refuse_foreign_flags(config)
    work = make_on_all_ranks(config, lambda: prepared_workload(config, whole, module))
    check(config, work, own, launched=False, own_model=bool(custom_class(config, module)))
    group = join_ranks("weft.place", config, work)
    with closing_on_error(group):
        plan, choices = plan_with_kernels(config, work, group)
        use_kernels_of_rank_zero(choices, group)
        return PlacedModel(config, plan.place(group, seed=config.seed), group, own)
