"""Read and continue files of a former version; refuse files of a later version.

Commit c72d10d wrote the fixtures: the last commit at which only records, graph stores and books had versions.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import weft
from tests.lib.graph_checks import same_graph
from tests.lib.running import complaints, losses
from weft.cli.main import main
from weft.config.config import Config
from weft.config.files import read_options
from weft.cost import Profile
from weft.partition import PartitionBook, make_book
from weft.reporting.sections.timeline_rows import read_spans
from weft.runtime.kernel_selection import DEFAULT
from weft.training.artifacts import checkpoint
from weft.training.artifacts.run_folder import RunFolder
from weft.training.artifacts.saved_model import SavedModel
from weft.training.planning import probe_command
from weft.utils.errors import InputError
from weft.utils.files import jsonl, migrate
from weft.utils.files.migrate import VERSIONS

FORMER = Path(__file__).parent / "fixtures" / "c72d10d"
CHECKPOINT = Path("checkpoints") / "epoch-00000003"
FILES = {
    "options": "run/config.toml",
    "choices": "run/choices.json",
    "record": "run/metrics.jsonl",
    "checkpoint": f"run/{CHECKPOINT}/state.json",
    "model": "run/model.safetensors",
    "timeline": "ranks/timeline.json",
    "profile": "machine.json",
    "plan": "plan.json",
    "graph": "graph/manifest.json",
    "book": "book.safetensors",
}
"""A file of each format among the fixtures."""
GO_ON = ["train", "--resume", "--epochs", "6", "--quiet", "--out"]
UNCHANGED = {"record": 1, "graph": 2, "book": 1}
"""Formats that already had a version; the others were unversioned (version 0)."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the fixtures to the test's working directory, since their paths are relative."""
    copy = tmp_path / "former"
    shutil.copytree(FORMER, copy)
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without interruption, with the former run's configuration."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    arguments = ["train", FORMER / "graph", "--config", FORMER / "run" / "config.toml", "--epochs", "6", "--out", out]
    assert main([*map(str, arguments), "--quiet"]) == 0
    return out


def version_in(path: Path) -> Any:
    """Return the version in a file, which must be equal in all lines of a record; None if there is none."""
    if path.suffix == ".toml":
        number = re.match(r"version = (\d+)", path.read_text())
        return number and int(number[1])
    if path.suffix == ".jsonl":
        (number,) = {json.loads(line)["version"] for line in path.read_text().splitlines()}
        return number
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        return json.loads(metadata["weft"]).get("version") if "weft" in metadata else int(metadata["version"])
    content = json.loads(path.read_text())
    return content.get("state", content).get("version")


def edit_state(path: Path, **changed: Any) -> None:
    """Rewrite a checkpoint's state with other values and a new digest; None removes a value."""
    state = json.loads(path.read_text())["state"] | changed
    text = json.dumps({name: value for name, value in state.items() if value is not None})
    path.write_text(f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}", "state": {text}}}')


def edit_metadata(path: Path, **changed: Any) -> None:
    """Rewrite the metadata of a model's file with other values."""
    with safe_open(path, "pt") as file:
        values = json.loads(file.metadata()["weft"]) | changed
    save_file(load_file(path), path, {"weft": json.dumps(values)})


def set_version(path: Path, version: int) -> None:
    """Rewrite a file with another version."""
    if path.suffix == ".toml":
        path.write_text(f"version = {version}\n{path.read_text()}")
    elif path.suffix == ".jsonl":
        path.write_text(path.read_text().replace('"version": 1,', f'"version": {version},'))
    elif path.name == "model.safetensors":
        edit_metadata(path, version=version)
    elif path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(load_file(path), path, metadata | {"version": str(version)})
    elif path.name == "state.json":
        edit_state(path, version=version)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))


def test_the_fixtures_are_of_former_versions() -> None:
    assert FILES.keys() == VERSIONS.keys()
    for kind, file in FILES.items():
        assert version_in(Path(file)) == UNCHANGED.get(kind), kind


def test_a_store_has_the_graph_of_its_tables() -> None:
    tables = ["--vertices", "users.csv", "--edges", "follows.csv", "--id", "user", "--features", "age:raw,visits:raw"]
    columns = ["--label", "group", "--split", "split", "--weight", "strength"]
    assert main(["data", "import", *tables, *columns, "--out", "again"]) == 0
    former, again = weft.load("graph"), weft.load("again")
    same_graph(former, again)
    assert former.vertex_names is not None
    assert former.vertex_names.tolist() == [f"u{number:02}" for number in range(48)]
    for path in Path("graph").glob("*.npy"):
        assert path.read_bytes() == Path("again", path.name).read_bytes(), path


