"""Commits and checkouts, each installed in a virtual environment of its own, as against.py compares them."""

from __future__ import annotations

import compileall
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILDS = ROOT / "build" / "against"
COMPILED = ("CMakeLists.txt", "constraints.txt", "csrc", "pyproject.toml")
PACKAGED = ("LICENSE", "README.md")  # a build asks for them, but they change nothing that runs
HIDDEN = ("LD_PRELOAD", "PYTHONHOME", "PYTHONPATH", "WEFT_DATA")  # would let a run find what is not its tree's
MODULES = """
import sys, weft
weft.train, weft.load  # import the rest, native code included
print(*{module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "weft"}, sep="\\n")
"""


class BadInputError(Exception):
    """A problem of the command's arguments, with its remedy, in one line."""


class RunFailedError(Exception):
    """A failed run of a tree, with the last line that it printed."""


@dataclass(frozen=True)
class Tree:
    """A tree that is installed in a virtual environment of its own."""

    name: str
    """The commit, or the path of the checkout."""
    folder: Path
    """The virtual environment's folder."""

    def start(self, arguments: Sequence[str], ranks: int, folder: Path) -> subprocess.Popen[str]:
        """Start this tree's Python in `folder`, in a process group of its own.

        Each of the ranks gets its part of the cores as threads, at least one. A profile of `weft probe` is hidden,
        since a run's decisions depend on it.
        """
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        environment |= {"OMP_NUM_THREADS": str(threads), "XDG_CACHE_HOME": str(folder / "cache")}
        command = [str(self.folder / "bin" / "python"), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=folder, env=environment, text=True, start_new_session=True, stdout=pipe, stderr=pipe
        )

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Wait for a process that `start` returned, and return its output; raise RunFailedError if it failed."""
        output, errors = process.communicate()
        if process.returncode:
            lines = (errors or output).strip().splitlines() or [f"exit code {process.returncode}"]
            raise RunFailedError(f"{self.name} fails: {lines[-1]}")
        return output

    def run(self, arguments: Sequence[str], ranks: int, folder: Path) -> str:
        """Run this tree's Python in `folder` and return its output; raise RunFailedError if it fails."""
        return self.finish(self.start(arguments, ranks, folder))


def install(tree: str) -> Tree:
    """Install a commit or a checkout in a folder named after its sources, unless that has been done before.

    Raises:
        BadInputError: there is no such tree, or it does not build.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        installed = Tree(copy_sources(tree, source), BUILDS / digest(source, (*COMPILED, "weft")))
        if not (installed.folder / "ready").exists():
            print(f"building {installed.name}", flush=True)
            make_environment(installed, source, compile_package(installed.name, source))
            (installed.folder / "ready").touch()
    modules = [Path(line) for line in installed.run(["-c", MODULES], 1, installed.folder).splitlines()]
    assert modules, "weft was not imported"
    assert all(path.is_relative_to(installed.folder) for path in modules), f"imported from elsewhere: {modules}"
    return installed


def copy_sources(tree: str, folder: Path) -> str:
    """Copy what a build of a commit or a checkout reads into an empty folder, and return the tree's full name."""
    checkout = Path(tree)
    if (checkout / "pyproject.toml").is_file():
        for name in (*COMPILED, *PACKAGED, "weft"):
            if (checkout / name).is_dir():
                shutil.copytree(checkout / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            elif (checkout / name).exists():
                shutil.copy(checkout / name, folder / name)
        return "the working tree" if checkout.resolve() == ROOT else str(checkout.resolve())
    git = ["git", "-C", str(ROOT)]
    commit = [*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{tree}^{{commit}}"]
    sha = subprocess.run(commit, capture_output=True, text=True).stdout.strip()
    if not sha:
        raise BadInputError(f"no commit {tree}: give a commit of this repository, or the path of a checkout")
    archive = subprocess.run([*git, "archive", sha], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return sha[:12]


def digest(source: Path, names: Sequence[str]) -> str:
    """Name some of a tree's sources by their content, and by the environment whose packages they run with."""
    content = hashlib.sha256(f"{sys.prefix} {sys.version}".encode())
    for path in sorted(path for name in names for path in [source / name, *(source / name).rglob("*")]):
        if path.is_file():
            content.update(f"\n{path.relative_to(source)}\n".encode() + path.read_bytes())
    return content.hexdigest()[:12]


def compile_package(name: str, source: Path) -> Path:
    """Return a folder with the package that pip makes of a tree, or of one with the same native code."""
    package = BUILDS / f"native-{digest(source, COMPILED)}"
    if package.exists():
        return package
    BUILDS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        environment = os.environ | {"PIP_CONSTRAINT": str(source / "constraints.txt")}
        command = [*pip, "--no-compile", "--target", folder, str(source)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        if result.returncode:
            log = BUILDS / "failed.log"
            log.write_text(result.stdout + result.stderr)
            raise BadInputError(f"{name} does not build: see {log}, or give another commit")
        partial = Path(tempfile.mkdtemp(dir=BUILDS))
        shutil.copytree(folder, partial, dirs_exist_ok=True)
        partial.rename(package)
    return package


def make_environment(tree: Tree, source: Path, package: Path) -> None:
    """Make a virtual environment of a compiled package and the Python sources of the tree.

    This process's own environment is searched behind the new one: its packages are found, but its weft is not, and an
    editable install's import hook does not run, since Python reads no .pth file in a folder that a .pth file names.
    """
    shutil.rmtree(tree.folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tree.folder)], check=True)
    packages = tree.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shutil.copytree(package, packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py"))
    shutil.copytree(source / "weft", packages / "weft", dirs_exist_ok=True)
    compileall.compile_dir(packages, quiet=1)
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "packages.pth").write_text("\n".join(paths) + "\n")
