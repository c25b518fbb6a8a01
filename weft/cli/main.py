"""Command line. A mistake of the caller is reported in one line, with exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import faulthandler
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from weft.cli.completion import SHELLS, completion_script
from weft.cli.data import add_data_commands, import_graph
from weft.cli.extensions import import_extension
from weft.cli.parser import Parser, add_options, given_fields, integer, integers, parse_strategies
from weft.config.config import MEMORY_REMEDY, PLACEMENT_FIELDS, Config, PartitionOptions, is_imported
from weft.config.files import named_by, options_text, read_options, with_choices
from weft.runtime.memory.heap import PRELOAD
from weft.runtime.processes.child_process import run_in_child
from weft.runtime.processes.forkserver import start_forkserver
from weft.runtime.processes.stop_request import SIGNALS, handle_signals
from weft.runtime.processes.temporary_folder import use_process_folder
from weft.utils.error_line import explain_error, print_error
from weft.utils.errors import InputError, RunError, Stopped, refusing_exit
from weft.utils.log import LOGGER, close_log, log_warnings, open_log
from weft.utils.standard_streams import STDERR, LossyStream, guard_standard_streams
from weft.utils.terminal import print_line

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
makes 6 runs; the table has means and standard deviations over the seeds. Repeat
the command to continue a sweep that was stopped.

examples:
  weft sweep sweep.toml
  weft sweep sweep.toml --random 20
  weft sweep sweep.toml --config run.toml --epochs 200 --out runs/widths --json"""
PLAN_EXAMPLES = """examples:
  weft plan graphs/mine --workers 4
  weft plan graphs/mine --model gat --json > plan.json
  weft train graphs/mine --model gat --plan plan.json"""
COMPARE_EXAMPLES = """examples:
  weft compare cora --strategies single,tensor,hybrid --workers 2
  weft compare --config run.toml --strategies split,split:sampling=labor --until val_accuracy=0.78
  weft compare cora --ablate --workers 2"""

SECONDS_AFTER_DESTRUCTOR = 0.01
"""Delay of a signal that arrived in a destructor."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Arguments of the command. None: those of this process, which then belongs to the command, with its
            signals.

    Returns:
        The exit code: 0: finished. 1: a run failed. 2: a mistake of the caller. 128 + n: stopped by signal n.
    """
    try:
        return _main(arguments)
    except Stopped as stop:  # a signal that arrives while `_main` returns
        if arguments is None:
            handle_signals(signal.SIG_IGN)
        LOGGER.info(str(stop))
        return 128 + stop.signal
    finally:
        close_log()