def test_a_store_of_version_1_is_opened() -> None:
    """Version 1 had no names of vertices, which came with version 2."""
    path = Path("graph/manifest.json")
    manifest = json.loads(path.read_text()) | {"version": 1}
    del manifest["id_column"]
    manifest["files"] = {name: about for name, about in manifest["files"].items() if not name.startswith("name_")}
    path.write_text(json.dumps(manifest))
    assert weft.load("graph").num_edges == 192
    assert weft.load("graph").vertex_names is None


def test_a_run_is_opened() -> None:
    run = weft.Run.open("run")
    assert run.config == Config(graph="graph", hidden=8, dtype="float64", epochs=3, checkpoint_every=3, timeline=1)
    assert run.summary["epochs"] == len(run.history) == 3
    assert run.history[-1]["loss"] == run.summary["loss"]
    assert weft.Run.open("ranks").config.strategy == "hybrid"
    assert {span.rank for span in read_spans(Path("ranks/timeline.json"))} == {0, 1}


def assert_predicts_as_before() -> None:
    np.testing.assert_allclose(weft.predict("run").numpy(), np.load("scores.npy"), rtol=1e-9, atol=1e-9)


def test_a_model_predicts_as_before() -> None:
    assert_predicts_as_before()
    (shape,) = {json.dumps(line["shape"]) for line in weft.Run.open("run").records if line["kind"] == "config"}
    former = json.loads(shape)
    del former["relations"], former["featured_types"]
    edit_metadata(Path("run/model.safetensors"), shape=former)
    assert_predicts_as_before()


