"""The example notebooks run unchanged, and so does what only cells can do, such as the stop button."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from tests.lib.running import children, losses
from weft.utils.files import jsonl

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS = 200
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\r(?!\n)")
"""Escape sequences that move or hide a cursor. Those of colours, which end with m, are allowed in a notebook."""
FORKED = "from weft.runtime.processes.forkserver import start_forkserver\nstart_forkserver()"
"""Code that has ranks forked, so that they share their imports; otherwise they are spawned."""
CUSTOM = """
import os, sys, torch, weft
from torch import nn

graph = weft.load("digits")

class Mean(nn.Module):
    def __init__(self, in_width, out_width):
        super().__init__()
        self.out_width, self.map = out_width, nn.Linear(in_width, out_width)

    def forward(self, view, x):
        return view.propagate(self.map(x), reduce="mean")

def error(logits, labels):
    return factor * nn.functional.cross_entropy(logits, labels, reduction="none")

def share(logits, labels):
    return (logits.argmax(1) == labels).double().mean()

factor = 0.5
model = weft.nn.Stack([Mean(64, 8), Mean(8, 10)], activation=lambda x: x.relu())
options = dict(loss=error, metrics=[share], optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1), out="runs/own")
"""
TRAINED = """
callbacks = [lambda line: print("epoch", line["epoch"])]
weft.train(graph, model, strategy="tensor", workers=2, epochs=100_000, callbacks=callbacks, **options)
"""
GONE_ON = """
epochs = len(weft.Run.open("runs/own").history) + 2
run = weft.train(graph, model, epochs=epochs, resume=True, quiet=True, **options)
print(run.summary["test_share"])
"""
AWAITED = """
import asyncio, signal
before = signal.getsignal(signal.SIGINT)
run = await asyncio.to_thread(weft.train, graph, model, epochs=2, quiet=True, loss=error)
assert signal.getsignal(signal.SIGINT) is before
len(run.history)
"""
TERMINAL = "import sys; from weft.utils.terminal import is_terminal as of; print(sys.stderr.isatty(), of(sys.stderr))"


class Cells:
    """A kernel that runs cells."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        command = folder / "bin" / "weft"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m weft "$@"\n')
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
        monkeypatch.delenv("PYTEST_CURRENT_TEST")  # where it is set, a kernel does not show what ranks write
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell()])  # each cell in turn replaces this one
        place = {"metadata": {"path": str(folder)}}
        self._client = nbclient.NotebookClient(notebook, timeout=SECONDS, allow_errors=True, resources=place)
        self._kernel = self._client.setup_kernel()

    def __enter__(self) -> Cells:
        self._kernel.__enter__()
        self.pid = int(self._client.km.provisioner.pid)
        return self

    def __exit__(self, *error: Any) -> None:
        self._kernel.__exit__(*error)

    def run(self, code: str, *, fails: bool = False) -> list[Any]:
        """Run a cell and return its outputs; fails: whether it must raise an error."""
        outputs: list[Any] = self._client.execute_cell(nbformat.v4.new_code_cell(code), 0).outputs
        errors = [output for output in outputs if output.output_type == "error"]
        assert bool(errors) == fails, errors
        return outputs

    def interrupt(self) -> None:
        """Interrupt the kernel and the processes that it has started, as the stop button does."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)


def text(outputs: list[Any]) -> str:
    """Return what a cell printed, followed by the value of its last line as text."""
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    return printed + "".join(output.data["text/plain"] for output in outputs if output.output_type == "execute_result")


def html(outputs: list[Any]) -> str:
    """Return the value of a cell's last line as HTML."""
    return "".join(output.data.get("text/html", "") for output in outputs if output.output_type == "execute_result")


def test_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cells(tmp_path, monkeypatch) as cells:
        cells.run(FORKED)
        shown = [cells.run(code) for code in codes("quick_start.ipynb")]
    graph, run, plot, table, two_ranks, stopped, gone_on, right, _ = shown
    assert "<td" in html(graph)
    assert "finished after 60 epochs" in html(run)
    assert plot[0].data["image/svg+xml"].startswith("<svg"), "a picture that needs no network"
    assert html(table).count("<tr") == 5
    assert "GatedMean" not in text(two_ranks)
    assert '<td style="text-align: left">2</td>' in html(two_ranks)
    assert re.search(r"stopped by SIGINT; continue with --resume --out \S+\n", text(stopped))
    assert "stopped after 22 epochs" in html(stopped)  # the callback is called after the exchange of stop requests
    assert figure(r"^40 epochs, test accuracy (\S+)$", gone_on) > 0.8
    assert figure(r"^(\S+) of the test vertices are classified correctly$", right) > 0.8
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert [code for outputs in shown for code in CURSOR.findall(text(outputs))] == []


def test_which_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cells(tmp_path, monkeypatch) as cells:
        cells.run(FORKED)
        shown = [cells.run(code) for code in codes("which_strategy.ipynb")]
    _, runs, costs, difference, seconds = shown
    assert text(runs).count("<Run ") == 3
    assert html(costs).count("<tr") == 4
    assert figure(r"^losses are at most (\S+) apart", difference) < 1e-9
    assert html(seconds).count("<tr") == 4


def codes(name: str) -> list[str]:
    """Return the code cells of an example, which must be saved without outputs."""
    notebook = nbformat.read(EXAMPLES / name, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    return [cell.source for cell in cells]


def figure(pattern: str, outputs: list[Any]) -> float:
    match = re.search(pattern, text(outputs), re.MULTILINE)
    assert match, text(outputs)
    return float(match[1])


def test_what_cells_define_on_two_ranks_and_the_stop_button(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks receive layers, functions and lambdas of cells; the stop button ends them, and the run can be resumed."""
    pytest.importorskip("cloudpickle")
    metrics = tmp_path / "runs" / "own" / "metrics.jsonl"

    ended = threading.Event()

    def press() -> None:
        while sum(line["kind"] == "epoch" for line in jsonl.read(metrics)) < 3:
            if ended.wait(0.05):
                return
        cells.interrupt()

    with Cells(tmp_path, monkeypatch) as cells:
        cells.run(CUSTOM)
        button = threading.Thread(target=press)
        button.start()
        outputs = cells.run(TRAINED, fails=True)
        ended.set()
        button.join()
        (error,) = [output for output in outputs if output.output_type == "error"]
        assert error.traceback == ["weft: stopped by SIGINT; continue with --resume --out runs/own"]
        assert "epoch 0\nepoch 1\nepoch 2\n" in "".join(
            output.text for output in outputs if output.get("name") == "stdout"
        )
        assert "Traceback" not in text(outputs)
        assert not CURSOR.search(text(outputs))
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children(cells.pid)]
        assert all("resource_tracker" in command for command in commands), "ranks go on"
        done = len(losses(metrics.parent))
        assert 0 <= figure(r"^(\S+)$", cells.run(GONE_ON)) <= 1
        assert len(losses(metrics.parent)) == done + 2
        assert text(cells.run(AWAITED)) == "2"
        assert text(cells.run(f"!{sys.executable} -c {quote(TERMINAL)}")).split() == ["True", "False"]
