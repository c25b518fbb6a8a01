"""The command line. What it says on a mistake is one line, and its exit code is 2."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from weft.cli.data import add_data_commands
from weft.cli.parser import Parser, add_options, parse_strategies, given_fields, integer, integers
from weft.config.config import PLACEMENT_FIELDS, Config, PartitionOptions, is_imported
from weft.config.files import named_by, options_text, read_options, with_choices
from weft.runtime.forkserver import start_forkserver
from weft.runtime.memory import restart_with_heap
from weft.runtime.stop_request import SIGNALS, handle_signals
from weft.utils.error_line import print_error
from weft.utils.errors import InputError, RunError, Stopped, printable
from weft.utils.explain import explained

if TYPE_CHECKING:
    from rich.table import Table

USAGE = "%(prog)s [graph] [--config FILE] [flags]"
TRAIN_EXAMPLES = """examples:
  weft train cora --model gat --heads 8 --normalize-features
  weft train graphs/mine --strategy tensor --workers 4 --out runs/mine
  weft train --out runs/mine --resume --epochs 200
  weft train --config run.toml --seed 1
  torchrun --nproc-per-node 4 -m weft train graphs/mine --strategy tensor"""
CONFIG_EXAMPLES = """examples:
  weft config cora --model gat --heads 8 > run.toml
  weft config --config runs/mine/config.toml --lr 0.005 > run.toml"""
SWEEP_USAGE = "%(prog)s FILE [graph] [--config FILE] [flags]"
SWEEP_EXAMPLES = """a file such as
  [data]
  graph = "cora"
  [model]
  hidden = [16, 64]
  [training]
  seed = [0, 1, 2]
makes 6 runs; the table has means and standard deviations over the seeds. The
same command goes on with a sweep that was stopped.

