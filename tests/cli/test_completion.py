"""Shells complete commands, flags and values by the script of `weft completion`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from weft.cli.main import main


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "weft"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash is installed")
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("weft tr", ["train"]),
        ("weft com", ["compare", "completion"]),
        ("weft data ", ["import", "schema", "info"]),
        ("weft data import --ed", ["--edges", "--edge-label", "--edge-features"]),
        ("weft train cora --strategy ten", ["tensor"]),
        ("weft train cora --strategy tensor --batch-s", ["--batch-size"]),
        ("weft compare --dtype ", ["float32", "float64", "bfloat16"]),
        ("weft predict runs/a --mo", ["--model"]),
        ("weft partition --method bal", ["balanced"]),
        ("weft completion ", ["bash", "zsh"]),
        ("weft train ", []),  # a file
        ("weft nothing --ep", []),
    ],
)
def test_bash_completes(line: str, completions: list[str], script: Path) -> None:
    words = line.split(" ")
    code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _weft; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", code, "bash", str(script), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert result.stdout.split() == completions


def test_zsh_uses_the_same_function(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    head, load, *rest = capsys.readouterr().out.splitlines()
    assert "zsh" in head
    assert load == "autoload -U compinit bashcompinit && compinit && bashcompinit"
    assert rest == script.read_text().splitlines()[1:]
    assert main(["completion", "fish"]) == 2
