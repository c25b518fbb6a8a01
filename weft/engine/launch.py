"""How ranks start: torch's own elastic launcher on this machine. How they work is elsewhere."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.core.errors import InputError, RunError
from weft.core.forkserver import start_method
from weft.core.meter import STATUS_BYTES, read_status
from weft.engine.stop import SIGNALS

STOPPED = 128


def launch(entry: Callable[..., None], arguments: tuple[Any, ...], *, workers: int) -> int:
    """Runs `entry(*arguments, status)` on `workers` local ranks; the signal that they were told to stop by, or 0.

    `status` is the file in which each rank shows what it does. A rank that stops as it was told exits with STOPPED +
    the signal. One that fails or is killed stops the others; RunError then names it and what it was doing, InputError
    if the caller's mistake made it fail.
    """
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        status = Path(scratch) / "status"
        status.write_bytes(bytes(workers * STATUS_BYTES))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=start_method(),
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        with _quiet(), _signal_handlers_restored():
            try:
                elastic_launch(config, _run_rank)(entry, *arguments, status)
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                if failure.exitcode - STOPPED in SIGNALS:
                    return failure.exitcode - STOPPED
                raise _explained(rank, failure, status) from None
            except SignalException as error:
                return int(error.sigval)
        return 0


def _run_rank(entry: Callable[..., None], *arguments: Any) -> None:
    """`entry` on a rank, which tells the launcher of its error; PyTorch would leave the traceback in a file besides."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored where a rank is forked from
    try:
        entry(*arguments)
    except Exception as error:
        get_error_handler().record_exception(error)
        sys.exit(1)


def _explained(rank: int, failure: ProcessFailure, status: Path) -> InputError | RunError:
    where = read_status(status, rank)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return RunError(
            f"rank {rank} (pid {failure.pid}) was killed by {name}{hint} in {where}; the others were stopped"
        )
    report = failure.error_file_data.get("message")
    if not isinstance(report, dict):
        return RunError(f"rank {rank} (pid {failure.pid}) ended with exit code {failure.exitcode} in {where}")
    message = str(report["message"])
    for kind in (InputError, RunError):
        if message.startswith(f"{kind.__name__}: "):
            return kind(message.removeprefix(f"{kind.__name__}: "))
    print(report["extraInfo"]["py_callstack"], file=sys.stderr)
    return RunError(f"rank {rank} failed in {where}: {message.splitlines()[0]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """The launcher logs what `launch` says in one line."""
    parts = ("torch.distributed.elastic", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in (*parts, *logging.root.manager.loggerDict) if name.startswith(parts)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """The launcher replaces handlers and leaves its own behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
