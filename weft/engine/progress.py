"""Live progress on a terminal, plain lines elsewhere. Written to standard error, so that results can be piped."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 2.0


class ProgressShow:
    """Shows the epochs of a run as they end; `quiet` shows nothing."""

    def __init__(self, start: int, epochs: int, *, quiet: bool) -> None:
        self._epochs, self._quiet = epochs, quiet
        self._last_line = 0.0
        console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        if not quiet and console.is_terminal:
            columns = (TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=console)
            self._task = self._bar.add_task("", total=epochs, completed=start)

    def __enter__(self) -> ProgressShow:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line beside the progress."""
        if self._bar:
            self._bar.console.print(f"weft: {text}", highlight=False)
        elif not self._quiet:
            print(f"weft: {text}", file=sys.stderr, flush=True)

    def epoch(self, epoch: int, loss: float, scores: dict[str, float | None]) -> None:
        """`epoch` has ended with this training loss and these scores."""
        known = (f"{name} {value:.4f}" for name, value in scores.items() if value is not None)
        text = "  ".join([f"loss {loss:.4f}", *known]).replace("_", " ")
        if self._bar:
            self._bar.update(self._task, completed=epoch + 1, description=text)
        elif not self._quiet:
            now = time.monotonic()
            if now - self._last_line >= SECONDS_BETWEEN_LINES or epoch + 1 == self._epochs:
                self._last_line = now
                print(f"epoch {epoch + 1}/{self._epochs}  {text}", file=sys.stderr, flush=True)
