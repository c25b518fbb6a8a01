"""What a person sees while a run goes on: live on a terminal, plain lines elsewhere.

Written to standard error, so that results can be piped.
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

from weft.utils.terminal import is_terminal
from weft.utils.units import format_bytes

SECONDS_BETWEEN_LINES = 2.0
SECONDS_BEFORE_WAITING = 0.3  # is shown, so that what is quick is not
SHOWS_A_SECOND = 4
ASKS_A_SECOND = 20
BAR_WIDTH = 16
RECENT = 20  # epochs by which the time that remains is told
SPLITS = ("val", "test", "train")


class ProgressShow:
    """Shows the epochs of a run as they end; `quiet` shows nothing. name: of the run, where it is one of several."""

    def __init__(self, start: int, epochs: int, *, quiet: bool, name: str = "") -> None:
        self._quiet, self._last_line = quiet, 0.0
        self._line = EpochLine(start, epochs, name)
        self._live = None if quiet else live(self._line)

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
        """One line beside the progress."""
        if self._live:
            self._live.console.print(f"weft: {text}", highlight=False)
        elif not self._quiet:
            print(f"weft: {text}", file=sys.stderr, flush=True)

    def epoch(self, epoch: int, loss: float, scores: dict[str, float | None], memory_bytes: int) -> None:
        """`epoch` has ended with this training loss and these scores; memory_bytes: the most that a rank has had."""
        line = self._line
        line.advance(epoch + 1, loss, scores, memory_bytes)
        if not self._live and not self._quiet:
            now = time.monotonic()
            if now - self._last_line >= SECONDS_BETWEEN_LINES or line.done == line.epochs:
                self._last_line = now
                print("  ".join([line.head, *line.parts()]), file=sys.stderr, flush=True)


class EpochLine:
    """A run in one line: epoch, bar, and as much of the rest as there is room for."""

    def __init__(self, start: int, epochs: int, name: str = "") -> None:
        self.done, self.epochs, self._name = start, epochs, name
        self._known: list[str] = []
        self._memory = ""
        self._start = time.monotonic()
        self._ends = deque([self._start], maxlen=RECENT + 1)

    def advance(self, done: int, loss: float, scores: dict[str, float | None], memory_bytes: int) -> None:
        """As many epochs are done."""
        self.done = done
        self._ends.append(time.monotonic())
        known = {name: value for name, value in scores.items() if value is not None}
        ordered = [name for split in SPLITS for name in known if name.startswith(f"{split}_")]
        self._known = [f"loss {loss:.4f}", *(f"{name.replace('_', ' ')} {known[name]:.4f}" for name in ordered)]
        self._memory = format_bytes(memory_bytes)

    @property
    def head(self) -> str:
        """What every line begins with."""
        return f"epoch {self.done:{len(str(self.epochs))}}/{self.epochs}"

    def parts(self) -> list[str]:
        """The rest, what matters most first: name, loss, time that remains, scores, seconds an epoch, memory."""
        named, now = [self._name] if self._name else [], time.monotonic()
        if not self._known:
            return [*named, format_seconds(now - self._start)]
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        left = max(0.0, self._ends[-1] + pace * (self.epochs - self.done) - now)
        over = self.done == self.epochs
        seconds = f"{format_seconds(now - self._start)} in all" if over else f"{format_seconds(left)} left"
        loss, *scores = self._known
        return [*named, loss, seconds, *scores, f"{pace:.3g} s/epoch", self._memory]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(self.head) - BAR_WIDTH - 2
        grid = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(total=self.epochs, completed=self.done, width=BAR_WIDTH)
        grid.add_row(Text(self.head, no_wrap=True), bar, Text(fitting(self.parts(), room), no_wrap=True))
        yield grid


class WaitLine:
    """What is done before the first epoch, and for how long already."""

    def __init__(self, text: str) -> None:
        self._text, self._start = text, time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{self._text}  {format_seconds(time.monotonic() - self._start)}", no_wrap=True)


@contextmanager
def waiting(text: str, *, quiet: bool, until: Callable[[], bool] = bool) -> Iterator[None]:
    """Shows what is done while entered, or until something is so; where there is no terminal, only what takes long.

    until: asked now and then by another thread.
    """
    if quiet:
        yield
        return
    shown, ended = live(WaitLine(text), transient=True), threading.Event()

    def show() -> None:
        start, said = time.monotonic(), False
        while not ended.wait(1 / ASKS_A_SECOND) and not until():
            if said or time.monotonic() - start < (SECONDS_BEFORE_WAITING if shown else SECONDS_BETWEEN_LINES):
                continue
            said = True
            if shown:
                shown.start()
            else:
                print(f"weft: {text}", file=sys.stderr, flush=True)
        if shown:
            shown.stop()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def live(line: EpochLine | WaitLine, *, transient: bool = False) -> Live | None:
    """A line that a terminal shows and that changes; None: standard error is none, or one that cannot."""
    if not is_terminal(sys.stderr):
        return None
    console = Console(file=sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Live(line, console=console, refresh_per_second=SHOWS_A_SECOND, transient=transient)


def fitting(parts: Sequence[str], width: int) -> str:
    """As many parts as there is room for, from the first on, with two blanks between them."""
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text


def format_seconds(seconds: float) -> str:
    """Whole seconds as '7 s', '2:05' or '1:02:05'."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
