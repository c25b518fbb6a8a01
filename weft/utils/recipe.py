"""Reading of a recipe: the numbers that describe a graph, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

from weft.utils.errors import InputError, unknown

SUFFIXES = {"k": Decimal(10**3), "m": Decimal(10**6), "g": Decimal(10**9), "b": Decimal(10**9), "%": Decimal("0.01")}
"""Factors by the last letter of a number."""
EXAMPLES = {
    "rmat": "rmat:vertices=100k,edges=1m",
    "sbm": "sbm:vertices=10k,degree=10,classes=8",
    "cites": "cites:vertices=100k,edges=1.4m,features=128,classes=172",
}
"""A recipe of each generator, which errors show."""


def parse(kind: str, text: str, defaults: Mapping[str, float | None], *, example: str = "") -> dict[str, float]:
    """Return the numbers of a recipe `key=value,...`, in which leading values need no keys.

    Args:
        kind: Name of the generator, for errors.
        text: The recipe after `kind:`.
        defaults: Default of each key, in order; None: the key is required.
        example: Example of a recipe, for errors.

    Raises:
        InputError: For an unknown or missing key, and for a value that is no number.
    """
    values: dict[str, float | None] = dict(defaults)
    named = False
    for i, item in enumerate(part.strip() for part in text.split(",")):
        key, equals, value = item.partition("=")
        if equals:
            named = True
        else:
            if named or i >= len(defaults):
                raise InputError(f"{kind}: '{item}' has no key: write it as key=value, with {', '.join(defaults)}")
            key, value = list(defaults)[i], item
        if key not in defaults:
            raise unknown(f"{kind} key", key, defaults)
        values[key] = number(kind, key, value)
    for key, optional in values.items():
        if optional is None:
            raise InputError(f"{kind}: '{key}' is missing: add {key}=..., for example '{example or EXAMPLES[kind]}'")
    return {key: optional for key, optional in values.items() if optional is not None}


def number(kind: str, key: str, text: str) -> float:
    """Return a nonnegative number, which may have a suffix k, m, g, b or %.

    Args:
        kind: Name of the generator, for errors.
        key: Key of the value, for errors.
        text: The number.

    Raises:
        InputError: The text is not such a number.
    """
    factor = SUFFIXES.get(text[-1:].lower())
    try:
        value = float(Decimal(text[:-1]) * factor if factor else Decimal(text))
    except (InvalidOperation, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InputError(f"{kind}: {key}={text} is no number from 0 on: write it like {key}=5, or 100k, 1m, 2g")
    return value


def whole_number(kind: str, values: dict[str, float], key: str) -> int:
    """Return a value as an int.

    Args:
        kind: Name of the generator, for errors.
        values: Values by key.
        key: Key of the value.

    Raises:
        InputError: If it has a fraction.
    """
    if values[key] != int(values[key]):
        raise InputError(f"{kind}: {key}={values[key]:g} is no whole number: round it")
    return int(values[key])
