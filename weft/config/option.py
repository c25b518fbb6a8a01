"""What an option is: a field with its help text, its legal values and its section in files and help."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import field
from typing import Any

from weft.utils.errors import InputError, unknown
from weft.utils.migrate import FORMER_OPTIMISATIONS, FORMER_OPTIONS


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    several: tuple[str, ...] = (),
    fixed: bool = False,
    section: str = "",
) -> Any:
    """A field with its help text and its legal values; `fixed` ones decide the numbers, so a resumed run keeps them.

    choices: one of them. several: any of them, separated by commas. section: of files and of the help.
    """
    metadata = {
        "help": help,
        "least": least,
        "below": below,
        "most": most,
        "choices": choices,
        "several": several,
        "fixed": fixed,
        "section": section,
    }
    return field(default=default, metadata=metadata)


def help_text(spec: dataclasses.Field[Any]) -> str:
    """What a field means, with the values that it may have where the words do not name them."""
    text, choices = str(spec.metadata["help"]), spec.metadata["choices"]
    return text if all(one in text for one in choices) else f"{text}; one of {', '.join(choices)}"


def checked(spec: dataclasses.Field[Any], value: Any) -> Any:
    """A value of a field, as it is kept. InputError, by its flag, for one that is not legal."""
    flag = "--" + spec.name.replace("_", "-")
    kind = type(spec.default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise InputError(f"{flag} {value!r}: give a value of type {kind.__name__}")
    least, below, most = (spec.metadata[name] for name in ("least", "below", "most"))
    choices = spec.metadata["choices"]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{flag} {value}: give a finite number")
    if least is not None and not value >= least:
        raise InputError(f"{flag} {value}: give at least {least}")
    if below is not None and not value < below:
        raise InputError(f"{flag} {value}: give less than {below}")
    if most is not None and not value <= most:
        raise InputError(f"{flag} {value}: give at most {most}")
    if choices and value not in choices:
        raise unknown(flag, str(value), choices)
    for name in filter(None, str(value).split(",")) if spec.metadata["several"] else ():
        if name in FORMER_OPTIMISATIONS:
            raise InputError(f"{flag} {name} is now called {FORMER_OPTIMISATIONS[name]}")
        if name not in spec.metadata["several"]:
            raise unknown(flag, name, spec.metadata["several"])
    return value


def unknown_option(name: str, known: Collection[str], what: str = "option") -> InputError:
    """Return the error for the name of an option that does not exist, with its new name if it was renamed."""
    today = FORMER_OPTIONS.get(name)
    return InputError(f"{name} is now called {today}") if today in known else unknown(what, name, known)
