"""Optional packages, which weft imports only where they are used."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from weft.utils.errors import InputError, cause
from weft.utils.user_folders import with_home

EXTRAS = {
    "altair": "report",
    "pandas": "tables",
    "pyarrow": "tables",
    "tensorboard": "tensorboard",
    "torch_geometric": "pyg",
    "vl_convert": "report",
}
"""Extra of weft that installs each package, by the name that is imported."""


def import_extra(name: str, what: str) -> Any:
    """Return a module of an optional package.

    Args:
        name: Full name of the module.
        what: What needs it; the error begins with this.

    Raises:
        InputError: The package is not installed, or its import fails.
    """
    try:
        with with_home():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing_package(name, what) from error
    except ImportError as error:
        raise missing_package(name, f"{what}: {cause(error)}") from error


def check_extra(name: str, what: str) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        name: Name of the package.
        what: What needs it; the error begins with this.

    Raises:
        InputError: The package is not installed.
    """
    if find_spec(name) is None:
        raise missing_package(name, what)


def missing_package(name: str, what: str) -> InputError:
    """Return the error for a package that is not installed.

    Args:
        name: Full name of a module of the package.
        what: What needs it.
    """
    package = name.partition(".")[0]
    return InputError(f"{what}: needs {package}: {install_command(EXTRAS[package])}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra of weft."""
    return f"pip install 'weft[{extra}]'"