def _main(arguments: Sequence[str] | None) -> int:
    """Run a command, and turn errors into a line and an exit code."""
    try:
        if arguments is None:
            guard_standard_streams()
            _handle_signals()
            _print_in_a_line()
        _require_encodable(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_args(arguments)
        if path := getattr(options, "log_file", None):
            open_log(path)
        _require_ranks(options)
        if arguments is None and (code_of_child := _prepare_process(options)) is not None:
            return code_of_child
        with refusing_exit():
            for name in getattr(options, "imports", ()):
                import_extension(name)
            return int(options.command(options)) or _report_lost_output(options)
    except InputError as error:
        code, text = 2, str(error)
    except RunError as error:
        code, text = 1, str(error)
    except Stopped as stop:
        LOGGER.info(str(stop))
        return 128 + stop.signal
    except Exception as error:
        code, text = 1, explain_error(error, MEMORY_REMEDY)
    finally:
        if arguments is None:
            handle_signals(signal.SIG_IGN)  # Python would print a traceback for a signal while it ends
    print_error(text, shared=code == 2)
    return code


def _require_encodable(texts: Iterable[object]) -> None:
    """Check that names can be those of files in this locale, where LC_ALL=C with PYTHONUTF8=0 means ASCII only.

    Args:
        texts: Command-line arguments or values of options. Values that are no text are ignored.

    Raises:
        InputError: A text has a character that the encoding of file names lacks.
    """
    encoding = sys.getfilesystemencoding()
    for text in [text for text in texts if isinstance(text, str)] if encoding != "utf-8" else ():
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            raise InputError(
                f"{text}: file names are in {encoding} in this locale, which lacks characters of this text: set "
                "LC_ALL=C.UTF-8, or PYTHONUTF8=1"
            ) from None


def _require_ranks(options: argparse.Namespace) -> None:
    """Raise InputError under torchrun for commands without ranks, or for another number of workers."""
    size = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if size == "1":
        return
    if options.command not in STARTING_RANKS:
        raise InputError("this command runs in one process: start it without torchrun")
    if str(getattr(options, "workers", size)) != size:
        raise InputError(f"--workers {options.workers}: torchrun has started {size} ranks: leave it out")


def _report_lost_output(options: argparse.Namespace) -> int:
    """Print a warning if standard output could not be written.

    Nothing is printed if its reader has ended, as in `weft plan ... | head -1`.

    Returns:
        Exit code: 1 if the output is all that the command makes, 0 if the result is in files.
    """
    sys.stdout.flush()
    error = sys.stdout.error if isinstance(sys.stdout, LossyStream) else None
    if error is None:
        return 0
    if error.errno != errno.EPIPE:
        LOGGER.warning(f"standard output could not be written ({error.strerror}), and is incomplete")
    return int(options.command not in WRITING_FILES)


def _handle_signals() -> None:
    """Let signals end this process with a line and an exit code, except while a run handles them."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise Stopped(f"stopped by {signal.Signals(number).name}", number)

    def raise_again(unraisable: Any) -> None:
        # Python drops exceptions of destructors, also that of a signal: send the signal again, a moment later. An alarm
        # needs no lock, unlike a thread: the destructor may run anywhere.
        error = unraisable.exc_value
        if isinstance(error, Stopped):
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(error.signal))
            signal.setitimer(signal.ITIMER_REAL, SECONDS_AFTER_DESTRUCTOR)
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = raise_again
    # Stack traces go to a copy of stderr, because stderr is redirected while gloo prints.
    faulthandler.register(signal.SIGUSR1, file=os.dup(STDERR))
    handle_signals(stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see run_in_child


def _print_in_a_line() -> None:
    """Print each message and each warning in one line, whatever imported modules do with logging.

    Warnings of arithmetic do not help users, and are ignored.
    """
    LOGGER.propagate = False
    warnings.simplefilter("ignore", RuntimeWarning)
    log_warnings()


def _prepare_process(options: argparse.Namespace) -> int | None:
    """Start the fork server of local ranks, or a child process that runs a command of one rank, or a rank of torchrun.

    Returns:
        The exit code of the child process; None if this process runs the command.

    Raises:
        RunError: A signal killed the child process.
    """
    if options.command is _plan:
        use_process_folder()  # for files that the library of a custom model leaves behind
    if options.command not in STARTING_RANKS:
        return None
    saved = _saved(options)
    values = (dataclasses.asdict(saved) if saved else {}) | _given_options(options)
    if "pages" in str(values.get("disable", "")):
        os.environ.setdefault(PRELOAD, "")  # without the heap for large arrays
    starts_ranks = options.command in (_compare, _sweep, _probe) or values.get("workers", 1) != 1
    if "RANK" in os.environ or not starts_ranks:
        return run_in_child(MEMORY_REMEDY)
    start_forkserver()
    return None


def _saved(options: argparse.Namespace) -> Config | None:
    """Return the configuration of the run to resume or to predict with, if there is one."""
    folder = getattr(options, "run", options.out if getattr(options, "resume", False) else None)
    if folder is None or not (folder / "config.toml").exists():
        return None
    return Config.read(folder / "config.toml")


def _parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog="weft", description="Trains graph neural networks on graphs that outgrow one device.")
    parser.add_argument("--version", action="version", version=f"weft {version('weft')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "train", help="train a model on a graph under a strategy", usage=USAGE, epilog=TRAIN_EXAMPLES
    )
    _add_config(command)
    add_options(command)
    command.add_argument("--out", type=Path, help="folder of the run (default: a new one in runs/)")
    command.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    command.add_argument(
        "--plan", type=Path, metavar="FILE", help="use the best plan in FILE, the output of weft plan --json"
    )
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
    contenders = command.add_mutually_exclusive_group(required=True)
    contenders.add_argument(
        "--strategies",
        help="names, separated by commas; flags of one follow it after colons, as in split,split:sampling=labor",
    )
    contenders.add_argument(
        "--ablate", action="store_true", help="start with communicated, and add the parts of strategy tensor one by one"
    )
    command.add_argument("--out", type=Path, help="folder of the runs (default: a new one in runs/)")
    _add_output(command)
    command.set_defaults(command=_compare)

    command = commands.add_parser(
        "sweep", help="train once for each combination of options", usage=SWEEP_USAGE, epilog=SWEEP_EXAMPLES
    )
    command.add_argument(
        "sweep", type=Path, metavar="FILE", help="file of options, each of which may be a list of values"
    )
    command.add_argument(
        "--random",
        type=integer,
        metavar="N",
        help='draw N combinations at random, by --seed, also from ranges such as lr = "1e-4..1e-1" (default: train '
        "with all combinations)",
    )
    _add_config(command)
    add_options(command)
    command.add_argument("--out", type=Path, help="folder of the runs; a sweep in it is continued (default: runs/FILE)")
    _add_output(command)
    command.set_defaults(command=_sweep)

    command = commands.add_parser(
        "plan", help="estimate time and memory of each strategy before a run", usage=USAGE, epilog=PLAN_EXAMPLES
    )
    _add_config(command)
    add_options(command, leave_out=("strategy", "machine"))
    command.add_argument(
        "--machine",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="profile to use (default: this machine's, from weft probe)",
    )
    command.add_argument(
        "--hosts",
        type=integer,
        default=1,
        metavar="X",
        help="number of such machines, each with its part of the ranks (default: 1)",
    )
    command.add_argument(
        "--machines",
        default="",
        metavar="X",
        help="machines that need not exist here, as in 1x24GB,4x24GB@1gbit,8xT4@15gbit, or a .toml file",
    )
    command.add_argument(
        "--approximate",
        action="store_true",
        help="also estimate approximate strategies, whose results differ from single",
    )
    command.add_argument(
        "--memory", action="store_true", help="estimate only memory and traffic, which needs no profile of the machine"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object, for weft train --plan")
    _add_log(command)
    command.set_defaults(command=_plan)

    command = commands.add_parser("probe", help="measure this machine, or under torchrun the network, for weft plan")
    command.add_argument(
        "--workers",
        type=integers,
        default=(),
        metavar="X",
        help="numbers of ranks to measure, as in 1,2,4 (default: these, up to the number of cores)",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="take half a minute, for estimates with a larger error (not under torchrun)",
    )
    command.add_argument("--out", type=Path, help="file of the profile (default: ~/.cache/weft/machine.json)")
    _add_log(command)
    command.set_defaults(command=_probe)

    command = commands.add_parser("doctor", help="check what this machine has, what will not work, and why")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(command=_doctor)

    command = commands.add_parser(
        "completion", help="print a script that lets a shell complete commands, flags and values"
    )
    command.add_argument("shell", choices=SHELLS, help="bash or zsh")
    command.set_defaults(command=_completion)

    command = commands.add_parser("predict", help="write predictions or embeddings for every vertex of a graph")
    command.add_argument("run", type=Path, help="folder of the run")
    _add_import(command)
    command.add_argument(
        "graph", nargs="?", help="another graph, or a schema of new tables (.toml) (default: the run's graph)"
    )
    command.add_argument("--vertices", metavar="FILE", help="new table of vertices, read by the transforms of the run")
    command.add_argument("--edges", metavar="FILE", help="new table of edges")
    command.add_argument(
        "--what",
        default="logits",
        metavar="X",
        help="logits, classes, probabilities or embeddings; in a table several of the first three, separated by commas "
        "(default: logits)",
    )
    command.add_argument("--vertex-type", metavar="X", help="write only the vertices of this type")
    command.add_argument(
        "--ids", metavar="FILE", help="write only the vertices (or sources, with --top) in the first column of FILE"
    )
    command.add_argument(
        "--layer",
        type=integer,
        metavar="X",
        help="layer whose output rows are the embeddings (default: the last but one)",
    )
    command.add_argument(
        "--top", type=integer, metavar="K", help="link: the K best targets of each source, without training links"
    )
    command.add_argument(
        "--pairs", type=Path, metavar="FILE", help="link: score the pairs of a table with the columns source and target"
    )
    command.add_argument("--model", metavar="X", help="package.module:Class, if the run trained a custom model")
    add_options(command, only=PLACEMENT_FIELDS)
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        help=".npy, .safetensors, .parquet or .csv file to write; for --top and --pairs .parquet or .csv",
    )
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")
    _add_log(command)
    command.set_defaults(command=_predict)

    command = commands.add_parser("report", help="show runs: write a page, follow runs that train, or write figures")
    command.add_argument(
        "runs", type=Path, nargs="+", metavar="run", help="folder of a run or of a sweep; several runs are compared"
    )
    output = command.add_mutually_exclusive_group(required=True)
    output.add_argument("--out", type=Path, help=".html file to write")
    output.add_argument(
        "--serve", action="store_true", help="serve the page to this machine only, and update it while runs train"
    )
    output.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="folder in which each figure is written as SVG, PNG and CSV"
    )
    command.add_argument("--overwrite", action="store_true", help="replace existing files")
    command.add_argument("--port", type=integer, metavar="X", help="port for --serve (default: any free port)")
    command.set_defaults(command=_report)

    command = commands.add_parser("partition", help="partition a graph's vertices")
    _add_import(command)
    add_options(command, only=("graph", "order"))
    command.add_argument("--parts", type=integer, required=True, metavar="X", help="number of parts")
    command.add_argument(
        "--method", default="metis", metavar="X", help="partition method, such as range or balanced (default: metis)"
    )
    add_options(command, dataclasses.fields(PartitionOptions))
    command.add_argument("--out", type=Path, help="partition file (book) to write (default: one in books/)")
    _add_log(command)
    command.set_defaults(command=_partition)

    commands = commands.add_parser("data", help="import graphs, or show what they contain").add_subparsers(
        required=True, metavar="COMMAND"
    )
    add_data_commands(commands)
    return parser


def _add_import(command: argparse.ArgumentParser) -> None:
    """Add --import to a command."""
    text = "first import MODULE, which registers strategies, losses, metrics, partition methods or datasets"
    command.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE", help=text)


def _add_config(command: argparse.ArgumentParser) -> None:
    """Add --config and --import to a command."""
    _add_import(command)
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="read options from FILE (see weft config); flags override it"
    )


def _add_log(command: argparse.ArgumentParser) -> None:
    """Add --log-file to a command."""
    text = "append messages to FILE, each in a line with date, level and rank"
    command.add_argument("--log-file", type=Path, metavar="FILE", help=text)


def _add_output(command: argparse.ArgumentParser) -> None:
    """Add --quiet, --json and --log-file to a command."""
    _add_log(command)
    command.add_argument("--quiet", action="store_true", help="print nothing but warnings, errors and the last line")
    command.add_argument("--json", action="store_true", help="print the result as one JSON object, and no table")


def _config(options: argparse.Namespace, **defaults: Any) -> Config:
    """Return the configuration of a command line: flags override a --config file, which overrides the defaults.

    Args:
        options: The parsed command line.
        **defaults: Values for fields that neither flags nor file set.

    Raises:
        InputError: No graph is named.
    """
    with _named_by_files(options):
        config = Config(**(defaults | _given_options(options)))
    _require_graph(config.graph)
    return config


def _require_named(options: argparse.Namespace, model: object) -> None:
    """Check that a model class is named on the command line, not only in a file: to import it runs its code.

    Args:
        options: The parsed command line.
        model: Name of the model, or a list of names in a sweep.

    Raises:
        InputError: Only a file names the class.
    """
    files = [path for path, values in _files(options).items() if "model" in values]
    for name in model if isinstance(model, list) else [model]:
        if is_imported(str(name)) and name != given_fields(options).get("model"):
            source = files[-1] if files else options.out / "config.toml"
            instead = ", which replaces the list" if isinstance(model, list) else ""
            raise InputError(
                f"{source}: the model {name} is code, which weft imports only if the command line names it: add "
                "--model "
                f"{name}{instead}"
            )


def _require_graph(graph: object) -> None:
    """Raise InputError if no graph is named."""
    if not graph:
        raise InputError("no graph: give its name, or a --config that names one (see --help)")


def _files(options: argparse.Namespace) -> dict[Path, dict[str, Any]]:
    """Return the options in the files that a command line names. Those of a sweep override those of --config."""
    values_by_file: dict[Path, dict[str, Any]] = {}
    if path := getattr(options, "config", None):
        values_by_file[path] = with_choices(path, read_options(path, Config))
    if path := getattr(options, "sweep", None):
        values_by_file[path] = read_options(path, Config, several=True)
    return values_by_file


def _given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command line: flags override its files."""
    merged: dict[str, Any] = {}
    for values in _files(options).values():
        merged |= values
    _require_encodable(merged.values())
    return merged | given_fields(options)


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Exclude imported objects from garbage collection, which saves about 5 % of the time of `weft plan`."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _named_by_files(options: argparse.Namespace) -> Iterator[None]:
    """Let errors about an option name the file that sets it, if no flag does."""
    named = set(given_fields(options))
    with ExitStack() as stack:
        for path, values in reversed(_files(options).items()):
            stack.enter_context(named_by(path, Config, values.keys() - named))
            named |= values.keys()
        yield


def _train(options: argparse.Namespace) -> int:
    """Run `weft train`."""
    from weft import reporting
    from weft.training.flag_checks import without_foreign_flags
    from weft.training.launch.torchrun import is_main_process
    from weft.training.run import run

    defaults: dict[str, Any] = {}
    if (saved_config := _saved(options)) is not None:
        strategy = _given_options(options).get("strategy", saved_config.strategy)
        defaults = dataclasses.asdict(without_foreign_flags(saved_config, strategy))
    config = _config(options, **defaults)
    _require_named(options, config.model)
    with _named_by_files(options):
        result = run(config, None, None, out=options.out, resume=options.resume, quiet=options.quiet, plan=options.plan)
    if is_main_process():
        tables = [reporting.run_table(result.summary)]
        values = {"folder": str(result.folder), **result.summary}
        _print_result(options, tables, f"records and model in {result.folder}", values)
    return 0


def _print_result(options: argparse.Namespace, tables: Sequence[Table], last_line: str, values: dict[str, Any]) -> None:
    """Print the result of a command: tables and a last line; with --quiet only the line, with --json an object."""
    from weft import reporting

    if options.json:
        print(json.dumps(values))
        return
    for table in tables if not options.quiet else ():
        reporting.print_table(table)
    print_line(last_line)


def _print_config(options: argparse.Namespace) -> int:
    """Run `weft config`."""
    from weft.training.flag_checks import refuse_foreign_flags

    config = _config(options)
    with _named_by_files(options):
        refuse_foreign_flags(config)
    print(options_text(Config, _given_options(options), explained=True), end="")
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Run `weft compare`."""
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
        folder, summaries = next(iter(runs.values())).folder.parent, {name: run.summary for name, run in runs.items()}
        tables = [reporting.compare_table(summaries), reporting.stage_table(summaries)]
        values = {"folder": str(folder), "runs": summaries}
        _print_result(options, tables, f"records in {folder}/compare.jsonl", values)
    return 0


def _sweep(options: argparse.Namespace) -> int:
    """Run `weft sweep`."""
    from weft import reporting
    from weft.experiments.sweep import over_seeds, sweep_as

    values, out = _given_options(options), options.out or Path("runs") / options.sweep.stem
    _require_graph(values.get("graph"))
    _require_named(options, values.get("model", ""))
    with _named_by_files(options):
        runs = sweep_as(values, out, random=options.random, quiet=options.quiet)
    points = over_seeds(runs)
    result = {"folder": str(out), "points": points}
    _print_result(options, [reporting.sweep_table(points)], f"records in {out}/sweep.jsonl", result)
    return int(any(run.error for run in runs))


def _plan(options: argparse.Namespace) -> int:
    """Run `weft plan`."""
    from weft import reporting
    from weft.training.planning.plan_call import Where, planned

    config = _config(options)
    _require_named(options, config.model)
    where = Where(machine=config.machine, hosts=options.hosts, machines=options.machines, memory_only=options.memory)
    config = dataclasses.replace(config, machine="")
    with _named_by_files(options), _imports_frozen():
        estimates, values = planned(config, None, None, where, approximate=options.approximate)
    if options.json:
        print(json.dumps(values))
    else:
        reporting.print_table(reporting.plan_table([dataclasses.asdict(estimate) for estimate in estimates]))
        if values["learned"]:
            print_line(reporting.calibration_line(values["learned"]))
        for estimate in [estimate for estimate in estimates if estimate.fits][:3]:
            print_line(estimate.command)
        for note in values["notes"]:
            print_line(note)
    return 0 if any(estimate.fits for estimate in estimates) else 1


def _probe(options: argparse.Namespace) -> int:
    """Run `weft probe`."""
    from weft.training.launch.torchrun import is_main_process, under_torchrun
    from weft.training.planning.probe_command import default_path, probe_machine, probe_network, save_profile

    path = options.out or default_path()
    if options.quick and (options.workers or under_torchrun()):
        raise InputError("--quick measures fixed numbers of ranks on one machine: leave out --workers and torchrun")
    profile = probe_network(path) if under_torchrun() else probe_machine(options.workers, quick=options.quick)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank on each host
        save_profile(profile, path)
    if is_main_process():
        print_line(f"profile in {path}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """Run `weft doctor`."""
    from weft.cli import doctor

    findings = doctor.diagnose()
    print(json.dumps(doctor.record(findings)) if options.json else doctor.report(findings))
    return 0 if doctor.works(findings) else 1


def _completion(options: argparse.Namespace) -> int:
    """Run `weft completion`."""
    from weft.nn.models.model_zoo import MODEL_NAMES
    from weft.partition import METHODS
    from weft.strategies import STRATEGIES

    names = {"model": [*MODEL_NAMES], "strategy": [*STRATEGIES], "partition": [*METHODS], "method": [*METHODS]}
    print(completion_script(_parser(), options.shell, names), end="")
    return 0


def _predict(options: argparse.Namespace) -> int:
    """Run `weft predict`."""
    from weft.prediction.link_scores import TopTargets
    from weft.prediction.prediction import predict
    from weft.training.launch.torchrun import is_main_process

    rows = predict(
        options.run,
        options.graph,
        vertices=options.vertices,
        edges=options.edges,
        out=options.out,
        what=options.what,
        vertex_type=options.vertex_type,
        ids=options.ids,
        layer=options.layer,
        top=options.top,
        pairs=options.pairs,
        model=options.model,
        overwrite=options.overwrite,
        **{name: value for name, value in vars(options).items() if name in PLACEMENT_FIELDS},
    )
    if isinstance(rows, TopTargets):
        rows, what = rows.target, "best targets"
    else:
        what = "scores" if options.pairs else options.what
    if is_main_process():
        print_line(f"{what} {list(rows.shape)} in {options.out}")
    return 0


def _report(options: argparse.Namespace) -> int:
    """Run `weft report`."""
    from weft.reporting.serve import serve
    from weft.reporting.write import read_runs, write_figures, write_report

    if options.serve:
        if options.overwrite:
            raise InputError("--overwrite has no effect with --serve: leave it out")
        return serve(options.runs, options.port or 0)
    if options.port is not None:
        raise InputError("--port has no effect without --serve: leave it out")
    if options.figures:
        number = write_figures(read_runs(options.runs), options.figures, overwrite=options.overwrite)
        print_line(f"{number} figures in {options.figures}")
        return 0
    write_report(read_runs(options.runs), options.out, overwrite=options.overwrite)
    print_line(f"report in {options.out}")
    return 0


def _partition(options: argparse.Namespace) -> int:
    """Run `weft partition`."""
    from weft import reporting
    from weft.partition import make_book
    from weft.partition.book import require_writable
    from weft.training.progress import waiting
    from weft.training.run import load_graph

    names = [spec.name for spec in dataclasses.fields(PartitionOptions)]
    config, method = _config(options), PartitionOptions(**given_fields(options, names))
    stem = Path(config.graph).stem.replace(":", "-").replace(",", "-")
    out = options.out or Path("books") / f"{stem}-{options.method}-{options.parts}.safetensors"
    require_writable(out)  # refuse a bad path before the work
    with waiting(f"loading {config.graph}", quiet=False):
        graph = load_graph(config)
    with waiting(f"partitioning {config.graph}", quiet=False):
        book = make_book(graph, options.parts, method=options.method, options=method)
    book.save(out)
    reporting.print_table(reporting.partition_table(book.quality.record()))
    print_line(f"book in {out}")
    return 0


STARTING_RANKS = (_train, _compare, _sweep, _predict, _probe)
"""Commands that start ranks, or run on those of torchrun."""
WRITING_FILES = (*STARTING_RANKS, _report, _partition, import_graph)
"""Commands whose result is in files, so that they succeed even if nothing can be printed."""
