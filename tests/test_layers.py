"""Rules of imports, checked in the sources: only lower packages, no circles, torch.distributed in one package."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import weft
from weft.strategies import STRATEGIES, Plan
from weft.strategies.split.plan import MiniBatchPlan

ROOT = Path(weft.nn.__file__).parent.parent
PACKAGES = (
    *("utils", "runtime", "config", "storage", "data", "kernels", "comm", "partition", "nn", "cost"),
    *("parallel", "strategies", "autotune", "reporting", "training", "prediction", "experiments", "cli"),
)
"""All packages, each of which imports only from those before it."""
PEERS = {"comm", "partition", "nn", "cost"}
"""Packages that do not import each other, whatever their order."""
MAX_FILES = 14
"""Largest number of files of a folder, those of its subfolders not included."""
NETWORK = {"comm", "training/launch/processes.py"}
HEAVY = {"torch.utils.flop_counter", "psutil", "triton", "pandas", "scipy", "torch_geometric", "matplotlib"}


def imports(path: Path) -> set[str]:
    """Return the full names of the modules that a file imports, at any depth."""
    return imported(path.read_text())


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree; cached, since several tests need them."""
    return [*ast.walk(ast.parse(text))]


@cache
def imported(text: str) -> set[str]:
    """Return the full names of the modules that a file's text imports; cached, since several tests need them."""
    names: set[str] = set()
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import of {node.module}"
            assert node.module
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_down() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(PACKAGES)
    for path in ROOT.rglob("*.py"):
        package, *inner = path.relative_to(ROOT).parts
        if not inner:  # weft/__init__.py, whose names are imported when they are used
            continue
        for name in imports(path):
            root, target, *_ = [*name.split("."), ""]
            if root != "weft" or target in ("", package):
                continue
            if target == "_native":
                assert package == "runtime", f"{path} imports the extension, not runtime.native"
                continue
            assert target in PACKAGES, f"{path} imports {name}"
            assert PACKAGES.index(target) < PACKAGES.index(package), f"{path} imports {name}: upward"
            assert not {target, package} <= PEERS, f"{path} imports {name}: sideways"


WHOLE_CONFIGURATION = {
    *("__init__.py", "cli/main.py", "training/run.py"),  # make it: weft.Config, a command line, a call
    *("experiments/compare.py", "experiments/sweep.py", "training/planning/search.py"),  # make variants of it
    "training/planning/plan_call.py",  # passes it to the search
    *("training/flag_checks.py", "training/input_checks.py"),  # check all sections
    *("training/artifacts/run_folder.py", "training/artifacts/checkpoint.py"),  # write, read and compare it
    *("training/artifacts/saved_model.py", "reporting/records.py"),  # read it
    *("training/rank.py", "training/loop.py"),  # train as all sections say, and save them
}
"""Files that may import Config; all others get the sections that they read, or single values."""


def test_few_files_read_the_whole_configuration() -> None:
    files = {
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "weft.config.config.Config" in imports(path)
    }
    assert files == WHOLE_CONFIGURATION


def test_no_folder_has_many_files() -> None:
    counts = {folder: len([*folder.glob("*.py")]) for folder in ROOT.rglob("*") if folder.is_dir()}
    assert max(counts.values()) <= MAX_FILES, {folder for folder in counts if counts[folder] > MAX_FILES}


def test_the_documented_order_is_that_of_the_code() -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    assert " → ".join(PACKAGES) in " ".join(text.split()), "CONTRIBUTING.md names another order of packages"


def test_no_process_has_what_it_does_not_need() -> None:
    """Heavy modules cost tens of megabytes, psutil 20 ms. PyTorch's FLOP counter imports Triton if it is there."""
    code = f"import sys, weft.training.planning.plan_call; print(*{HEAVY} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def imports_within_folders(root: Path) -> dict[str, set[str]]:
    """Return for each file of weft below `root`, by path without suffix, the files of its package that it imports."""
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.py")}
    links: dict[str, set[str]] = {file: set() for file in files}
    for file, path in files.items():
        for name in imports(path):
            package, *parts = name.split(".")
            if package != "weft" or parts[:1] != file.split("/")[:1]:
                continue
            for candidate in (parts, parts[:-1]):  # a module, or a name in one
                targets = {"/".join(candidate), "/".join((*candidate, "__init__"))} & files.keys()
                links[file] |= targets
                if targets:
                    break
    return links


