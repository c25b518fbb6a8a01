"""Stores preserve graphs, and an error names every kind of damage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.lib.graph_checks import CALM, assert_one_line, graphs, same_graph
from tests.lib.ranks import forked
from weft.cli.main import main
from weft.data import DataWarning, Graph, load, save
from weft.data import graph as graph_module
from weft.data.adjacency import Adjacency
from weft.data.checks.rules import check_stored_transpose
from weft.data.store import check_record, store
from weft.data.store.npy import map_array
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.processes.temporary_folder import LEFTOVER_SECONDS, lock_folder
from weft.storage.unnamed_files import release
from weft.utils.errors import InputError


def sample() -> Graph:
    """Return a directed, weighted graph with all attributes that a graph without vertex types can have."""
    mask = torch.tensor([True, False, False])
    graph = Graph.from_edges(
        torch.tensor([0, 1, 2, 2]),
        torch.tensor([1, 2, 1, 1]),
        weight=torch.tensor([0.5, 1.0, 2.0, 4.0]),
        edge_features=torch.arange(8.0).reshape(4, 2),
        x=torch.arange(6.0).reshape(3, 2),
        y=torch.tensor([0, 1, -1]),
        train_mask=mask,
        val_mask=mask.roll(1),
        test_mask=mask & False,
        name="sample",
    )
    return replace(graph, ids=torch.tensor([2, 0, 1]))


@CALM
@given(graph=graphs())
def test_round_trip(graph: Graph) -> None:
    with tempfile.TemporaryDirectory() as folder:
        graph.save(Path(folder) / "g")
        for verify in (True, False):
            opened = Graph.open(Path(folder) / "g", verify=verify)
            same_graph(graph, opened)
            assert opened.path == Path(folder) / "g"
            assert replace(opened, name="changed").path is None
        again = Path(folder) / "again"
        opened.save(again)
        same_graph(graph, load(again))
        assert sorted(path.name for path in Path(folder).iterdir()) == ["again", "g"]


def test_changes_to_an_opened_graph_are_not_released(tmp_path: Path) -> None:
    """Releasing memory keeps changed pages, which only this process has; others are read from the file again."""
    sample().save(tmp_path / "g")
    graph = Graph.open(tmp_path / "g")
    assert graph.x is not None
    doubled = 2 * graph.x
    graph.x.mul_(2)
    for tensor in (graph.x, graph.x[1:], graph.in_edges.indptr):
        release(tensor)
    assert torch.equal(graph.x, doubled)


def test_opened_tensors_are_memory_mapped_copy_on_write(tmp_path: Path) -> None:
    save(sample(), tmp_path / "g")
    opened = Graph.open(tmp_path / "g")
    assert opened.x is not None
    assert isinstance(map_array(tmp_path / "g" / "x.npy").base, mmap)
    opened.x[0, 0] = 99.0
    same_graph(Graph.open(tmp_path / "g"), sample())


def test_a_file_beyond_memory_is_mapped(tmp_path: Path) -> None:
    """The system would not reserve memory for a copy of every page. The file has a hole, so it takes no space."""
    path, count = tmp_path / "x.npy", memory_limit_bytes()
    with path.open("wb") as file:
        described = {"descr": "<f4", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, described)
        file.truncate(file.tell() + 4 * count)
    array = map_array(path)
    assert array[-1] == 0
    array[-1] = 3
    assert map_array(path)[-1] == 0


def test_a_symmetric_graph_stores_its_topology_once(tmp_path: Path) -> None:
    source = torch.tensor([0, 1, 1, 2])
    target = torch.tensor([1, 0, 2, 1])
    Graph.from_edges(source, target).save(tmp_path / "g")
    assert sorted(path.stem for path in (tmp_path / "g").iterdir()) == [
        "indices",
        "indptr",
        "manifest",
    ]
    opened = Graph.open(tmp_path / "g")
    assert opened.in_edges.transpose.indices is opened.in_edges.indices


def test_only_a_store_is_replaced_and_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    sample().save(folder)
    other = replace(sample(), name="other")
    with pytest.raises(InputError) as error:
        other.save(folder)
    assert_one_line(error, folder, "overwrite")
    assert Graph.open(folder).name == "sample"
    other.save(folder, overwrite=True)
    assert Graph.open(folder).name == "other"

    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    (foreign / "manifest.json").write_text('{"name": "some other program\'s"}')
    for path in (foreign, foreign / "thesis.txt"):
        with pytest.raises(InputError) as error:
            other.save(path, overwrite=True)
        assert_one_line(error, path, "another folder")
    assert (foreign / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g", "mine"]


@pytest.mark.parametrize("broken", ["write_array", "replace_folder"])
def test_a_failed_save_leaves_no_files(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample().save(tmp_path / "old")
    monkeypatch.setattr(store, broken, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    for folder, overwrite in ((tmp_path / "new", False), (tmp_path / "old", True)):
        with pytest.raises(OSError, match="disk full"):
            replace(sample(), name="newer").save(folder, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    same_graph(Graph.open(tmp_path / "old"), sample())


def test_a_signal_while_a_folder_is_created_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "lock_folder", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sample().save(tmp_path / "g")
    assert not list(tmp_path.iterdir())


def test_folders_that_a_killed_import_left_behind_are_removed(tmp_path: Path) -> None:
    """Only old folders without a lock are removed: a process that still writes a graph has the lock."""
    old = time.time() - 2 * LEFTOVER_SECONDS
    for name in (".g.0123abcd.partial", ".h.1123abcd.partial", ".mine.partial"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    lock = lock_folder(tmp_path / ".h.1123abcd.partial")
    sample().save(tmp_path / "g")
    os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {"g", ".h.1123abcd.partial", ".mine.partial"}


def test_a_failed_rename_restores_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample().save(tmp_path / "old")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(store, "exchange", lambda *_: False)
    with pytest.raises(OSError, match="no"):
        sample().save(tmp_path / "old", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    same_graph(Graph.open(tmp_path / "old"), sample())


def stopped_at(step: str, folder: Path, *, can_exchange: bool) -> None:
    """Replace the store in a process that is killed just before a step, such as the second rename."""
    process = forked().Process(target=replace_until, args=(step, folder, can_exchange))
    process.start()
    process.join(60)
    assert process.exitcode == 9


def replace_until(step: str, folder: Path, can_exchange: bool) -> None:
    steps = Counter[str]()

    def before(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            steps[name] += 1
            if f"{name} {steps[name]}" == step:
                os._exit(9)
            return function(*arguments, **options)

        return run

    Path.rename = before("rename", Path.rename)  # type: ignore[method-assign]
    store.exchange = before("exchange", store.exchange if can_exchange else lambda *_: False)
    shutil.rmtree = before("remove", shutil.rmtree)
    replace(sample(), name="newer").save(folder, overwrite=True)


@pytest.mark.parametrize(("step", "name"), [("exchange 1", "sample"), ("remove 1", "newer")])
def test_a_store_survives_a_killed_replacement(step: str, name: str, tmp_path: Path) -> None:
    sample().save(tmp_path / "g")
    stopped_at(step, tmp_path / "g", can_exchange=True)
    assert Graph.open(tmp_path / "g").name == name


@pytest.mark.parametrize(("step", "name"), [("rename 1", "sample"), ("rename 2", ""), ("remove 1", "newer")])
def test_the_error_names_the_old_store_without_atomic_exchange(step: str, name: str, tmp_path: Path) -> None:
    sample().save(tmp_path / "g")
    stopped_at(step, tmp_path / "g", can_exchange=False)
    if name:
        assert Graph.open(tmp_path / "g").name == name
        return
    for opening in (Graph.open, load):
        with pytest.raises(InputError, match=r"was stopped while it replaced this graph: mv .*\.old /"):
            opening(tmp_path / "g")
    (aside,) = tmp_path.glob(".g.*.old")
    aside.rename(tmp_path / "g")
    same_graph(Graph.open(tmp_path / "g"), sample())


@pytest.mark.slow
def test_python_without_assertions_writes_the_same_store(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n1,2\n2,0\n")
    command = [sys.executable, "-O", "-m", "weft", "data", "import", "--edges", str(tmp_path / "edges.csv")]
    subprocess.run([*command, "--out", str(tmp_path / "g")], check=True, capture_output=True, timeout=120)
    assert Graph.open(tmp_path / "g").num_edges == 3


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return a function that damages a store by changing its manifest."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def flip(folder: Path) -> None:
    data = bytearray((folder / "x.npy").read_bytes())
    data[-1] ^= 1
    (folder / "x.npy").write_bytes(data)


def cut(folder: Path) -> None:
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:-3])


def write(name: str, array: Any) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / name, array, allow_pickle=True)


def set_values(folder: Path) -> None:
    """Write a store with right checksums and invalid values."""
    graph = replace(sample(), x=torch.full((3, 2), float("nan")), trusted=True)
    graph.save(folder, overwrite=True)


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def replaced(key: str, array: np.ndarray) -> Callable[[Path], object]:
    """Return a function that replaces an array, and changes the manifest to match it."""

    def damage(folder: Path) -> None:
        np.save(folder / f"{key}.npy", array)
        checksum = hashlib.sha256(array.tobytes()).hexdigest()
        about = {"dtype": array.dtype.str, "shape": list(array.shape), "sha256": checksum}
        edit(lambda m: m["files"].update({key: about}))(folder)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing file": (lambda folder: (folder / "x.npy").unlink(), ["x.npy", "missing", "import"]),
    "truncated": (cut, ["x.npy", "bytes", "truncated", "import"]),
    "empty": (lambda folder: (folder / "x.npy").write_bytes(b""), ["x.npy", "cannot be read", "import"]),
    "header": (lambda folder: (folder / "x.npy").write_bytes(b"PK" * 99), ["x.npy", "cannot be read", "import"]),
    "flipped bit": (flip, ["x.npy", "sha256", "import"]),
    "shape": (write("x.npy", np.zeros((2, 3), np.float32)), ["x.npy", "'shape'", "[2, 3]", "[3, 2]", "import"]),
    "dtype": (write("x.npy", np.zeros((3, 2))), ["x.npy", "'dtype'", "<f8", "<f4", "import"]),
    "edge features": (
        write("edge_features.npy", np.zeros((4, 2), np.float32)),
        ["edge_features.npy", "sha256", "import"],
    ),
    "objects": (write("y.npy", np.array([{}] * 3)), ["y.npy", "never unpickles", "import"]),
    "values": (set_values, ["x[0, 0]", "nan", "finite"]),
    "newer": (
        edit(lambda m: m.update(version=4)),
        ["manifest.json", "has version 4", "versions up to 3: upgrade weft"],
    ),
    "foreign": (edit(lambda m: m.update(format="zip")), ["manifest.json", "'format'", "weft data import"]),
    "no field": (edit(lambda m: m.pop("symmetric")), ["manifest.json", "'symmetric'", "missing", "import"]),
    "no version": (edit(lambda m: m.pop("version")), ["manifest.json", "'version'", "missing", "import"]),
    "field type": (edit(lambda m: m.update(files=[])), ["manifest.json", "'files'", "dict", "import"]),
    "no array": (edit(lambda m: m["files"].pop("indices")), ["manifest.json", "lacks 'indices'", "import"]),
    "no checksum": (edit(lambda m: m["files"]["x"].pop("sha256")), ["manifest.json", "'sha256'", "missing"]),
    "no dtype": (edit(lambda m: m["files"]["x"].pop("dtype")), ["manifest.json", "'dtype'", "missing"]),
    "path outside": (edit(lambda m: m["files"].update({"../x": {}})), ["manifest.json", "'../x'", "import"]),
    "no JSON": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        ["manifest.json", "JSONDecodeError", "import"],
    ),
    "no text": (
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
        ["manifest.json", "UnicodeDecodeError"],
    ),
    "nested": (lambda folder: (folder / "manifest.json").write_text("[" * 10**5), ["manifest.json", "RecursionError"]),
    "names": (edit(lambda m: m.update(relations=[1])), ["manifest.json", "'relations'", "int", "str"]),
    "offsets": (edit(lambda m: m.update(type_offsets=["0"])), ["manifest.json", "'type_offsets'", "str", "int"]),
    "no scales": (replaced("x", np.zeros((3, 2), np.int8)), ["manifest.json", "lacks 'x_scale'", "import"]),
    "scales of floats": (replaced("x_scale", np.ones(2, np.float32)), ["manifest.json", "torch.float32", "int8"]),
    "header byte": (lambda folder: flip_bit(folder / "x.npy", 25), ["x.npy", "TokenError", "import"]),
    "ids of floats": (replaced("indices", np.zeros(4)), ["in_edges.indices is torch.float64", "import"]),
    "text": (replaced("x", np.array(["a"])), ["x.npy", "<U1", "import"]),
    "byte order": (replaced("x", np.zeros((3, 2), ">f4")), ["x.npy", ">f4", "import"]),
    "unsigned": (replaced("y", np.zeros(3, np.uint16)), ["y.npy", "uint16", "import"]),
    "single number": (replaced("indptr", np.array(0)), ["indptr.npy", "[]", "import"]),
    "transpose": (replaced("transpose_edge_ids", np.array([0, 1, 2, 9], np.int32)), ["transpose.edge_ids", "import"]),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), ["manifest.json", "missing", "import"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "g"
    sample().save(folder)
    spoil, parts = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(InputError) as error:
        Graph.open(folder)
    assert_one_line(error, folder, *parts)


def test_a_path_is_printed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "import", "rmat:3,4", "--out", "/proc/a\n\x1bb/c"]) == 1
    assert capsys.readouterr().err.startswith(r"weft: error: /proc/a\n\x1bb: No such file")


def directed() -> Graph:
    """Return a graph without weights whose transpose has as many entries in each row as the in-edges."""
    return Graph.from_edges(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))


WRONG: dict[str, tuple[Graph, Callable[[Path], object], str]] = {
    "symmetric": (directed(), edit(lambda m: m.update(symmetric=True)), "stored as symmetric"),
    "transpose of other edges": (
        directed(),
        replaced("transpose_indices", np.array([2, 0, 1], np.int32)),
        "is not the transpose",
    ),
    "rows of other edges": (
        sample(),
        replaced("transpose_indptr", np.array([0, 2, 2, 4])),
        "is not the transpose",
    ),
    "order of edges": (
        sample(),
        replaced("transpose_edge_ids", np.array([1, 0, 2, 3], np.int32)),
        "is not the transpose",
    ),
    "weights of the transpose": (
        sample(),
        replaced("transpose_weight", np.array([0.5, 1.0, 2.0, 5.0], np.float32)),
        "is not the transpose",
    ),
    "unsorted sources": (sample(), replaced("indices", np.array([2, 0, 2, 1], np.int32)), "target 1 do not ascend"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("verify", [True, None])
def test_wrong_contents_with_right_checksums_are_named(wrong: str, verify: bool | None, tmp_path: Path) -> None:
    graph, spoil, part = WRONG[wrong]
    graph.save(tmp_path / "g")
    Graph.open(tmp_path / "g", verify=verify)
    spoil(tmp_path / "g")
    with pytest.raises(InputError) as error:
        Graph.open(tmp_path / "g", verify=verify)
    assert_one_line(error, tmp_path / "g", part, "import")


def test_unsorted_rows_of_a_matrix_are_refused() -> None:
    """SciPy's CSR matrices may be unsorted; self-loops would then be found or not by chance."""
    indptr, indices = torch.tensor([0, 3, 3, 4]), torch.tensor([1, 2, 0, 0], dtype=torch.int32)
    with pytest.raises(InputError, match=r"sources of target 0 do not ascend: use Graph\.from_edges"):
        Graph(in_edges=Adjacency(indptr=indptr, indices=indices, num_sources=3))


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 22])
def test_blocks_of_the_check_agree(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.data.adjacency.BLOCK_ENTRIES", block)
    monkeypatch.setattr("weft.data.checks.rules.BLOCK_ENTRIES", block)
    edges = torch.randint(9, (2, 40), generator=torch.Generator().manual_seed(0))
    graph = Graph.from_edges(*edges, weight=torch.arange(40.0), num_vertices=50)
    assert graph.in_edges.unsorted_target is None
    check_stored_transpose(graph.in_edges, graph.in_edges.transpose)
    target = int(graph.in_edges.degree.argmax())
    first, last = graph.in_edges.indptr[target : target + 2].tolist()
    indices = graph.in_edges.indices.clone()
    indices[first:last] = indices[first:last].flip(0)
    assert replace(graph.in_edges, indices=indices).unsorted_target == target
    with pytest.raises(InputError, match="is not the transpose"):
        check_stored_transpose(graph.in_edges, replace(graph.in_edges, indices=indices).transpose)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a graph folder that was opened, and whose check is recorded although its files are new."""
    monkeypatch.setattr(check_record, "MIN_AGE_SECONDS", -1.0)
    replace(sample(), val_mask=sample().train_mask, trusted=True).save(tmp_path / "g")
    with pytest.warns(DataWarning, match="both train_mask and val_mask"):
        Graph.open(tmp_path / "g", verify=None)
    return tmp_path / "g"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets an entry whenever the values of a graph are checked."""
    graphs: list[object] = []
    check = graph_module.check_values
    monkeypatch.setattr(graph_module, "check_values", lambda graph: (graphs.append(graph), check(graph)))
    return graphs


@pytest.mark.filterwarnings("ignore::weft.data.DataWarning")
def test_a_second_opening_reads_no_values(checked: Path, checks: list[object]) -> None:
    Graph.open(checked, verify=None)
    assert not checks
    Graph.open(checked)
    assert len(checks) == 1


def test_a_second_opening_repeats_warnings(checked: Path) -> None:
    with pytest.warns(DataWarning, match="both train_mask and val_mask"):
        Graph.open(checked, verify=None)


CHANGES: dict[str, Callable[[Path], object]] = {
    "manifest": edit(lambda m: m.update(name="other")),
    "times": lambda folder: os.utime(folder / "x.npy", ns=(0, 0)),
    "bytes": lambda folder: (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()),
    "copies": lambda folder: [shutil.copy2(p, f"{p}.new") and os.replace(f"{p}.new", p) for p in folder.glob("*.npy")],
    "record": lambda folder: (folder / "checked.json").write_text("["),
    "record of others": lambda folder: (folder / "checked.json").chmod(0o666),
    "link": lambda folder: (
        (folder / "checked.json").rename(folder / "r") and (folder / "checked.json").symlink_to(folder / "r")
    ),
    "folder": lambda folder: (folder / "checked.json").unlink() or (folder / "checked.json").mkdir(),
    "fifo": lambda folder: (folder / "checked.json").unlink() or os.mkfifo(folder / "checked.json"),
}


@pytest.mark.filterwarnings("ignore::weft.data.DataWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_folder_is_checked_again(
    change: Callable[[Path], object], checked: Path, checks: list[object]
) -> None:
    change(checked)
    Graph.open(checked, verify=None)
    assert len(checks) == 1


@pytest.mark.filterwarnings("ignore::weft.data.DataWarning")
def test_the_record_of_another_user_is_not_trusted(
    checked: Path, checks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    Graph.open(checked, verify=None)
    assert len(checks) == 1


def test_new_files_and_read_only_folders_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample().save(tmp_path / "g")
    Graph.open(tmp_path / "g")
    assert not (tmp_path / "g" / "checked.json").exists()
    monkeypatch.setattr(check_record, "MIN_AGE_SECONDS", -1.0)
    monkeypatch.setattr(check_record, "write_text", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    Graph.open(tmp_path / "g")


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, part in ((tmp_path / "file", "is a file"), (tmp_path / "none", "no such folder")):
        with pytest.raises(InputError) as error:
            Graph.open(path)
        assert_one_line(error, path, part)
