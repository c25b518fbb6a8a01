"""Training loop.

The loop uses the steps of a strategy and the loss and scores of a task. It does not depend on how the strategy stores
rows.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from torch import Tensor

from weft.config.config import Config
from weft.data import data_digests
from weft.data.io.graph_parts import float_blocks
from weft.nn import embeddings
from weft.runtime.memory.limit import peak_memory_bytes
from weft.runtime.processes.stop_request import StopRequest
from weft.strategies import Placed, Step
from weft.training.artifacts import checkpoint, embedding_shards
from weft.training.artifacts.checkpoint import Checkpoint, Progress
from weft.training.artifacts.run_writer import RunWriter
from weft.training.cuda_graph import make_pass
from weft.training.custom_functions import NO_FUNCTIONS, Callback, OwnFunctions
from weft.training.optimizer import (
    added_to_gradients,
    advance,
    clip,
    load_updates,
    make_optimizer,
    make_scheduler,
    optimizer_tensors,
    plain_state,
)
from weft.training.tasks.metrics import NodeTask, Task
from weft.training.tasks.scores import make_metrics
from weft.training.tasks.task import validation_score
from weft.utils.errors import InputError

Report = dict[str, Any]
"""Report of one rank after an epoch: loss, counts of the evaluation, phases, peak memory, and a stop signal."""
PHASES = ("setup", "train", "eval", "record")
"""Phases of an epoch whose seconds and bytes are recorded separately."""


class Trainer:
    """Trains a model under a strategy.

    Every rank runs this loop. All ranks gather the same reports after each epoch, so they make the same decisions: when
    to stop, to save, or to change the learning rate.

    Args:
        config: The run's configuration.
        strategy: The model and graph, placed on this rank by a strategy.
        task: Computes loss, gradient and scores from the model's output rows.
        functions: User-defined optimizer, scheduler and metrics.
    """

    def __init__(self, config: Config, strategy: Placed, task: Task, functions: OwnFunctions = NO_FUNCTIONS) -> None:
        self.config, self.strategy, self.task = config, strategy, task
        self.model, self.group, self.meter = strategy.model, strategy.group, strategy.group.meter
        self.parameters, self.sharded_parameters = list(self.model.parameters()), set(embeddings(self.model).values())
        self.optimizer = make_optimizer(config, self.parameters, functions)
        metrics = make_metrics(config, strategy.graph.labels(config.task), functions)
        lower_is_better = metrics[0].lower_is_better
        self.scheduler = make_scheduler(config, self.optimizer, functions, lower_is_better=lower_is_better)
        self.progress = Progress(lower_is_better=lower_is_better)
        self.train_pass = make_pass(strategy, task, functions, timeline=config.timeline)
        self.validation = validation_score(strategy.graph, config)
        self.best = checkpoint.model_tensors(self.model)
        self._timeline_until = 0

    def restore(self, progress: Progress, tensors: dict[str, Tensor], updates: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint, bit for bit if strategy and number of ranks are the same.

        Args:
            progress: Epoch and best scores of the checkpoint.
            tensors: Tensors of model, best weights and optimizer, with all rows of embeddings.
            updates: State of optimizer and scheduler that is not in tensors, as `plain_state` returns it.

        Raises:
            InputError: The checkpoint belongs to another optimizer or scheduler; see also `check_checkpoint`.
        """
        tensors = embedding_shards.place(tensors, self.strategy, self.optimizer)
        self.progress = progress
        self.best = checkpoint.tensors_under("best.", tensors)
        self.model.load_state_dict(checkpoint.tensors_under("model.", tensors))
        load_updates(self.optimizer, self.scheduler, checkpoint.tensors_under("optimizer.", tensors), updates)

    @cached_property
    def data(self) -> dict[str, str]:
        """Digests of the graph's arrays. Only rank 0 computes them, for files; other ranks get {}."""
        return {} if self.group.rank else data_digests(self.strategy.graph)

    def checkpoint(self) -> Checkpoint:
        """Return the state of the run between two epochs.

        All ranks must call it. Only the checkpoint of rank 0 contains all rows of embeddings.
        """
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        tensors |= {f"optimizer.{name}": value for name, value in optimizer_tensors(self.optimizer).items()}
        return Checkpoint(
            config=self.config,
            fingerprint=self.strategy.graph.fingerprint,
            data=self.data,
            progress=self.progress,
            tensors=embedding_shards.gather(tensors, self.strategy, self.optimizer),
            updates=plain_state(self.optimizer, self.scheduler),
        )

    def run(
        self, stop: StopRequest, writer: RunWriter | None, call: Callback | None = None, *, may_end: bool = False
    ) -> int:
        """Train until the last epoch, the end of patience, a callback that returns True, or a signal to any rank.

        Args:
            stop: The stop request of this rank.
            writer: On rank 0, writes records and checkpoints and shows progress.
            call: On rank 0, a function that is called with each epoch's record, and returns True to end the run.
            may_end: True on all ranks if rank 0 has such a function that may return True.

        Returns:
            The number of the signal that stopped the run, or 0.

        Raises:
            InputError: The loss is infinite or NaN.
        """
        if self.config.timeline:
            self._timeline_until = self.progress.epoch + self.config.timeline
            self.meter.begin_timeline()
        counts: list[Any] = [None]
        is_over = self.progress.is_over(self.config)
        while not is_over:
            epoch = self.progress.epoch
            reports = self._epoch(epoch, stop)
            loss = sum(report["loss"] for report in reports)
            if not math.isfinite(loss):
                raise InputError(self._explain_loss(loss, epoch))
            counts = [report["counts"] for report in reports]
            scores, lr = self._scores(counts), self.optimizer.param_groups[0]["lr"]
            due = self._is_due(epoch)
            if due:
                self._keep_best(epoch, scores, counts)
            score = scores[self.validation] if due and self.validation else None
            advance(self.scheduler, loss, score, lower_is_better=self.progress.lower_is_better)
            self.progress.epoch += 1
            is_over = self.progress.is_over(self.config)
            record = writer.epoch(epoch, loss, lr, scores, reports) if writer else {}
            if call or may_end:
                with self.meter.during("record", f"epoch {epoch + 1}, callbacks"):
                    ends = call(record) if call else False
                    if may_end:
                        is_over |= self.group.all_gather_object({"ends": ends})[0]["ends"]
            signal = 0 if is_over else max(report["stop"] for report in reports)
            interval = self.config.checkpoint_every
            if signal or is_over or (interval and (epoch + 1) % interval == 0):
                self._checkpoint(writer)
            if signal:
                return int(signal)
        if (last := self.progress.epoch - 1) >= 0 and not self._is_due(last):
            # --eval-every asks for no evaluation after this epoch, so a longer run has none: it counts for the result,
            # but is in no checkpoint, so that a resumed run equals an uninterrupted one.
            if counts[0] is None:
                counts = self.group.all_gather_object(self._evaluate(last))
            self._keep_best(last, self._scores(counts), counts)
        return 0

    def _is_due(self, epoch: int) -> bool:
        """Return True if --eval-every asks for an evaluation after an epoch."""
        return (epoch + 1) % self.config.eval_every == 0

    def _explain_loss(self, loss: float, epoch: int) -> str:
        """Return an error message with the likely reason for an infinite or NaN loss."""
        if epoch:
            return f"--lr {self.config.lr}: the loss became {loss} in epoch {epoch + 1}; use a lower learning rate"
        x = self.strategy.graph.x
        peaks = [] if x is None or 0 in x.shape else [float(block.abs().max()) for block in float_blocks([x])]
        largest = f" (the largest feature is {max(peaks):.3g})" if peaks else ""
        return (
            f"the loss is {loss} before the first step: features{largest} or edge weights are out of range in "
            f"{self.config.dtype}; scale them, for example with --normalize-features"
        )

    def whole_best(self) -> dict[str, Tensor]:
        """Return the weights of the epoch with the best validation score.

        All ranks must call it. On rank 0, embeddings have all rows; on other ranks, none.
        """
        best = {f"best.{name}": value for name, value in self.best.items()}
        tensors = embedding_shards.gather(best, self.strategy, self.optimizer)
        return checkpoint.tensors_under("best.", tensors)

    def _checkpoint(self, writer: RunWriter | None) -> None:
        """Write a checkpoint on rank 0. The other ranks take part only to send their rows of embeddings."""
        if not embeddings(self.model) and not writer:
            return
        with self.meter.during("record", "a checkpoint"):
            state = self.checkpoint()
        if writer:
            writer.checkpoint(state)

    def _epoch(self, epoch: int, stop: StopRequest) -> list[Report]:
        """Train one epoch, evaluate if it is due, and return the reports of all ranks."""
        counts = None
        with self.meter.during("train", f"epoch {epoch + 1}, training"):
            losses = [(self._train(step), step.updates) for step in self.strategy.steps(epoch)]
        if self._is_due(epoch) or epoch + 1 == self.config.epochs:
            counts = self._evaluate(epoch)
        report = {
            "loss": sum(loss for loss, _ in losses) / sum(updates for _, updates in losses),
            "counts": counts,
            "stop": stop.signal,
            "phases": {phase: self.meter.take(phase).plain() for phase in PHASES},
            "peak_memory_bytes": peak_memory_bytes(),
            "timeline": self.meter.take_timeline(last=epoch + 1 == self._timeline_until),
        }
        with self.meter.during("record", f"epoch {epoch + 1}, report"):
            return self.group.all_gather_object(report)

    def _evaluate(self, epoch: int) -> dict[str, Any]:
        """Return this rank's results of an evaluation after an epoch, as JSON values."""
        with self.meter.during("eval", f"epoch {epoch + 1}, evaluation"):
            step = self.strategy.evaluation(epoch)
            if isinstance(self.task, NodeTask):
                with self.meter.timer("score"):
                    return self.task.counts_of(self.strategy.logit_ranges(step), step)
            with self.meter.timer("encode"):
                rows = self.strategy.forward(step)
            with self.meter.timer("score"):
                return self.task.counts(rows, step)

    def _train(self, step: Step) -> float:
        """Do one training step, with the optimizer's if it updates, and return this rank's part of the loss."""
        with added_to_gradients(self.parameters):
            loss = self.train_pass(step)
        if step.updates:
            with self.meter.timer("update"):
                if self.config.clip_norm:
                    clip(self.parameters, self.sharded_parameters, self.group, self.config.clip_norm)
                self.optimizer.step()
                self.model.zero_grad()
        return loss.item()

    def _scores(self, counts: list[Any]) -> dict[str, float | None]:
        """Return the scores of an evaluation from the results of all ranks; {} if these are None."""
        return {} if counts[0] is None else self.task.scores(counts)

    def _keep_best(self, epoch: int, scores: dict[str, float | None], counts: list[Any]) -> None:
        """Keep scores, counts for the report, and weights if the validation score is the best so far.

        Without a validation score, the last evaluated epoch counts as the best.

        Args:
            epoch: The epoch before the evaluation.
            scores: Scores of the evaluation by name.
            counts: Results of the evaluation of all ranks.
        """
        val = scores[self.validation] if self.validation else None
        if not self.validation or self.progress.improves(val):
            self.progress.best_score, self.progress.best_epoch = val, epoch
            self.progress.best_scores, self.progress.best_details = scores, self.task.details(counts)
            self.best = checkpoint.model_tensors(self.model)
        self.progress.waited = epoch - self.progress.best_epoch
