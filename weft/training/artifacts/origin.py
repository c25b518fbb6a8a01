"""Origin of a run for its record: date, host, hardware, versions, commit and command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from weft.training.planning.probe_command import processor

MAX_GIT_SECONDS = 5.0
"""Longest time to look for changed files, which may be slow on a network file system."""


def command_line() -> str:
    """Return the command that started this process, without the folder of the interpreter."""
    return shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


def run_origin(device: str) -> dict[str, Any]:
    """Return when and where a run starts, and with which versions, as JSON values. The record of a run contains them.

    Args:
        device: Device of the run, cpu or cuda.
    """
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": working_commit(),
    }


def working_commit() -> str:
    """Return the git commit of the working directory, with `-dirty` if files differ from it; empty without one."""
    # The repository's configuration may name a program that watches files: it must not run.
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=MAX_GIT_SECONDS
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
