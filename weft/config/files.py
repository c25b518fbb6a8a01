"""TOML files of options: a table for each section of a schema, and errors that name file, section and key."""

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
from weft.utils import migrate
from weft.utils.errors import InputError, readable, unknown

WIDTH = 100
MENTIONED = re.compile(r"^unknown (\w+)(?= ')|--([a-z][a-z-]*)")
"""The option that an error is about: the first that it mentions."""


CHOICES = "choices.json"
"""Beside the configuration of a run: the implementations of kernels that it used."""


def with_choices(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The options that a file gives, with the implementations beside it, if it is of a run and names no others."""
    beside = path.parent / CHOICES
    return values if values.get("choices") or not beside.exists() else values | {"choices": str(beside)}


def read_options(path: Path, schema: type, *, several: bool = False) -> dict[str, Any]:
    """The options that a file gives, by name, each in the table of its section; a file without tables will do as well.

    several: an option may be a list of values, which is not empty and has none twice. InputError, in one line, for a
    file that cannot be read, for a section or an option that there is not, or in another section, and for a value that
    is none.
    """
    with readable(path, "mend it, or give another file"):
        tables = migrate.options(tomllib.loads(path.read_text()), path)
    specs = {spec.name: spec for spec in dataclasses.fields(schema)}
    found: dict[str, Any] = {}
    for section, name, value in _entries(path, tables, {spec.metadata["section"] for spec in specs.values()}):
        place = f"{path}:{f' [{section}]' if section else ''}"
        if name not in specs:
            raise InputError(f"{place} {unknown_option(name, specs)}")
        if section not in ("", specs[name].metadata["section"]):
            raise InputError(f"{place} {name} belongs to [{specs[name].metadata['section']}]: move it there")
        if name in found:
            raise InputError(f"{place} {name} is given twice: leave one out")
        with named_by(path, schema, [name], bare=not section):
            found[name] = _value(specs[name], value, several=several)
    return found


def _entries(path: Path, tables: dict[str, Any], sections: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Section, or '' without one, name and value of what stands in a file."""
    for name, value in tables.items():
        if not isinstance(value, dict):
            yield "", name, value
        elif name not in sections:
            raise InputError(f"{path}: {unknown('section', name, sections)}")
        else:
            yield from ((name, inner, one) for inner, one in value.items())


def _value(spec: dataclasses.Field[Any], value: Any, *, several: bool) -> Any:
    """A value of an option, or a list of such. InputError where it is none."""
    if not several or not isinstance(value, list):
        return checked(spec, value)
    values = [checked(spec, one) for one in value]
    if not values or len(set(values)) < len(values):
        raise InputError(f"--{spec.name.replace('_', '-')} {value}: give one value or more, and each once")
    return values


@contextmanager
def named_by(path: Path | None, schema: type, names: Collection[str], *, bare: bool = False) -> Iterator[None]:
    """Errors about an option whose name is among some say where it stands in a file, not which flag it has.

    bare: in none of the file's tables. None: there is no file.
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
    """The text of a file that gives some values.

    explained: with what each option means, and, behind a #, those that have no value here by their defaults.
    """
    sections: dict[str, list[str]] = {}
    for spec in dataclasses.fields(schema):
        if not explained and spec.name not in values:
            continue
        lines = sections.setdefault(spec.metadata["section"], [])
        if explained:
            lines += [f"# {line}" for line in textwrap.wrap(help_text(spec), WIDTH, break_on_hyphens=False)]
        line = tomli_w.dumps({spec.name: values.get(spec.name, spec.default)}).strip()
        lines.append(line if spec.name in values else f"#{line}")
    version = f"version = {migrate.VERSIONS['options']}  # of this file's format\n"
    return "\n".join([version, *("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())])
