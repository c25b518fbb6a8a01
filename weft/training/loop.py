"""The training loop. It knows a strategy's steps, a task's loss and scores, and nothing of rows beyond that."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from torch import Tensor

from weft.config.config import Config
from weft.data import data_digests
from weft.nn import embeddings
from weft.runtime.memory import peak_memory_bytes
from weft.runtime.stop_request import StopRequest
from weft.strategies import Placed, Step
from weft.training.artifacts import checkpoint, embedding_shards
from weft.training.artifacts.checkpoint import Checkpoint, Progress
from weft.training.artifacts.run_writer import RunWriter
from weft.training.cuda_graph import make_pass
from weft.training.custom_functions import NO_FUNCTIONS, Callback, OwnFunctions
from weft.training.optimizer import (
    advance,
    clip,
    load_updates,
    make_optimizer,
    make_scheduler,
    optimizer_tensors,
    plain_state,
)
from weft.training.tasks.metrics import Task
from weft.training.tasks.scores import make_metrics
from weft.training.tasks.task import validation_score
from weft.utils.errors import InputError

Report = dict[str, Any]
PHASES = ("setup", "train", "eval", "record")


class Trainer:
    """Trains a model under a strategy. Every rank runs this loop and, from the same reports, decides the same."""

    def __init__(self, config: Config, strategy: Placed, task: Task, own: OwnFunctions = NO_FUNCTIONS) -> None:
        self.config, self.strategy, self.task = config, strategy, task
        self.model, self.group, self.meter = strategy.model, strategy.group, strategy.group.meter
        self.parameters, self.own_rows = list(self.model.parameters()), set(embeddings(self.model).values())
        self.optimizer = make_optimizer(config, self.parameters, own)
        lower = make_metrics(config, strategy.graph, own)[0].lower_is_better
        self.scheduler = make_scheduler(config, self.optimizer, own, lower_is_better=lower)
        self.progress = Progress(lower_is_better=lower)
        self.train_pass = make_pass(config, strategy, task, own)
        self.validation = validation_score(strategy.graph, config)
        self.best = checkpoint.model_tensors(self.model)
        self._timeline_until = 0

    def restore(self, progress: Progress, tensors: dict[str, Tensor], updates: dict[str, Any]) -> None:
        """Goes on from a checkpoint's state, bit for bit where strategy and ranks are the same."""
        tensors = embedding_shards.place(tensors, self.strategy, self.optimizer)
        self.progress = progress
        self.best = checkpoint.tensors_under("best.", tensors)
        try:
            self.model.load_state_dict(checkpoint.tensors_under("model.", tensors))
        except RuntimeError as error:
            raise InputError(
                f"--resume: the checkpoint is of another model ({str(error).splitlines()[-1].strip()})"
            ) from error
        load_updates(self.optimizer, self.scheduler, checkpoint.tensors_under("optimizer.", tensors), updates)

    @cached_property
    def data(self) -> dict[str, str]:
        """Digests of the graph's data, on rank 0, which writes them; {} on the others."""
        return {} if self.group.rank else data_digests(self.strategy.graph)

    def checkpoint(self) -> Checkpoint:
        """The run as it stands between two epochs; all ranks make it, and rank 0's is whole."""
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

    def run(self, stop: StopRequest, writer: RunWriter | None, call: Callback | None = None) -> int:
        """Trains until the last epoch, the end of patience, or until a rank was told to stop: that signal, or 0.

        writer: rank 0's, for records, checkpoints and progress. call: for each epoch's record, on rank 0.
        """
        if self.config.timeline:
            self._timeline_until = self.progress.epoch + self.config.timeline
            self.meter.begin_timeline()
        while not self.progress.is_over(self.config):
            epoch = self.progress.epoch
            reports = self._epoch(epoch, stop)
            loss = sum(report["loss"] for report in reports)
            if not math.isfinite(loss):
                raise InputError(self._blamed(loss, epoch))
            scores, lr = self._scores(epoch, reports), self.optimizer.param_groups[0]["lr"]
            advance(self.scheduler, scores.get(self.validation) if self.validation else None)
            self.progress.epoch += 1
            signal = 0 if self.progress.is_over(self.config) else max(report["stop"] for report in reports)
            if writer:
                line = writer.epoch(epoch, loss, lr, scores, reports)
                if call:
                    with self.meter.during("record", f"epoch {epoch}, callbacks"):
                        call(line)
            every = self.config.checkpoint_every
            if signal or self.progress.is_over(self.config) or (every and (epoch + 1) % every == 0):
                self._checkpoint(writer)
            if signal:
                return int(signal)
        return 0

    def _blamed(self, loss: float, epoch: int) -> str:
        """What makes a loss infinite or no number."""
        if epoch:
            return f"--lr {self.config.lr}: the loss became {loss} in epoch {epoch}; give a lower one"
        x = self.strategy.graph.x
        largest = "" if x is None or not x.numel() else f" (the largest feature is {x.abs().max():.3g})"
        return (
            f"the loss is {loss} before the first step: features{largest} or edge weights are not for this model in "
            f"{self.config.dtype}; scale them, for example by --normalize-features"
        )

    def whole_best(self) -> dict[str, Tensor]:
        """The weights of the best validation score; all ranks call it, and rank 0 gets them whole."""
        best = {f"best.{name}": value for name, value in self.best.items()}
        named = embedding_shards.gather(best, self.strategy, self.optimizer)
        return checkpoint.tensors_under("best.", named)

    def _checkpoint(self, writer: RunWriter | None) -> None:
        """Rank 0 writes; the others are needed only where each has rows of its own."""
        if not embeddings(self.model) and not writer:
            return
        with self.meter.during("record", "a checkpoint"):
            state = self.checkpoint()
        if writer:
            writer.checkpoint(state)

    def _epoch(self, epoch: int, stop: StopRequest) -> list[Report]:
        """Trains one epoch and evaluates where it is time to; every rank's report of it."""
        counts = None
        with self.meter.during("train", f"epoch {epoch}, training"):
            losses = [self._train(step) for step in self.strategy.steps(epoch)]
        if (epoch + 1) % self.config.eval_every == 0 or epoch + 1 == self.config.epochs:
            with self.meter.during("eval", f"epoch {epoch}, evaluation"):
                step = self.strategy.evaluation(epoch)
                with self.meter.timer("encode"):
                    rows = self.strategy.forward(step)
                with self.meter.timer("score"):
                    counts = self.task.counts(rows, step)
        report = {
            "loss": sum(losses) / len(losses),
            "counts": counts,
            "stop": stop.signal,
            "phases": {phase: self.meter.take(phase).plain() for phase in PHASES},
            "peak_memory_bytes": peak_memory_bytes(),
            "timeline": self.meter.take_timeline(last=epoch + 1 == self._timeline_until),
        }
        with self.meter.during("record", f"epoch {epoch}, report"):
            return self.group.all_gather_object(report)

    def _train(self, step: Step) -> float:
        self.optimizer.zero_grad()
        loss = self.train_pass(step)
        with self.meter.timer("update"):
            if self.config.clip_norm:
                clip(self.parameters, self.own_rows, self.group, self.config.clip_norm)
            self.optimizer.step()
        return loss.item()

    def _scores(self, epoch: int, reports: list[Report]) -> dict[str, float | None]:
        """The scores of an evaluated epoch ({} of another), keeping weights and scores where validation is best.

        Where nothing validates, the last epoch is the best.
        """
        counts = [report["counts"] for report in reports]
        if counts[0] is None:
            return {}
        scores, validation = self.task.scores(counts), self.validation
        val = scores[validation] if validation else None
        if not validation or self.progress.improves(val):
            self.progress.best_score, self.progress.best_epoch = val, epoch
            self.progress.best_scores = scores
            self.best = checkpoint.model_tensors(self.model)
        self.progress.waited = epoch - self.progress.best_epoch
        return scores
