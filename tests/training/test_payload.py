"""Objects sent to local ranks: by name, by value from an interactive session, and errors if neither is possible."""

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
    """Return a `__main__` module with the definitions of a notebook cell."""
    module = ModuleType("__main__")
    exec(CELL, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def received(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Unpickle an object in a process without the session's definitions."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setitem(sys.modules, "__main__", ModuleType("__main__"))
        return Received(data).open()


def test_definitions_of_cells_are_sent_by_value(session: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    assert in_session()
    layer, shorten, load = received(pickled([session.Layer(), session.shorten, weft.load]), monkeypatch)
    assert layer.double() == 42
    assert shorten("accuracy") == "acc"
    assert load is weft.load, "importable objects are sent by name"
    # Plant an error: send the object by name.
    with pytest.raises(InputError, match="local ranks cannot import an object of the run"):
        received(pickle.dumps(session.Layer()), monkeypatch)


@pytest.mark.parametrize("name", ["Layer", "shorten"])
def test_without_cloudpickle_one_line_says_what_to_do(
    name: str, session: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "find_spec", lambda _: None)
    error = rf"^local ranks cannot import {'<lambda>' if name == 'shorten' else name}, which this session defines: "
    with pytest.raises(
        InputError, match=error + r"pip install 'weft\[notebook\]', or write it to a file \(%%writefile"
    ):
        pickled({"part": [getattr(session, name)]})
    assert received(pickled(weft.load), monkeypatch) is weft.load


@pytest.mark.usefixtures("in_a_script")
def test_definitions_of_a_script_are_sent_by_name() -> None:
    """Ranks import the script, so its classes need not be sent."""
    assert not in_session()
    assert Received(pickled(Path)).open() is Path
    error = r"^the loss cannot be sent to local ranks .*: define it with def or class in a module"
    with pytest.raises(InputError, match=error), sending("loss"):
        pickled(lambda: 0)


def test_a_name_that_a_rank_does_not_find_is_a_one_line_error() -> None:
    """Ranks do not find a class that is defined below the guard of its script."""
    with pytest.raises(
        InputError, match=r"cannot import .*not_there.*: define it with def or class at the top"
    ) as caught:
        Received(b"c__main__\nnot_there\n.").open()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_script_without_a_guard_is_refused(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(f"import weft\nweft.train('digits', strategy='tensor', workers=2, epochs=1, out={str(out)!r})\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    error = f"{script} trains when it is imported, and local ranks import it: put that code under `if __name__ =="
    assert lines[-1].startswith(f"weft.utils.errors.InputError: {error}")
    assert sum(line.startswith("Traceback") for line in lines) == 1, "ranks print no traceback"
    assert not out.exists()


def test_a_script_that_is_no_file_is_refused(
    session: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python names a script from standard input `<stdin>`."""
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
    """weft calls fail during the import of a script, in processes started by weft or by other libraries."""
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
