"""Command line flags, one for each field of a schema, such as the options of a run."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from weft.config.config import OPTIONS
from weft.config.familiar import FAMILIAR_COMMANDS, options_for
from weft.config.option import help_text
from weft.utils.errors import InputError, nearest
from weft.utils.files.migrate import FORMER_OPTIONS


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in one line and accepts no abbreviated flags.

    Args:
        root: Parser of all commands. None: this one.
        **options: Arguments of `ArgumentParser`.
    """

    def __init__(self, *, root: Parser | None = None, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": formatter, **options})
        self._root = root or self

    def add_subparsers(self, **options: Any) -> Any:
        """Add the parsers of commands. They share the root, so that an error can recognise a flag of another command.

        Args:
            **options: Arguments of `ArgumentParser.add_subparsers`.
        """
        return super().add_subparsers(**{"parser_class": partial(Parser, root=self._root), **options})

    def words(self, path: str = "") -> Iterator[tuple[str, list[str]]]:
        """Yield the words that may follow each command, the longest commands first.

        Args:
            path: The command of this parser with a space after each word, without weft.
        """
        commands: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                commands = dict(action.choices)
        for name, command in commands.items():
            yield from command.words(f"{path}{name} ")
        positional = [word for action in self._actions if not action.option_strings for word in action.choices or ()]
        yield path, positional or self._flags()

    def _flags(self) -> list[str]:
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments, and refuse unknown ones here, in the parser of the command that they were given to.

        Args:
            args: The arguments. Default: those of the process.
            namespace: Object to store the values in.
        """
        values, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return values, others

    def error(self, message: str) -> NoReturn:
        """Raise InputError for refused arguments, with a hint for misspelt commands and former or misplaced flags."""
        flags = self._flags()
        command = re.match(r"argument \S+: invalid choice: '(.+)' \(choose from (.+)\)", message)
        if command and command[1] in FAMILIAR_COMMANDS:
            message = f"unknown command {command[1]}: {FAMILIAR_COMMANDS[command[1]]}"
        elif command and (near := nearest(command[1], re.findall(r"[\w-]+", command[2]))):
            message = f"unknown command {command[1]}: did you mean {near}?"
        flag = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if flag and (former := FORMER_OPTIONS.get(flag[1].removeprefix("--"))):
            message = f"{flag[1]} is now --{former}"
        elif flag and flag[1] in _all_flags(self._root):
            near = nearest(flag[1], flags)
            message = f"{flag[1]} has no effect here: leave it out" + (f", or use {near}" if near else "")
        elif flag and (options := [*map(flag_of, options_for(flag[1].removeprefix("--")))]) and {*options} <= {*flags}:
            message = f"unknown flag {flag[1]}: use {' and '.join(options)}"
        elif flag and (near := nearest(flag[1], flags)):
            message = f"unknown flag {flag[1]}: did you mean {near}?"
        raise InputError(f"{message} (see {self.prog} --help)")


def _all_flags(root: Parser) -> set[str]:
    """Return the flags of the commands, except of those that take fixed words, and of all options of training.

    Args:
        root: Parser of all commands, or of the options of one strategy.
    """
    flags = {word for _, words in root.words() for word in words if word.startswith("--")}
    return flags | {*map(flag_of, OPTIONS)}


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def integer(text: str) -> int:
    """Parse a whole number in ASCII digits."""
    if not re.fullmatch(r"-?[0-9]{1,30}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    return int(text)


def integers(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas."""
    return tuple(integer(word) for word in text.split(","))


def real(text: str) -> float:
    """Parse a number in ASCII digits."""
    if not re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|-?inf|nan", text, re.IGNORECASE | re.ASCII):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number")
    return float(text)


NUMBERS: dict[type, Callable[[str], Any]] = {int: integer, float: real}
"""Parsers of numbers by type."""


def add_options(
    parser: argparse.ArgumentParser,
    specs: Iterable[dataclasses.Field[Any]] = tuple(OPTIONS.values()),
    *,
    leave_out: Sequence[str] = (),
    only: Sequence[str] | None = None,
) -> None:
    """Add a flag for each field of a dataclass to a parser, grouped by section in the help.

    Flags that are not given are absent from the parsed result.

    Args:
        parser: The parser.
        specs: The fields. Default: all options of a run.
        leave_out: Names of fields without a flag.
        only: Names of the fields that get a flag. Default: all.
    """
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for spec in specs:
        if spec.name in leave_out or (only is not None and spec.name not in only):
            continue
        if spec.name == "graph":
            parser.add_argument("graph", nargs="?", default=argparse.SUPPRESS, help=spec.metadata["help"])
            continue
        section = spec.metadata["section"]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        flag = flag_of(spec.name)
        text = f"{help_text(spec)} (default: {'none' if spec.default == '' else spec.default})".replace("%", "%%")
        if isinstance(spec.default, bool):
            action = argparse.BooleanOptionalAction
            groups[section].add_argument(flag, action=action, default=argparse.SUPPRESS, help=text)
        else:
            groups[section].add_argument(flag, type=parser_of(spec), default=argparse.SUPPRESS, metavar="X", help=text)


def parser_of(spec: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """Return the function that parses a field's value from the command line."""
    return NUMBERS.get(type(spec.default), str)


def parse_strategies(text: str) -> dict[str, dict[str, Any]]:
    """Parse `--strategies`: names separated by commas, each with flags of its strategy after colons.

    Returns:
        For each name as written, the strategy and the fields that its flags set.

    Raises:
        InputError: A name occurs twice, or a flag or its value is invalid.
    """
    fields_by_name: dict[str, dict[str, Any]] = {}
    for name in text.split(","):
        strategy, *flags = name.split(":")
        parser = Parser(prog="weft compare", add_help=False)
        add_options(parser, leave_out=("graph", "strategy"))
        try:
            values = parser.parse_args([f"--{flag}" if flag else "" for flag in flags])
        except InputError as error:
            raise InputError(f"--strategies {name}: {error}") from error
        if name in fields_by_name:
            raise InputError(f"--strategies {text}: give different names, separated by commas")
        fields_by_name[name] = {"strategy": strategy, **given_fields(values)}
    return fields_by_name


def given_fields(options: argparse.Namespace, names: Collection[str] = OPTIONS) -> dict[str, Any]:
    """Return the fields that the command line sets, by name.

    Args:
        options: The parsed command line.
        names: Names of the fields. Default: those of all options of a run.
    """
    return {name: value for name, value in vars(options).items() if name in names}
