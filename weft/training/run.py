"""`train`: from a graph and a model to a finished run, on one rank, on local ranks, or on the ranks of torchrun."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from weft import reporting
from weft.comm import Group
from weft.config.config import Config, is_imported
from weft.data import Graph, GraphShape, as_asked, load
from weft.nn import Workload, check_model_name, row_dtype
from weft.nn.convert import takes_types
from weft.strategies import Plan
from weft.training.artifacts.checkpoint import Checkpoint
from weft.training.artifacts.run_folder import RunFolder, new_folder
from weft.training.artifacts.saved_model import load_model, no_run
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, extract_functions
from weft.training.flag_checks import (
    fields_unused_by_module,
    fields_unused_by_functions,
    refuse_foreign_flags,
    rows_device,
)
from weft.training.input_checks import check
from weft.training.launch.joined_ranks import join_ranks, make_on_all_ranks, closing_on_error, plan_together
from weft.training.launch.local_ranks import on_local_ranks
from weft.training.launch.processes import require_guard
from weft.training.launch.torchrun import is_main_process, on_present_ranks, restarted, under_torchrun
from weft.training.machine_context import kernels_for_run
from weft.training.planning.run_estimate import resolve_strategy, estimate_run
from weft.training.planning.search import AUTO
from weft.training.progress import waiting
from weft.training.rank import Ended, Job, make_plan, make_workload, prepare_process, run_rank
from weft.training.tasks.task import requested_model, graph_for_task, task_model
from weft.utils import jsonl
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError, RunError, Stopped, printable, unknown
from weft.utils.notebook import facts_table
from weft.utils.optional_packages import import_extra


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its folder, and its last line, with scores, seconds, and what each rank did.

    What is read of the folder is there on the host that it is on (under torchrun, rank 0's).
    """

    folder: Path
    summary: dict[str, Any]
    """Empty of a run that has not ended."""

    def __repr__(self) -> str:
        known = {name: value for name, value in self.summary.items() if name.startswith("test_") and value is not None}
        scores = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in known.items()]
        facts = [f"{self.summary['epochs']:,} epochs", *scores] if self.summary else ["has not ended"]
        return f"<Run {printable(str(self.folder))}: {', '.join(facts)}>"

    def _repr_html_(self) -> str | None:
        """What a notebook shows; None where the folder is not there, or damaged: `repr` then."""
        try:
            found = reporting.RunRecords.read(self.folder)
            parse_call = {"graph": found.config.graph, "model": found.config.model}
            return facts_table(f"Run {self.folder}", parse_call | reporting.run_facts(found))
        except InputError:
            return None

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run in a folder, also one that was stopped. InputError where there is none, or its record is damaged."""
        found = RunFolder(Path(folder))
        if not found.config.exists():
            raise no_run(found)
        return cls(folder=found.path, summary=found.summary())

    @property
    def config(self) -> Config:
        """The configuration, as config.toml has it."""
        return Config.read(RunFolder(self.folder).config)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return jsonl.read(RunFolder(self.folder).metrics)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of epochs: loss, seconds, and scores where it was evaluated."""
        return [line for line in self.records if line["kind"] == "epoch"]

    def to_pandas(self, of: str = "epochs") -> Any:
        """A pandas.DataFrame of the records, also of a run that goes on.

        of: `epochs`, a row for each, by its number: loss, lr, seconds and scores; or `ranks`, a row for each epoch,
        rank and phase: seconds, counts, and bytes by tag as columns such as `bytes_sent.halo`.
        InputError for another word, and where `weft[tables]` is not installed.
        """
        tables = {"epochs": reporting.epoch_columns, "ranks": reporting.rank_columns}
        if of not in tables:
            raise unknown("table", of, tables)
        frame = import_extra("pandas", "to_pandas").DataFrame(tables[of](self.records))
        return frame.set_index("epoch") if of == "epochs" and len(frame) else frame

    def plot(self) -> Any:
        """The loss above the scores, over the epochs: an altair chart, which a notebook shows.

        InputError where no epoch is recorded yet, and where `weft[report]` is not installed.
        """
        return reporting.plot(reporting.RunRecords.read(self.folder))

    @property
    def model(self) -> nn.Module:
        """The model with its best weights, see `weft.load_model`. InputError where it is a module of one's own."""
        return load_model(self.folder)


