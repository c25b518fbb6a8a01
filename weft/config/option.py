"""Options: fields of a dataclass with a help text, valid values, and a section in files and in the help."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from weft.config.familiar import options_for
from weft.utils.errors import InputError, unknown
from weft.utils.files.migrate import FORMER_OPTIMISATIONS, FORMER_OPTIONS
from weft.utils.units import parse_bytes


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    several: tuple[str, ...] = (),
    amount: bool = False,
    fixed: bool = False,
    section: str = "",
) -> Any:
    """Return a field of a dataclass that is an option.

    Args:
        default: Default value.
        help: Help text.
        least: Smallest valid value.
        below: Value that valid values are below.
        most: Largest valid value.
        choices: Valid values.
        several: Valid words of a value that contains words separated by commas.
        amount: True for a number of bytes, which may be text with a unit, such as 512MB; empty: not given.
        fixed: True if the option affects a run's results, so that a resumed run must not change it.
        section: Section in files and in the help.
    """
    metadata = {
        "help": help,
        "least": least,
        "below": below,
        "most": most,
        "choices": choices,
        "several": several,
        "amount": amount,
        "fixed": fixed,
        "section": section,
    }
    return field(default=default, metadata=metadata)


def help_text(spec: dataclasses.Field[Any]) -> str:
    """Return the help text of a field, with its valid values unless the text names them."""
    text, choices = str(spec.metadata["help"]), spec.metadata["choices"]
    return text if all(choice in text for choice in choices) else f"{text}; one of {', '.join(choices)}"


def checked(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Check the value of a field, and return it with its final type.

    Args:
        spec: The field.
        value: The value.

    Raises:
        InputError: The value is not valid. The message names the flag.
    """
    flag = "--" + spec.name.replace("_", "-")
    kind = type(spec.default)
    if kind is float and type(value) is int:
        value = float(value)
    is_amount = spec.metadata["amount"]
    if kind is str and type(value) is int and not is_amount:
        value = str(value)  # such as batch_size=1024, which may also be "all"
    if type(value) is not kind and not (is_amount and type(value) is int):
        raise InputError(f"{flag} {value!r}: give a value of type {kind.__name__}")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{flag} {value}: no file of options can hold bytes that are not UTF-8: rename the file")
    if is_amount:
        bytes_of(str(value), flag)
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


def bytes_of(amount: int | str, flag: str) -> int | None:
    """Return the bytes of an amount, or None if it is empty.

    Args:
        amount: A number of bytes, or text such as 512MB.
        flag: The flag, for the error.

    Raises:
        InputError: The text is not an amount.
    """
    if isinstance(amount, int):
        return amount
    return parse_bytes(amount, flag) if amount else None


def unknown_option(name: str, names: Collection[str], what: str = "option") -> InputError:
    """Return the error for an option that does not exist, with its new name, or weft's name for it, if there is one.

    Args:
        name: The name.
        names: Names of all options.
        what: Kind of thing that the name should be.
    """
    today = FORMER_OPTIONS.get(name)
    if (options := options_for(name)) and set(options) <= set(names):
        return InputError(f"unknown {what} '{name}': use {' and '.join(options)}")
    return InputError(f"{name} is now called {today}") if today in names else unknown(what, name, names)


@dataclass(frozen=True, kw_only=True)
class CheckedOptions:
    """Base of dataclasses whose fields are options. Their values are checked when an instance is made."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            object.__setattr__(self, spec.name, checked(spec, getattr(self, spec.name)))

    def non_defaults(self, leave_out: Collection[str] = ()) -> dict[str, Any]:
        """Return the values that differ from their defaults, by name, except for those of the fields in `leave_out`."""
        specs = (spec for spec in dataclasses.fields(self) if spec.name not in leave_out)
        return {spec.name: value for spec in specs if (value := getattr(self, spec.name)) != spec.default}
