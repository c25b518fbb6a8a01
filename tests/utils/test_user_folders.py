"""A user without a home folder, as in a container with `--user 12345`, can name paths and train."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.training.machine_context import local_cluster
from weft.utils.errors import InputError
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
