"""TOML files of options, with a table for each section. Errors name the file, the section and the option."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from weft.config.option import checked, help_text, unknown_option
from weft.config.value_range import ValueRange, as_range
from weft.utils.errors import InputError, readable, unknown
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_OPTIONS_BYTES, read_text

WIDTH = 100
"""Width of help texts in files."""
MENTIONED = re.compile(r"^unknown (\w+)(?= ')|--([a-z][a-z-]*)")
"""Option that an error message is about: the first one that it mentions."""

CHOICES = "choices.json"
"""File in the folder of a run with the kernel implementations that it used."""


def with_choices(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a file, with the kernel implementations next to it if it belongs to a run.

    Args:
        path: The file.
        values: Its options.
    """
    choices = path.parent / CHOICES
    return values if values.get("choices") or not choices.exists() else values | {"choices": str(choices)}


def read_options(path: Path, schema: type, *, several: bool = False) -> dict[str, Any]:
    """Return the options in a file by name. Each is in the table of its section, or in none.

    Args:
        path: The file.
        schema: Dataclass whose fields are the options.
        several: True if an option may be a list of values, not empty and without duplicates, or a `ValueRange`.

    Raises:
        InputError: The file cannot be read; a section or an option does not exist, or is in another section; or a value
            is not valid. The message is one line.
    """
    with readable(path, "correct it, or give another file"):
        tables = migrate.options(tomllib.loads(read_text(path, MAX_OPTIONS_BYTES)), path)
    specs = {spec.name: spec for spec in dataclasses.fields(schema)}
    options: dict[str, Any] = {}
    for section, name, value in _entries(path, tables, {spec.metadata["section"] for spec in specs.values()}):
        place = f"{path}:{f' [{section}]' if section else ''}"
        if name not in specs:
            raise InputError(f"{place} {unknown_option(name, specs)}")
        if section not in ("", specs[name].metadata["section"]):
            raise InputError(f"{place} {name} belongs to [{specs[name].metadata['section']}]: move it there")
        if name in options:
            raise InputError(f"{place} {name} is given twice: leave one out")
        with named_by(path, schema, [name], bare=not section):
            options[name] = _value(specs[name], value, several=several)
    return options


def _entries(path: Path, tables: dict[str, Any], sections: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield the section, or an empty string without one, the name and the value of each entry of a file."""
    for name, value in tables.items():
        if not isinstance(value, dict):
            yield "", name, value
        elif name not in sections:
            raise InputError(f"{path}: {unknown('section', name, sections)}")
        else:
            yield from ((name, inner, item) for inner, item in value.items())


def _value(spec: dataclasses.Field[Any], value: Any, *, several: bool) -> Any:
    """Return a checked value of an option, a list of values, or a range.

    Raises:
        InputError: A value is not valid.
    """
    if several and isinstance(value_range := as_range(spec, value), ValueRange):
        return value_range
    if not several or not isinstance(value, list):
        return checked(spec, value)
    values = [checked(spec, item) for item in value]
    if not values or len(set(values)) < len(values):
        raise InputError(f"--{spec.name.replace('_', '-')} {value}: give at least one value, and none twice")
    return values


@contextmanager
def named_by(path: Path | None, schema: type, names: Collection[str], *, bare: bool = False) -> Iterator[None]:
    """Make errors about options, raised in the `with` block, name the place in a file instead of the flag.

    Args:
        path: The file; None: leave errors unchanged.
        schema: Dataclass whose fields are the options.
        names: Names of the options that the file contains.
        bare: True if the options are in none of the tables of the file.
    """
    try:
        yield
    except InputError as error:
        text = str(error)
        mentioned = MENTIONED.search(text)
        name = (mentioned[1] or mentioned[2]).replace("-", "_") if mentioned else ""
        if path is None or mentioned is None or name not in names:
            raise
        (spec,) = (spec for spec in dataclasses.fields(schema) if spec.name == name)
        key = name if bare else f"[{spec.metadata['section']}] {name}"
        start = mentioned.end() - len(mentioned[0].removeprefix("unknown "))
        raise InputError(f"{path}: {text[:start]}{key}{text[mentioned.end() :]}") from error


def options_text(schema: type, values: Mapping[str, Any], *, explained: bool = False) -> str:
    """Return the text of an option file.

    Args:
        schema: Dataclass whose fields are the options.
        values: Values by name.
        explained: True to add the help text of each option, and options without a value as comments with their
            defaults.
    """
    sections: dict[str, list[str]] = {}
    for spec in dataclasses.fields(schema):
        if not explained and spec.name not in values:
            continue
        lines = sections.setdefault(spec.metadata["section"], [])
        if explained:
            lines += [f"# {line}" for line in textwrap.wrap(help_text(spec), WIDTH, break_on_hyphens=False)]
        line = tomli_w.dumps({spec.name: values.get(spec.name, spec.default)}).strip()
        line = "".join(c if c.isprintable() or c == "\n" else f"\\U{ord(c):08x}" for c in line)
        lines.append(line if spec.name in values else f"#{line}")
    version = f"version = {migrate.VERSIONS['options']}  # of this file's format\n"
    return "\n".join([version, *("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())])