examples:
  weft sweep sweep.toml
  weft sweep sweep.toml --config run.toml --epochs 200 --out runs/widths --json"""
PLAN_EXAMPLES = """examples:
  weft plan graphs/mine --workers 4
  weft plan graphs/mine --model gat --json > plan.json
  weft train graphs/mine --model gat --plan plan.json"""
COMPARE_EXAMPLES = """examples:
  weft compare cora --strategies single,tensor,hybrid --workers 2
  weft compare --config run.toml --strategies split,split:sampling=labor --until val_accuracy=0.78
  weft compare cora --ablate --workers 2"""


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
        _require_ranks(options)
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
    print_error(text, shared=code == 2)
    return code


def _require_ranks(options: argparse.Namespace) -> None:
    """InputError for a command, or a number of workers, that has nothing to do with the ranks that torchrun started."""
    size = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if size == "1":
        return
    if options.command not in STARTING_RANKS:
        raise InputError("this command is one process's: start it without torchrun")
    if str(getattr(options, "workers", size)) != size:
        raise InputError(f"--workers {options.workers}: torchrun has started {size} ranks: leave it out")


def _hear_signals() -> None:
    """Ends this process with a line and its exit code when it is told to stop before a run listens, or after it."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise Stopped(f"stopped by {signal.Signals(number).name}", number)

    faulthandler.register(signal.SIGUSR1, file=os.dup(sys.stderr.fileno()))  # also while gloo's lines are left out
    handle_signals(stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see restart_with_heap


def _warn_in_a_line() -> None:
    """Prints a warning as a line of weft's own, and leaves out those of arithmetic, which tell a person nothing."""
    warnings.simplefilter("ignore", RuntimeWarning)
    warnings.showwarning = lambda text, *_: print(f"weft: warning: {printable(str(text))}", file=sys.stderr, flush=True)


def _prepare_process(options: argparse.Namespace) -> None:
    """Does what comes before PyTorch's import: settings of the process, and the process that ranks are forked from."""
    saved = _saved(options)
    values = (dataclasses.asdict(saved) if saved else {}) | _given(options)
    if "pages" not in str(values.get("disable", "")):
        restart_with_heap()
    apart = options.command in (_compare, _sweep, _probe) or values.get("workers", 1) != 1
    if "RANK" not in os.environ and apart:
        start_forkserver()


def _saved(options: argparse.Namespace) -> Config | None:
    """The configuration of the run that is to go on, or to predict, if there is one."""
    folder = getattr(options, "run", options.out if getattr(options, "resume", False) else None)
    if folder is None or not (folder / "config.toml").exists():
        return None
    return Config.read(folder / "config.toml")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="weft", description="Trains graph neural networks on graphs that outgrow one device.")
    parser.add_argument("--version", action="version", version=f"weft {version('weft')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    command = commands.add_parser(
        "train", help="train a model on a graph under a strategy", usage=USAGE, epilog=TRAIN_EXAMPLES
    )
    _add_config(command)
    add_options(command)
    command.add_argument("--out", type=Path, help="folder of the run (default: a new one in runs/)")
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    command.add_argument("--plan", type=Path, metavar="FILE", help="take the best that weft plan --json has found")
    _add_output(command)
    command.set_defaults(command=_train)

    command = commands.add_parser(
        "config", help="print a configuration file for weft train", usage=USAGE, epilog=CONFIG_EXAMPLES
    )
    _add_config(command)
    add_options(command)
    command.set_defaults(command=_print_config)

    command = commands.add_parser(
        "compare", help="train the same model under several strategies", usage=USAGE, epilog=COMPARE_EXAMPLES
    )
    _add_config(command)
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
    _add_output(command)
    command.set_defaults(command=_compare)

    command = commands.add_parser(
        "sweep", help="train once for each combination of options", usage=SWEEP_USAGE, epilog=SWEEP_EXAMPLES
    )
    command.add_argument("sweep", type=Path, metavar="FILE", help="a file of options, of which any may be a list")
    _add_config(command)
    add_options(command)
    command.add_argument("--out", type=Path, help="folder of the runs, to go on with if it is there (runs/FILE)")
    _add_output(command)
    command.set_defaults(command=_sweep)

    command = commands.add_parser(
        "plan", help="what each strategy will take, before it runs", usage=USAGE, epilog=PLAN_EXAMPLES
    )
    _add_config(command)
    add_options(command, leave_out=("strategy",))
    command.add_argument("--machine", type=Path, metavar="FILE", help="another profile than this machine's")
    command.add_argument("--hosts", type=integer, default=1, metavar="X", help="so many such machines, ranks on each (1)")
    command.add_argument(
        "--machines",
        default="",
        metavar="X",
        help="others that are not there, as in 1x24GB,4x24GB@1gbit,8xT4@15gbit, or a .toml",
    )
    command.add_argument("--approximate", action="store_true", help="also strategies that change numbers")
    command.add_argument("--json", action="store_true", help="print one JSON object, for weft train --plan")
    command.set_defaults(command=_plan)

    command = commands.add_parser("probe", help="measure this machine, or under torchrun the network, for weft plan")
    command.add_argument(
        "--workers", type=integers, default=(), metavar="X", help="numbers of ranks, as in 1,2,4 (these, up to the cores)"
    )
    command.add_argument("--out", type=Path, help="file of the profile (~/.cache/weft/machine.json)")
    command.set_defaults(command=_probe)

    command = commands.add_parser("doctor", help="what this machine has, what will not work, and why")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(command=_doctor)

    command = commands.add_parser("predict", help="what a trained model gives for every vertex of a graph")
    command.add_argument("run", type=Path, help="folder of the run")
    command.add_argument("graph", nargs="?", help="another graph, such as one that has grown (default: the run's)")
    command.add_argument("--what", default="logits", metavar="X", help="logits, classes or embeddings (logits)")
    command.add_argument(
        "--layer", type=integer, metavar="X", help="embeddings: the layer whose rows they are (the last but one)"
    )
    command.add_argument("--model", metavar="X", help="package.module:Class, where the run's is not one of weft's")
    add_options(command, only=PLACEMENT_FIELDS)
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
    command.add_argument("--port", type=integer, metavar="X", help="with --serve: at this port (any that is free)")
    command.set_defaults(command=_report)

    command = commands.add_parser("partition", help="divide a graph's vertices among parts")
    add_options(command, only=("graph", "order"))
    command.add_argument("--parts", type=integer, required=True, metavar="X", help="number of parts")
    command.add_argument(
        "--method", default="metis", metavar="X", help="a method of weft.partition, such as range or balanced (metis)"
    )
    add_options(command, PartitionOptions)
    command.add_argument("--out", type=Path, help="file of the book (default: one in books/)")
    command.set_defaults(command=_partition)

    commands = commands.add_parser("data", help="graphs on disk").add_subparsers(required=True, metavar="COMMAND")
    add_data_commands(commands)
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="a file of options (weft config); flags go before")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--quiet", action="store_true", help="print nothing but warnings, errors and the last line")
    command.add_argument("--json", action="store_true", help="print the result as one JSON object, and no table")


