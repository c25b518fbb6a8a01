"""Versions of the files that weft writes and reads back, and the names and layouts of former versions.

Each function takes what a file holds and returns it in today's form. Readers know that form alone, and check whether
it is whole. A file without a version is of version 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from weft.utils.errors import InputError

VERSIONS = {
    "options": 2,  # config.toml, and any file for --config or of a sweep; 2: no optimisation "intra", no option "probe"
    "choices": 1,  # choices.json
    "record": 1,  # each line of metrics.jsonl
    "checkpoint": 2,  # state.json of a checkpoint; 2: digests of the graph's data
    "model": 1,  # metadata of model.safetensors
    "timeline": 1,  # timeline.json
    "profile": 1,  # machine.json of weft probe
    "plan": 1,  # what weft plan --json prints
    "graph": 2,  # manifest.json of a graph store; 2: names of vertices
    "book": 1,  # metadata of a partition book
}
"""The newest version of each format, which is the version that is written.

Whoever changes a format gives it the next number, and its function below what turns the version before into it.
"""
FORMER_OPTIONS = {"without": "disable", "bins": "chunks", "metric": "metrics", "probe": "machine"}
"""Today's names of options by their former names."""
FORMER_OPTIMISATIONS = {"intra": "prefetch"}
"""Today's names of optimisations, which are values of `disable`, by their former names."""
FORMER_CHOICES = {
    "origin": "default",
    "kinds": {
        "map": {"floors": [[1], [0, 1 << 18], [0], [0]], "names": ["torch", "onednn"]},
        "map_weights": {"floors": [[1, 2], [0, 1 << 22], [0, 16], [0, 16]], "names": ["mkl"] * 15 + ["onednn"]},
        "sum": {"floors": [[0]], "names": ["triton"]},
    },
}
"""Implementations of kernels in runs and profiles that do not name any; they stay when the default changes."""


class NewerFile(InputError):
    """A file that this program is too old to read. In contrast to a damaged file, nothing may replace it."""


def versioned(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file: the version of its format, and some values."""
    return {"version": VERSIONS[kind], **values}


def options(tables: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the tables of a file of options by today's names of options, without the version."""
    version = _version("options", tables, path)
    tables = {name: value for name, value in tables.items() if name != "version"}
    if version > 1:
        return tables
    names = FORMER_OPTIONS if version == 0 else {"probe": "machine"}
    return {
        name: _renamed(value, names, f"{path}: [{name}]") if isinstance(value, dict) else value
        for name, value in _renamed(tables, names, f"{path}:").items()
    }


def config(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the configuration that a file of a run holds by today's names of options."""
    return _renamed(values, FORMER_OPTIONS, f"{path}:")


def _renamed(values: Mapping[str, Any], names: Mapping[str, str], place: str) -> dict[str, Any]:
    """Return options by today's names, given by former names, and optimisations in `disable` by today's names.

    The former option `probe` could also name a run's probe.json, which nothing reads today: it is left out.

    Raises:
        InputError: an option is given by both of its names; the message begins with `place`.
    """
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        today = names.get(name, name)
        if name == "probe" and not _is_profile(value):
            if value:
                _print_once(f"the former option probe is ignored: {value} is no profile, see --machine")
            continue
        if today in renamed:
            raise InputError(f"{place} {today} is given twice: leave one out")
        renamed[today] = _optimisations(value) if today == "disable" else value
    return renamed


def _is_profile(path: Any) -> bool:
    """Return whether a path is that of a file which holds a profile of weft probe."""
    try:
        return "prices" in json.loads(Path(path).read_text())
    except (OSError, TypeError, ValueError, RecursionError):
        return False


@cache  # a file may be read several times
def _print_once(text: str) -> None:
    """Print a line to standard error, of torchrun's ranks on rank 0 alone, unless this process has printed it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"weft: {text}", file=sys.stderr, flush=True)


def _optimisations(value: Any) -> Any:
    """Return a value of `disable`, or a sweep's list of values, by today's names of optimisations."""
    if isinstance(value, list):
        return [_optimisations(one) for one in value]
    if not isinstance(value, str):
        return value
    return ",".join(dict.fromkeys(FORMER_OPTIMISATIONS.get(name, name) for name in value.split(",")))


def choices(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a choices.json."""
    _version("choices", values, path)
    return values


def record(line: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a line of a record; lines of ranks may lack counts that were added later under the same version."""
    _version("record", line, path)
    return _with(line, sampled={}, stages={}, working_bytes=0) if line["kind"] == "rank" else line


def checkpoint(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint's state; while Adam was the only optimiser, it kept nothing of it but tensors."""
    version = _version("checkpoint", state, path)
    if version < 1:
        state = _with(state, updates={"groups": [], "values": {}})
    state = state | {"config": config(state["config"], path)}
    return state if version > 1 else _with(state, data={})


def model(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the description of the model in a model.safetensors. InputError as of `described`."""
    _version("model", values, path)
    return described(values, path.parent)


def described(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return how a run's model is made. InputError for a run that does not say it, as runs once did not."""
    if "shape" not in values:
        raise InputError(
            f"{folder} does not say how its model is made, as runs of an earlier weft: train again, or go on for an "
            "epoch with --resume"
        )
    shape = _with(values["shape"], relations=[], featured_types=[])
    return values | {"shape": shape, "config": config(values["config"], folder)}


def timeline(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a timeline.json."""
    _version("timeline", values, path)
    return values


def profile(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a machine's profile."""
    version = _version("profile", values, path)
    return values if version else _with(values, choices=FORMER_CHOICES, learned=[])


def plan(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file of plans."""
    _version("plan", values, path)
    return values


def graph(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the manifest of a graph store; version 1 lacks names of vertices, which are optional in version 2."""
    _version("graph", manifest, path)
    return manifest


def book(metadata: dict[str, str], path: Path) -> dict[str, str]:
    """Return the metadata of a partition book, in which the version is a text, as all values are."""
    _version("book", {"version": int(metadata["version"])}, path)
    return metadata


def _version(kind: str, values: Mapping[str, Any], path: Path) -> int:
    """Return the version of what a file holds. NewerFile for a later one than is known, ValueError for what is none."""
    version = values.get("version", 0)
    if type(version) is not int or version < 0:
        raise ValueError(f"its version is {version!r}, and not a whole number from 0")
    if version > VERSIONS[kind]:
        raise NewerFile(
            f"{path}: is of version {version}, and this weft reads up to version {VERSIONS[kind]}: upgrade weft"
        )
    return version


def _with(values: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return values and, behind them, defaults for what they lack."""
    return values | {name: value for name, value in defaults.items() if name not in values}
