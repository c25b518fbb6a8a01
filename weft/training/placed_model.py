"""Model and graph placed by a strategy, for a training loop that the user writes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.config.config import LearningOptions
from weft.data import Graph
from weft.nn import embeddings
from weft.strategies import Placed, Step
from weft.training.arguments import PlaceArguments
from weft.training.artifacts.embedding_shards import gather_rows
from weft.training.custom_functions import OwnFunctions, extract_functions
from weft.training.flag_checks import refuse_foreign_flags
from weft.training.input_checks import check
from weft.training.launch.joined_ranks import check_consistent, closing_on_error
from weft.training.launch.launcher import launcher_for
from weft.training.launch.torchrun import on_present_ranks, under_torchrun
from weft.training.optimizer import added_to_gradients
from weft.training.rank import plan_with_kernels, use_kernels_of_rank_zero
from weft.training.run import custom_class, parse_call, prepared_workload
from weft.training.signature import listing
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.task import make_task
from weft.utils.errors import InputError

LOOP_FIELDS = (
    *("epochs", "optimizer", "lr", "weight_decay", "momentum", "clip_norm", "scheduler", "scheduler_epochs"),
    *("lr_factor", "warmup_epochs", "eval_every", "patience", "until", "timeline", "tensorboard"),
    *("checkpoint_every", "measure"),
)
"""Fields of Config that the user's loop decides instead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Training rows of this rank in one step."""

    rows: Tensor
    """Indices of the logits that have a training label, int64 [k]."""
    y: Tensor
    """Labels of `rows`, [k, ...]."""
    vertices: Tensor
    """Original ids of the vertices of `rows`, int64 [k]."""
    size: int
    """Number of training rows of the optimizer step on all ranks. Divide the sum of the losses by it."""
    updates: bool
    """True if `optimizer.step()` should follow; False if accumulate_grad_batches adds the next batch's gradients first.
    """
    step: Step
    """Step of the strategy, for `PlacedModel`."""


PENALTY = -1
"""Value of `PlacedModel._active_call` while the gradient of a penalty is computed."""


