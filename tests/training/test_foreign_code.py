"""Code that only a file names as a model is never run: weft imports only modules that the user names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import weft
from weft.cli.main import main
from weft.utils.errors import InputError

MODULE = """
from pathlib import Path
from torch import nn
from weft.nn import GCNConv, Stack

Path("imported").touch()

def Net(num_features, num_classes):
    Path("called").touch()
    return Stack([GCNConv(num_features, num_classes)])
"""
FOREIGN = "foreign_module:Net"
NAMED = "the model foreign_module:Net is code, which weft imports only if the command line names it"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which contains the module."""
    (tmp_path / "foreign_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "foreign_module", raising=False)
    return tmp_path


def was_imported(folder: Path) -> bool:
    """Return whether the module was imported."""
    return (folder / "imported").exists()


def name_in_model(run: Path) -> None:
    """Write the module's name into model.safetensors."""
    path = run / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["weft"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata["config"]["model"] = FOREIGN
    save_file(weights, path, {"weft": json.dumps(metadata)})


def name_in_record(run: Path) -> None:
    """Write the module's name into the record of a run that has not ended."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "config":
            line["config"]["model"] = FOREIGN
    records = [json.dumps(line) + "\n" for line in lines if line["kind"] != "summary"]
    (run / "metrics.jsonl").write_text("".join(records))


@pytest.mark.parametrize("damage", [name_in_model, name_in_record])
def test_code_that_a_run_names_is_not_run(damage: Callable[[Path], None], folder: Path) -> None:
    run = weft.train("digits", epochs=1, checkpoint_every=1, out=folder / "run", quiet=True)
    damage(run.folder)
    calls: list[Callable[[], Any]] = [
        lambda: weft.load_model(run.folder),
        lambda: weft.Run.open(run.folder).model,
        lambda: weft.predict(run.folder),
    ]
    for call in calls:
        with pytest.raises(InputError, match="a custom class that weft does not import"):
            call()
    assert main(["predict", str(run.folder), "--out", str(folder / "logits.npy")]) == 2
    assert not was_imported(folder)


def test_code_that_a_configuration_names_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, sweep, run = folder / "run.toml", folder / "sweep.toml", folder / "run"
    file.write_text(f'[data]\ngraph = "digits"\n[model]\nmodel = "{FOREIGN}"\n[training]\nepochs = 1\n')
    sweep.write_text(f'[data]\ngraph = "digits"\n[model]\nmodel = ["gcn", "{FOREIGN}"]\n')
    run.mkdir()
    (run / "config.toml").write_text(file.read_text())
    for command in (
        ["train", "--config", str(file), "--out", str(folder / "new")],
        ["train", "--out", str(run), "--resume"],
        ["compare", "--config", str(file), "--strategies", "single"],
        ["plan", "--config", str(file)],
        ["sweep", str(sweep), "--out", str(folder / "sweep")],
        ["sweep", str(folder / "epochs.toml"), "--config", str(file), "--out", str(folder / "sweep")],
    ):
        (folder / "epochs.toml").write_text("[training]\nepochs = [1, 2]\n")
        assert main(command) == 2, command
        assert NAMED in capsys.readouterr().err
        assert not was_imported(folder)


def test_code_that_the_user_names_is_run(folder: Path) -> None:
    file = folder / "run.toml"
    file.write_text(f'[data]\ngraph = "digits"\n[model]\nmodel = "{FOREIGN}"\n[training]\nepochs = 1\n')
    assert main(["train", "--config", str(file), "--model", FOREIGN, "--out", str(folder / "run"), "--quiet"]) == 0
    assert was_imported(folder)
    resumed = ["train", "--resume", "--out", str(folder / "run"), "--epochs", "2", "--quiet"]
    assert main(resumed) == 2
    assert main([*resumed, "--model", FOREIGN]) == 0
    predicted = ["predict", str(folder / "run"), "--out", str(folder / "logits.npy")]
    assert main(predicted) == 2
    assert main([*predicted, "--model", FOREIGN]) == 0


LEAVING = """
import inspect, sys
from weft.nn import GCNConv, Stack

class Layer(GCNConv):
    def begin(self, *arguments, **options):
        if "training" == PLACE and any(frame.function == "run_rank" for frame in inspect.stack()):
            sys.exit(0)
        return super().begin(*arguments, **options)

def Net(num_features, num_classes):
    if PLACE == "call":
        sys.exit(0)
    return Stack([Layer(num_features, num_classes)])

if PLACE == "import":
    sys.exit(0)
"""


@pytest.mark.parametrize(("place", "line"), [("import", 17), ("call", 13), ("training", 8)])
def test_code_of_the_user_does_not_end_a_run(
    place: str, line: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "foreign_module.py"
    path.write_text(f"PLACE = {place!r}{LEAVING}")
    assert main(["train", "digits", "--model", FOREIGN, "--epochs", "1", "--out", str(folder / "run"), "--quiet"]) == 2
    assert f"foreign_module.py:{line} calls sys.exit(0), which would end weft" in capsys.readouterr().err
    assert not (folder / "run").exists()