def train(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    plan: str | Path | None = None,
    **options: Any,
) -> Run:
    """Trains a model on a graph under a strategy; leaves records, checkpoints and the best weights in a folder.

    graph: a Graph, or a name or path that `weft.load` takes. model: gcn, sage, gin, gat, gatv2, rgcn, or a module
    over views of your own (see weft.nn.Stack), which has the weights of the best validation score afterwards.
    out: the run's folder; by default a new one in runs/. resume: go on from the newest checkpoint in `out`.
    plan: a file of `weft plan --json`, of which the best is taken; strategy="auto" plans by itself.
    options: the fields of weft.Config: strategy="tensor", workers=4, epochs=100, ... Of these, loss, metrics (one or a
    list), optimizer and scheduler may be functions: each row's loss [k] and a metric's number from logits [k, C] and
    labels; an optimiser from a list of parameters; a LRScheduler from it. callbacks: a list of functions, called on
    rank 0 with each epoch's record. See docs/training.md.
    Under torchrun, joins the ranks that are there, which start from rank 0's weights. In a script, call it under
    `if __name__ == "__main__":`, since local ranks import the script anew.

    Raises InputError for a mistake of the caller; RunError if a rank is lost; Stopped, a KeyboardInterrupt, after
    SIGTERM or Ctrl-C, which the run obeys at the end of the epoch, when its checkpoint is written.
    """
    own, options = extract_functions(options)
    config, whole, module = parse_call(graph, model, options, "weft.train")
    taken = Path(plan) if plan else None
    return run(config, whole, module, own, out=Path(out) if out else None, resume=resume, quiet=quiet, plan=taken)


def parse_call(
    graph: Graph | str | Path, model: nn.Module | str, options: dict[str, Any], caller: str
) -> tuple[Config, Graph | None, nn.Module | None]:
    """The configuration that a call comes to, and its graph and module where they were given as objects."""
    _require_type(caller, "graph", graph, (Graph, str, Path), "make it a Graph, as weft.Graph.from_pyg(data) does")
    _require_type(caller, "model", model, (nn.Module, str), "give a name, or a module, not its class")
    name = graph.name if isinstance(graph, Graph) else str(graph)
    kind = model if isinstance(model, str) else type(model).__name__
    module = None if isinstance(model, str) else model
    if module is not None:
        options = {"dtype": dtype_name(row_dtype(module)), **options}
    config = Config.from_dict({**options, "graph": name, "model": kind}, caller)
    whole = graph if isinstance(graph, Graph) else None
    if whole is not None and config.split:
        raise InputError(f"split {config.split} is of weft.load, and {name} is loaded already: leave it out")
    return config, whole, module


def _require_type(caller: str, what: str, value: object, kinds: tuple[type, ...], remedy: str) -> None:
    """InputError for a value of none of some types."""
    if not isinstance(value, kinds):
        raise InputError(f"{caller}: the {what} is of type {type(value).__name__}: {remedy}")


def run(
    config: Config,
    graph: Graph | None,
    model: nn.Module | None,
    own: OwnFunctions = NO_FUNCTIONS,
    *,
    out: Path | None,
    resume: bool = False,
    quiet: bool = False,
    name: str = "",
    apart: bool = False,
    plan: Path | None = None,
) -> Run:
    """`train` for a configuration; without a graph or a model, those that the configuration names.

    graph: as it is, to which the configuration may add data and edges, and which it may reorder. name: what progress
    calls the run, where it is one of several. apart: in processes of its own, also on one rank. plan: a file of `weft
    plan`, of which the best is taken.
    """
    require_guard()
    if resume and out is None:
        raise InputError("--resume needs --out: the folder of the run to go on with")
    config, work, told = on_present_ranks(config), None, None
    if config.strategy == AUTO or plan is not None:
        undecided = replace(config, strategy=Config().strategy)
        work = load_workload(undecided, graph, model, quiet=quiet)
        config, told = resolve_strategy(config, work, plan)
    refuse_foreign_flags(config)
    job = replace(make_job(config, graph, model, own, out=out, resume=resume, quiet=quiet, name=name), estimate=told)
    launched = (apart or config.workers > 1) and not under_torchrun()
    work = work or load_workload(config, graph, model, quiet=quiet)
    check(config, work, own, launched=launched, own_model=bool(job.own_model))
    return run_checked(job, work, launched=launched)


