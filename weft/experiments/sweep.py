"""A configuration with several values of some options: a run for each combination, one after the other."""

from __future__ import annotations

import itertools
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.config import Config
from weft.training.artifacts.run_folder import RunFolder
from weft.training.flag_checks import refuse_foreign_flags
from weft.training.launch.torchrun import under_torchrun
from weft.training.run import run
from weft.utils.errors import InputError, RunError, Stopped
from weft.utils.jsonl import Recorder


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One of a sweep's runs."""

    varied: dict[str, Any]
    """The options that have several values in the sweep, with those of this run."""
    folder: Path
    summary: dict[str, Any]
    """Empty of a run that failed."""
    error: str = ""
    """Why it failed."""


def sweep(values: Mapping[str, Any], out: Path, *, quiet: bool = False) -> list[SweepRun]:
    """Trains once for each combination of values into a folder of its own in `out`, and records all in sweep.jsonl.

    values: of Config's fields, several in a list. A run that has ended is not run again, and one that was stopped goes
    on, so the same call goes on with a sweep. Each runs in processes of its own. One that fails does not stop the
    others. InputError for a mistake of the caller, before the first run.
    """
    if under_torchrun():
        raise InputError("a sweep starts its ranks by itself: give --workers, or start weft train --config by torchrun")
    configs = combinations(values)
    for one, _ in configs.values():
        refuse_foreign_flags(one)
    finished = {name: RunFolder(out / name).is_finished(one) for name, (one, _) in configs.items()}
    runs = []
    for number, (name, (one, varied)) in enumerate(configs.items(), start=1):
        folder = RunFolder(out / name)
        try:
            if not finished[name]:
                shown = f"{number}/{len(configs)} {name}"
                resume = folder.config.exists()
                run(one, None, None, out=folder.path, resume=resume, quiet=quiet, name=shown, in_subprocess=True)
            runs.append(SweepRun(varied=varied, folder=folder.path, summary=folder.summary()))
        except (InputError, RunError) as error:
            print(f"weft: {name}: {error}", file=sys.stderr, flush=True)
            runs.append(SweepRun(varied=varied, folder=folder.path, summary={}, error=str(error)))
        except Stopped as stop:
            raise Stopped(f"stopped in run {number} of {len(configs)}; the same command goes on", stop.signal) from None
    out.mkdir(parents=True, exist_ok=True)
    record = out / "sweep.jsonl"
    record.unlink(missing_ok=True)
    recorder = Recorder(record)
    for done in runs:
        recorder.write("run", options=done.varied, folder=str(done.folder), summary=done.summary, error=done.error)
    recorder.close()
    return runs


def combinations(values: Mapping[str, Any]) -> dict[str, tuple[Config, dict[str, Any]]]:
    """The configurations of a sweep by the names of their folders, each with the options that vary.

    InputError for one that cannot be, and where two would have one folder.
    """
    several = {name: value for name, value in values.items() if isinstance(value, list)}
    found: dict[str, tuple[Config, dict[str, Any]]] = {}
    for chosen in itertools.product(*several.values()):
        varied = dict(zip(several, chosen, strict=True))
        said = ",".join(f"{name}={value}" for name, value in varied.items()) or "run"
        name = re.sub(r"[^\w.,=+-]", "-", said)
        if name in found:
            raise InputError(f"two runs would have the folder {name}: give values that differ in letters or digits")
        found[name] = Config(**{**values, **varied}), varied
    return found


def over_seeds(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """Runs that differ in their seed alone, together: their options, and the means and spreads of what they reached.

    A spread is the standard deviation of a sample; None of one run.
    """
    groups: dict[str, list[SweepRun]] = {}
    for one in runs:
        options = {name: value for name, value in one.varied.items() if name != "seed"}
        groups.setdefault(str(options), []).append(one)
    return [_together(group) for group in groups.values()]


def _together(group: Sequence[SweepRun]) -> dict[str, Any]:
    ended = [one.summary for one in group if one.summary]
    numbers: dict[str, Any] = {}
    for name in ended[0] if ended else ():
        values = [one[name] for one in ended if isinstance(one.get(name), int | float)]
        if len(values) == len(ended):
            spread = statistics.stdev(values) if len(values) > 1 else None
            numbers[name] = {"mean": statistics.fmean(values), "std": spread}
    return {
        "options": {name: value for name, value in group[0].varied.items() if name != "seed"},
        "numbers": numbers,
        "ended": len(ended),
        "runs": [
            {"options": one.varied, "folder": str(one.folder), "summary": one.summary, "error": one.error}
            for one in group
        ],
    }
