"""Options of a run: legal and illegal values, errors of one line, and writing and reading of their file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from weft.config.config import Config
from weft.config.familiar import FAMILIAR_OPTIONS, SYNONYMS
from weft.utils.errors import InputError, RunError
from weft.utils.files import jsonl
from weft.utils.files.jsonl import Recorder


def test_survives_its_file(tmp_path: Path) -> None:
    config = Config(graph="cora", hidden=7, lr=0.5, decoupled=True)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert Config.read(path) == config


def test_every_option_has_a_help_text() -> None:
    assert all(spec.metadata["help"] for spec in dataclasses.fields(Config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "--layers 0: give at least 1"),
        ({"workers": -2}, "--workers -2: give at least 1"),
        ({"dropout": 1.0}, "--dropout 1.0: give less than 1"),
        ({"lr": float("nan")}, "--lr nan: give a finite number"),
        ({"dtype": "float46"}, "unknown --dtype 'float46': did you mean 'float64'?"),
        ({"disable": "reuse,page"}, "unknown --disable 'page': did you mean 'pages'?"),
        ({"hidden": "64"}, "--hidden '64': give a value of type int"),
        ({"graph": "\udcff"}, r"--graph \udcff: no file of options can hold bytes that are not UTF-8: rename the file"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Config(**options)
    assert str(caught.value) == message


def test_text_may_be_a_whole_number() -> None:
    assert Config(batch_size=1024, fanout=5) == Config(batch_size="1024", fanout="5")
    with pytest.raises(InputError, match="give a value of type str"):
        Config(batch_size=0.5)


def test_names_the_nearest_option() -> None:
    with pytest.raises(InputError, match=r"run\.toml: unknown option 'layer': did you mean 'layers'"):
        Config.from_dict({"layer": 3}, "run.toml")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learning_rate", "use lr"),
        ("early_stopping", "use patience"),
        ("num_epochs", "use epochs"),
        ("gpus", "use workers and device"),
        ("output_dir", "choose one of "),  # `out` is an argument, but not an option of a file
    ],
)
def test_names_the_option_for_a_familiar_name(name: str, advice: str) -> None:
    with pytest.raises(InputError, match=f"^weft.train: unknown option '{name}': {advice}"):
        Config.from_dict({name: 1}, "weft.train")


def test_familiar_names_lead_to_options_and_are_none() -> None:
    names = {spec.name for spec in dataclasses.fields(Config)} | {"out", "resume", "quiet"}
    assert {option for options in FAMILIAR_OPTIONS.values() for option in options} <= names
    assert names.isdisjoint(FAMILIAR_OPTIONS)
    assert len(FAMILIAR_OPTIONS) == sum(len(synonyms.split()) for synonyms in SYNONYMS.values())


def test_changed_lists_only_options_that_affect_results() -> None:
    assert Config(epochs=3, workers=2).changed(Config(epochs=9, strategy="tensor")) == []
    assert Config(seed=1).changed(Config(seed=2)) == ["seed"]


@pytest.mark.parametrize("line", ["3", "[]", '{"epoch": 3}', '{"kind": 3}', "[" * 100_000, "\x00", "\xff"])
def test_a_line_of_another_shape_is_damage(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"kind": "epoch"}}\n', encoding="latin-1")
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 1 is damaged"):
        jsonl.read(path)


def test_a_record_goes_back_to_a_mark_or_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    recorder.write("config", epoch=0)
    for epoch in range(4):
        recorder.write("epoch", epoch=epoch, loss=0.1 + epoch)
        recorder.write("rank", epoch=epoch, rank=0)
        if epoch == 1:
            mark, then = recorder.mark(), path.read_bytes()
    recorder.close()
    whole = path.read_bytes()
    assert jsonl.restore(path, mark) is None
    assert path.read_bytes() == then
    again = Recorder(path)
    assert again.mark() == mark
    again.write("epoch", epoch=2, loss=2.1)
    again.close()
    assert [line["epoch"] for line in jsonl.read(tmp_path / jsonl.EPOCHS)] == [0, 1, 2]
    for damaged in (whole[:-1][: mark.size - 1], b"", whole.replace(b"0.1", b"0.2"), whole[20:], whole + whole[::-1]):
        path.write_bytes(damaged)
        damaged_copy = jsonl.restore(path, mark)
        if damaged.startswith(then):
            assert damaged_copy is None
            continue
        assert damaged_copy is not None
        assert damaged_copy.read_bytes() == damaged
        assert jsonl.read(path) == jsonl.read(tmp_path / jsonl.EPOCHS)
        assert [line["epoch"] for line in jsonl.read(path)] == [0, 1]
        damaged_copy.unlink()


def test_a_record_that_is_gone_is_noticed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "metrics.jsonl")
    recorder.write("epoch", epoch=0)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl: No such file"):
        recorder.write("epoch", epoch=1)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunError, match=r"metrics\.jsonl: it was replaced during the run"):
        recorder.write("epoch", epoch=2)
    recorder.close()


def test_record_forgives_only_a_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    for epoch in range(3):
        recorder.write("epoch", epoch=epoch, loss=0.1)
    recorder.write("summary", loss=0.1)
    recorder.close()
    path.write_text(path.read_text() + '{"kind": "ep')
    assert [line["kind"] for line in jsonl.read(path)] == ["epoch"] * 3 + ["summary"]
    path.write_text('{"kind": "ep\n' + path.read_text())
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 1 is damaged"):
        jsonl.read(path)
