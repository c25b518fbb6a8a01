"""The part of Optuna that examples/optuna_search.py uses, for tests without the package."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class TrialPruned(Exception):
    """Raised by an objective whose trial is pruned."""


class Trial:
    """Trial that is pruned if it falls behind the median of the former trials at the same step."""

    def __init__(self, study: Study) -> None:
        self.study, self.params = study, dict[str, Any]()
        self.values: list[float] = []

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        assert log
        self.params[name] = math.exp(self.study.random.uniform(math.log(low), math.log(high)))
        return float(self.params[name])

    def suggest_int(self, name: str, low: int, high: int, *, log: bool) -> int:
        self.params[name] = round(self.suggest_float(name, low, high, log=log))
        return int(self.params[name])

    def report(self, value: float, step: int) -> None:
        assert step == len(self.values)
        self.values.append(value)

    def should_prune(self) -> bool:
        step = len(self.values) - 1
        others = [max(trial.values[: step + 1]) for trial in self.study.finished]
        return len(others) >= self.study.first and max(self.values) < statistics.median(others)


class Study:
    """Study that maximizes."""

    def __init__(self, first: int) -> None:
        self.first, self.random = first, random.Random(0)
        self.finished: list[Trial] = []
        self.pruned: list[Trial] = []
        self.best_value, self.best_params = -math.inf, dict[str, Any]()

    def optimize(self, objective: Callable[[Trial], float], *, n_trials: int) -> None:
        for _ in range(n_trials):
            trial = Trial(self)
            try:
                value = objective(trial)
            except TrialPruned:
                self.pruned.append(trial)
                continue
            self.finished.append(trial)
            if value > self.best_value:
                self.best_value, self.best_params = value, trial.params


def create_study(*, direction: str, pruner: int) -> Study:
    assert direction == "maximize"
    return Study(pruner)


pruners = SimpleNamespace(MedianPruner=lambda n_startup_trials: n_startup_trials)
