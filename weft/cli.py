"""The command line. What it says on a mistake is one line, and its exit code is 2."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table

from weft.core.config import PLACING, Config, PartitionOptions
from weft.core.errors import InputError, RunError, Stopped, printable
from weft.core.explain import explained
from weft.core.forkserver import start_forkserver
from weft.core.memory import start_anew_to_keep_pages
from weft.core.stop import SIGNALS, handle_signals
from weft.parser import Parser, add_options, contenders, given, whole

if TYPE_CHECKING:
    from weft.data import Graph

MOST_WIDE = 10_000
DATA_OPTIONS = (
    "split",
    "normalize_features",
    "random_features",
    "random_classes",
    "inverse_relations",
    "order",
    "seed",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit code: 0 if it finished, 2 for a mistake of the caller, 1 for a run that failed.

    arguments: None for those of this process, which is the command's then.
    """
    try:
        return _main(arguments)
    except Stopped as stop:  # in the few lines below that end it
        if arguments is None:
            handle_signals(signal.SIG_IGN)
        print(f"weft: {stop}", file=sys.stderr, flush=True)
        return 128 + stop.signal


def _main(arguments: Sequence[str] | None) -> int:
    try:
        if arguments is None:
            _hear_signals()
            _warn_in_a_line()
        options = _parser().parse_args(arguments)
        if arguments is None and options.command in STARTING_RANKS:
            _prepare_process(options)
        return int(options.command(options))
    except InputError as error:
        code, text = 2, str(error)
    except RunError as error:
        code, text = 1, str(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the output has left
        return 1
    except Stopped as stop:
        print(f"weft: {stop}", file=sys.stderr, flush=True)
        return 128 + stop.signal
    except Exception as error:
        code, text = 1, explained(error)
    finally:
        if arguments is None:
            handle_signals(signal.SIG_IGN)  # Python's own end would answer a signal with a traceback
    print(f"weft: error: {printable(text)}", file=sys.stderr, flush=True)
    return code


def _hear_signals() -> None:
    """Ends this process with a line and its exit code when it is told to stop before a run listens, or after it."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise Stopped(f"stopped by {signal.Signals(number).name}", number)

    faulthandler.register(signal.SIGUSR1, file=os.dup(sys.stderr.fileno()))  # also while gloo's lines are left out
    handle_signals(stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see start_anew_to_keep_pages


def _warn_in_a_line() -> None:
    """Prints a warning as a line of weft's own, and leaves out those of arithmetic, which tell a person nothing."""
    warnings.simplefilter("ignore", RuntimeWarning)
    warnings.showwarning = lambda text, *_: print(f"weft: warning: {printable(str(text))}", file=sys.stderr, flush=True)


def _prepare_process(options: argparse.Namespace) -> None:
    """Does what comes before PyTorch's import: settings of the process, and the process that ranks are forked from."""
    if "pages" not in getattr(options, "disable", ""):
        start_anew_to_keep_pages()
    before = _saved(options)
    workers = getattr(options, "workers", before.workers if before else 1)
    if "RANK" not in os.environ and (options.command is _compare or workers > 1):
        start_forkserver()


def _saved(options: argparse.Namespace) -> Config | None:
    """The configuration of the run that is to go on, or to predict, if there is one."""
    folder = getattr(options, "run", options.out if getattr(options, "resume", False) else None)
    if folder is None or not (folder / "config.toml").exists():
        return None
    return Config.read(folder / "config.toml")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="weft", description="Trains graph neural networks on graphs that outgrow one device.")
    parser.add_argument("--version", action="version", version=version("weft"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    command = commands.add_parser("train", help="train a model on a graph under a strategy")
    add_options(command)
    command.add_argument("--out", type=Path, help="folder of the run (default: a new one in runs/)")
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    command.set_defaults(command=_train)

    command = commands.add_parser("compare", help="train the same model under several strategies")
    add_options(command, leave_out=("strategy",))
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--strategies",
        help="names, separated by commas; a flag of one follows it by a colon, as in split,split:sampling=labor",
    )
    which.add_argument(
        "--ablate", action="store_true", help="the parts of strategy tensor, one by one, from communicated on"
    )
    command.add_argument("--out", type=Path, help="folder of the runs (default: a new one in runs/)")
    command.set_defaults(command=_compare)

    command = commands.add_parser("predict", help="what a trained model gives for every vertex of a graph")
    command.add_argument("run", type=Path, help="folder of the run")
    command.add_argument("graph", nargs="?", help="another graph, such as one that has grown (default: the run's)")
    command.add_argument("--what", default="logits", metavar="X", help="logits, classes or embeddings (logits)")
    command.add_argument(
        "--layer", type=whole, metavar="X", help="embeddings: the layer whose rows they are (the last but one)"
    )
    command.add_argument("--model", metavar="X", help="package.module:Class, where the run's is not one of weft's")
    add_options(command, only=PLACING)
    command.add_argument("--out", type=Path, required=True, help="a new .npy, .safetensors or .parquet file")
    command.add_argument("--overwrite", action="store_true", help="replace the file that is there")
    command.set_defaults(command=_predict)

    command = commands.add_parser("report", help="a page of what runs did, to be read or followed in a browser")
    command.add_argument(
        "runs", type=Path, nargs="+", metavar="run", help="folder of a run; several are set side by side"
    )
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="the .html file to write")
    where.add_argument("--serve", action="store_true", help="show it to this machine alone, and follow the runs")
    command.add_argument("--overwrite", action="store_true", help="replace the file that is there")
    command.add_argument("--port", type=whole, metavar="X", help="with --serve: at this port (any that is free)")
    command.set_defaults(command=_report)

    command = commands.add_parser("partition", help="divide a graph's vertices among parts")
    add_options(command, only=("graph", "order"))
    command.add_argument("--parts", type=whole, required=True, metavar="X", help="number of parts")
    command.add_argument(
        "--method", default="metis", metavar="X", help="range, random, metis, fennel, balanced (metis)"
    )
    add_options(command, PartitionOptions)
    command.add_argument("--out", type=Path, help="file of the book (default: one in books/)")
    command.set_defaults(command=_partition)

    commands = commands.add_parser("data", help="graphs on disk").add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("import", help="turn a file or a named dataset into a graph folder")
    command.add_argument("source", help="a file or a dataset name")
    add_options(command, only=DATA_OPTIONS)
    command.add_argument("--out", type=Path, required=True, help="folder of the graph")
    command.set_defaults(command=_import)
    command = commands.add_parser("info", help="what a graph holds; verifies a folder's checksums")
    command.add_argument("graph", help="a graph folder, a file or a dataset name")
    command.set_defaults(command=_info)
    return parser


