"""Bad input ends in one line that names the mistake and the remedy, exit code 2, and no partial files."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.lib.running import command, complaints, finish, handled, start
from weft.cli import main as main_module
from weft.cli.main import main
from weft.data import Graph, load
from weft.runtime.processes.stop_request import SIGNALS, handle_signals
from weft.training import run

HYBRID = ("--strategy", "hybrid", "--workers", "2")
Damage = Callable[[Path], None]
SLOW = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Save a small graph and return its folder."""
    folder = tmp_path / "graph"
    load("sbm:vertices=60,degree=4,classes=3,features=5").save(folder)
    return folder


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must exit with code 2, and return its one line of error."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if not line.startswith("weft: loading ")]  # on a slow machine
    assert line.startswith("weft: error: ")
    return line.removeprefix("weft: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digits", "--layers", "0"], "--layers 0: give at least 1"),
        (["train", "digits", "--workers", "-2"], "--workers -2: give at least 1"),
        (["train", "digits", "--lr", "fast"], "argument --lr: 'fast' is not a number"),
        (["trainn", "digits"], "unknown command trainn: did you mean train?"),
        (["data", "imprt", "x"], "unknown command imprt: did you mean import?"),
        (["evaluate", "runs/a"], "unknown command evaluate: weft train prints the test scores, weft report shows them"),
        (["train", "digits", "--learning-rate", "0.1"], "unknown flag --learning-rate: use --lr"),
        (["train", "digits", "--early-stopping"], "unknown flag --early-stopping: use --patience"),
        (["train", "digits", "--gpus", "2"], "unknown flag --gpus: use --workers and --device"),
        (["train", "digits", "--batch_size=8"], "unknown flag --batch_size: did you mean --batch-size?"),
        (
            ["predict", "runs/no", "--out", "x.npy", "--id", "x"],
            "--id has no effect here: leave it out, or use --ids (see weft predict --help)",
        ),
        (["data", "info", "x", "--epoch", "3"], "unrecognized arguments: --epoch 3 (see weft data info --help)"),
        (["train", "digits", "--num_workers", "2"], "unknown flag --num_workers: use --workers"),
        (["train", "digits", "--n-layers", "2"], "unknown flag --n-layers: use --layers"),
        (["train", "digits", "--output_dir", "x"], "unknown flag --output_dir: use --out"),
        (["train", "digits", "--model", "gcnn"], "unknown model 'gcnn': did you mean 'gcn'?"),
        (["train", "digits", "--strategy", "tensors"], "unknown strategy 'tensors': did you mean 'tensor'?"),
        (["train", "digits", "--strategy", "single", "--workers", "2"], "strategy single runs on one rank"),
        (["train", "digit"], "unknown dataset 'digit': did you mean 'digits'?"),
        (["train", "no/such/graph"], "no/such/graph: no such file or folder"),
        (["train", "rmat:vertices=100,edges=300"], "--random-features 256"),
        (["train", "rmat:vertices=100,edges=300", "--random-features", "4"], "--random-classes 16"),
        (["train", "digits", "--resume"], "--resume needs --out"),
        (["train", "digits", "--resume", "--out", "nothing/here"], "nothing/here contains no run"),
        (["train", "digits", "--device", "cuda"], "--device cuda: torch finds no GPU here"),
        (["train"], "no graph: give its name, or a --config that names one"),
        (["train", "digits", "--order", "dfs"], "unknown --order 'dfs': did you mean 'bfs'?"),
        (["train", "digits", *HYBRID, "--partition", "mettis"], "unknown --partition 'mettis': did you mean 'metis'?"),
        (["train", "digits", *HYBRID, "--partition", "no/book.safetensors"], "no/book.safetensors: no such file"),
        (["train", "digits", *HYBRID, "--cache-memory", "much"], "--cache-memory 'much': give an amount such as 512MB"),
        (["train", "digits", *HYBRID, "--cache-ratio", "1.5"], "--cache-ratio 1.5: give at most 1"),
        (["train", "digits", *HYBRID, "--cache-ratio", "-0.5"], "--cache-ratio -0.5: give a fraction from 0 to 1"),
        (["train", "digits", *HYBRID, "--machine", "no.json"], "--machine no.json: no such file: give a profile"),
        (["train", "digits", *HYBRID, "--probe", "no.json"], "--probe is now --machine"),
        (["train", "digits", "--strategy", "stale", "--refresh-every", "0"], "--refresh-every 0: give at least 1"),
        (["compare", "digits", "--strategies", "single,single"], "give different names"),
        (["compare", "digits", "--strategies", "single,tnesor"], "did you mean 'tensor'?"),
        (["compare", "digits", "--ablate", "--scratch", "/tmp"], "--scratch has no effect under strategy"),
        (["compare", "digits", "--ablate", "--disable", "share"], "--disable share has no effect under strategy"),
        (["train", "no/such/graph", "--chunks", "2"], "--chunks has no effect under strategy single"),
    ],
)
def test_mistakes_in_the_command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def damage_checksum(folder: Path) -> None:
    array = np.load(folder / "x.npy")
    array[0, 0] += 1
    np.save(folder / "x.npy", array)


