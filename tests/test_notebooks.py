"""The example notebooks run as they stand; and what cells do that scripts do not."""

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
from weft.utils import jsonl

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS = 200
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\r(?!\n)")
"""What moves a cursor, or hides it. Colours, which end with m, a notebook shows."""
FORKED = "from weft.runtime.forkserver import start_forkserver\nstart_forkserver()"
"""Has ranks forked, so that their imports are made once; otherwise they start by spawn."""
OWN = """
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
told = [lambda line: print("epoch", line["epoch"])]
weft.train(graph, model, strategy="tensor", workers=2, epochs=100_000, callbacks=told, **options)
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
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell()])  # the place of each in turn
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
        """The outputs of a cell."""
        outputs: list[Any] = self._client.execute_cell(nbformat.v4.new_code_cell(code), 0).outputs
        errors = [one for one in outputs if one.output_type == "error"]
        assert bool(errors) == fails, errors
        return outputs

    def interrupt(self) -> None:
        """As the stop button does: the kernel, and what it has started."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)


def text(outputs: list[Any]) -> str:
    """What a cell has printed, and shown of its last line as text."""
    printed = "".join(one.text for one in outputs if one.output_type == "stream")
    return printed + "".join(one.data["text/plain"] for one in outputs if one.output_type == "execute_result")


def html(outputs: list[Any]) -> str:
    """What a cell has shown of its last line."""
    return "".join(one.data.get("text/html", "") for one in outputs if one.output_type == "execute_result")


def test_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cells(tmp_path, monkeypatch) as cells:
        cells.run(FORKED)
        shown = [cells.run(code) for code in codes("quick_start.ipynb")]
    graph, run, plot, table, two_ranks, stopped, gone_on, right, _ = shown
    assert "<td" in html(graph)
    assert "finished after 60 epochs" in html(run)
    assert "vegaEmbed" in html(plot)
    assert html(table).count("<tr") == 5
    assert "GatedMean" not in text(two_ranks)
    assert '<td style="text-align: left">2</td>' in html(two_ranks)
    assert re.search(r"stopped by SIGINT; continue with --resume --out \S+\n", text(stopped))
    assert "stopped after 22 epochs" in html(stopped)  # the callback is called behind the exchange of requests to stop
    assert figure(r"^40 epochs, test accuracy (\S+)$", gone_on) > 0.8
    assert figure(r"^(\S+) of the test vertices are right$", right) > 0.8
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert [found for outputs in shown for found in CURSOR.findall(text(outputs))] == []


def test_which_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cells(tmp_path, monkeypatch) as cells:
        cells.run(FORKED)
        shown = [cells.run(code) for code in codes("which_strategy.ipynb")]
    _, runs, costs, apart, seconds = shown
    assert text(runs).count("<Run ") == 3
    assert html(costs).count("<tr") == 4
    assert figure(r"^losses are at most (\S+) apart", apart) < 1e-9
    assert html(seconds).count("<tr") == 4


def codes(name: str) -> list[str]:
    """The cells of an example, which is kept without what they show."""
    notebook = nbformat.read(EXAMPLES / name, 4)
    found = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in found)
    return [cell.source for cell in found]


def figure(pattern: str, outputs: list[Any]) -> float:
    found = re.search(pattern, text(outputs), re.MULTILINE)
    assert found, text(outputs)
    return float(found[1])


def test_what_cells_define_on_two_ranks_and_the_stop_button(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer, functions and lambdas go to the ranks; the button ends these, and the run and the kernel go on."""
    pytest.importorskip("cloudpickle")
    metrics = tmp_path / "runs" / "own" / "metrics.jsonl"

    ended = threading.Event()

    def press() -> None:
        while sum(line["kind"] == "epoch" for line in jsonl.read(metrics)) < 3:
            if ended.wait(0.05):
                return
        cells.interrupt()

    with Cells(tmp_path, monkeypatch) as cells:
        cells.run(OWN)
        button = threading.Thread(target=press)
        button.start()
        outputs = cells.run(TRAINED, fails=True)
        ended.set()
        button.join()
        (error,) = [one for one in outputs if one.output_type == "error"]
        assert error.traceback == ["weft: stopped by SIGINT; continue with --resume --out runs/own"]
        assert "epoch 0\nepoch 1\nepoch 2\n" in "".join(one.text for one in outputs if one.get("name") == "stdout")
        assert "Traceback" not in text(outputs)
        assert not CURSOR.search(text(outputs))
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children(cells.pid)]
        assert all("resource_tracker" in command for command in commands), "ranks go on"
        done = len(losses(metrics.parent))
        assert 0 <= figure(r"^(\S+)$", cells.run(GONE_ON)) <= 1
        assert len(losses(metrics.parent)) == done + 2
        assert text(cells.run(AWAITED)) == "2"
        assert text(cells.run(f"!{sys.executable} -c {quote(TERMINAL)}")).split() == ["True", "False"]