def load_workload(config: Config, graph: Graph | None, model: nn.Module | None, *, quiet: bool) -> Workload:
    """The workload of a configuration; torchrun's ranks have met before it is."""
    with waiting(f"loading {config.graph}", quiet=quiet or not is_main_process()):
        return make_on_all_ranks(config, lambda: prepared_workload(config, graph, model))


def make_job(
    config: Config,
    graph: Graph | None,
    model: nn.Module | None,
    own: OwnFunctions,
    *,
    out: Path | None,
    resume: bool = False,
    quiet: bool = False,
    name: str = "",
) -> Job:
    """What the ranks of a run have in common, with what was given as objects.

    InputError for an option that has no effect on these.
    """
    own_model = custom_class(config, model)
    return Job(
        config=config,
        out=out,
        resume=resume,
        quiet=quiet,
        name=name,
        idle=fields_unused_by_functions(config, own) + (fields_unused_by_module(config, model) if own_model else ()),
        own_model=own_model,
        own_graph=graph is not None,
        own=own,
    )


def prepared_workload(config: Config, graph: Graph | None, model: nn.Module | None) -> Workload:
    """What a configuration asks for, of the graph and model that it names or that are given; sets up the process.

    InputError for options that a model of one's own does not read.
    """
    prepare_process(config)
    if custom_class(config, model):
        fields_unused_by_module(config, model)
    graph = prepared_graph(config, graph, model)
    return make_workload(config, graph, task_model(requested_model(model, config), GraphShape.of(graph), config))


def prepared_graph(config: Config, graph: Graph | None, model: nn.Module | None) -> Graph:
    """The graph that a configuration names, or the one given, as its task and the model want it."""
    graph = graph_for_task(load_graph(config) if graph is None else as_asked(graph, **data_options(config)), config)
    return graph.by_type() if model is not None and takes_types(model) else graph


def custom_class(config: Config, model: nn.Module | None = None) -> str:
    """The qualified name of the class of a module of one's own; '': the configuration names one of weft's.

    InputError for a name that weft has not, which needs no graph to be told.
    """
    if model is not None:
        return f"{type(model).__module__}.{type(model).__qualname__}"
    if is_imported(config.model):
        return config.model
    check_model_name(config.model)
    return ""


def run_checked(job: Job, work: Workload, plan: Plan | None = None, *, launched: bool, last: bool = True) -> Run:
    """A run that `check` has found nothing wrong with.

    plan: the run's, if it was made before. launched: in processes of their own. last: ranks of torchrun part then.
    """
    if under_torchrun():
        folder, ended = _work_joined(replace(job, resume=job.resume or restarted()), work, last=last)
    else:
        _check_folder(job, work.graph)
        with waiting(f"planning {job.config.strategy}", quiet=job.quiet):
            plan = plan or make_plan(job.config, work, job.resumed)
            job = with_kernels(with_estimate(job, plan))
        folder = _open_folder(job, work.graph)
        try:
            ended = (_work_launched if launched else _work_alone)(job, folder, plan)
        except RunError:
            raise
        except Exception:
            folder.discard()
            raise
        finally:
            folder.release()
    if isinstance(ended, int):
        name = signal.Signals(ended).name
        raise Stopped(f"stopped by {name}; continue with {how_to_resume(job, folder)}", ended)
    return Run(folder=folder.path, summary=ended)


def how_to_resume(job: Job, folder: RunFolder) -> str:
    """Return the flags that go on with a run. Code that is imported has to be named each time."""
    model = f" --model {job.config.model}" if is_imported(job.config.model) else ""
    return f"--resume --out {folder.path}{model}"


