"""Versions of the files that weft writes and reads, and conversion from former versions.

Each function converts the content of a file to the current version. All other code knows only the current version, and
checks that the content is complete. A file without a version has version 0.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from weft.utils.errors import InputError
from weft.utils.files.file_reading import MAX_JSON_BYTES, read_text
from weft.utils.log import LOGGER

VERSIONS = {
    "options": 2,  # config.toml, and any file for --config or of a sweep; 2: no optimisation "intra", no option "probe"
    "choices": 1,  # choices.json
    "record": 1,  # each line of metrics.jsonl
    "checkpoint": 4,  # state.json of a checkpoint; 2: digests of the graph's data; 3: no lines of the record; 4: counts
    "model": 1,  # metadata of model.safetensors
    "timeline": 1,  # timeline.json
    "profile": 1,  # machine.json of weft probe
    "plan": 1,  # what weft plan --json prints
    "graph": 3,  # manifest.json of a graph store; 2: names of vertices; 3: labels of edges
    "book": 1,  # metadata of a partition book
}
"""Current version of each format, which is the version that is written.

To change a format, increase its number, and extend its function below to convert from the previous version.
"""
FORMER_OPTIONS = {"without": "disable", "bins": "chunks", "metric": "metrics", "probe": "machine"}
"""Current name of each renamed option, by its former name."""
FORMER_OPTIMISATIONS = {"intra": "prefetch"}
"""Current name of each renamed optimisation (a value of `disable`), by its former name."""
FORMER_CHOICES = {
    "origin": "default",
    "kinds": {
        "map": {"floors": [[1], [0, 1 << 18], [0], [0]], "names": ["torch", "onednn"]},
        "map_weights": {"floors": [[1, 2], [0, 1 << 22], [0, 16], [0, 16]], "names": ["mkl"] * 15 + ["onednn"]},
        "sum": {"floors": [[0]], "names": ["triton"]},
    },
}
"""Implementations of kernels for runs and profiles that contain none. They must not change with the default."""


class NewerFile(InputError):
    """File of a later version of weft. In contrast to a damaged file, nothing may replace it."""


def versioned(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file: values with the version of their format.

    Args:
        kind: Format, a key of VERSIONS.
        values: The values.
    """
    return {"version": VERSIONS[kind], **values}


def options(tables: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the tables of an option file with current names of options, without the version.

    Args:
        tables: Content of the file.
        path: The file, for messages.
    """
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
    """Return a run's configuration with current names of options.

    Args:
        values: Content of the file.
        path: The file, for messages.
    """
    return _renamed(values, FORMER_OPTIONS, f"{path}:")


def _renamed(values: Mapping[str, Any], names: Mapping[str, str], place: str) -> dict[str, Any]:
    """Return options with current names, and `disable` with current names of optimisations.

    The former option `probe` could also name a run's probe.json, which weft no longer reads: it is then left out.

    Raises:
        InputError: An option is given by both of its names; the message begins with `place`.
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
        return "prices" in json.loads(read_text(Path(path), MAX_JSON_BYTES))
    except (OSError, TypeError, ValueError, RecursionError):
        return False


@cache  # a file may be read several times
def _print_once(text: str) -> None:
    """Print a line to standard error, of torchrun's ranks on rank 0 alone, unless this process has printed it."""
    if os.environ.get("RANK", "0") == "0":
        LOGGER.info(text)


def _optimisations(value: Any) -> Any:
    """Return a value of `disable`, or the list of values of a sweep, with current names of optimisations."""
    if isinstance(value, list):
        return [_optimisations(item) for item in value]
    if not isinstance(value, str):
        return value
    return ",".join(dict.fromkeys(FORMER_OPTIMISATIONS.get(name, name) for name in value.split(",")))


def choices(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a choices.json.

    Args:
        values: Content of the file.
        path: The file, for messages.
    """
    _version("choices", values, path)
    return values


def record(line: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a line of a record. Lines of ranks get the counts that were added later under the same version.

    Args:
        line: The line.
        path: The file, for messages.
    """
    _version("record", line, path)
    return _with(line, sampled={}, stages={}, working_bytes=0) if line["kind"] == "rank" else line


def checkpoint(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint.

    Args:
        state: Content of state.json. Version 0 has only tensors of the optimizer, since it was always Adam. Before
            version 3, `record` has the lines of all epochs, since epochs.jsonl did not exist. Before version 4,
            `progress` has no counts of the best epoch.
        path: The file, for messages.
    """
    version = _version("checkpoint", state, path)
    if version < 1:
        state = _with(state, updates={"groups": [], "values": {}})
    if version < 3:
        state = state | {"record": _with(state["record"], epochs_size=0, epochs_sha256=hashlib.sha256().hexdigest())}
    if version < 4:
        state = state | {"progress": _with(state["progress"], best_details={})}
    state = state | {"config": config(state["config"], path)}
    return state if version > 1 else _with(state, data={})


def model(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the description of the model in a model.safetensors.

    Args:
        values: Content of the file.
        path: The file, for messages.

    Raises:
        InputError: The file does not describe the model.
    """
    _version("model", values, path)
    return run_description(values, path.parent)


def run_description(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the description of how to build the model of a run.

    Args:
        values: Content of the description.
        folder: Folder of the run, for messages.

    Raises:
        InputError: The description is incomplete, as in runs of early versions.
    """
    if "shape" not in values:
        raise InputError(
            f"{folder} does not say how its model is made, since an earlier version of weft wrote it: train again, or "
            "continue for one epoch with --resume"
        )
    shape = _with(values["shape"], relations=[], featured_types=[])
    return values | {"shape": shape, "config": config(values["config"], folder)}


def timeline(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a timeline.json.

    Args:
        values: Content of the file.
        path: The file, for messages.
    """
    _version("timeline", values, path)
    return values


def profile(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a machine's profile.

    Args:
        values: Content of the file.
        path: The file, for messages.
    """
    version = _version("profile", values, path)
    return values if version else _with(values, choices=FORMER_CHOICES, learned=[])


def plan(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file of plans.

    Args:
        values: Content of the file.
        path: The file, for messages.
    """
    _version("plan", values, path)
    return values


def graph(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the manifest of a graph store. Names of vertices (2), labels of edges and schemas (3) are optional.

    Args:
        manifest: Content of the manifest.
        path: The file, for messages.
    """
    _version("graph", manifest, path)
    return manifest


def book(metadata: dict[str, str], path: Path) -> dict[str, str]:
    """Return the metadata of a partition book, whose values, also the version, are strings.

    Args:
        metadata: The metadata.
        path: The file, for messages.
    """
    _version("book", {"version": int(metadata["version"])}, path)
    return metadata


def _version(kind: str, values: Mapping[str, Any], path: Path) -> int:
    """Return the version of the content of a file.

    Raises:
        NewerFile: The version is later than the current one.
        ValueError: The version is not an integer of at least 0.
    """
    version = values.get("version", 0)
    if type(version) is not int or version < 0:
        raise ValueError(f"its version is {version!r}, not an integer of at least 0")
    if version > VERSIONS[kind]:
        raise NewerFile(
            f"{path}: has version {version}, but this weft reads versions up to {VERSIONS[kind]}: upgrade weft"
        )
    return version


def _with(values: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return values with defaults for missing names, which come last."""
    return values | {name: value for name, value in defaults.items() if name not in values}
