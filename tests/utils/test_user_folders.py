"""A user without a home folder, as in a container with `--user 12345`, can name paths and train."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.training.machine_context import local_cluster
from weft.utils.errors import InputError
from weft.utils.optional_packages import import_extra
from weft.utils.user_folders import expand_user, home_folder


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.mark.usefixtures("without_home")
def test_a_user_without_home() -> None:
    assert expand_user("~/graphs") == Path("~/graphs")
    with pytest.raises(InputError, match="set HOME to a folder"):
        home_folder()
    assert local_cluster(weft.Config()) is None  # it has no profile
    with pytest.raises(InputError, match="set HOME to a folder"):
        weft.load("dblp")


def test_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/homes/ada")
    assert home_folder() == Path("/homes/ada")
    assert expand_user("~/graphs") == Path("/homes/ada/graphs")
    assert expand_user("~nobody9/graphs") == Path("~nobody9/graphs")


@pytest.mark.usefixtures("without_home")
def test_a_package_that_needs_a_home_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Altair asks for the home folder when it is imported, and fails without one."""
    (tmp_path / "needs_home.py").write_text("from pathlib import Path\nPath.home()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "needs_home", raising=False)
    import_extra("needs_home", "a test")
    assert "HOME" not in os.environ
