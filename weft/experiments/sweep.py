"""Hyperparameter sweeps: one run for each combination of values, or for combinations drawn at random."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.config import OPTIONS, Config
from weft.config.option import unknown_option
from weft.config.value_range import ValueRange, as_range
from weft.experiments.runs import Runs
from weft.training.artifacts.run_folder import RunFolder
from weft.training.flag_checks import refuse_foreign_flags
from weft.training.launch.processes import require_guard
from weft.training.launch.torchrun import under_torchrun
from weft.training.run import Run, run
from weft.utils.errors import InputError, RunError, Stopped
from weft.utils.files.jsonl import Recorder
from weft.utils.log import LOGGER
from weft.utils.random import key


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """Run of a sweep."""

    varied: dict[str, Any]
    """Values that this run has of the options that vary in the sweep."""
    folder: Path
    """Folder of the run."""
    summary: dict[str, Any]
    """Summary of the run. Empty: it failed."""
    error: str = ""
    """Reason why the run failed. Empty: it did not."""


def sweep(
    graph: str | Path,
    model: str | Sequence[str] = "gcn",
    *,
    out: str | Path = "runs/sweep",
    random: int | None = None,
    quiet: bool = False,
    **options: Any,
) -> Runs:
    """Train once for each combination of options, or for some drawn at random, each in its own folder and processes.

    A finished run is not repeated and a stopped one is resumed, so the same call continues a sweep. A run that fails
    prints a line and does not stop the others.

    Args:
        graph: Name or path of the graph.
        model: Name of a model, or a list of names.
        out: Folder of the runs and sweep.jsonl.
        random: Number of combinations to draw at random. None: train with all of them.
        quiet: Print no progress.
        **options: Fields of `weft.Config`, of which each may be a list of values: hidden=[16, 64], seed=[0, 1, 2], ...
            With `random`, numbers may be ranges: lr="1e-4..1e-1".

    Returns:
        The runs by the names of their folders, also failed ones that have begun.

    Raises:
        InputError: An argument is wrong.
        Stopped: SIGTERM or Ctrl-C ended a run.
    """
    require_guard()
    for name in options:
        if name not in OPTIONS:
            raise InputError(f"weft.sweep: {unknown_option(name, OPTIONS)}")
    values = {name: as_range(OPTIONS[name], value) for name, value in options.items()}
    models = model if isinstance(model, str) else list(model)
    entries = sweep_as({**values, "graph": str(graph), "model": models}, Path(out), random=random, quiet=quiet)
    return Runs({run.folder.name: Run.open(run.folder) for run in entries if RunFolder(run.folder).config.exists()})


def sweep_as(values: Mapping[str, Any], out: Path, *, random: int | None = None, quiet: bool = False) -> list[SweepRun]:
    """Train once for each combination of values, each in its own folder and processes, and write sweep.jsonl.

    A finished run is not repeated and a stopped one is resumed, so the same call continues a sweep. A run that fails
    does not stop the others.

    Args:
        values: Fields of `Config`. A list has several values of a field, as has a range.
        out: Folder of the runs.
        random: Number of combinations to draw at random. None: train with all of them.
        quiet: Print no progress.

    Returns:
        The runs, in the order of the combinations.

    Raises:
        InputError: A value is wrong, or the folder contains runs of another sweep. Raised before the first run.
        Stopped: SIGTERM or Ctrl-C ended a run.
    """
    if under_torchrun():
        raise InputError(
            "weft sweep starts its own ranks: use --workers instead of torchrun, or torchrun with weft train --config"
        )
    configs = combinations(values, random)
    for config, _ in configs.values():
        refuse_foreign_flags(config)
    for path in sorted(out.glob("*/config.toml")):
        if path.parent.name not in configs:
            raise InputError(
                f"--out {out} contains the run {path.parent.name}, which is not part of this sweep: choose another "
                "folder, or remove that run"
            )
    finished = {name: RunFolder(out / name).is_finished(config) for name, (config, _) in configs.items()}
    runs = []
    for number, (name, (config, varied)) in enumerate(configs.items(), start=1):
        folder = RunFolder(out / name)
        try:
            if not finished[name]:
                shown = f"{number}/{len(configs)} {name}"
                resume = folder.config.exists()
                run(config, None, None, out=folder.path, resume=resume, quiet=quiet, name=shown, in_subprocess=True)
            runs.append(SweepRun(varied=varied, folder=folder.path, summary=folder.summary()))
        except (InputError, RunError) as error:
            LOGGER.info(f"{name}: {error}")
            runs.append(SweepRun(varied=varied, folder=folder.path, summary={}, error=str(error)))
        except Stopped as stop:
            raise Stopped(
                f"stopped in run {number} of {len(configs)}; the same command continues the sweep", stop.signal
            ) from None
    out.mkdir(parents=True, exist_ok=True)
    record = out / "sweep.jsonl"
    record.unlink(missing_ok=True)
    recorder = Recorder(record)
    for entry in runs:
        recorder.write("run", options=entry.varied, folder=str(entry.folder), summary=entry.summary, error=entry.error)
    recorder.close()
    return runs


def combinations(values: Mapping[str, Any], random: int | None = None) -> dict[str, tuple[Config, dict[str, Any]]]:
    """Return the configurations of a sweep by the names of their folders, each with the values that vary.

    Args:
        values: Fields of `Config`. A list has several values of a field, as has a range.
        random: Number of combinations to draw; those that are drawn twice count once. None: all combinations.

    Raises:
        InputError: A configuration is invalid, or two runs would have the same folder.
    """
    configs: dict[str, tuple[Config, dict[str, Any]]] = {}
    for varied in _all_points(values) if random is None else _random_points(values, random):
        text = ",".join(f"{name}={value}" for name, value in varied.items()) or "run"
        name = re.sub(r"[^\w.,=+-]", "-", text)
        if name in configs and not (random and configs[name][1] == varied):
            raise InputError(f"two runs would have the folder {name}: use values that differ in letters or digits")
        configs[name] = Config(**{**values, **varied}), varied
    return configs


def _all_points(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the values that vary, by name.

    Raises:
        InputError: A value is a range.
    """
    for name, value in values.items():
        if isinstance(value, ValueRange):
            raise InputError(f"--{name.replace('_', '-')} {value}: a range needs --random, the number of runs to draw")
    several = {name: value for name, value in values.items() if isinstance(value, list)}
    for combination in itertools.product(*several.values()):
        yield dict(zip(several, combination, strict=True))


