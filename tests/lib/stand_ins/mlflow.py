"""The part of MLflow that examples/experiment_trackers.py uses, for tests without the package."""

from __future__ import annotations

calls: list[str] = []
history: list[dict[str, float]] = []


def set_experiment(name: str) -> None:
    calls.append(f"experiment {name}")


def start_run() -> object:
    calls.append("start")
    return object()


def log_metrics(values: dict[str, float], *, step: int) -> None:
    assert step == len(history)
    assert all(isinstance(value, float) for value in values.values())
    history.append(values)


def end_run() -> None:
    calls.append("end")
