"""Progress display of a run: a live line on a terminal, plain lines elsewhere.

It goes to standard error, so that results on standard output can be piped.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.training.launch.torchrun import is_main_process
from weft.utils.errors import printable
from weft.utils.log import LIVE, LOGGER, PROGRESS, is_configured
from weft.utils.standard_streams import lossy
from weft.utils.terminal import is_terminal
from weft.utils.units import format_bytes

SECONDS_BETWEEN_LINES = 2.0
"""Shortest time between two plain lines, where there is no terminal."""
SECONDS_BEFORE_WAITING = 0.3
"""Delay before a waiting line appears on a terminal, so that quick operations show none."""
REFRESHES_PER_SECOND = 4
POLLS_PER_SECOND = 20
BAR_WIDTH = 16
RECENT_EPOCHS = 20
"""Number of last epochs whose mean duration gives the remaining time."""
SPLITS = ("val", "test", "train")
"""Splits in the order in which their scores are shown."""


class ProgressShow:
    """Shows the epochs of a run as they end.

    Args:
        start: Number of epochs done before, in a resumed run.
        epochs: Number of epochs of the run.
        quiet: Show nothing.
        name: Name of the run, if it is one of several.
    """

    def __init__(self, start: int, epochs: int, *, quiet: bool, name: str = "") -> None:
        self._quiet, self._last_line = quiet, 0.0
        self._line = EpochLine(start, epochs, name)
        self._live = None if quiet else live_display(self._line)

    def __enter__(self) -> ProgressShow:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line, on a terminal above the progress."""
        if not self._quiet:
            LOGGER.info(text)

    def epoch(self, epoch: int, loss: float, scores: dict[str, float | None], memory_bytes: int) -> None:
        """Show that an epoch has ended.

        Args:
            epoch: Number of the epoch, from 0.
            loss: Training loss.
            scores: Scores by name; None or absent if unknown.
            memory_bytes: Peak memory of the rank that used most.
        """
        line = self._line
        line.advance(epoch + 1, loss, scores, memory_bytes)
        now = time.monotonic()
        if not self._quiet and (now - self._last_line >= SECONDS_BETWEEN_LINES or line.done == line.epochs):
            self._last_line = now
            PROGRESS.info("  ".join([line.head, *line.parts()]), extra=LIVE if self._live else None)


class EpochLine:
    """Progress of a run in one line: epoch, bar, and as many other facts as fit.

    Args:
        start: Number of epochs done before, in a resumed run.
        epochs: Number of epochs of the run.
        name: Name of the run, if it is one of several.
    """

    def __init__(self, start: int, epochs: int, name: str = "") -> None:
        self.done, self.epochs, self._name = start, epochs, printable(name)
        self._results: list[str] = []
        self._memory = ""
        self._start = time.monotonic()
        self._ends = deque([self._start], maxlen=RECENT_EPOCHS + 1)

    def advance(self, done: int, loss: float, scores: dict[str, float | None], memory_bytes: int) -> None:
        """Update the line after an epoch.

        Args:
            done: Number of epochs done.
            loss: Training loss.
            scores: Scores by name; None or absent if unknown.
            memory_bytes: Peak memory of the rank that used most.
        """
        self.done = done
        self._ends.append(time.monotonic())
        shown = {name: value for name, value in scores.items() if value is not None}
        ordered = [name for split in SPLITS for name in shown if name.startswith(f"{split}_")]
        self._results = [f"loss {loss:.4f}", *(f"{name.replace('_', ' ')} {shown[name]:.4f}" for name in ordered)]
        self._memory = format_bytes(memory_bytes)

    @property
    def head(self) -> str:
        """Start of the line: number of epochs done, and of all epochs."""
        return f"epoch {self.done:{len(str(self.epochs))}}/{self.epochs}"

    def parts(self) -> list[str]:
        """Return the rest of the line, the most important parts first.

        The parts are: name, loss, remaining time, scores, seconds per epoch, and peak memory.
        """
        named, now = [self._name] if self._name else [], time.monotonic()
        if not self._results:
            return [*named, format_seconds(now - self._start)]
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        left = max(0.0, self._ends[-1] + pace * (self.epochs - self.done) - now)
        over = self.done == self.epochs
        seconds = f"{format_seconds(now - self._start)} in all" if over else f"{format_seconds(left)} left"
        loss, *scores = self._results
        return [*named, loss, seconds, *scores, f"{pace:.3g} s/epoch", self._memory]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(self.head) - BAR_WIDTH - 2
        grid = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(total=self.epochs, completed=self.done, width=BAR_WIDTH)
        grid.add_row(Text(self.head, no_wrap=True), bar, Text(fit_parts(self.parts(), room), no_wrap=True))
        yield grid


class WaitLine:
    """Line for work before the first epoch, with the seconds that it has taken so far.

    Args:
        text: Description of the work.
    """

    def __init__(self, text: str) -> None:
        self._text, self._start = printable(text), time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{self._text}  {format_seconds(time.monotonic() - self._start)}", no_wrap=True)


@contextmanager
def waiting(text: str, *, quiet: bool, until: Callable[[], bool] = bool) -> Iterator[None]:
    """Show what is being done in the with block, once it takes a while. Ranks other than 0 show nothing.

    Args:
        text: Description of the work.
        quiet: Show nothing.
        until: Polled by another thread: when it returns True, the line is removed before the block ends.
    """
    if quiet or not is_main_process():
        yield
        return
    shown, ended = live_display(WaitLine(text), transient=True), threading.Event()

    def show() -> None:
        start, is_shown = time.monotonic(), False
        while not ended.wait(1 / POLLS_PER_SECOND) and not until():
            if is_shown or time.monotonic() - start < (SECONDS_BEFORE_WAITING if shown else SECONDS_BETWEEN_LINES):
                continue
            is_shown = True
            LOGGER.info(text, extra=LIVE if shown else None)
            if shown:
                shown.start()
        if shown:
            shown.stop()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def live_display(line: EpochLine | WaitLine, *, transient: bool = False) -> Live | None:
    """Return a display that redraws a line on the terminal, or None if messages do not go to one.

    Args:
        line: The line to show.
        transient: Remove the line at the end.
    """
    if is_configured() or not is_terminal(sys.stderr):
        return None
    console = Console(file=lossy(sys.stderr))
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Live(line, console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=transient)


def fit_parts(parts: Sequence[str], width: int) -> str:
    """Join the first parts, as many as fit, with two spaces between them.

    Args:
        parts: Texts, the most important first.
        width: Number of columns.
    """
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text


def format_seconds(seconds: float) -> str:
    """Format a duration in whole seconds as '7 s', '2:05' or '1:02:05'."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
