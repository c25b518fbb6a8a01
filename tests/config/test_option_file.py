"""Option files: every option can be written and read; errors are one line with file, section, key and remedy."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from weft.config.config import Config
from weft.config.files import named_by, options_text, read_options
from weft.utils.errors import InputError
from weft.utils.files.migrate import VERSIONS

FIELDS = {spec.name: spec for spec in dataclasses.fields(Config)}


def other(spec: dataclasses.Field[Any]) -> Any:
    """Return a legal value of an option other than its default."""
    if spec.name == "until":
        return "val_accuracy=0.9"
    if spec.metadata["amount"]:
        return "512MB"
    if isinstance(spec.default, bool):
        return not spec.default
    if isinstance(spec.default, int):
        return spec.default + 3
    if isinstance(spec.default, float):
        return spec.default / 2 if spec.default > 0 else 0.25
    names = spec.metadata["several"] or spec.metadata["choices"]
    return names[-1] if names else 'a "name"\\ of # some\nkind \u202e\x9b\U000e0001'


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("explained", [False, True])
def test_every_option_survives(name: str, explained: bool, tmp_path: Path) -> None:
    path, options = tmp_path / "run.toml", {"graph": "digits", name: other(FIELDS[name])}
    text = options_text(Config, options, explained=explained)
    path.write_text(text)
    assert text.replace("\n", "").isprintable()
    assert read_options(path, Config) == options
    assert Config.read(path) == Config(**options)


def test_omitted_options_are_listed_with_their_defaults(tmp_path: Path) -> None:
    """Each omitted option is a comment with its default and help; without the `#`, it sets the default."""
    text = options_text(Config, {}, explained=True)
    assert tomllib.loads(text) == {"version": VERSIONS["options"]} | {
        spec.metadata["section"]: {} for spec in FIELDS.values()
    }
    path = tmp_path / "run.toml"
    path.write_text(re.sub(r"^#(?=\w)", "", text, flags=re.MULTILINE))
    assert read_options(path, Config) == {name: spec.default for name, spec in FIELDS.items()}
    words = " ".join(re.findall(r"^# (.*)", text, flags=re.MULTILINE))
    assert all(spec.metadata["help"] in words for spec in FIELDS.values())


def test_every_option_has_a_section() -> None:
    assert all(spec.metadata["section"] for spec in FIELDS.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\nhidden = "64"', "[model] hidden '64': give a value of type int"),
        ("[model]\nhiden = 64", "[model] unknown option 'hiden': did you mean 'hidden'?"),
        ("[training]\nhidden = 64", "[training] hidden belongs to [model]: move it there"),
        ("[modeel]\nhidden = 64", "unknown section 'modeel': did you mean 'model'?"),
        ("[model]\nlayers = 0", "[model] layers 0: give at least 1"),
        ("[model]\nlayers = [1, 2]", "[model] layers [1, 2]: give a value of type int"),
        ('[model]\nnorm = "btch"', "unknown [model] norm 'btch': did you mean 'batch'?"),
        ('[strategy]\ndisable = "page"', "unknown [strategy] disable 'page': did you mean 'pages'?"),
        ('version = 2\n[strategy]\ndisable = "intra"', "[strategy] disable intra is now called prefetch"),
        ("version = 2\n[strategy]\nbins = 3", "[strategy] bins is now called chunks"),
        ("layers = 0", "layers 0: give at least 1"),
        ("layers = 3\n[model]\nlayers = 3", "[model] layers is given twice: leave one out"),
        ("[strategy]\nbins = 3\nchunks = 3", "[strategy] chunks is given twice: leave one out"),
        ('[training]\nuntil = "soon"', "[training] until soon: give a score and its value, such as val_accuracy=0.9"),
        (
            "layers = ",
            "cannot be read (TOMLDecodeError: Invalid value (at end of document)): correct it, or give another",
        ),
        ("\udcff", "cannot be read (UnicodeDecodeError:"),
    ],
)
def test_a_mistake(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(InputError) as caught:
        Config.read(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.toml: No such file or directory: check the path"):
        read_options(tmp_path / "run.toml", Config)


def test_a_file_without_sections_and_former_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('graph = "digits"\nmodel = "gat"\nlr = 1\nwithout = "reuse"')
    assert Config.read(path) == Config(graph="digits", model="gat", lr=1.0, disable="reuse")


def test_several_values(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text("[model]\nhidden = [8, 16]\nlayers = 3\n[training]\nlr = [1, 0.5]")
    assert read_options(path, Config, several=True) == {"hidden": [8, 16], "layers": 3, "lr": [1.0, 0.5]}
    for values in ("[8, 8]", "[]"):
        path.write_text(f"[model]\nhidden = {values}")
        with pytest.raises(InputError, match=re.escape(f"[model] hidden {values}: give at least one value, and none")):
            read_options(path, Config, several=True)
    path.write_text('[model]\nhidden = [8, "wide"]')
    with pytest.raises(InputError, match=r"sweep\.toml: \[model\] hidden 'wide': give a value of type int"):
        read_options(path, Config, several=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--chunks 3: too many, give --epochs", "f.toml: [strategy] chunks 3: too many, give --epochs"),
        ("--epochs 3: too few for --chunks", "--epochs 3: too few for --chunks"),
        ("unknown chunks 'x'", "f.toml: unknown [strategy] chunks 'x'"),
        ("nowhere is there --a thing", "nowhere is there --a thing"),
        ("nothing", "nothing"),
    ],
)
def test_an_error_names_the_place_of_its_first_option(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught, named_by(Path("f.toml"), Config, ["chunks"]):
        raise InputError(text)
    assert str(caught.value) == message
