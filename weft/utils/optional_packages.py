"""Packages that weft works without, imported where they are used."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from weft.utils.errors import InputError, cause

EXTRAS = {
    "altair": "report",
    "pandas": "tables",
    "pyarrow": "tables",
    "torch_geometric": "pyg",
    "vl_convert": "report",
}
"""The extra of weft that installs each, by the name that is imported."""


def import_extra(name: str, what: str) -> Any:
    """A module of such a package. what: a person asked for that needs it, which begins the error.

    InputError where it is not installed, or does not load.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing_package(name, what) from error
    except ImportError as error:
        raise missing_package(name, f"{what}: {cause(error)}") from error


def check_extra(name: str, what: str) -> None:
    """InputError where such a package is not installed; imports nothing."""
    if find_spec(name) is None:
        raise missing_package(name, what)


def missing_package(name: str, what: str) -> InputError:
    """The error for a package that is not there."""
    package = name.partition(".")[0]
    return InputError(f"{what}: needs {package}: {install_command(EXTRAS[package])}")


def install_command(extra: str) -> str:
    """What installs an extra of weft."""
    return f"pip install 'weft[{extra}]'"