def test_a_checkpoint_of_a_run_that_was_killed_predicts() -> None:
    path = Path("run/metrics.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert weft.Run.open("run").summary == {}
    assert_predicts_as_before()


@pytest.mark.parametrize("name", ["run", "ranks"])
def test_a_checkpoint_is_read_whole(name: str) -> None:
    state = json.loads((Path(name) / CHECKPOINT / "state.json").read_text())["state"]
    read = checkpoint.newest(Path(name) / "checkpoints")
    assert read is not None
    assert state["config"].pop("probe") == read.config.machine == ""
    assert state["config"].items() <= asdict(read.config).items()
    assert state["progress"].items() <= asdict(read.progress).items()
    assert read.progress.best_details == {}
    assert (read.fingerprint, read.updates) == (state["fingerprint"], state["updates"])
    assert state["record"].items() <= asdict(read.record).items()


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_record_is_rebuilt_from_a_former_checkpoint(version: int, folder: Path) -> None:
    """Before version 3, a checkpoint had the lines of all epochs. Resuming copies these lines to epochs.jsonl."""
    run = RunFolder(folder / "run")
    epochs = [line for line in jsonl.read(run.metrics) if line["kind"] == "epoch"]
    edit_state(folder / "run" / CHECKPOINT / "state.json", version=version, data={})
    saved = checkpoint.newest(run.checkpoints)
    assert not run.epochs.exists()
    run.take_back(saved)
    assert jsonl.read(run.epochs) == epochs
    run.metrics.unlink()
    run.take_back(saved)
    assert jsonl.read(run.metrics) == jsonl.read(run.epochs) == epochs


@pytest.mark.parametrize("name", ["run", "ranks"])
def test_a_run_goes_on(name: str, folder: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The resumed run uses its former kernels and reaches the losses of an uninterrupted run."""
    before = {file: (folder / name / file).read_text() for file in ("metrics.jsonl", "choices.json")}
    assert main([*GO_ON, name, "--workers", "1"]) == 0
    (line,) = complaints(capsys.readouterr().err)
    assert line.startswith(f"weft: {name} was written by an earlier version of weft, without digests of the data")
    assert losses(folder / name) == pytest.approx(losses(whole), rel=1e-9, abs=1e-9)
    epochs = before["metrics.jsonl"].partition('{"kind": "event"')[0]
    assert (folder / name / "metrics.jsonl").read_text().startswith(epochs)
    kinds = json.loads(before["choices.json"])["kinds"]
    assert json.loads((folder / name / "choices.json").read_text())["kinds"] == kinds


def test_a_run_without_choices_and_updates_goes_on(folder: Path, whole: Path) -> None:
    """A run from before kernel selection, when Adam was the only optimiser, can be resumed."""
    (folder / "run" / "choices.json").unlink()
    edit_state(folder / "run" / CHECKPOINT / "state.json", updates=None)
    assert main([*GO_ON, "run"]) == 0
    assert losses(folder / "run") == pytest.approx(losses(whole), rel=1e-9, abs=1e-9)


def test_lines_of_ranks_without_counts_are_read(folder: Path) -> None:
    path = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("sampled", "stages", "working_bytes"):
            line.pop(name, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rank_lines = [line for line in weft.Run.open("run").records if line["kind"] == "rank"]
    assert rank_lines
    assert all((line["sampled"], line["stages"], line["working_bytes"]) == ({}, {}, 0) for line in rank_lines)


def test_a_profile_without_choices_and_calibration_is_read(folder: Path) -> None:
    path = folder / "machine.json"
    content = json.loads(path.read_text())
    del content["choices"], content["learned"]
    path.write_text(json.dumps(content))
    profile = Profile.read(path)
    assert profile.choices == DEFAULT
    assert profile.calibration == []
    assert len(profile.prices) == len(content["prices"])


def test_a_profile_decides(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((folder / "machine.json").read_text())
    assert json.loads(json.dumps(Profile.read(folder / "machine.json").record())) == content
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_command, "hardware", lambda: {"processor": "none", "cores": 2})
    probe_command.default_path().parent.mkdir(parents=True)
    (folder / "machine.json").rename(probe_command.default_path())
    run = weft.train("graph", strategy="auto", workers=1, epochs=1, out="auto", quiet=True)
    assert run.config.strategy == "single"


def test_a_plan_is_taken(folder: Path) -> None:
    path = folder / "plan.json"
    content = json.loads(path.read_text())
    content["plans"] = [plan for plan in content["plans"] if plan["strategy"] == "offload"]
    path.write_text(json.dumps(content))
    assert main(["train", "graph", "--plan", "plan.json", "--epochs", "1", "--out", "planned", "--quiet"]) == 0
    assert weft.Run.open("planned").config.strategy == "offload"


def test_options_are_taken() -> None:
    expected = Config(graph="graph", layers=3, hidden=8, norm="layer", dropout=0.25, epochs=2, dtype="float64")
    assert Config.read(Path("options.toml")) == expected
    assert main(["train", "--config", "options.toml", "--out", "by-file", "--quiet"]) == 0
    assert weft.Run.open("by-file").config == expected


def test_former_names_are_of_former_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('metric = "accuracy"\n[strategy]\nbins = 3\nwithout = "reuse"')
    assert Config.read(path) == Config(metrics="accuracy", chunks=3, disable="reuse")
    set_version(path, 1)
    with pytest.raises(InputError, match=r"run\.toml: metric is now called metrics"):
        Config.read(path)


@pytest.mark.parametrize("version", [0, 1])
def test_intra_in_a_file_of_options_is_prefetch(version: int, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'version = {version}\n[strategy]\ndisable = "inter,intra"')
    assert Config.read(path).disable == "inter,prefetch"
    path.write_text(f'version = {version}\n[strategy]\ndisable = ["", "intra"]')
    assert read_options(path, Config, several=True) == {"disable": ["", "prefetch"]}


def test_former_names_in_a_run_are_read(folder: Path) -> None:
    """Former names of options are read from a checkpoint, a model, and the record of a run that was killed."""
    path = folder / "run" / CHECKPOINT / "state.json"
    former = json.loads(path.read_text())["state"]["config"]
    former["without"] = former.pop("disable") or "intra"
    edit_state(path, config=former)
    edit_metadata(folder / "run" / "model.safetensors", config=former)
    read = checkpoint.newest(folder / "run" / "checkpoints")
    assert read is not None
    assert read.config.disable == "prefetch"
    assert SavedModel.read(RunFolder(folder / "run")).description.config.disable == "prefetch"
    assert_predicts_as_before()
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)[:-1]
    path.write_text("".join(lines).replace('"disable": ""', '"without": "intra"'))
    assert SavedModel.read(RunFolder(folder / "run")).description.config.disable == "prefetch"


@pytest.mark.parametrize("version", [0, 1])
def test_probe_in_a_file_of_options_is_a_machine(
    version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`probe` may name a profile; a former run's probe.json, which nothing reads any more, is ignored."""
    path = tmp_path / "run.toml"
    path.write_text(f'version = {version}\n[strategy]\nprobe = "machine.json"')
    assert Config.read(path) == Config(machine="machine.json")
    assert not capsys.readouterr().err
    migrate._print_once.cache_clear()
    for file in ("ranks/probe.json", "ranks/probe.json", "no.json", ""):
        path.write_text(f'version = {version}\n[strategy]\nprobe = "{file}"')
        assert Config.read(path) == Config()
    assert capsys.readouterr().err.splitlines() == [
        f"weft: the former option probe is ignored: {file} is no profile, see --machine"
        for file in ("ranks/probe.json", "no.json")
    ]
    path.write_text('version = 2\n[strategy]\nprobe = "machine.json"')
    with pytest.raises(InputError, match=r"\[strategy\] probe is now called machine"):
        Config.read(path)


def test_a_run_that_decided_by_a_probe_goes_on(folder: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The resumed run decides as a new run does, and says in one line that it ignores the former file."""
    path = folder / "ranks" / "config.toml"
    path.write_text(path.read_text().replace('probe = ""', 'probe = "ranks/probe.json"'))
    migrate._print_once.cache_clear()
    assert main([*GO_ON, "ranks", "--workers", "1"]) == 0
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "probe" in text]
    assert line.startswith("weft: the former option probe is ignored: ranks/probe.json")
    assert losses(folder / "ranks") == pytest.approx(losses(whole), rel=1e-9, abs=1e-9)
    assert 'machine = ""' in path.read_text()


def test_a_book_is_opened() -> None:
    graph = weft.load("graph")
    assert torch.equal(PartitionBook.open("book.safetensors", graph).part, make_book(graph, 2, method="range").part)


READING = {
    **{kind: [*GO_ON, "run"] for kind in ("options", "choices", "record", "checkpoint")},
    "model": ["predict", "run", "--out", "rows.npy"],
    "timeline": ["report", "ranks", "--out", "page.html"],
    "profile": ["plan", "graph", "--machine", "machine.json"],
    "plan": ["train", "graph", "--plan", "plan.json", "--quiet"],
    "graph": ["train", "graph", "--quiet"],
    "book": ["train", "graph", "--strategy", "hybrid", "--workers", "2", "--partition", "book.safetensors", "--quiet"],
}
"""A command that reads the file of each format."""


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_file_of_a_later_version_is_refused(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is refused in one line and not replaced, even if a damaged one would be ignored or created again."""
    path = folder / FILES[kind]
    set_version(path, 99)
    content, names = path.read_bytes(), {file.name for file in folder.iterdir()}
    assert main(READING[kind]) == 2
    (line,) = complaints(capsys.readouterr().err)
    assert line.endswith(f"has version 99, but this weft reads versions up to {VERSIONS[kind]}: upgrade weft")
    assert FILES[kind] in line
    assert path.read_bytes() == content
    assert {file.name for file in folder.iterdir()} == names


def test_today_s_files_have_their_versions(
    folder: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = weft.load("graph")
    graph.save(tmp_path / "graph")
    make_book(graph, 2, method="range").save(tmp_path / "book.safetensors")
    Profile.read(folder / "machine.json").save(tmp_path / "machine.json")
    capsys.readouterr()
    assert main(["plan", "graph", "--workers", "1", "--machine", "machine.json", "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    paths = {kind: FILES[kind] for kind in ("profile", "plan", "graph", "book")}
    versions = {kind: version_in(tmp_path / path) for kind, path in paths.items()}
    of_run = {"options": "config.toml", "timeline": "timeline.json", "checkpoint": f"{CHECKPOINT}/state.json"}
    of_run |= {kind: FILES[kind].removeprefix("run/") for kind in ("choices", "record", "model")}
    versions |= {kind: version_in(whole / path) for kind, path in of_run.items()}
    assert versions == VERSIONS


@pytest.mark.parametrize("version", ["true", "-1", '"1"', "1.0"])
def test_what_is_no_version_is_damage(version: str, folder: Path) -> None:
    path = folder / "machine.json"
    path.write_text(path.read_text().replace("{", f'{{"version": {version},', 1))
    with pytest.raises(InputError, match=r"machine\.json: cannot be read \(its version is .*weft probe"):
        Profile.read(path)