class PlacedModel:
    """Model on this rank's part of a graph.

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

    Every rank must make the same calls. Call `placed.backward(loss)`, not `loss.backward()`, which raises InputError:
    the logits depend on rows of other ranks, or were computed in chunks, and only `placed` knows their backward pass.

    Attributes: `model` is this rank's copy of the model, with the same parameters on all ranks. `rank` and `size` are
    this rank and the number of ranks. `vertices`, int64 [n], are the original ids of the vertices of this rank.

    Args:
        config: The configuration of task, metrics and seed.
        placed: The model and graph, placed on this rank by a strategy.
        group: The ranks.
        functions: User-defined metrics.
    """

    def __init__(self, config: LearningOptions, placed: Placed, group: Group, functions: OwnFunctions) -> None:
        self.placed, self.group, self.model = placed, group, placed.model
        self.graph, self.rank, self.size = placed.graph, group.rank, group.size
        self.vertices = self._original_ids(torch.arange(self.graph.num_vertices)[placed.rows])
        task = make_task(config, placed, functions)
        assert isinstance(task, NodeTask)
        self.task = task
        self._outputs: tuple[Tensor, Tensor, bool] | None = None
        """Output of the last forward pass, the detached logits that the user received, and `Batch.updates`."""
        self._accumulating = False
        """True between two batches whose gradients are added up."""
        self._calls = 0
        """Number of forward passes so far."""
        self._active_call = 0
        """Number of the forward pass on whose logits the current backward pass may depend; 0: no backward pass runs."""
        self._versions: list[int] = []
        """PyTorch's version counter of each parameter at the first `backward`."""
        self._unchanged_epochs = 0
        """Number of calls of `batches` since the first `backward` at which all version counters were unchanged."""

    def _original_ids(self, vertices: Tensor) -> Tensor:
        """Return the ids of vertices before --order renumbered them."""
        return vertices if self.graph.ids is None else self.graph.ids[vertices]

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield the steps of an epoch: one for the whole graph, or one for each mini-batch of `split` and `sampled`.

        With accumulate_grad_batches, call `optimizer.step()` and `optimizer.zero_grad()` only if `batch.updates`.

        Warn if no parameter changes in three epochs with a `backward`, as with an optimizer of another model.
        """
        if self._versions == [parameter._version for parameter in self.model.parameters()]:
            self._unchanged_epochs += 1
        if self._unchanged_epochs == 3:
            warnings.warn(
                "no parameter of placed.model has changed since the first placed.backward: create the optimizer with "
                "placed.model.parameters(), not with the model that you passed to weft.place",
                stacklevel=2,
            )
        self._accumulating = False
        for step in self.placed.steps(epoch):
            examples = self.task.examples(step)
            rows = self.vertices if step.vertices is None else self._original_ids(step.vertices)
            vertices = rows[examples.rows.cpu()]
            yield Batch(**examples._asdict(), updates=step.updates, vertices=vertices, step=step)

    def __call__(self, batch: Batch) -> Tensor:
        """Return the logits [n, C] of this rank in a step, to compute a loss from.

        Row i belongs to `vertices[i]` if the batch is the whole graph, and to `batch.vertices[i]` in a mini-batch.
        """
        outputs = self.placed.forward(batch.step)
        logits = outputs.detach().requires_grad_()
        self._calls += 1
        logits.register_hook(partial(self._check_active, self._calls))
        self._outputs = outputs, logits, batch.updates
        return logits

    def backward(self, loss: Tensor, penalty: Tensor | None = None) -> None:
        """Add to every parameter's `grad` the gradient of the sum of all ranks' losses, and of the penalty.

        Call it instead of `loss.backward()`, which would end at the logits and give no parameter a gradient.

        Args:
            loss: This rank's part of the loss, a function of the logits that the last `placed(batch)` returned.
            penalty: A function of the parameters alone, such as an L2 penalty, which every rank computes and which
                counts once. A rank has only some rows of an embedding, so a penalty on it must be a sum over rows.

        Raises:
            InputError: No logits were computed since the last call, the loss does not depend on them, or it depends on
                those of an earlier batch or directly on the parameters; or the penalty depends on logits.
        """
        if self._outputs is None:
            raise InputError("backward: no logits were computed since the last call: call placed(batch) first")
        (outputs, logits, updates), self._outputs = self._outputs, None
        # 1. Set the gradients aside, so that a direct dependency of the loss on parameters is noticed.
        # 2. Backpropagate from the loss to the logits, then let the strategy continue from there.
        # 3. Add the gradient of the penalty, and the gradients set aside.
        parameters = [*self.model.parameters()]
        self._versions = self._versions or [parameter._version for parameter in parameters]
        if self._accumulating and all(parameter.grad is None for parameter in parameters):
            raise InputError(
                "backward: the gradients of the previous batch are gone, but accumulate_grad_batches adds those of "
                "several batches: call optimizer.step() and optimizer.zero_grad() only if batch.updates"
            )
        with added_to_gradients(parameters):
            try:
                if loss.requires_grad:
                    self._active_call = self._calls
                    loss.backward()
                elif len(logits):
                    raise InputError("backward: the loss does not depend on the logits that placed(batch) returned")
                if any(parameter.grad is not None for parameter in parameters):
                    raise InputError(
                        "backward: the loss depends directly on parameters, and that term would count once for each "
                        "rank: pass it as penalty: placed.backward(loss, penalty=...)"
                    )
                grad = self.placed.empty_rows(outputs)
                grad.zero_() if logits.grad is None else grad.copy_(logits.grad)
                self.placed.backward(outputs, grad)
                if penalty is not None:
                    self._active_call = PENALTY
                    penalty.backward()
            finally:
                self._active_call = 0
        self._accumulating = not updates

    def _check_active(self, call: int, _: Tensor) -> None:
        """Raise InputError if a backward pass reaches logits from which no gradient continues to the parameters."""
        if self._active_call == PENALTY:
            raise InputError("backward: the penalty depends on the logits: put that term into the loss")
        if not self._active_call:
            raise InputError(
                "a backward pass from the logits of placed(batch) ends there, and gives the parameters no gradient: "
                "call placed.backward(loss) instead of loss.backward()"
            )
        if call != self._active_call:
            raise InputError(
                "backward: the loss depends on the logits of an earlier batch: call placed.backward for each batch; "
                "gradients add up until optimizer.zero_grad()"
            )

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits [n, C] of `vertices`, computed with all neighbours and without dropout."""
        return self.placed.forward(self.placed.evaluation(0)).detach()

    def evaluate(self) -> dict[str, float | None]:
        """Return the scores over the vertices of all ranks by name, such as val_accuracy; see `--metrics`."""
        step = self.placed.evaluation(0)
        counts = self.task.counts(self.placed.forward(step), step)
        return self.task.scores(self.group.all_gather_object(counts))

    def gather(self, rows: Tensor) -> Tensor | None:
        """Return the rows [N, ...] of all ranks, ordered by original vertex id, on rank 0; None on other ranks.

        Args:
            rows: Rows of `vertices`, [n, ...].
        """
        whole = rows.new_zeros(self.graph.num_vertices, *rows.shape[1:])
        whole[self.vertices.to(rows.device)] = rows
        whole = self.group.all_reduce(whole, tag="gather")
        return None if self.rank else whole

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state_dict; on rank 0, with the embedding rows of all ranks, for `load_state_dict`."""
        state: dict[str, Tensor] = self.model.state_dict()
        rows = {name: gather_rows(state[name], self.placed.embedded, self.group) for name in embeddings(self.model)}
        return state | rows

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state_dict with all embedding rows, as rank 0's `state_dict` returns it. Every rank must pass it."""
        rows = {name: state[name][self.placed.embedded.to(state[name].device)] for name in embeddings(self.model)}
        self.model.load_state_dict(state | rows)

    def __enter__(self) -> PlacedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()


