"""Objects sent to local ranks: pickled by reference if the ranks can import them, by value if a notebook defines them.

Both ends are processes of the same user, connected by a pipe. No file is ever unpickled.
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
    """Object to send to a rank, which receives a `Received` in its place.

    Args:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        return Received, (pickled(self._value),)


class Received:
    """Pickled object that a rank has received.

    Args:
        data: The bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self) -> Any:
        """Unpickle the object.

        Raises:
            InputError: This process cannot import something that the object refers to.
        """
        try:
            return pickle.loads(self._data)
        except (AttributeError, ImportError) as error:
            raise InputError(
                f"local ranks cannot import an object of the run ({cause(error)}): define it with def or class at the "
                "top "
                "level of the script, or in a module"
            ) from error


def pickled(value: Any) -> bytes:
    """Pickle an object for local ranks. Raises whatever pickling raises.

    Raises:
        InputError: A session defines the object, and cloudpickle is not installed.
    """
    if in_session() and find_spec("cloudpickle"):
        return bytes(import_module("cloudpickle").dumps(value))
    file = io.BytesIO()
    (ByName if in_session() else pickle.Pickler)(file).dump(value)
    return file.getvalue()


class ByName(pickle.Pickler):
    """Pickler that raises InputError for objects of a session, which ranks cannot import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise InputError(
                f"local ranks cannot import {value.__qualname__}, which this session defines: pip install "
                "'weft[notebook]', or write it to a file (%%writefile model.py) and import it"
            )
        return NotImplemented


def in_session() -> bool:
    """Return True if this process defines objects in no file that ranks could import: in a notebook or at a prompt."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")


@contextmanager
def sending(name: str) -> Iterator[None]:
    """Turn any exception while an object is pickled into an InputError that names it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # a user's object may raise anything here
        raise InputError(
            f"the {name} cannot be sent to local ranks ({cause(error)}): define it with def or class in a module, and "
            "open files and connections only when it is first called"
        ) from error
