"""What local ranks are sent: by name, by value out of a session, and what is said where neither can be."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft
from weft.training.launch import payload
from weft.training.launch.payload import Received, in_session, pickled, sending
from weft.training.launch.processes import RANK, UNGUARDED, launch, require_guard
from weft.utils.errors import InputError

CELL = """
class Layer:
    def double(self):
        return 2 * half

half = 21
shorten = lambda text: text[:3]
"""


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The definitions of a cell, in a process whose `__main__` they are."""
    made = ModuleType("__main__")
    exec(CELL, made.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", made)
    return made


def received(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object where the session is not."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setitem(sys.modules, "__main__", ModuleType("__main__"))
        return Received(data).open()


def test_what_cells_define_goes_by_value(session: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    assert in_session()
    layer, shorten, load = received(pickled([session.Layer(), session.shorten, weft.load]), monkeypatch)
    assert layer.double() == 42
    assert shorten("accuracy") == "acc"
    assert load is weft.load, "what ranks can import goes by name"
    with pytest.raises(InputError, match="local ranks cannot import an object of the run"):  # planted: by name
        received(pickle.dumps(session.Layer()), monkeypatch)


@pytest.mark.parametrize("name", ["Layer", "shorten"])
def test_without_cloudpickle_one_line_says_what_to_do(
    name: str, session: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "find_spec", lambda _: None)
    said = rf"^local ranks cannot import {'<lambda>' if name == 'shorten' else name}, which this session defines: "
    with pytest.raises(InputError, match=said + r"pip install 'weft\[notebook\]', or write it to a file \(%%writefile"):
        pickled({"part": [getattr(session, name)]})
    assert received(pickled(weft.load), monkeypatch) is weft.load


@pytest.mark.usefixtures("in_a_script")
def test_a_script_goes_by_name() -> None:
    """Ranks import it, so a class of a test module is the same one there."""
    assert not in_session()
    assert Received(pickled(Path)).open() is Path
    said = r"^the loss cannot be sent to local ranks .*: define it with def or class in a module"
    with pytest.raises(InputError, match=said), sending("loss"):
        pickled(lambda: 0)


def test_what_a_rank_does_not_find_is_said_in_a_line() -> None:
    """As a class that is defined below the guard of its script."""
    with pytest.raises(InputError, match=r"cannot import .*not_there.*: define it with def or class at the top") as caught:
        Received(b"c__main__\nnot_there\n.").open()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(f"import weft\nweft.train('digits', strategy='tensor', workers=2, epochs=1, out={str(out)!r})\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    said = f"{script} trains when it is imported, and local ranks import it: put that code under `if __name__ =="
    assert lines[-1].startswith(f"weft.utils.errors.InputError: {said}")
    assert sum(line.startswith("Traceback") for line in lines) == 1, "ranks say nothing"
    assert not out.exists()


def test_a_script_that_is_no_file_is_told_so(
    session: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Python names one that comes by standard input."""
    monkeypatch.setattr(session, "__file__", "<stdin>", raising=False)
    with pytest.raises(InputError, match=r"^local ranks import the script, but <stdin> is not a file: save the script"):
        launch(print, (), workers=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (weft.train, {"graph": "digits"}),
        (weft.predict, {"run": "."}),
        (weft.compare, {"graph": "digits", "strategies": ["single"]}),
    ],
)
def test_nothing_runs_while_a_process_imports_its_script(
    call: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in processes of somebody else's."""
    require_guard()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(InputError, match=r"^the script trains when it is imported"):
        call(**options)
    ended: list[int] = []
    monkeypatch.setattr(multiprocessing.current_process(), "_name", RANK)
    monkeypatch.setattr("os._exit", ended.append)
    with pytest.raises(InputError):
        require_guard()
    assert ended == [UNGUARDED]