@listing(PlaceArguments)
def place(graph: Graph | str | Path, model: nn.Module | str = "gcn", **options: Unpack[PlaceArguments]) -> PlacedModel:
    """Place a model and a graph on the ranks under a strategy, for a training loop that the user writes.

    In a script under torchrun, join the ranks that torchrun started; they begin with the weights of rank 0. Otherwise
    there is one rank. See PlacedModel for an example.

    Args:
        graph: A Graph, or a name or path that `weft.load` accepts.
        model: gcn, sage, gin, gat, gatv2, rgcn, lightgcn, or a module, as in `weft.train`.
        **options: Fields of weft.Config that say what is computed and where: strategy, partition, device_memory,
            batch_size, metrics, seed, ...

    Raises:
        InputError: An argument is wrong, or is an option that the loop decides.
    """
    functions, named_options = extract_functions(options)
    config, graph_object, module = parse_call(graph, model, named_options, "weft.place")
    for name in config.non_defaults():
        if name in LOOP_FIELDS:
            raise InputError(f"{name} has no effect in weft.place, because your own loop decides it: leave it out")
    if functions.callbacks or functions.loss or functions.optimizer or functions.scheduler:
        raise InputError(
            "weft.place uses no loss, optimizer, scheduler or callbacks, because your own loop calls them: leave them "
            "out"
        )
    if config.task != "node":
        raise InputError(f"task {config.task}: weft.place supports only the node task: use weft.train")
    if config.workers > 1 and not under_torchrun():
        raise InputError(f"workers={config.workers}: start the script with torchrun --nproc-per-node {config.workers}")
    config = on_present_ranks(config)
    refuse_foreign_flags(config)
    # A loop may use any row, so no row is left out that the loss of a labelled vertex does not need.
    config = replace(config, disable=f"{config.disable},reach")
    launcher = launcher_for(config)
    work = launcher.load(lambda: prepared_workload(config, graph_object, module))
    check(config, work, functions, launched=False, own_model=bool(custom_class(config, module)))
    with closing_on_error(launcher.connect()) as group:
        check_consistent(group, "weft.place", vars(config), work)
        plan, choices = plan_with_kernels(config, work, group)
        use_kernels_of_rank_zero(choices, group)
        return PlacedModel(config, plan.place(group, seed=config.seed), group, functions)
