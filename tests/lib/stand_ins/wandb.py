"""The part of Weights & Biases that examples/experiment_trackers.py uses, for tests without the package."""

from __future__ import annotations

from typing import Any


class TrackedRun:
    """Run whose history is in memory."""

    def __init__(self, **options: Any) -> None:
        self.options, self.is_finished = options, False
        self.history: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any], *, step: int) -> None:
        assert step == len(self.history)
        self.history.append(values)

    def finish(self) -> None:
        self.is_finished = True


runs: list[TrackedRun] = []


def init(**options: Any) -> TrackedRun:
    runs.append(TrackedRun(**options))
    return runs[-1]