def _random_points(values: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield combinations of the values that vary, drawn at random, by name. Each has all seeds of a list.

    A combination depends on its index and the first seed, so that a larger number adds combinations.

    Args:
        values: Fields of `Config`. A list or a range has several values of a field.
        number: Number of combinations.

    Raises:
        InputError: The number is not positive, or no value varies.
    """
    if number < 1:
        raise InputError(f"--random {number}: give at least 1")
    several = {name: value for name, value in values.items() if isinstance(value, list | ValueRange)}
    seeds = several.pop("seed", None)
    if isinstance(seeds, ValueRange):
        raise InputError(f"--seed {seeds}: give a list of seeds, with each of which every combination is trained")
    if not several:
        raise InputError(f"--random {number} has no effect without a list or a range of values: leave it out")
    first_seed = seeds[0] if seeds else values.get("seed", OPTIONS["seed"].default)
    for index in range(number):
        point = {}
        for name, value in several.items():
            uniform = (key(first_seed, index, *name.encode()) >> 11) / 2**53  # in [0, 1), with all bits of a float
            point[name] = value[int(uniform * len(value))] if isinstance(value, list) else value.draw(uniform)
        yield from [{**point, "seed": seed} for seed in seeds] if seeds else [point]


def over_seeds(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """Group runs that differ only in their seed, and return the options and statistics of each group.

    Statistics are the mean and the sample standard deviation (None for a single run) of each number of the summaries.
    """
    groups: dict[str, list[SweepRun]] = {}
    for entry in runs:
        options = {name: value for name, value in entry.varied.items() if name != "seed"}
        groups.setdefault(str(options), []).append(entry)
    return [_statistics(group) for group in groups.values()]


def _statistics(group: Sequence[SweepRun]) -> dict[str, Any]:
    summaries = [entry.summary for entry in group if entry.summary]
    numbers: dict[str, Any] = {}
    for name in summaries[0] if summaries else ():
        values = [summary[name] for summary in summaries if isinstance(summary.get(name), int | float)]
        if len(values) == len(summaries):
            spread = statistics.stdev(values) if len(values) > 1 else None
            numbers[name] = {"mean": statistics.fmean(values), "std": spread}
    return {
        "options": {name: value for name, value in group[0].varied.items() if name != "seed"},
        "numbers": numbers,
        "ended": len(summaries),
        "runs": [
            {"options": entry.varied, "folder": str(entry.folder), "summary": entry.summary, "error": entry.error}
            for entry in group
        ],
    }
