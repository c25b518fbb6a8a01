"""What a process sends to its local ranks: by name what they can import, by value what a notebook's cells define.

Both ends are processes of one person's, and what goes between them is a pipe; no file is ever read so.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from weft.utils.errors import InputError, cause


class Sent:
    """An object on its way to a rank, which finds a `Received` in its place."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        return Received, (pickled(self._value),)


class Received:
    """An object that has come to a rank, in bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self) -> Any:
        """The object. InputError where the rank does not find what it is made of."""
        try:
            return pickle.loads(self._data)
        except (AttributeError, ImportError) as error:
            raise InputError(
                f"local ranks do not find what they are sent ({cause(error)}): define it by def or class at the top of "
                "the script, or in a module"
            ) from error


def pickled(value: Any) -> bytes:
    """An object in bytes for local ranks. Whatever pickling raises; InputError see `ByName`."""
    if in_session() and find_spec("cloudpickle"):
        return bytes(import_module("cloudpickle").dumps(value))
    file = io.BytesIO()
    (ByName if in_session() else pickle.Pickler)(file).dump(value)
    return file.getvalue()


class ByName(pickle.Pickler):
    """InputError for what a session defines, which ranks cannot import."""

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, type | FunctionType) and one.__module__ == "__main__":
            raise InputError(
                f"local ranks do not have {one.__qualname__}, which this session defines: pip install "
                "'weft[notebook]', or write it to a file (%%writefile model.py) and import it"
            )
        return NotImplemented


def in_session() -> bool:
    """Whether this process's own definitions are in no file that ranks could import: in a notebook, or at a prompt."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")


@contextmanager
def sending(what: str) -> Iterator[None]:
    """InputError, which names it, for something that cannot be sent to local ranks."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # an object of a person's own may raise anything here
        raise InputError(
            f"the {what} cannot be sent to local ranks ({cause(error)}): define it by def or class in a module, and "
            "open files and connections at its first call"
        ) from error
