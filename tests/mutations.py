"""Mutation testing: change single expressions of weft at random, and report which changes the tests catch.

`python -m tests.mutations --seed 1 --count 20 --paths weft/comm,weft/strategies` draws changes of lines that tests
run, applies each to a copy of the tree, and runs the tests of its line there. Run `python -m tests.covered` first:
it records which tests run a line.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import signal
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coverage import CoverageData

from tests.covered import DATA, ROOT, test_of
from tests.lib.tree_copy import Outcome, TreeCopy

ROWS = {"rows", "ids", "row_ids", "received", "needed", "index", "indices", "places", "vertices", "sources", "fetched"}
"""Names of variables that contain a row or a number for each vertex; a change drops the last."""
OPPOSITES = {"max": "min", "amax": "amin", "maximum": "minimum"}
OPPOSITES |= {low: high for high, low in OPPOSITES.items()}
ORDERS: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
TYPES = {"list", "dict", "tuple", "set", "type"}
OFTEN_EQUIVALENT = {"order", "extreme"}
"""Kinds of changes that matter only for equal or for several values, which may never occur at a line."""
LIMIT_SECONDS = 120
WHOLE_SECONDS = 1800


@dataclass
class Mutation:
    """A change of one expression, the tests that run its line, and the outcome."""

    path: str
    line: int
    kind: str
    start: int
    stop: int
    text: str
    before: str
    after: str
    verdict: str = ""
    by: str = ""
    seconds: float = 0.0
    passed: int = 0
    tests: list[str] = field(default_factory=list, repr=False)

    def apply(self, source: bytes) -> bytes:
        """Return the file's bytes with the change."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def judge(self, outcome: Outcome) -> None:
        """Record the outcome of a run: a failed test catches the change, a run that exceeds its time limit does not."""
        suspect = " (equivalent?)" if self.kind in OFTEN_EQUIVALENT else ""
        survived = f"survived{suspect}" if outcome.finished else "unfinished"
        self.verdict = "caught" if outcome.failed else survived
        self.by, self.seconds, self.passed = outcome.failed, outcome.seconds, outcome.passed


def runs(node: ast.AST, statement: int = 0, backward: bool = False) -> Iterator[tuple[ast.AST, int, bool]]:
    """Yield the nodes below a node, except messages, types and defaults, as (node, line of its statement, backward).

    backward: True in a function that returns gradients.
    """
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.FunctionDef(name, _, body):
            children, backward = list(body), name in ("backward", "gradients")
        case ast.ClassDef(body=body):
            children = list(body)
        case ast.AnnAssign(value=value):
            children = [value] if value else []
    statement = node.lineno if isinstance(node, ast.stmt) else statement
    yield node, statement, backward
    for child in children:
        yield from runs(child, statement, backward)


def changes(node: ast.AST, *, backward: bool) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the possible changes of an expression, as (kind, the part that is replaced, its new text)."""
    text = ast.unparse
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right) if not (is_sequence(left) or is_sequence(right)):
            yield "sign", node, f"(({text(left)}) {'-' if isinstance(op, ast.Add) else '+'} ({text(right)}))"
        case ast.BinOp(left, ast.Mult()) if not is_sequence(left):
            yield "sign", left, f"(-({text(left)}))"
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield "sign", node, f"({text(operand)})"
        case ast.Subscript(_, ast.Slice(lower, upper), ast.Load()):
            if upper is not None:
                yield "slice", upper, f"({text(upper)}) - 1"
            if lower is not None:
                yield "slice", lower, f"({text(lower)}) + 1"
        case ast.Subscript(ast.Name(name)) if name in TYPES or name[0].isupper():
            return
        case ast.Subscript(_, ast.Name() | ast.BinOp() | ast.Constant(int()) as index, ast.Load()):
            yield "slice", index, f"({text(index)}) + 1"
        case ast.Compare(left, [op], [right]) if type(op) in ORDERS:
            yield "order", node, f"(({text(left)}) {ORDERS[type(op)]} ({text(right)}))"
        case ast.BoolOp(op, values):
            other = " or " if isinstance(op, ast.And) else " and "
            yield "logic", node, f"({other.join(f'({text(value)})' for value in values)})"
        case ast.Return(ast.Tuple(elements)) if backward:
            yield from (("gradient", part, "None") for part in elements if not isinstance(part, ast.Constant))
        case ast.Return(ast.expr() as value) if backward:
            yield "gradient", value, f"({text(value)}) * 0"
        case ast.Call(function):
            yield from changed_call(node, getattr(function, "attr", getattr(function, "id", "")))


def changed_call(call: ast.Call, name: str) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the changes of a call of the function `name`: its opposite, no gradient, or one row fewer."""
    text, function = ast.unparse, call.func
    if name in OPPOSITES:
        owner = f"{text(function.value)}." if isinstance(function, ast.Attribute) else ""
        yield "extreme", function, owner + OPPOSITES[name]
    if name in ("backward", "requires_grad_") and isinstance(function, ast.Attribute):
        yield "gradient", call, f"({text(function.value)}).detach()"
    for part in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if isinstance(part, ast.Name) and part.id in ROWS and name != "isinstance":
            yield "rows", part, f"{part.id}[:-1]"
        elif name == "cat" and isinstance(part, ast.List | ast.Tuple) and len(part.elts) > 1:
            yield "rows", part, text(ast.List(part.elts[:-1], ast.Load()))


