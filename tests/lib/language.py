"""Find names and docstrings that break the rules of CONTRIBUTING.md, "Language".

`python -m tests.lib.language weft/comm` prints each violation of the files in a folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("weft", "tests", "benchmarks", "examples")
VAGUE_NAMES = {"one", "found", "made", "told", "asked", "given", "known", "said", "held", "kept", "own"}
"""Names of variables and parameters that do not say what a variable contains."""
DIALECT = {"foretold", "retold", "hindsight", "everyone", "besides", "foreseen", "mirrored", "miniature"}
"""Words that have a standard word in the field (docs/glossary.md), as identifiers or parts of these."""
OPENINGS = re.compile(
    r"(That|Those|Of|The same|So|And|Such|As|Where|By|From|It|Its|They|Their|Whose|Whoever|What|How "
    r"(many|wide|much|long))\b"
)
"""First words of a docstring that refers to another text, or that names nothing."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PURE_CALLS = {
    *("Path", "abs", "all", "any", "dict", "equal", "getattr", "hasattr", "int", "isinstance", "is_relative_to"),
    *("isprintable", "item", "keys", "len", "list", "max", "members", "min", "range", "set", "sorted", "str", "strip"),
}
"""Functions and methods without side effects, which an assert may call: under python -O, no assert is executed."""


class Violation(NamedTuple):
    """A place that breaks a rule."""

    rule: str
    """The name of the rule."""
    path: str
    """Path of the file, relative to the repository."""
    line: int
    """Number of the line."""
    detail: str
    """The name or the sentence."""


def violations_of(name: str, nodes: list[ast.AST]) -> Iterator[Violation]:
    """Yield the violations of one file of Python, given its path and all nodes of its syntax tree."""
    for node in nodes:
        for line, identifier in names_of(node):
            if identifier in VAGUE_NAMES:
                yield Violation("vague name", name, line, identifier)
            if DIALECT & set(re.split(r"_|(?<=[a-z])(?=[A-Z])", identifier)):
                yield Violation("dialect", name, line, identifier)
        for docstring in docstrings_of(node):
            if OPENINGS.match(docstring.value.strip()):
                yield Violation("opening", name, docstring.lineno, docstring.value.strip().splitlines()[0])
        if isinstance(node, ast.Assert) and not Path(name).name.startswith("test_"):
            for effect in effects_of(node):
                yield Violation("effect in an assert", name, node.lineno, ast.unparse(effect))
    if name.startswith("weft/"):
        yield from undocumented_arguments(nodes[0], name)


def names_of(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable, parameter, function, or class that a node defines."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.id
    elif isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield node.lineno, node.name


def docstrings_of(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstring of a module, class or function, and those below its fields."""
    for statement in [] if isinstance(node, (ast.Lambda, ast.IfExp)) else getattr(node, "body", []):
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            yield statement.value


def effects_of(statement: ast.Assert) -> Iterator[ast.expr]:
    """Yield the parts of an assert's condition that may have a side effect.

    Test modules are exempt, because pytest rewrites their asserts, which are then executed in any case.
    """
    for node in ast.walk(statement.test):
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            yield node
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in PURE_CALLS:
                yield node


def undocumented_arguments(tree: ast.AST, name: str) -> Iterator[Violation]:
    """Yield the public functions of two or more parameters whose docstring has no section `Args`."""
    scopes = [tree]
    while scopes:
        scope = scopes.pop()
        for node in scope.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                scopes.append(node)
            if not isinstance(node, FUNCTIONS) or (node.name.startswith("_") and node.name != "__init__"):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            number = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            docstring = ast.get_docstring(node)
            # Without a docstring, a method is documented by the class that it overrides, `__init__` by its class.
            if docstring and number > 1 and not re.search(r"^Args:$", docstring, re.MULTILINE):
                yield Violation("no Args", name, node.lineno, node.name)


def all_violations(root: Path | None = None) -> list[Violation]:
    """Return the violations of all files below a folder, by default of the whole repository."""
    violations: list[Violation] = []
    classes: dict[str, list[Violation]] = defaultdict(list)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        nodes = list(ast.walk(ast.parse(path.read_text())))
        violations += violations_of(name, nodes)
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and name.startswith("weft/"):
                classes[node.name].append(Violation("duplicate class", name, node.lineno, node.name))
    violations += [place for places in classes.values() if len(places) > 1 for place in places]
    below = root.resolve().relative_to(ROOT).as_posix() if root else ""
    return [violation for violation in violations if violation.path.startswith(below)]


if __name__ == "__main__":
    for violation in all_violations(Path(sys.argv[1]) if len(sys.argv) > 1 else None):
        print(f"{violation.path}:{violation.line}: {violation.rule}: {violation.detail}")
