"""A run's model card states the facts of the run, and its command repeats the run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import weft
from tests.lib.graphs import make_graph
from tests.lib.running import train
from weft.cli.main import main
from weft.nn import Stack
from weft.nn.layers.conv import SAGEConv
from weft.training.run import Run


def rows(folder: Path) -> dict[str, str]:
    """Return the cells of the card's tables by their first column; the last of several rows counts."""
    cells = re.findall(r"^\| (.+?) \| (.*) \|$", (folder / "card.md").read_text(), re.MULTILINE)
    return dict(cells)


def test_the_card_states_the_facts_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_graph(60, weighted=True).save("a graph")
    arguments = ["--epochs", "4", "--lr", "0.05", "--norm", "batch", "--residual", "--dtype", "float64", "--seed", "3"]
    assert main(["train", "./a graph", *arguments, "--strategy", "offload", "--chunks", "2", "--out", "run"]) == 0
    run, card = Run.open("run"), rows(Path("run"))
    graph = weft.Graph.open("a graph")
    assert (card["vertices"], card["edges"], card["features"]) == ("60", f"{graph.num_edges}", "7")
    assert card["fingerprint"] == graph.fingerprint
    assert card["parameters"] == f"{sum(parameter.numel() for parameter in run.model.parameters()):,}"
    assert card["train_accuracy"] == f"{run.summary['train_accuracy']:.6g}"
    assert card["best epoch"] == str(run.summary["best_epoch"] + 1), "people count from 1"
    assert card["weft"] == weft.__version__
    assert (card["lr"], card["residual"], card["chunks"]) == ("0.05", "True", "2")
    assert "hidden" not in card

    (line,) = re.findall(r"^    (weft train .*)$", Path("run/card.md").read_text(), re.MULTILINE)
    assert main([*shlex.split(line)[1:], "--out", "again"]) == 0
    again = Run.open("again")
    assert [line["loss"] for line in again.history] == [line["loss"] for line in run.history]
    assert again.config == run.config
    assert (again.folder / "model.safetensors").read_bytes() == (run.folder / "model.safetensors").read_bytes()
    assert (again.folder / "card.md").read_text() == (run.folder / "card.md").read_text()


def test_the_card_of_objects_has_a_call(tmp_path: Path) -> None:
    model = Stack([SAGEConv(7, 8), SAGEConv(8, 5)])
    run = train(make_graph(40), model, out=tmp_path / "run", epochs=2, quiet=True, lr=0.5)
    text = (run.folder / "card.md").read_text()
    call = text.partition("```python\n")[2].partition("```")[0]
    again = {"weft": weft, "graph": make_graph(40), "model": Stack([SAGEConv(7, 8), SAGEConv(8, 5)])}
    again["model"].load_state_dict(model.state_dict())
    call = call.replace("weft.train(", f"run = weft.train(out={str(tmp_path / 'again')!r}, graph=")
    exec(call, again)
    assert again["run"].config == run.config
    assert rows(run.folder)["model"] == "weft.nn.layers.stack.Stack"
    assert "hidden" not in rows(run.folder)


def test_the_card_shows_names_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "./a|b\n# <img src=x>![y](z)`\u202e&#x202e;"
    make_graph(40).save(name)
    weft.train(name, epochs=1, out="run", quiet=True)
    text = Path("run/card.md").read_text()
    assert text.replace("\n", "").isprintable()
    assert rows(Path("run"))["graph"] == r"./a\|b\\n# \<img src=x\>!\[y\](z)\`\\u202e\&#x202e;"
    call = text.partition("```python\n")[2].partition("\n```\n")[0]
    exec(call.replace("weft.train(", "weft.train(out='again', quiet=True, graph="), {"weft": weft})
    assert Run.open("again").config == Run.open("run").config


def test_a_run_that_has_not_ended_has_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.training.artifacts.run_writer.make_card", full)
    with pytest.raises(weft.RunError, match=r"card\.md: cannot write the card \(No space"):
        train(make_graph(40), out=tmp_path / "run", epochs=1, quiet=True)
    assert not (tmp_path / "run" / "card.md").exists()
    assert not Run.open(tmp_path / "run").summary
