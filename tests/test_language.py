"""Names and docstrings follow the rules of CONTRIBUTING.md, "Language"."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.lib import language
from tests.lib.language import Violation, all_violations

ALLOWED: dict[str, dict[str, int]] = {}
"""Number of violations of each rule that a folder may still have. Numbers are only ever lowered."""


def test_rules_hold() -> None:
    violations = all_violations()
    folders = {violation: folder_of(violation.path) for violation in violations}
    counts = Counter((folder, violation.rule) for violation, folder in folders.items())
    allowed = {(folder, rule): number for folder, rules in ALLOWED.items() for rule, number in rules.items()}
    for folder, rule in counts.keys() | allowed.keys():
        number, limit = counts[folder, rule], allowed.get((folder, rule), 0)
        places = [f"{v.path}:{v.line} {v.detail}" for v in violations if (folders[v], v.rule) == (folder, rule)]
        assert number <= limit, f"{folder}: {number} of at most {limit} violations of {rule!r}: {places[-10:]}"
        assert number == limit, f"{folder}: {number} violations of {rule!r} are left: lower ALLOWED from {limit}"


def folder_of(path: str) -> str:
    """Return the package of a file of weft, or the first folder of another file."""
    first, second, *_ = path.split("/")
    return f"{first}/{second}" if first == "weft" else first


@pytest.mark.parametrize(
    ("text", "rule", "detail"),
    [
        ('def f() -> None:\n    """That of the plan."""', "opening", "That of the plan."),
        ('x = 1\n"""How many there are."""', "opening", "How many there are."),
        ("found = 1", "vague name", "found"),
        ("def f(own: int) -> None: ...", "vague name", "own"),
        ("[one for one in range(3)]", "vague name", "one"),
        ("def foretold_bytes() -> None: ...", "dialect", "foretold_bytes"),
        ('def f(a: int, b: int) -> None:\n    """Return nothing."""', "no Args", "f"),
        ('class C:\n    def f(self, a: int, b: int) -> None:\n        """Return nothing."""', "no Args", "f"),
        ("assert len(queue) > 0 and queue.pop()", "effect in an assert", "queue.pop()"),
        ("assert next(names), f'{names.pop()}'", "effect in an assert", "next(names)"),
        ("assert (size := len(names))", "effect in an assert", "(size := len(names))"),
        ("assert not subprocess.run(words).returncode", "effect in an assert", "subprocess.run(words)"),
    ],
)
def test_planted_violation(text: str, rule: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule finds what breaks it, and only that."""
    monkeypatch.setattr(language, "ROOT", tmp_path)
    path = tmp_path / "weft" / "core.py"
    path.parent.mkdir()
    path.write_text(text)
    assert [(violation.rule, violation.detail) for violation in all_violations()] == [(rule, detail)]


def test_planted_duplicate_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    (tmp_path / "weft").mkdir()
    for name in ("a", "b"):
        (tmp_path / "weft" / f"{name}.py").write_text("class Table: ...\nclass _Private: ...\n")
    expected = [Violation("duplicate class", f"weft/{name}.py", 1, "Table") for name in ("a", "b")]
    assert all_violations() == expected
