"""A command line's flags: one for each field of a schema."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from weft.config.config import Config, PartitionOptions
from weft.config.option import help_text
from weft.utils.errors import InputError, nearest
from weft.utils.migrate import FORMER_OPTIONS

COMMAND_FLAGS = (
    "--config",
    "--out",
    "--resume",
    "--strategies",
    "--what",
    "--layer",
    "--overwrite",
    "--quiet",
    "--json",
    "--undirected",
    "--serve",
    "--port",
    "--plan",
    "--machine",
    "--hosts",
    "--approximate",
)
"""Flags that are no fields of a schema."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and that takes no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": as_written, **options})

    def error(self, message: str) -> NoReturn:
        flag = re.match(r"unrecognized arguments: (--[a-z-]+)", message)
        if flag and (former := FORMER_OPTIONS.get(flag[1].removeprefix("--"))):
            message = f"{flag[1]} is now --{former}"
        elif flag and flag[1] in _flags():
            message = f"{flag[1]} has no effect here: leave it out"
        elif flag and (near := nearest(flag[1], _flags())):
            message = f"unknown flag {flag[1]}: did you mean {near}?"
        raise InputError(f"{message} (see {self.prog} --help)")


def _flags() -> list[str]:
    """Those of all commands."""
    fields = (*dataclasses.fields(Config), *dataclasses.fields(PartitionOptions))
    return [*COMMAND_FLAGS, *("--" + spec.name.replace("_", "-") for spec in fields)]


def integer(text: str) -> int:
    """A whole number in ASCII digits."""
    if not re.fullmatch(r"-?[0-9]{1,30}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number")
    return int(text)


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(integer(word) for word in text.split(","))


def real(text: str) -> float:
    """A number in ASCII digits."""
    if not re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|-?inf|nan", text, re.IGNORECASE | re.ASCII):
        raise argparse.ArgumentTypeError(f"'{text}' is no number")
    return float(text)


NUMBERS: dict[type, Callable[[str], Any]] = {int: integer, float: real}


def add_options(
    parser: argparse.ArgumentParser,
    schema: type[Config | PartitionOptions] = Config,
    *,
    leave_out: Sequence[str] = (),
    only: Sequence[str] | None = None,
) -> None:
    """One flag per field, in the help those of a section together; those not given are absent from the result."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for spec in dataclasses.fields(schema):
        if spec.name in leave_out or (only is not None and spec.name not in only):
            continue
        if spec.name == "graph":
            parser.add_argument("graph", nargs="?", default=argparse.SUPPRESS, help=spec.metadata["help"])
            continue
        section = spec.metadata["section"]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        flag = "--" + spec.name.replace("_", "-")
        text = f"{help_text(spec)} ({'none' if spec.default == '' else spec.default})".replace("%", "%%")
        if isinstance(spec.default, bool):
            action = argparse.BooleanOptionalAction
            groups[section].add_argument(flag, action=action, default=argparse.SUPPRESS, help=text)
        else:
            groups[section].add_argument(flag, type=kind_of(spec), default=argparse.SUPPRESS, metavar="X", help=text)


def kind_of(spec: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """What reads a field's value from the command line."""
    return NUMBERS.get(type(spec.default), str)


def parse_strategies(text: str) -> dict[str, dict[str, Any]]:
    """What `--strategies` says: by each name as it stands, the strategy and the flags that follow it by colons.

    InputError for the same twice, and for a flag or a value that there is not.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in text.split(","):
        strategy, *flags = name.split(":")
        parser = Parser(prog="weft compare", add_help=False)
        add_options(parser, leave_out=("graph", "strategy"))
        try:
            values = parser.parse_args([f"--{flag}" if flag else "" for flag in flags])
        except InputError as error:
            raise InputError(f"--strategies {name}: {error}") from error
        if name in found:
            raise InputError(f"--strategies {text}: give different names, separated by commas")
        found[name] = {"strategy": strategy, **given_fields(values, Config)}
    return found


def given_fields(options: argparse.Namespace, schema: type[Config | PartitionOptions]) -> dict[str, Any]:
    """The fields of a schema that a command line gives."""
    names = {spec.name for spec in dataclasses.fields(schema)}
    return {name: value for name, value in vars(options).items() if name in names}