def _config(options: argparse.Namespace, **defaults: Any) -> Config:
    """What a command line, over a file of --config, over some defaults says. InputError where no graph is named."""
    with _named_by_files(options):
        config = Config(**(defaults | _given(options)))
    _require_graph(config.graph)
    return config


def _require_named(options: argparse.Namespace, model: object) -> None:
    """InputError where the model is code that a file names, and not the command line: importing it would run it.

    model: its name, or the list of them that a sweep has.
    """
    files = [path for path, values in _files(options).items() if "model" in values]
    for name in model if isinstance(model, list) else [model]:
        if is_imported(str(name)) and name != given_fields(options, Config).get("model"):
            place = files[-1] if files else options.out / "config.toml"
            instead = ", which replaces the list" if isinstance(model, list) else ""
            raise InputError(
                f"{place}: the model {name} is code, which weft imports only if the command line names it: add --model "
                f"{name}{instead}"
            )


def _require_graph(graph: object) -> None:
    if not graph:
        raise InputError("no graph is named: give one, or a --config with one (see --help)")


def _files(options: argparse.Namespace) -> dict[Path, dict[str, Any]]:
    """The options in the files that a command line names: those of --config, and over them those of a sweep."""
    found: dict[Path, dict[str, Any]] = {}
    if path := getattr(options, "config", None):
        found[path] = with_choices(path, read_options(path, Config))
    if path := getattr(options, "sweep", None):
        found[path] = read_options(path, Config, several=True)
    return found


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a command line gives, over those of its files."""
    found: dict[str, Any] = {}
    for values in _files(options).values():
        found |= values
    return found | given_fields(options, Config)


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Leaves what imports have made out of garbage collections, which took a twentieth of a plan's time for it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _named_by_files(options: argparse.Namespace) -> Iterator[None]:
    """Errors about an option that a file gives, and no flag, say where it stands."""
    named = set(given_fields(options, Config))
    with ExitStack() as stack:
        for path, values in reversed(_files(options).items()):
            stack.enter_context(named_by(path, Config, values.keys() - named))
            named |= values.keys()
        yield


def _train(options: argparse.Namespace) -> int:
    from weft import reporting
    from weft.training.flag_checks import without_foreign_flags
    from weft.training.launch.torchrun import is_main_process
    from weft.training.run import run

    saved: dict[str, Any] = {}
    if (before := _saved(options)) is not None:
        strategy = _given(options).get("strategy", before.strategy)
        saved = dataclasses.asdict(without_foreign_flags(before, strategy))
    config = _config(options, **saved)
    _require_named(options, config.model)
    with _named_by_files(options):
        done = run(config, None, None, out=options.out, resume=options.resume, quiet=options.quiet, plan=options.plan)
    if is_main_process():
        tables = [reporting.run_table(done.summary)]
        values = {"folder": str(done.folder), **done.summary}
        _print_result(options, tables, f"records and model in {done.folder}", values)
    return 0


def _print_result(options: argparse.Namespace, tables: Sequence[Table], last: str, values: dict[str, Any]) -> None:
    """Prints what came of a command: tables and a last line, as --quiet the line alone, as --json one object."""
    from weft import reporting

    if options.json:
        print(json.dumps(values))
        return
    for table in tables if not options.quiet else ():
        reporting.print_table(table)
    print(last)


def _print_config(options: argparse.Namespace) -> int:
    from weft.training.flag_checks import refuse_foreign_flags

    config = _config(options)
    with _named_by_files(options):
        refuse_foreign_flags(config)
    print(options_text(Config, _given(options), explained=True), end="")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from weft import reporting
    from weft.experiments.compare import ablate, compare_as
    from weft.training.launch.torchrun import is_main_process

    config = _config(options)
    _require_named(options, config.model)
    with _named_by_files(options):
        if options.ablate:
            runs = ablate(config, options.out, quiet=options.quiet)
        else:
            runs = compare_as(config, parse_strategies(options.strategies), options.out, quiet=options.quiet)
    if is_main_process():
        folder, summaries = next(iter(runs.values())).folder.parent, {name: one.summary for name, one in runs.items()}
        tables = [reporting.compare_table(summaries), reporting.stage_table(summaries)]
        values = {"folder": str(folder), "runs": summaries}
        _print_result(options, tables, f"records in {folder}/compare.jsonl", values)
    return 0


def _sweep(options: argparse.Namespace) -> int:
    from weft import reporting
    from weft.experiments.sweep import over_seeds, sweep

    values, out = _given(options), options.out or Path("runs") / options.sweep.stem
    _require_graph(values.get("graph"))
    _require_named(options, values.get("model", ""))
    with _named_by_files(options):
        runs = sweep(values, out, quiet=options.quiet)
    points = over_seeds(runs)
    result = {"folder": str(out), "points": points}
    _print_result(options, [reporting.sweep_table(points)], f"records in {out}/sweep.jsonl", result)
    return int(any(one.error for one in runs))


def _plan(options: argparse.Namespace) -> int:
    from weft import reporting
    from weft.training.planning.plan_call import Where, planned

    config = _config(options)
    _require_named(options, config.model)
    where = Where(machine=options.machine or "", hosts=options.hosts, machines=options.machines)
    with _named_by_files(options), _imports_frozen():
        found, values = planned(config, None, None, where, approximate=options.approximate)
    if options.json:
        print(json.dumps(values))
    else:
        reporting.print_table(reporting.plan_table([dataclasses.asdict(one) for one in found]))
        if values["learned"]:
            print(reporting.calibration_line(values["learned"]))
        for one in [one for one in found if one.fits][:3]:
            print(one.command)
        for note in values["notes"]:
            print(note)
    return 0 if any(one.fits for one in found) else 1


def _probe(options: argparse.Namespace) -> int:
    from weft.training.launch.torchrun import is_main_process, under_torchrun
    from weft.training.planning.probe_command import default_path, save_profile, probe_machine, probe_network

    path = options.out or default_path()
    profile = probe_network(path) if under_torchrun() else probe_machine(options.workers)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one of each host
        save_profile(profile, path)
    if is_main_process():
        print(f"profile in {path}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from weft.cli import doctor

    findings = doctor.diagnose()
    print(json.dumps(doctor.record(findings)) if options.json else doctor.report(findings))
    return 0 if doctor.works(findings) else 1


def _predict(options: argparse.Namespace) -> int:
    from weft.prediction.prediction import predict
    from weft.training.launch.torchrun import is_main_process

    rows = predict(
        options.run,
        options.graph,
        out=options.out,
        what=options.what,
        layer=options.layer,
        model=options.model,
        overwrite=options.overwrite,
        **{name: value for name, value in vars(options).items() if name in PLACEMENT_FIELDS},
    )
    if is_main_process():
        print(f"{options.what} {list(rows.shape)} in {options.out}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from weft.reporting.serve import serve
    from weft.reporting.write import read_runs, write_report

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
    from weft import reporting
    from weft.partition import make_book
    from weft.partition.book import require_writable
    from weft.training.progress import waiting
    from weft.training.run import load_graph

    config, method = _config(options), PartitionOptions(**given_fields(options, PartitionOptions))
    stem = Path(config.graph).stem.replace(":", "-").replace(",", "-")
    out = options.out or Path("books") / f"{stem}-{options.method}-{options.parts}.safetensors"
    require_writable(out)  # before the work
    with waiting(f"loading {config.graph}", quiet=False):
        graph = load_graph(config)
    with waiting(f"partitioning {config.graph}", quiet=False):
        book = make_book(graph, options.parts, method=options.method, options=method)
    book.save(out)
    reporting.print_table(reporting.partition_table(book.quality.record()))
    print(f"book in {out}")
    return 0


STARTING_RANKS = (_train, _compare, _sweep, _predict, _probe)
