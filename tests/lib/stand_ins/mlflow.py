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
    kinds = set(map(type, values.values()))
    assert kinds == {float}
    assert step == len(history)
    history.append(values)


def end_run() -> None:
    calls.append("end")