def with_estimate(job: Job, plan: Plan) -> Job:
    """A job with what its plan will take, where that is worth it and nobody has said."""
    return job if job.estimate else replace(job, estimate=estimate_run(job.config, plan))


def with_kernels(job: Job) -> Job:
    """A job with the implementations that it is to use, whoever said so: runs that use the same are the same."""
    found, told = kernels_for_run(job.config, job.resumed), job.estimate
    if told and told.correction and not (found == told.correction.choices and job.config.dtype == "float32"):
        told = replace(told, correction=None)  # its kernels are others than those that were priced
    return replace(job, choices=found, estimate=told, config=replace(job.config, choices=""))


def load_graph(config: Config) -> Graph:
    """The graph that a configuration names, with the random data and in the order that it asks for."""
    return load(config.graph, split=config.split, **data_options(config))


def data_options(config: Config) -> dict[str, Any]:
    """What a configuration adds to a graph, and its order."""
    names = ("random_features", "random_classes", "seed", "normalize_features", "order")
    inverse = config.inverse_relations and config.task == "node"  # for links, after some were held out
    return {name: getattr(config, name) for name in names} | {"inverse_relations": inverse}


def _check_folder(job: Job, graph: Graph) -> None:
    """InputError where the folder that was asked for is not for this run."""
    if job.out is not None:
        folder = RunFolder(job.out)
        folder.require_unlocked()
        _found(job, folder, graph)


def _found(job: Job, folder: RunFolder, graph: Graph) -> tuple[bool, Checkpoint | None]:
    """Whether a run in the folder goes on, and from what. InputError where the folder is not for that."""
    if job.resume and (folder.config.exists() or not restarted()):
        return True, folder.resumed(job.config, graph)
    folder.require_empty()
    return False, None


def _open_folder(job: Job, graph: Graph) -> RunFolder:
    """The run's folder, which is its own from now on until it is released."""
    folder = RunFolder(job.out or new_folder(job.config.graph, job.config.model, job.config.strategy))
    folder.lock()
    try:
        goes_on, found = _found(job, folder, graph)
        if goes_on:
            folder.take_back(found)
        folder.begin(job.config, job.idle, job.choices)
    except InputError:
        folder.release()
        with suppress(OSError):  # there is something in it
            folder.path.rmdir()
        raise
    return folder


def _work_alone(job: Job, folder: RunFolder, plan: Plan) -> Ended:
    return run_rank(job, folder, plan, Group(device=rows_device(job.config)), impatient=True)


def _work_joined(job: Job, work: Workload, *, last: bool) -> tuple[RunFolder, Ended]:
    """A rank that torchrun started. Rank 0 plans and opens the folder; its mistake is every rank's."""
    config, graph = job.config, work.graph
    group = join_ranks("weft.train", config, work)
    opened: list[RunFolder] = []
    foreseen: list[Job] = []

    def lead() -> tuple[Plan, str]:
        _check_folder(job, graph)
        plan = make_plan(config, work, job.resumed)
        foreseen.append(with_kernels(with_estimate(job, plan)))
        opened.append(_open_folder(foreseen[0], graph))
        return plan, str(opened[0].path)

    with closing_on_error(group):
        plan, path = plan_together(config, work, group, lead)
        folder = opened[0] if opened else RunFolder(Path(path))
        try:
            ended = run_rank(foreseen[0] if foreseen else job, folder, plan, group)
        except InputError:
            if group.rank == 0:
                folder.discard()
            raise
        finally:
            folder.release()
    if last or isinstance(ended, int):
        group.close()
    return folder, ended


def _work_launched(job: Job, folder: RunFolder, plan: Plan) -> Ended:
    """Starts local ranks; the model has the best weights afterwards."""
    model = plan.work.model
    try:
        ended = on_local_ranks(job.config, partial(run_rank, job, folder), plan, quiet=job.quiet)
    except RunError as error:
        raise RunError(f"{error}; continue with {how_to_resume(job, folder)}") from None
    if not isinstance(ended, int):
        model.load_state_dict(load_file(folder.model))
    return ended