def circles(root: Path) -> list[tuple[str, ...]]:
    """Return the circles of imports, each as a sorted tuple of the files that import each other, if indirectly."""
    links = imports_within_folders(root)
    reached: dict[str, set[str]] = {}
    for file in links:
        seen: set[str] = set()
        waiting = list(links[file])
        while waiting:
            other = waiting.pop()
            if other not in seen:
                seen.add(other)
                waiting += links[other]
        reached[file] = seen
    return sorted({tuple(sorted(b for b in reached[a] if a in reached[b])) for a in links if a in reached[a]})


def test_no_circle_of_imports() -> None:
    for circle in circles(ROOT):
        raise AssertionError(f"import each other: {', '.join(circle)}")


@pytest.mark.parametrize(
    "line",
    [
        "from weft.data.graph import Graph",
        "from weft.data import Graph",
        "if TYPE_CHECKING:\n    from weft.data import graph",
        "def later():\n    import weft.data.graph",
    ],
)
def test_a_planted_circle_is_found(line: str, tmp_path: Path) -> None:
    """A circle is detected at any depth of a file, and through a module, a name in it, or its package."""
    copy = tmp_path / "weft"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    planted = copy / "data" / "store" / "manifest.py"
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    [circle] = [circle for circle in circles(copy) if circle[0].startswith("data/")]
    assert {"data/graph", "data/store/manifest", "data/store/store"} <= set(circle)


def test_one_door_to_the_network() -> None:
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT)
        if any(name.startswith("torch.distributed") for name in imports(path)):
            assert place.parts[0] in NETWORK or str(place) in NETWORK, f"{path} imports torch.distributed"


NAMES = {name for name, plan in STRATEGIES.items() if plan.__module__.startswith("weft.")}
"""Names of weft's strategies. Other tests may have registered more."""
BELOW_STRATEGIES = {*PACKAGES[: PACKAGES.index("strategies")]} - {"config"}
OTHER_MEANINGS = {("data", "split"), ("nn", "cached")}
"""Strings of a package that equal a strategy's name and mean something else: a graph's split, an argument of PyG."""


def strategies_named(text: str, package: str) -> list[str]:
    """Return the strings in a file's text that name a strategy.

    These are strings that equal a strategy's name, such as in a comparison, except for OTHER_MEANINGS, and messages
    with a name before or after the word "strategy": "--strategy offload", "strategy 'offload'", "the offload strategy".
    Docstrings and comments may explain by strategies.

    Args:
        text: Text of the file.
        package: Package of the file.
    """
    nodes, names = nodes_of(text), "|".join(NAMES)
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    strings = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    values = [node.value for node in strings if isinstance(node.value, str)]
    message = re.compile(rf"strateg(y|ies)\W{{1,3}}({names})\b|\b({names}) strateg")
    return [
        value
        for value in values
        if message.search(value) or (value in NAMES and (package, value) not in OTHER_MEANINGS)
    ]


def test_strategies_are_named_by_themselves_alone() -> None:
    """Packages below `weft.strategies` are told a strategy's name, or the strategy adds it to an error."""
    for path in (path for package in BELOW_STRATEGIES for path in (ROOT / package).rglob("*.py")):
        strings = strategies_named(path.read_text(), path.relative_to(ROOT).parts[0])
        assert not strings, f"{path} names a strategy: {strings}"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_no_strategy_inherits_from_another(name: str) -> None:
    plans = [base for base in STRATEGIES[name].__mro__[1:] if issubclass(base, Plan)]
    assert not {*plans} & {*STRATEGIES.values()}
    assert len(plans) <= (3 if issubclass(STRATEGIES[name], MiniBatchPlan) else 2)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('name = "offload"', True),
        ('if config.strategy == "single": pass', True),
        ('train(strategy="cached")', True),
        ('raise ValueError(f"strategy offload: {name} fails")', True),
        ("raise ValueError(\"use strategy='tensor', or --strategy \" f'pipeline for {name}')", True),
        ('raise ValueError("unlike the hybrid strategy")', True),
        ('"""Under `offload` or --strategy single, this is slow."""', False),
        ("x = 1  # not under strategy tensor", False),
        ('raise ValueError(f"strategy {name}: split a single tensor")', False),
        ('raise ValueError("use another strategy; a cached pipeline")', False),
    ],
)
def test_a_planted_name_of_a_strategy_is_found(line: str, is_found: bool) -> None:
    text = (ROOT / "parallel" / "chunks" / "run" / "chunk_views.py").read_text()
    assert bool(strategies_named(f"{text}\n{line}\n", "parallel")) is is_found


