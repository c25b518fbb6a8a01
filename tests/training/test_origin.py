"""The record of a run has the commit of the working directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from weft.training.artifacts.origin import working_commit


def git(*arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *author, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert working_commit() == "", "outside of a repository"
    git("init")
    Path("file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "v1")
    head = git("rev-parse", "HEAD")
    assert working_commit() == head
    program, ran = tmp_path / "watch", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    git("config", "core.fsmonitor", str(program))
    Path("file").write_text("2")
    assert working_commit() == f"{head}-dirty"
    assert not ran.exists(), "the repository's configuration runs no program"
    monkeypatch.setenv("PATH", "")
    assert working_commit() == "", "without git"
