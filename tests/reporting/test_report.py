"""The report: its figures have the numbers of the records, what people name is text, what is damaged is refused."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.lib.running import train
from tests.reporting.folders import Elements, Line, make_run, rank_line, tables, text
from weft.cli.main import main
from weft.reporting import page as page_module
from weft.reporting.records import KINDS, REQUIRED_FIELDS
from weft.reporting.serve import HOST, ReportServer
from weft.reporting.write import read_runs, report_page
from weft.utils.errors import InputError
from weft.utils.jsonl import Recorder

pytest.importorskip("altair")
GRAPH = "sbm:vertices=300,degree=6,classes=3,features=8"
EVIL = '<img src=x onerror=alert(1)> & "quoted"'


@pytest.fixture(autouse=True)
def no_vega(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vega takes seconds to put together, and is only needed where figures are drawn."""
    monkeypatch.setattr(page_module, "vega", lambda: "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks whose vertices are divided, with a timeline."""
    out = tmp_path_factory.mktemp("runs") / "divided"
    train(GRAPH, workers=2, strategy="communicated", epochs=4, eval_every=2, timeline=1, out=out)
    return out


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[Line]:
    """Its record."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def page_of(*folders: Path) -> str:
    return report_page(read_runs(folders))


def test_curves_are_the_record(folder: Path, lines: list[Line]) -> None:
    found, epochs = tables(page_of(folder)), [line for line in lines if line["kind"] == "epoch"]
    assert [(one["epoch"], one["loss"], one["lr"], one["seconds"]) for one in found["epochs"]] == [
        (one["epoch"], one["loss"], one["lr"], one["seconds"]) for one in epochs
    ]
    scores = {(one["epoch"], one["split"]): one["value"] for one in found["scores-0"]}
    assert scores == {
        (one["epoch"], split): one[f"{split}_accuracy"]
        for one in epochs
        for split in ("train", "val", "test")
        if f"{split}_accuracy" in one
    }
    assert len(scores) == 6  # 2 of 4 epochs are evaluated


def test_seconds_are_the_record(folder: Path, lines: list[Line]) -> None:
    found, ranks = tables(page_of(folder)), [line for line in lines if line["kind"] == "rank"]
    shown = {"compute": "compute", "communication": "network", "waiting": "waiting"}
    for phase in ("train", "eval", "setup"):
        bars = {(one["label"], one["kind"]): one["seconds"] for one in found[f"phase-{phase}"]}
        for rank in range(2):
            for kind in KINDS:
                of = [one[f"{kind}_seconds"] for one in ranks if (one["phase"], one["rank"]) == (phase, rank)]
                expected = sum(of) if phase == "setup" else statistics.median(of)
                assert bars[f"rank {rank}", shown[kind]] == expected
    courses = [(one["label"], one["epoch"], one["compute"], one["network"], one["waiting"]) for one in found["ranks"]]
    trained = sorted((one for one in ranks if one["phase"] == "train"), key=lambda one: one["rank"])
    assert courses == [
        (f"rank {one['rank']}", one["epoch"], *(one[f"{kind}_seconds"] for kind in KINDS)) for one in trained
    ]


def test_counts_are_the_record(folder: Path, lines: list[Line]) -> None:
    found = tables(page_of(folder))
    trained = [line for line in lines if line["kind"] == "rank" and line["phase"] == "train"]
    traffic = {one["label"]: one["bytes"] for one in found["traffic-0"] if one["kind"] == "counted"}
    last = [line for line in trained if line["epoch"] == 3]
    for tag in ("halo", "gradients"):
        assert traffic[f"sent: {tag}"] == sum(line["bytes_sent"][tag] for line in last) > 0
    assert traffic["sent: all tags"] == sum(sum(line["bytes_sent"].values()) for line in last)
    most = {one["label"]: one["bytes"] for one in found["memory"]}
    for rank in range(2):
        assert most[f"rank {rank}"] == max(line["peak_memory_bytes"] for line in trained if line["rank"] == rank)
    loads = {(one["label"], one["load"]): one["value"] for one in found["balance"]}
    assert [loads[f"rank {rank}", "edges x width"] for rank in range(2)] == [line["edges"] for line in last]
    shares = [one["share"] for one in found["balance"] if one["load"] == "edges x width"]
    assert shares == pytest.approx([one["edges"] / statistics.fmean(two["edges"] for two in last) for one in last])


def test_the_graph_and_its_parts_are_counted_anew(folder: Path) -> None:
    found, graph = tables(page_of(folder)), weft.load(GRAPH)
    degree = graph.in_edges.degree.tolist()
    bars = {one["degree"]: one["vertices"] for one in found["degrees"]}
    assert bars["0"] == degree.count(0)
    assert bars["1"] == degree.count(1)
    assert bars["4 to 7"] == sum(4 <= one <= 7 for one in degree)
    assert sum(bars.values()) == graph.num_vertices
    part = weft.partition.range_parts(graph.in_edges, 2)
    quality = weft.partition.Quality.measure(graph, part, 2, 0.0)
    parts = {(one["label"], one["load"]): one["value"] for one in found["parts"]}
    for rank in range(2):
        assert parts[f"rank {rank}", "vertices"] == quality.vertices[rank]
        assert parts[f"rank {rank}", "in-edges"] == quality.in_edges[rank]
        assert parts[f"rank {rank}", "remote sources"] == quality.remote[rank]
    assert f"{quality.cut:,} of {graph.num_edges:,}" in text(page_of(folder))


def test_a_timeline_is_that_of_the_file(folder: Path) -> None:
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    drawn = tables(page_of(folder))["timeline-0"]
    expected = sorted(
        (one["name"], one["ts"] / 1e3, (one["ts"] + one["dur"]) / 1e3) for one in events if one["ph"] == "X"
    )
    assert sorted((one["name"], one["start"], one["stop"]) for one in drawn) == expected
    lanes: dict[str, list[Line]] = {}
    for one in drawn:
        lanes.setdefault(one["lane"], []).append(one)
    assert any(lane == "rank 1 compute (2)" for lane in lanes)
    for slices in lanes.values():  # nothing hides another
        ordered = sorted(slices, key=lambda one: one["start"])
        assert all(one["stop"] <= two["start"] + 1e-9 for one, two in pairwise(ordered))


def test_planned_bytes_stand_beside_those_counted(tmp_path: Path) -> None:
    run = train(GRAPH, workers=2, strategy="tensor", epochs=2, out=tmp_path / "run")
    found: dict[str, dict[str, int]] = {"counted": {}, "planned": {}}
    for one in tables(page_of(run.folder))["traffic-0"]:
        found[one["kind"]][one["label"]] = one["bytes"]
    assert found["planned"] == found["counted"]
    assert {"sent: rows_to_cols", "sent: cols_to_rows", "sent: gradients", "sent: all tags"} <= found["planned"].keys()


def test_a_forecast_stands_beside_what_was_moved(tmp_path: Path) -> None:
    run = train(GRAPH, strategy="offload", chunks=2, epochs=2, out=tmp_path / "run")
    found = tables(page_of(run.folder))
    forecast = run.records[0]["placement"][0]["forecast"]
    moved = {(one["label"], one["kind"]): one["bytes"] for one in found["traffic-0"]}
    assert moved["to the device: all tags", "planned"] == forecast["to_device"]
    assert moved["to the device: all tags", "counted"] == forecast["to_device"]
    held = {one["kind"]: one["bytes"] for one in found["memory-estimates"]}
    assert held == {f"{name}, estimated": forecast[name] for name in ("device", "host", "disk") if forecast[name]}


def test_lines_have_what_readers_need(lines: list[Line]) -> None:
    """What reading asks of a line, of a real run: an end that has no event is left out of this."""
    for kind in REQUIRED_FIELDS.keys() - {"event"}:
        known = [line for line in lines if line["kind"] == kind]
        assert known
        for line in known:
            assert REQUIRED_FIELDS[kind].keys() <= line.keys()


def test_several_runs_are_set_side_by_side(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", epochs=3)
    two = make_run(tmp_path / "two", epochs=5, scale=2.0, lr=0.5)
    made = page_of(one, two)
    losses = {(row["run"], row["epoch"]): row["loss"] for row in tables(made)["epochs"]}
    assert losses == {("one", e): 1 / (1 + e) for e in range(3)} | {("two", e): 2 / (1 + e) for e in range(5)}
    heads = [cell for row in made.split("<thead>")[1:2] for cell in row.split("</thead>")[0].split('scope="col">')[1:]]
    assert [cell.split("<")[0] for cell in heads] == ["one", "two"]
    assert "two, rank 1" in {row["label"] for row in tables(made)["balance"]}
    chart = json.loads(Elements(made).scripts["figure-loss"])
    assert chart["encoding"]["color"]["scale"]["domain"] == ["one", "two"]
    said = text(made)
    assert "lr 0.01 0.5" in said
    assert said.count("weft train digits --model=gcn") == 2


def test_runs_of_one_name_are_told_by_their_paths(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / place / "run") for place in ("a", "b")]
    assert {row["run"] for row in tables(page_of(*folders))["epochs"]} == {str(folder) for folder in folders}
    with pytest.raises(InputError, match="is named twice"):
        read_runs([folders[0], folders[0] / ".." / "run"])


def test_what_people_name_is_text(tmp_path: Path) -> None:
    evil = make_run(tmp_path / EVIL, graph="</script><script>alert(2)</script>", model="gcn")
    recorder = Recorder(evil / "metrics.jsonl")
    recorder.write("epoch", epoch=3, loss=1.0, seconds=1.0, **{"val_</script><b>": 0.5})
    recorder.write("rank", **rank_line(3, 0) | {"bytes_sent": {"</script><i>": 7}})
    recorder.close()
    plain = make_run(tmp_path / "plain")
    made, usual = Elements(page_of(evil, plain)), Elements(page_of(plain))
    assert {name for name, _ in made.found} == {name for name, _ in usual.found}
    assert not [attrs for _, attrs in made.found if any(name.startswith("on") for name in attrs)]
    assert EVIL in {row["run"] for row in tables(page_of(evil, plain))["epochs"]}
    assert "<img" not in page_of(evil, plain)


def test_a_page_needs_no_network_and_says_so(folder: Path) -> None:
    made = Elements(page_of(folder))
    assert not [known for _, known in made.found if known.keys() & {"src", "srcset", "data", "action"}]
    assert all(str(known["href"]).startswith("#") for known in made.of("a"))
    assert any("default-src 'none'" in str(known.get("content")) for known in made.of("meta"))


def test_every_figure_has_words_and_numbers(folder: Path) -> None:
    made = Elements(page_of(folder))
    ids = {known.get("id") for _, known in made.found}
    figures = made.of("figure")
    assert len(figures) >= 10
    for known in figures:
        assert {known["aria-labelledby"], f"{known['id']}-table"} <= ids
        assert json.loads(made.scripts[str(known["id"])])["description"]
    levels = [int(name[1]) for name, _ in made.found if name in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(two <= one + 1 for one, two in pairwise(levels))
    assert {"header", "nav", "main", "footer"} <= {name for name, _ in made.found}
    assert len(ids - {None}) == sum("id" in known for _, known in made.found)  # none is twice


def test_what_is_not_recorded_is_named(tmp_path: Path) -> None:
    said = text(page_of(make_run(tmp_path / "run", ranks=1)))
    left_out = said[said.rindex("Not shown") :]
    for title in ("Timelines of the ranks", "Load balance over the ranks", "Partition"):
        assert f"{title}:" in left_out
    assert "Loss and scores:" not in left_out
    assert "the strategy records no estimate" in said


@pytest.mark.parametrize(("begun", "said"), [(False, "interrupted: 0 of 3 epochs"), (True, "running: 0 of 3 epochs")])
def test_a_run_without_epochs(begun: bool, said: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", epochs=3, ended=False)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    if begun:
        (folder / "lock").touch()
    made = page_of(folder)
    assert said in text(made)
    assert not tables(made).keys() & {"epochs", "ranks", "memory", "balance"}
    assert "Loss and scores: no epoch is recorded yet" in text(made)


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=False)
    recorder = Recorder(folder / "metrics.jsonl")
    recorder.write("event", event="stopped", epoch=2, signal=15)
    recorder.close()
    assert "stopped after 3 epochs" in text(page_of(folder))
    assert "val accuracy, newest" in text(page_of(folder))


def test_a_line_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 3, "lo')
    assert len(tables(page_of(folder))["epochs"]) == 3


def test_numbers_that_are_none_are_gaps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=False)
    recorder = Recorder(folder / "metrics.jsonl")
    recorder.write("epoch", epoch=3, loss=float("nan"), seconds=1.0, val_accuracy=float("inf"))
    recorder.close()
    found = tables(page_of(folder))
    assert [row["loss"] for row in found["epochs"]][2:] == [1 / 3, None]
    assert found["scores-0"][-1]["value"] is None


def test_a_resumed_run_tells_of_its_newest_start(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=2, ended=False)
    recorder = Recorder(folder / "metrics.jsonl")
    begun: dict[str, Any] = {"epoch": 3, "config": {}, "graph": {}, "num_parameters": 20, "ranks": 1}
    recorder.write("config", **begun, placement=[{}])
    recorder.write("epoch", epoch=3, loss=0.1, seconds=1.0)
    recorder.write("rank", **rank_line(3, 0))
    recorder.close()
    found = tables(page_of(folder))
    assert [row["epoch"] for row in found["epochs"]] == [0, 1, 2, 3]
    assert [(row["label"], row["epoch"]) for row in found["ranks"]] == [("rank 0", 3)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "line 2 is damaged"),
        ('{"kind": "epoch", "epoch": 1, "loss": 1.0}', "line 2 is damaged (a line of kind epoch has no 'seconds')"),
        ('{"kind": "epoch", "epoch": 1, "loss": "low", "seconds": 1}', "has 'loss' low, of the wrong type"),
        (
            json.dumps({"kind": "rank", **rank_line(0, 0), "bytes_sent": {"halo": "many"}}),
            "the records do not have the format",
        ),
        (json.dumps({"kind": "rank", **rank_line(0, 0), "stages": 3}), "the records do not have the format"),
    ],
)
def test_a_damaged_record_is_one_line(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = make_run(tmp_path / "run"), tmp_path / "report.html"
    metrics = folder / "metrics.jsonl"
    first, *rest = metrics.read_text().splitlines()
    metrics.write_text("\n".join([first, line, *rest]) + "\n")
    assert main(["report", str(folder), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]


def test_what_a_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, taken = str(make_run(tmp_path / "run")), tmp_path / "taken.html"
    taken.write_text("mine")
    (tmp_path / "damaged" / "run").mkdir(parents=True)
    (tmp_path / "damaged" / "run" / "config.toml").write_text("graph = ")
    for arguments, said in {
        (run,): "--out",
        (run, "--out", str(taken)): "--overwrite",
        (run, "--out", str(tmp_path / "page.pdf")): ".html",
        (run, "--out", str(tmp_path / "none" / "page.html")): "No such file or directory",
        (run, "--out", str(taken), "--serve"): "not allowed with",
        (run, "--out", str(taken), "--port", "80"): "--port has no effect without --serve",
        (run, "--serve", "--overwrite"): "--overwrite has no effect with --serve",
        (run, "--serve", "--port", "65536"): "--port 65536",
        (str(tmp_path), "--out", str(taken)): "contains no run",
        (str(tmp_path / "damaged" / "run"), "--out", str(taken), "--overwrite"): "config.toml: cannot be read",
    }.items():
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert taken.read_text() == "mine"
    assert main(["report", run, "--out", str(taken), "--overwrite"]) == 0
    assert taken.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_a_package_that_is_missing_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # of Vega
    page_module.vega.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["report", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "page.html")]) == 2
    assert f"needs {missing}: pip install 'weft[report]'" in capsys.readouterr().err


def test_pytorch_is_not_imported(tmp_path: Path) -> None:
    code = "import sys; from weft.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    told = [sys.executable, "-c", code, "report", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "one.html")]
    assert subprocess.run(told, check=False).returncode == 0
    assert (tmp_path / "one.html").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    """One that follows a run which goes on."""
    with ReportServer([make_run(tmp_path / "run", ended=False)], 0) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def asked(server: ReportServer, path: str = "", **headers: str) -> tuple[int, str, str]:
    """The answer's code, ETag and text."""
    request = urllib.request.Request(
        server.url + path, headers={name.replace("_", "-"): headers[name] for name in headers}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers["ETag"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.read().decode()


def test_a_served_report_follows_its_run(server: ReportServer) -> None:
    assert server.server_address[0] == HOST == "127.0.0.1"
    code, state, made = asked(server)
    assert (code, len(tables(made)["epochs"])) == (200, 3)
    assert Elements(made).of("body") == [{"data-follow": state}]
    assert asked(server, If_None_Match=state)[0] == 304
    metrics = server.folders[0] / "metrics.jsonl"
    recorder = Recorder(metrics)
    recorder.write("epoch", epoch=3, loss=0.1, lr=0.01, seconds=1.0)
    recorder.close()
    code, grown, made = asked(server, If_None_Match=state)
    assert (code, tables(made)["epochs"][-1]["loss"]) == (200, 0.1)
    with metrics.open("a") as file:
        file.write('{"kind": "rank", "ep')
    code, torn, made = asked(server)
    assert (code, len(tables(made)["epochs"])) == (200, 4)
    assert len({state, grown, torn}) == 3
    with metrics.open("a") as file:
        file.write('\n{"kind": "epoch"}\n')
    code, _, made = asked(server)
    assert code == 500
    assert "is damaged" in made


def test_a_served_report_is_for_this_machine(server: ReportServer) -> None:
    assert asked(server, Host="evil.example")[0] == 403
    assert asked(server, Host=f"localhost:{server.server_port}")[0] == 200
    assert asked(server, "metrics.jsonl")[0] == 404
    with pytest.raises(InputError, match=f"--port {server.server_port}: Address already in use"):
        ReportServer(server.folders, server.server_port)


def test_serving_says_where_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    told = [sys.executable, "-m", "weft", "report", str(make_run(tmp_path / "run")), "--serve"]
    with subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        first = command.stdout.readline()
        assert first.startswith("report at http://127.0.0.1:")
        with urllib.request.urlopen(first.split()[2]) as answer:
            assert len(tables(answer.read().decode())["epochs"]) == 3
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=30) == ("", "")
    assert command.returncode == 0
