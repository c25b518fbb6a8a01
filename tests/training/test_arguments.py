"""Keyword arguments of `weft.train` and its like are declared for editors and type checkers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from tests.lib import arguments
from tests.lib.pages import ROOT
from weft.config.config import Config

SCRIPT = '''
"""Script of a user, which mypy checks in strict mode."""

from pathlib import Path

import torch
from torch import Tensor, nn

import weft


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row."""
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def share_of_best(logits: Tensor, labels: Tensor) -> float:
    """Return the accuracy."""
    return float((logits.argmax(1) == labels).float().mean())


def main() -> None:
    """Train, predict, compare, plan and place."""
    graph = weft.load("digits")
    run = weft.train(
        graph,
        "gat",
        out=Path("runs/a"),
        strategy="tensor",
        workers=2,
        epochs=3,
        heads=8,
        dtype="float64",
        loss=loss,
        metrics=["accuracy", share_of_best],
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        callbacks=[print],
    )
    logits: Tensor = weft.predict(run, what="logits", strategy="offload", device_memory="1GB")
    targets: list[int] = weft.predict(run, top=3).target.flatten().tolist()
    runs = weft.compare(graph, strategies=["single", "tensor"], lr=0.1, device_memory=1 << 30)
    fits = [estimate.fits for estimate in weft.plan(graph, machines="1x24GB", hidden=32)]
    with weft.place(graph, strategy="hybrid", partition="metis") as placed:
        print(logits, targets, runs, fits, placed)
'''
MISTAKES = {
    'weft.train("digits", learning_rate=0.1)': 'Unexpected keyword argument "learning_rate" for "train"',
    'weft.train("digits", epochs="3")': 'has incompatible type "str"; expected "int"',
    'weft.train("digits", dtype="float46")': "expected \"Literal['float32', 'float64', 'bfloat16']\"",
    'weft.compare("digits", strategies=["single"], strategy="single")': 'Unexpected keyword argument "strategy"',
    'weft.predict("runs/a", epochs=3)': 'Unexpected keyword argument "epochs" for overloaded function "predict"',
    'weft.place("digits", epochs=3)': 'Unexpected keyword argument "epochs" for "place"',
}


def test_the_file_is_generated_from_the_options() -> None:
    assert arguments.PATH.read_text() == arguments.text(), "run python -m tests.lib.arguments"


def test_signatures_list_them() -> None:
    """IPython completes from signatures."""
    for function in (weft.train, weft.compare, weft.plan, weft.place):
        parameters = inspect.signature(function).parameters
        assert parameters["layers"].default == Config().layers
        assert "options" not in parameters
    assert "epochs" in inspect.signature(weft.train).parameters
    assert "epochs" not in inspect.signature(weft.place).parameters


@pytest.mark.slow  # mypy reads PyTorch
def test_mypy_checks_a_call(tmp_path: Path) -> None:
    functions = [f"\n\ndef mistake_{number}() -> None:\n    {call}\n" for number, call in enumerate(MISTAKES)]
    errors = mypy(tmp_path, SCRIPT + "".join(functions))
    assert len(errors) == len(MISTAKES), errors
    for error, expected in zip(errors, MISTAKES.values(), strict=True):
        assert expected in error


def mypy(folder: Path, script: str) -> list[str]:
    """Return the first error of each line that mypy finds in a script in strict mode.

    Args:
        folder: Folder for the script.
        script: Its text.
    """
    path = folder / "script.py"
    path.write_text(script)
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--no-error-summary", "--hide-error-context"]
    command = [sys.executable, "-m", "mypy", *options, f"--cache-dir={folder / 'cache'}", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stderr
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    return list({error.split(":")[1]: error for error in reversed(errors)}.values())[::-1]