def truncate(folder: Path) -> None:
    content = (folder / "indices.npy").read_bytes()
    (folder / "indices.npy").write_bytes(content[:-8])


def newer(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 99, "format": 99, "format_version": 99}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_checksum, "x.npy"),
        (truncate, "indices.npy"),
        (newer, "manifest.json"),
        (lambda folder: (folder / "x.npy").unlink(), "x.npy"),
    ],
)
def test_a_damaged_store(capsys: pytest.CaptureFixture[str], store: Path, damage: Damage, message: str) -> None:
    damage(store)
    out = store.parent / "run"
    line = mistake(capsys, "train", store, "--out", out)
    assert str(store) in line
    assert message in line
    assert not out.exists()


def test_a_damaged_archive(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The error for each wrong value names file and field, and nothing is written."""
    edges = np.array([[0, 1, 2], [1, 2, 0]], dtype=np.int32)
    good = {
        "edge_index": edges,
        "num_nodes": np.array(3),
        "x": np.eye(3, dtype=np.float32),
        "y": np.array([0, 1, 1]),
        "train_mask": np.array([True, True, False]),
    }
    wrong: dict[str, tuple[str, np.ndarray]] = {
        "out of range": ("edge_index", edges + 1),
        "negative": ("edge_index", edges - 1),
        "ragged": ("y", np.array([0, 1])),
        "nan": ("x", np.full((3, 3), np.nan, dtype=np.float32)),
        "inf": ("x", np.full((3, 3), np.inf, dtype=np.float32)),
        "label": ("y", np.array([0, 1, -3])),
        "no train": ("train_mask", np.zeros(3, dtype=bool)),
    }
    out = tmp_path / "out"
    for name, (field, value) in wrong.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **(good | {field: value}))
        line = mistake(capsys, "train", path, "--out", out)
        assert field in line or ("edge" in line and field == "edge_index"), line
        assert name in line, line
        if name != "no train":
            assert field in mistake(capsys, "data", "import", path, "--out", out).replace("source", field).replace(
                "target", field
            )
        assert not out.exists()


def test_an_output_folder_of_another_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(store), "--epochs", "3", "--out", str(out)]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    monkeypatch.setattr(run, "make_plan", None)  # the mistake is reported before slow planning
    assert "contains another run" in mistake(capsys, "train", store, "--epochs", "5", "--out", out)
    assert "has finished its 3 epochs: give more --epochs, --patience or --until" in mistake(
        capsys, "train", store, "--resume", "--out", out
    )
    changed = mistake(capsys, "train", store, "--resume", "--out", out, "--hidden", "8", "--epochs", "5")
    assert "--hidden differs from the run" in changed
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_resume_keeps_the_options_of_the_run(capsys: pytest.CaptureFixture[str], store: Path, tmp_path: Path) -> None:
    """Omitted flags have the values of the run, not the defaults; the graph must be unchanged."""
    out = tmp_path / "run"
    assert main(["train", str(store), "--hidden", "8", "--epochs", "3", "--out", str(out)]) == 0
    assert main(["train", str(store), "--resume", "--epochs", "5", "--out", str(out)]) == 0
    capsys.readouterr()
    Graph.open(store)
    load("sbm:vertices=61,degree=4,classes=3,features=5").save(store, overwrite=True)
    assert "the edges are not those that" in mistake(capsys, "train", store, "--resume", "--epochs", "9", "--out", out)


def test_import_and_info(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    edges = tmp_path / "edges.csv"
    edges.write_text("source,target\n0,1\n1,2\n2,0\n")
    command = ["data", "import", str(edges), "--out", str(tmp_path / "graph")]
    assert main([*command, "--random-features", "4", "--order", "degree"]) == 0
    assert main(["data", "info", str(tmp_path / "graph")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("vertices          3\n") == 2
    assert "features          4\n" in printed
    assert printed.count("edge features     0\n") == 2
    assert printed.count("numbering         reordered\n") == 2
    for source in (edges, "digits"):
        assert "already" in mistake(capsys, "data", "import", source, "--out", tmp_path / "graph")
        assert main(["data", "import", str(source), "--out", str(tmp_path / "graph"), "--overwrite"]) == 0
        capsys.readouterr()
    assert weft.Graph.open(tmp_path / "graph").name == "digits"


def test_foreign_names_are_printed_as_text(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    graph = store.rename(store.with_name("a\x1b[31m\n\u202eb"))
    edges = store.with_name("edges\n\x1b.csv")
    edges.write_text("source,target\n0,1\n", encoding="utf-8")
    for arguments in (
        ["import", str(graph), "--out", f"{graph}2"],
        ["import", str(edges), "--out", f"{graph}3"],
        ["import", "--edges", str(edges), "--out", f"{graph}4"],
        ["info", f"{graph}3"],
    ):
        assert main(["data", *arguments]) == 0
        printed = capsys.readouterr()
        assert all(line.isprintable() for line in (printed.out + printed.err).splitlines())
        assert r"\n" in printed.out
        assert r"\x1b" in printed.out


def test_a_book_that_does_not_fit(capsys: pytest.CaptureFixture[str], store: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.safetensors"
    assert main(["partition", "digits", "--parts", "2", "--out", str(book)]) == 0
    capsys.readouterr()
    out = tmp_path / "run"
    train = ["--strategy", "hybrid", "--partition", book, "--out", out]
    assert "divides another graph than" in mistake(capsys, "train", store, "--workers", "2", *train)
    assert "has 2 parts: start the same number of --workers or ranks" in mistake(
        capsys, "train", "digits", "--workers", "3", *train
    )
    many = ["--strategy", "cached", "--workers", "61", "--partition", "metis", "--out", out]
    assert "has 60 vertices: give at most that many" in mistake(capsys, "train", store, *many)
    assert not out.exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("split,split", "--strategies split,split: give different names"),
        ("split:sampling=none", "unknown --sampling 'none'"),
        ("split:samplings=labor", "--strategies split:samplings=labor: unknown flag --samplings"),
        ("split:help", "--strategies split:help: unrecognized arguments: --help"),
        ("split:", "--strategies split:: unrecognized arguments:"),
        ("split:lr=0.1", "--strategies split:lr=0.1: --lr is not specific to strategy split: set it for all runs"),
        ("tensor:fanout=3", "--strategies tensor:fanout=3: --fanout is not specific to strategy tensor"),
    ],
)
def test_contenders_that_cannot_be(capsys: pytest.CaptureFixture[str], store: Path, names: str, message: str) -> None:
    assert message in mistake(capsys, "compare", store, "--strategies", names)


def test_compare(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "compare"
    monkeypatch.setattr(run, "make_plan", None)  # plans are computed before the first run
    command = [
        "compare",
        str(store),
        "--strategies",
        "single,tensor",
        "--workers",
        "2",
        "--epochs",
        "3",
        "--out",
        str(out),
    ]
    assert main([*command, "--dtype", "float64"]) == 0
    single, tensor = (json.loads(line)["summary"] for line in (out / "compare.jsonl").read_text().splitlines())
    assert single["loss"] == pytest.approx(tensor["loss"], rel=1e-9)
    assert single["test_accuracy"] == tensor["test_accuracy"]
    table = capsys.readouterr().out
    assert "single" in table
    assert "tensor" in table


def test_compare_one_strategy_with_several_flags(
    capsys: pytest.CaptureFixture[str], store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "compare"
    names = "single,split:batch-size=all:fanout=all,split:fanout=2"
    train = ["--epochs", "3", "--dtype", "float64", "--until", "val_accuracy=1", "--out", str(out)]
    assert main(["compare", str(store), "--strategies", names, *train]) == 0
    lines = [json.loads(line) for line in (out / "compare.jsonl").read_text().splitlines()]
    assert [line["strategy"] for line in lines] == names.split(",")
    single, whole, drawn = (line["summary"]["loss"] for line in lines)
    assert whole == pytest.approx(single, rel=1e-9)
    assert drawn != pytest.approx(single, rel=1e-3)
    assert "not reached" in capsys.readouterr().out


def test_compare_plans_for_the_ranks_of_torchrun(store: Path, tmp_path: Path) -> None:
    """`single` cannot run on two ranks, which is refused before any contender trains."""
    output = command("compare", store, "--strategies", "tensor,single", "--out", tmp_path / "out", workers=2)
    assert output.result == 2
    assert "strategy single runs on one rank: give --workers 1, or --strategy tensor for 2" in output.err
    assert not (tmp_path / "out").exists()


def test_ablate(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "ablate"
    arguments = ("compare", store, "--ablate", "--epochs", "2", "--dtype", "float64", "--out", out)
    output = command(*arguments, workers=2)
    assert output.result == 0
    lines = [json.loads(line) for line in (out / "compare.jsonl").read_text().splitlines()]
    assert [line["strategy"] for line in lines] == ["vertex-parallel", "tensor", "decoupled", "pipeline"]
    losses = [line["summary"]["loss"] for line in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[2] == losses[3] != losses[1]
    exchanges = [line["summary"]["ranks"][0]["collectives"] for line in lines]
    assert exchanges[3]["rows_to_cols"] == 4 * exchanges[2]["rows_to_cols"]
    assert "pipeline" in output.out


def stop_at_the_last_line(number: int) -> None:
    """Send a signal to this process just before it ignores signals."""
    signals: list[int] = []

    def handled_late(handler: Any) -> Any:
        if handler is signal.SIG_IGN and not signals:
            signals.append(number)
            os.kill(os.getpid(), number)
        return handle_signals(handler)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run without a terminal
    main_module.handle_signals = handled_late


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_at_the_end(number: signal.Signals) -> None:
    code, errors = finish(start("data", "info", "nowhere", prepare=partial(stop_at_the_last_line, number)))
    assert code == 128 + number, errors
    assert errors == f"weft: stopped by {number.name}\n"


class StopsInDestructor:
    """Object whose destructor is interrupted by a signal."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def stop_in_a_destructor() -> None:
    """Send a signal to this process within a destructor, before it runs its command."""

    def run_late(_options: Any) -> int:
        StopsInDestructor()
        time.sleep(100)
        return 0

    main_module._doctor = run_late


def test_signal_in_a_destructor() -> None:
    """Python discards exceptions of destructors, also that of a signal, after printing a traceback."""
    code, errors = finish(start("doctor", prepare=stop_in_a_destructor), 20)
    assert (code, errors) == (128 + signal.SIGTERM, "weft: stopped by SIGTERM\n")


@pytest.mark.parametrize("seconds", [pytest.param(0.0, marks=SLOW), 0.2, pytest.param(0.5, marks=SLOW)])
def test_signal_before_training(seconds: float, tmp_path: Path) -> None:
    options = "train rmat:20k,200k --random-features 8 --random-classes 3 --epochs 100000 --strategy hybrid --workers 2"
    run = start(*options.split(), "--out", tmp_path / "run")
    while signal.SIGTERM not in handled(run.pid):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(run.pid, signal.SIGTERM)
    code, errors = finish(run)
    assert code == 128 + signal.SIGTERM, errors
    assert errors.splitlines()[-1].startswith("weft: stopped by SIGTERM")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epoch", "3"], "unknown flag --epoch: did you mean --epochs?"),
        (["--normalize_features"], "unknown flag --normalize_features: did you mean --normalize-features?"),
        (["--epochs", "+3"], "argument --epochs: '+3' is not a whole number"),
        (["--epochs", "\u0663"], "argument --epochs: '\u0663' is not a whole number"),
        (["--epochs", "1_000"], "argument --epochs: '1_000' is not a whole number"),
        (["--lr", "1e-2x"], "argument --lr: '1e-2x' is not a number"),
        (["--lr", "nan"], "--lr nan: give a finite number"),
        (["--layers", "2147483648"], "--layers 2147483648: give at most 1000"),
        (["--workers", "1000000000"], "--workers 1000000000: give at most 4096"),
        (["--chunks", "20000"], "--chunks 20000: give at most 16384"),
        (["--partition", "no\nfile.safetensors"], "no\\nfile.safetensors"),
    ],
)
def test_a_bad_flag_is_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = ["--strategy", "cached"] if "--partition" in flags else []
    assert main(["train", "digits", *strategy, *flags, "--out", str(tmp_path / "run")]) == 2
    (error,) = complaints(capsys.readouterr().err)
    assert message in error
    assert not (tmp_path / "run").exists()


def test_out_of_memory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--hidden", str(2**20), "--layers", "3", "--out", str(tmp_path / "run")]) == 1
    (error,) = complaints(capsys.readouterr().err)
    remedy = "reduce the widths, or use --strategy offload, which stores rows on disk"
    assert error == f"weft: error: out of memory (4398.05 GB more were requested): {remedy}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor"], "this command runs in one process: start it without torchrun"),
        (["data", "info", "digits"], "this command runs in one process"),
        (["train", "digits", "--workers", "3"], "--workers 3: torchrun has started 2 ranks: leave it out"),
    ],
)
def test_commands_that_torchrun_cannot_start(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert message in mistake(capsys, *arguments)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_scheduler_s_tasks_are_no_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "2")
    assert main(["train", "digits", "--out", str(tmp_path / "run")]) == 2
    assert "started 2 tasks, and each would train by itself: let it start torchrun" in capsys.readouterr().err
    monkeypatch.setenv(name, "1")
    assert main(["train", "digits", "--epochs", "1", "--out", str(tmp_path / "run")]) == 0