def _config(options: argparse.Namespace, **defaults: Any) -> Config:
    return Config(**(defaults | given(options, Config)))


def _train(options: argparse.Namespace) -> int:
    from weft import report
    from weft.engine.options import without_foreign_flags
    from weft.engine.run import run
    from weft.engine.torchrun import is_main_process

    saved: dict[str, Any] = {}
    if (before := _saved(options)) is not None:
        strategy = getattr(options, "strategy", before.strategy)
        saved = dataclasses.asdict(without_foreign_flags(before, strategy))
    config = _config(options, **saved)
    done = run(config, None, None, out=options.out, resume=options.resume)
    if is_main_process():
        _print(report.run_table(done.summary))
        print(f"records and model in {done.folder}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from weft import engine, report
    from weft.engine.torchrun import is_main_process

    config = _config(options)
    if options.ablate:
        runs = engine.ablate(config, options.out)
    else:
        runs = engine.compare(config, contenders(options.strategies), options.out)
    if not is_main_process():
        return 0
    summaries = {name: done.summary for name, done in runs.items()}
    _print(report.compare_table(summaries))
    _print(report.stage_table(summaries))
    print(f"records in {next(iter(runs.values())).folder.parent}/compare.jsonl")
    return 0


def _predict(options: argparse.Namespace) -> int:
    from weft import engine
    from weft.engine.torchrun import is_main_process

    rows = engine.predict(
        options.run,
        options.graph,
        out=options.out,
        what=options.what,
        layer=options.layer,
        model=options.model,
        overwrite=options.overwrite,
        **{name: value for name, value in vars(options).items() if name in PLACING},
    )
    if is_main_process():
        print(f"{options.what} {list(rows.shape)} in {options.out}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from weft.report.serve import serve
    from weft.report.write import read_runs, write_report

    if options.serve:
        if options.overwrite:
            raise InputError("--overwrite has no effect with --serve: leave it out")
        return serve(options.runs, options.port or 0)
    if options.port is not None:
        raise InputError("--port has no effect without --serve: leave it out")
    write_report(read_runs(options.runs), options.out, overwrite=options.overwrite)
    print(f"report in {options.out}")
    return 0


def _partition(options: argparse.Namespace) -> int:
    from weft import report
    from weft.engine.run import load_graph
    from weft.partition import make_book
    from weft.partition.book import require_writable

    config, method = _config(options), PartitionOptions(**given(options, PartitionOptions))
    stem = Path(config.graph).stem.replace(":", "-").replace(",", "-")
    out = options.out or Path("books") / f"{stem}-{options.method}-{options.parts}.safetensors"
    require_writable(out)  # before the work
    book = make_book(load_graph(config), options.parts, method=options.method, options=method)
    book.save(out)
    _print(report.partition_table(book.quality.record()))
    print(f"book in {out}")
    return 0


def _print(table: Table) -> None:
    """Prints a table, as wide as it needs to be where the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = console.measure(table, options=console.options.update(width=MOST_WIDE)).maximum
    console.print(table)


STARTING_RANKS = (_train, _compare, _predict)


def _import(options: argparse.Namespace) -> int:
    from weft.engine.run import load_graph

    graph = load_graph(_config(options, graph=options.source))
    graph.save(options.out)
    _describe(graph)
    print(f"saved in {options.out}")
    return 0


def _info(options: argparse.Namespace) -> int:
    from weft import data

    _describe(data.load(options.graph))
    return 0


def _describe(graph: Graph) -> None:
    """Prints one fact a line."""
    degree, several = graph.in_edges.degree, " (several per vertex)" if graph.multilabel else ""
    facts = {
        "name": graph.name,
        "vertices": f"{graph.num_vertices:,}",
        "edges": f"{graph.num_edges:,}",
        "in-degree": f"mean {graph.num_edges / max(len(degree), 1):.1f}, most {max(degree.tolist(), default=0)}",
        "isolated targets": f"{int((degree == 0).sum()):,}",
        "edge weights": "yes" if graph.in_edges.weight is not None else "no",
        "edge features": graph.num_edge_features,
        "relations": len(graph.relations),
        "numbering": "original" if graph.ids is None else "reordered",
        "features": graph.num_features,
        "values" if graph.label_kind == "values" else "classes": f"{graph.num_classes}{several}",
        "fingerprint": graph.fingerprint,
    }
    for split in ("train", "val", "test"):
        mask = getattr(graph, f"{split}_mask")
        facts[f"{split} vertices"] = "no split" if mask is None else f"{int(mask.sum()):,}"
    for split in ("val", "test") if graph.test_links is not None else ():
        links = getattr(graph, f"{split}_links")
        facts[f"{split} links"] = "none" if links is None else f"{len(links):,}"
    for name, value in facts.items():
        print(f"{name:17} {value}")