SERVERS = {
    "http.server.BaseHTTPRequestHandler": {"reporting/serve.py"},
    "http.server.ThreadingHTTPServer": {"reporting/serve.py"},
    "socket": {"reporting/serve.py", "cli/doctor.py", "training/artifacts/folder_lock.py"}
    | {"training/launch/joined_ranks.py"},  # names of this host and of its interfaces, except for the server
    "sklearn.datasets.load_digits": {"data/io/digits.py"},  # a file of scikit-learn
}
"""Names from CLIENTS, and the files that may import them."""
CLIENTS = (
    *("aiohttp", "asyncio", "ftplib", "http", "httpx", "huggingface_hub", "ogb", "requests", "smtplib"),
    *("sklearn.datasets", "socket", "socketserver", "ssl", "torch.hub", "urllib", "xmlrpc"),
)
"""Modules that can use the network."""


def test_only_datasets_are_fetched() -> None:
    """PyG's classes download datasets. No other code of weft is a client of the network, besides torch.distributed."""
    for path in ROOT.rglob("*.py"):
        file, text = path.relative_to(ROOT).as_posix(), path.read_text()
        for name in imported(text):
            is_client = any(f"{name}.".startswith(f"{module}.") for module in CLIENTS)
            assert not is_client or file in SERVERS.get(name, ()), f"{path} imports {name}"
        assert "create_connection" not in text, path
        assert "torch.hub" not in text, path
        assert file == "data/io/published/downloads.py" or 'import_extra("torch_geometric.datasets"' not in text, path


def test_one_way_to_print() -> None:
    """Text that may be foreign is printed by `print_line` alone. All else is JSON, TOML and fixed text."""
    allowed = {"utils/terminal.py": 1, "cli/main.py": 5, "reporting/serve.py": 1}
    consoles = {"reporting/print_table.py", "training/progress.py"}  # they escape the text of tables and lines
    for path in ROOT.rglob("*.py"):
        file, text = path.relative_to(ROOT).as_posix(), path.read_text()
        calls = re.findall(r"(?<![\w.])print\(.*|\bstd(?:out|err)\.write.*", text)
        assert len(calls) <= allowed.get(file, 0), f"{path}: use print_line instead of {calls}"
        assert file in consoles or not imported(text) & {"rich", "rich.console.Console", "rich.print"}, path


UNPICKLING = (
    *("allow_pickle=True", "pickle.load", "Unpickler", "torch.load(", ".read_pickle(", "weights_only"),
    *(".recv()", "multiprocessing.Queue", "Manager(", "dist.all_gather_object", "object_list"),
)
"""Parts of calls that unpickle what is in a file, or what another process sends."""
PICKLE_MODULES = ("cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "yaml")


def test_nothing_is_unpickled() -> None:
    """Only a rank unpickles: the payload that its launcher sends over the pipe of `multiprocessing`."""
    of_rank = "pickle.loads(self._data)"
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if path == ROOT / "training" / "launch" / "payload.py":
            assert text.count(of_rank) == 1
            text = text.replace(of_rank, "")
        else:
            modules = {name.partition(".")[0] for name in imported(text)}
            assert not modules & {*PICKLE_MODULES}, path
        for word in UNPICKLING:
            assert word not in text, f"{path}: {word}"


IMPORTERS = {
    "__init__.py": 2,  # names of weft
    "cli/extensions.py": 1,  # a module that --import names
    "training/launch/payload.py": 1,  # cloudpickle
    "training/tasks/task.py": 1,  # a model that the user has named, see tests/training/test_foreign_code.py
    "utils/entry_points.py": 1,  # an extension that an installed package declares
    "utils/optional_packages.py": 1,  # an extra of weft
}
"""Number of calls in each file of weft that import a module by a text, and what it names."""


def test_nothing_is_imported_or_evaluated_that_a_file_names() -> None:
    for path in ROOT.rglob("*.py"):
        calls = [node for node in nodes_of(path.read_text()) if isinstance(node, ast.Call)]
        functions = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
        methods = [call.func.attr for call in calls if isinstance(call.func, ast.Attribute)]
        assert not {"eval", "exec", "compile", "__import__"} & {*functions}, path
        number = (functions + methods).count("import_module") + path.read_text().count("point.load()")
        assert number <= IMPORTERS.get(path.relative_to(ROOT).as_posix(), 0), path