def is_sequence(node: ast.expr) -> bool:
    """Return True if an operand is text or a list, for which another sign would only be a TypeError."""
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def mutations(path: str, source: bytes, tests: dict[int, list[str]]) -> Iterator[Mutation]:
    """Yield all changes of a file, each with the tests that run its line, if any."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, statement, backward in runs(ast.parse(source)):
        for kind, part, text in changes(node, backward=backward):
            assert part.end_lineno is not None
            assert part.end_col_offset is not None
            start = starts[part.lineno - 1] + part.col_offset
            stop = starts[part.end_lineno - 1] + part.end_col_offset
            first, last = starts[part.lineno - 1], starts[part.end_lineno]
            before, after = source[first:last], source[first:start] + text.encode() + source[stop:last]
            yield Mutation(
                path=path,
                line=part.lineno,
                kind=kind,
                start=start,
                stop=stop,
                text=text,
                before=before.decode().strip(),
                after=after.decode().strip(),
                tests=tests.get(part.lineno) or tests.get(statement, []),
            )


def files_of(tree: Path, prefixes: list[str]) -> list[str]:
    """Return the source files that prefixes name: files, folders or modules, with slashes or dots."""
    names = [prefix.removesuffix(".py").replace(".", "/").strip("/") for prefix in prefixes]
    sources = [str(path.relative_to(tree)) for path in sorted((tree / "weft").rglob("*.py"))]
    return [path for path in sources if any(path.startswith((f"{name}/", f"{name}.py")) for name in names)]


def drawn(tree: Path, prefixes: list[str], seed: int, count: int, data: Path) -> list[Mutation]:
    """Draw changes of lines that tests run, of each kind in turn. Tests that run the fewest lines come first."""
    measured, possible = CoverageData(str(data)), defaultdict(list)
    measured.read()
    with closing(sqlite3.connect(data)) as table:
        query = "select context, count(*) from line_bits join context on context.id = context_id group by context"
        breadth = Counter[str]()
        for context, number in table.execute(query):
            breadth[test_of(context)] += number
    for path in files_of(tree, prefixes):
        if (tree / path).stat().st_mtime > data.stat().st_mtime:
            print(f"{path} has changed since its lines were counted", file=sys.stderr)
        contexts = measured.contexts_by_lineno(str(ROOT / path))
        tests = {line: sorted({test_of(context) for context in contexts[line]} - {""}) for line in contexts}
        for mutation in mutations(path, (tree / path).read_bytes(), tests):
            possible[mutation.kind if mutation.tests else "not run"].append(mutation)
    print({kind: len(group) for kind, group in sorted(possible.items())}, f"possible changes; seed {seed}")
    random_order, result = random.Random(seed), []
    turns = [random_order.sample(group, len(group)) for kind, group in sorted(possible.items()) if kind != "not run"]
    while len(result) < count and any(turns):
        result += [group.pop() for group in turns if group]
    for mutation in result[:count]:
        mutation.tests.sort(key=lambda test: (breadth[test], test))
    return result[:count]


def main() -> None:
    """Draw changes, try each on a copy of the tree, and write a table and a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--paths", default="weft")
    parser.add_argument(
        "--coverage", type=Path, default=DATA, help="coverage.py's file, which lists the tests of each line"
    )
    parser.add_argument(
        "--whole", action="store_true", help="run all quick tests for changes that the line's tests do not catch"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutations.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy is removed
    with TreeCopy(ROOT) as copy:
        tried = drawn(copy.tree, options.paths.split(","), options.seed, options.count, options.coverage)
        for mutation in tried:
            mutation.judge(copy.run_changed(mutation.path, mutation.apply, mutation.tests, LIMIT_SECONDS))
            if options.whole and mutation.verdict != "caught":
                mutation.judge(copy.run_changed(mutation.path, mutation.apply, None, WHOLE_SECONDS))
            print(f"{mutation.verdict:10} {mutation.seconds:5.0f} s  {mutation.path}:{mutation.line}  {mutation.kind}")
            print(f"  - {mutation.before}\n  + {mutation.after}\n  {mutation.by or f'{mutation.passed} tests passed'}")
            options.out.write_text(json.dumps([asdict(each) for each in tried if each.verdict], indent=1))
    print(f"fail without a change: {sorted(copy.unsound)}" if copy.unsound else "every failure is due to a change")
    print(dict(Counter(mutation.verdict for mutation in tried)))


if __name__ == "__main__":
    main()
