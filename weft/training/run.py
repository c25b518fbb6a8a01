"""`weft.train`: trains a model on a graph on one rank, on local ranks, or on the ranks of torchrun."""

from __future__ import annotations

import copy
import signal
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from weft import reporting
from weft.config.config import Config, LearningOptions, is_imported
from weft.data import Graph, GraphShape, as_asked, load
from weft.nn import Workload, check_model_name, row_dtype
from weft.nn.convert import takes_types
from weft.runtime.processes.child_process import report_status
from weft.strategies import Plan, get_strategy
from weft.training.arguments import TrainArguments
from weft.training.artifacts.checkpoint import Checkpoint
from weft.training.artifacts.run_folder import RunFolder, new_folder
from weft.training.artifacts.saved_model import load_model, no_run
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, extract_functions
from weft.training.flag_checks import (
    fields_unused_by_functions,
    fields_unused_by_module,
    make_options,
    refuse_foreign_flags,
)
from weft.training.input_checks import check, check_checkpoint
from weft.training.launch.joined_ranks import check_consistent, closing_on_error, plan_together
from weft.training.launch.launcher import Launcher, launcher_for
from weft.training.launch.processes import require_guard
from weft.training.launch.torchrun import on_present_ranks, restarted
from weft.training.machine_context import kernels_for_run, local_cluster
from weft.training.planning.plan_file import as_planned
from weft.training.planning.run_estimate import estimate_run, options_of_rank_zero
from weft.training.planning.search import AUTO, choose_options
from weft.training.progress import waiting
from weft.training.rank import Job, make_plan, make_workload, prepare_process, run_rank
from weft.training.signature import listing
from weft.training.tasks.scores import with_registered
from weft.training.tasks.task import graph_for_task, is_custom, requested_model, task_model
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError, RunError, Stopped, printable, unknown
from weft.utils.files import jsonl
from weft.utils.files.tensor_file import load_tensors
from weft.utils.notebook import facts_table
from weft.utils.optional_packages import import_extra

MIN_EPOCHS = 100
"""Fewest epochs of a run that is estimated only for its summary: an estimate costs at most a few epochs."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Finished or stopped run.

    Its properties read files in the folder, so they work on the host that has the folder (under torchrun, that of rank
    0).
    """

    folder: Path
    """Folder of the run."""
    summary: dict[str, Any]
    """Last line of the record: scores, seconds, and what each rank did. Empty if the run has not ended."""
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    """Custom module that `weft.train` received. None: the run was opened, or its model was named."""

    def __repr__(self) -> str:
        test_scores = {
            name: value for name, value in self.summary.items() if name.startswith("test_") and value is not None
        }
        scores = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in test_scores.items()]
        facts = [f"{self.summary['epochs']:,} epochs", *scores] if self.summary else ["has not ended"]
        return f"<Run {printable(str(self.folder))}: {', '.join(facts)}>"

    def _repr_html_(self) -> str | None:
        """Return a table for a notebook, or None, for `repr` instead, if the folder is missing or damaged."""
        try:
            records = reporting.RunRecords.read(self.folder)
            subject = {"graph": records.config.graph, "model": records.config.model}
            return facts_table(f"Run {self.folder}", subject | reporting.run_facts(records))
        except InputError:
            return None

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open the run in a folder, which may have been stopped.

        Raises:
            InputError: The folder contains no run, or its record is damaged.
        """
        run_folder = RunFolder(Path(folder))
        if not run_folder.config.exists():
            raise no_run(run_folder)
        return cls(folder=run_folder.path, summary=run_folder.summary())

    @property
    def config(self) -> Config:
        """Configuration of the run, from config.toml."""
        return Config.read(RunFolder(self.folder).config)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        return jsonl.read(RunFolder(self.folder).metrics)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Records of the epochs: loss, seconds, and the scores of evaluations."""
        return [line for line in self.records if line["kind"] == "epoch"]

    def to_pandas(self, of: str = "epochs") -> Any:
        """Return the records as a pandas.DataFrame. The run may still be training.

        Args:
            of: `epochs`: a row for each epoch, indexed by its number, with loss, lr, seconds and scores. `ranks`: a row
                for each epoch, rank and phase, with seconds, counts, and bytes by tag in columns such as
                `bytes_sent.halo`.

        Raises:
            InputError: `of` is another word, or `weft[tables]` is not installed.
        """
        tables = {"epochs": reporting.epoch_columns, "ranks": reporting.rank_columns}
        if of not in tables:
            raise unknown("table", of, tables)
        frame = import_extra("pandas", "to_pandas").DataFrame(tables[of](self.records))
        return frame.set_index("epoch") if of == "epochs" and len(frame) else frame

    def plot(self) -> reporting.Plot:
        """Return a chart of loss and scores over the epochs, which a notebook displays as SVG, without a network.

        Its attribute `chart` is a chart of Vega-Altair, to change or save: `run.plot().chart.save("run.pdf")`.

        Raises:
            InputError: No epoch is recorded yet, or `weft[report]` is not installed.
        """
        return reporting.plot(reporting.RunRecords.read(self.folder))

    @property
    def model(self) -> nn.Module:
        """Model with its best weights, in evaluation mode; of a custom module, a copy.

        Raises:
            InputError: The run was opened, and its model is a custom module: use `weft.load_model`.
        """
        return load_model(self.folder, copy.deepcopy(self.module))


@listing(TrainArguments)
def train(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    plan: str | Path | None = None,
    **options: Unpack[TrainArguments],
) -> Run:
    """Train a model on a graph under a strategy, and save records, checkpoints and the best weights in a folder.

    Under torchrun, join the ranks that torchrun started; they begin with the weights of rank 0. In a script, call it
    under `if __name__ == "__main__":`, because local ranks import the script.

    Args:
        graph: A Graph, or a name or path that `weft.load` accepts.
        model: gcn, sage, gin, gat, gatv2, rgcn, lightgcn, or a module: of PyG, or over weft's views (see
            weft.nn.Stack). A module has the weights of the best validation score afterwards.
        out: Folder of the run. Default: a new one in runs/.
        resume: Continue from the newest checkpoint in `out`.
        quiet: Show no progress.
        plan: File of `weft plan --json`, whose best plan is used. With strategy="auto", the call plans by itself.
        **options: Fields of weft.Config: strategy="tensor", workers=4, epochs=100, ... Four of these may be functions.
            loss: returns the loss of each row, [k], from logits [k, C] and labels. metrics (one or a list): returns a
            number from logits and labels. optimizer: returns an optimizer for a list of parameters. scheduler: returns
            an LRScheduler for an optimizer. One more option is callbacks: a list of functions, called on rank 0 with
            the record of each epoch. See docs/training.md.

    Raises:
        InputError: An argument is wrong.
        RunError: A rank is lost.
        Stopped: A KeyboardInterrupt after SIGTERM or Ctrl-C, at the end of the epoch, when its checkpoint is written.
    """
    functions, fields = extract_functions(options)
    config, graph_object, module = parse_call(graph, model, fields, "weft.train")
    plan_path = Path(plan) if plan else None
    return run(
        config,
        graph_object,
        module,
        functions,
        out=Path(out) if out else None,
        resume=resume,
        quiet=quiet,
        plan=plan_path,
    )


def parse_call(
    graph: Graph | str | Path, model: nn.Module | str, options: dict[str, Any], caller: str
) -> tuple[Config, Graph | None, nn.Module | None]:
    """Return the configuration of a call such as `weft.train`, and its graph and module if they are objects.

    Args:
        graph: A Graph, or a name or path.
        model: A module, or a name.
        options: Fields of the configuration.
        caller: Name of the called function, for messages.

    Raises:
        InputError: An argument has a wrong type or value.
    """
    _require_type(caller, "graph", graph, (Graph, str, Path), "convert it, for example with weft.Graph.from_pyg(data)")
    _require_type(caller, "model", model, (nn.Module, str), "pass a name, or a module instead of its class")
    name = graph.name if isinstance(graph, Graph) else str(graph)
    kind = model if isinstance(model, str) else type(model).__name__
    module = None if isinstance(model, str) else model
    if module is not None:
        options = {"dtype": dtype_name(row_dtype(module)), **options}
    config = Config.from_dict({**options, "graph": name, "model": kind}, caller)
    graph_object = graph if isinstance(graph, Graph) else None
    if graph_object is not None and config.split:
        raise InputError(
            f"split {config.split} has no effect on {name}, which is already loaded: pass split to weft.load instead"
        )
    return config, graph_object, module


def _require_type(caller: str, argument: str, value: object, kinds: tuple[type, ...], remedy: str) -> None:
    """Raise InputError if an argument has none of some types."""
    if not isinstance(value, kinds):
        raise InputError(f"{caller}: the {argument} is of type {type(value).__name__}: {remedy}")


def run(
    config: Config,
    graph: Graph | None,
    model: nn.Module | None,
    functions: OwnFunctions = NO_FUNCTIONS,
    *,
    out: Path | None,
    resume: bool = False,
    quiet: bool = False,
    name: str = "",
    in_subprocess: bool = False,
    plan: Path | None = None,
) -> Run:
    """Train as configured. See `train`.

    Args:
        config: The configuration.
        graph: The graph, to which the configuration may add random data or edges, and which it may reorder. None: the
            graph that the configuration names.
        model: The module. None: the model that the configuration names.
        functions: User-defined functions.
        out: Folder of the run. None: a new one in runs/.
        resume: Continue from the newest checkpoint in `out`.
        quiet: Show no progress.
        name: Name of the run in the progress display, if it is one of several.
        in_subprocess: Start a subprocess even for a single rank.
        plan: File of `weft plan --json`, whose best plan is used.

    Returns:
        The finished run.

    Raises:
        InputError: The configuration is wrong.
        RunError: A rank is lost.
        Stopped: A signal stopped the run.
    """
    # 1. Choose the strategy, if a plan does. 2. Check everything that can be checked. 3. Start the ranks.
    require_guard()
    if resume and out is None:
        raise InputError("--resume needs --out: the folder of the run to continue")
    config, work, estimate = on_present_ranks(config), None, None
    if config.strategy == AUTO or plan is not None:
        any_strategy = replace(config, strategy=Config().strategy)
        launcher = launcher_for(any_strategy, in_subprocess=in_subprocess, quiet=quiet)
        work = load_workload(launcher, any_strategy, graph, model)
        choose = partial(as_planned, vars(config), work, plan) if plan else partial(choose_options, config, work)
        options, estimate = options_of_rank_zero(choose, launcher)
        config = replace(config, **options)
    refuse_foreign_flags(config)
    functions = with_registered(functions, config)
    job = replace(
        make_job(config, graph, model, functions, out=out, resume=resume, quiet=quiet, name=name), estimate=estimate
    )
    launcher = launcher_for(config, in_subprocess=in_subprocess, quiet=quiet)
    work = work or load_workload(launcher, config, graph, model)
    check(config, work, functions, launched=launcher.starts_ranks, own_model=bool(job.own_model))
    return replace(run_checked(job, launcher, work), module=model)


def load_workload(launcher: Launcher, config: Config, graph: Graph | None, model: nn.Module | None) -> Workload:
    """Return the workload of a call, and show that it is loading. Ranks of torchrun report errors together.

    Args:
        launcher: The launcher of the call.
        config: The configuration.
        graph: The graph, or None for the one that the configuration names.
        model: The module, or None for the model that the configuration names.
    """
    with waiting(f"loading {config.graph}", quiet=launcher.quiet):
        return launcher.load(lambda: prepared_workload(config, graph, model))


def make_job(
    config: Config,
    graph: Graph | None,
    model: nn.Module | None,
    functions: OwnFunctions,
    *,
    out: Path | None,
    resume: bool = False,
    quiet: bool = False,
    name: str = "",
) -> Job:
    """Return the settings of a run that all ranks share.

    Args:
        config: The configuration.
        graph: The graph object, or None for the one that the configuration names.
        model: The module, or None for the model that the configuration names.
        functions: User-defined functions.
        out: Folder of the run. None: a new one.
        resume: Continue the run in `out`.
        quiet: Show no progress.
        name: Name of the run in the progress display.

    Raises:
        InputError: An option has no effect on the module or the functions.
    """
    own_model = custom_class(config, model)
    return Job(
        config=config,
        out=out,
        resume=resume,
        quiet=quiet,
        name=name,
        idle=fields_unused_by_functions(config, functions)
        + (fields_unused_by_module(config, model) if own_model else ()),
        own_model=own_model,
        own_graph=graph is not None,
        functions=functions,
    )


def prepared_workload(config: Config, graph: Graph | None, model: nn.Module | None) -> Workload:
    """Load or prepare graph and model, apply the settings of the process, and return the workload.

    Args:
        config: The configuration.
        graph: The graph, or None for the one that the configuration names.
        model: The module, or None for the model that the configuration names.

    Raises:
        InputError: An option has no effect on a custom module, or graph and task do not fit.
    """
    prepare_process(config)
    if custom_class(config, model):
        fields_unused_by_module(config, model)
    graph = prepared_graph(config, graph, model)
    shape = GraphShape.of(graph, config.task)
    model = task_model(requested_model(model, config), shape, config, strategy=config.strategy)
    return make_workload(config, graph, model)


def prepared_graph(config: LearningOptions, graph: Graph | None, model: nn.Module | None) -> Graph:
    """Return the graph of a run, as its task and model need it.

    Args:
        config: The configuration.
        graph: The graph, or None for the one that the configuration names.
        model: The module, or None for the model that the configuration names. A converted heterogeneous model needs
            vertices sorted by type.
    """
    graph = graph_for_task(load_graph(config) if graph is None else as_asked(graph, **data_options(config)), config)
    return graph.by_type() if model is not None and takes_types(model) else graph


def custom_class(config: Config, model: nn.Module | None = None) -> str:
    """Return the qualified class name of a custom module, or an empty string for a built-in model.

    Args:
        config: The configuration, which may name a class to import.
        model: The module, if the caller passed one.

    Raises:
        InputError: The configuration names an unknown model.
    """
    if model is not None:
        return f"{type(model).__module__}.{type(model).__qualname__}"
    if is_custom(config.model):
        return config.model
    check_model_name(config.model)
    return ""


def run_checked(job: Job, launcher: Launcher, work: Workload, planned: Plan | None = None, *, last: bool = True) -> Run:
    """Train after all checks of `check` have passed.

    Args:
        job: Settings of the run.
        launcher: The launcher of the call.
        work: The model and graph.
        planned: The plan of the run, if it was already made.
        last: Disconnect the ranks of torchrun afterwards. False: another run follows.

    Raises:
        InputError: The folder is in use or unsuitable, or no plan fits.
        RunError: A rank is lost.
        Stopped: A signal stopped the run.
    """
    # 1. Connect, and check that all processes of the call do the same. 2. The first one plans and opens the folder.
    # 3. Train on all ranks.
    opened: list[tuple[Job, RunFolder]] = []  # in the first process

    def lead() -> tuple[Plan, dict[str, Any]]:
        _check_folder(job, work.graph)
        with waiting(f"planning {job.config.strategy}", quiet=job.quiet):
            plan = planned or make_plan(job.config, work)
            planned_job = with_kernels(with_estimate(job, plan))
        folder = _open_folder(planned_job, work)
        opened.append((planned_job, folder))
        return plan, {"folder": str(folder.path)}

    with closing_on_error(launcher.connect()) as group:
        check_consistent(group, "weft.train", vars(job.config), work)
        # An agent of torchrun counts only failures of its own ranks: the ranks of another host may know of no restart.
        is_restarted = any(report["restarted"] for report in group.all_gather_object({"restarted": restarted()}))
        job = replace(job, resume=job.resume or is_restarted, restarted=is_restarted)
        strategy, options = get_strategy(job.config.strategy), make_options(job.config)
        try:
            with group.meter.during("plan", "planning"):
                plan, values = plan_together(group, work, strategy, options, lead)
            job, folder = opened[0] if opened else (job, RunFolder(Path(values["folder"])))
            remedy = f"continue with {how_to_resume(job, folder)}"
            report_status(group.meter, remedy)
            ended = launcher.run(plan, partial(run_rank, job, folder), group)
            if launcher.starts_ranks and not isinstance(ended, int):
                work.model.load_state_dict(load_tensors(folder.model))
        except RunError as error:
            if not opened:  # the first process may have discarded the folder
                raise
            raise RunError(f"{error}; continue with {how_to_resume(*opened[0])}") from None
        except Exception:
            for _, folder in opened:
                folder.discard()
            raise
        finally:
            for _, folder in opened:
                folder.release()
        if last or isinstance(ended, int):
            group.close()
    if isinstance(ended, int):
        raise Stopped(f"stopped by {signal.Signals(ended).name}; {remedy}", ended)
    return Run(folder=folder.path, summary=ended)


def how_to_resume(job: Job, folder: RunFolder) -> str:
    """Return the flags that continue a run.

    A model class that is imported must be named each time, since code named in files is not imported.

    Args:
        job: Settings of the run.
        folder: Folder of the run.
    """
    model = f" --model {job.config.model}" if is_imported(job.config.model) else ""
    return f"--resume --out {folder.path}{model}"


def with_estimate(job: Job, plan: Plan) -> Job:
    """Add an estimate of time and memory to a job that has none, if it has enough epochs and the plan allows one.

    Args:
        job: Settings of the run.
        plan: The plan of the run.
    """
    config = job.config
    if job.estimate or config.epochs < MIN_EPOCHS or config.task != "node":
        return job
    cluster = local_cluster(config)
    return replace(job, estimate=estimate_run(plan, cluster)) if cluster else job


def with_kernels(job: Job) -> Job:
    """Add the kernel selection to a job, and remove its source, --choices, from the configuration.

    Runs with the same kernels then have the same configuration.
    """
    kernels, estimate = kernels_for_run(job.config, job.resumed), job.estimate
    if (
        estimate
        and estimate.correction
        and not (kernels == estimate.correction.choices and job.config.dtype == "float32")
    ):
        estimate = replace(estimate, correction=None)  # it was measured with other kernels
    return replace(job, choices=kernels, estimate=estimate, config=replace(job.config, choices=""))


def load_graph(config: LearningOptions) -> Graph:
    """Load the graph that a configuration names, with the configured random data and order."""
    return load(config.graph, split=config.split, **data_options(config))


def data_options(config: LearningOptions) -> dict[str, Any]:
    """Return a configuration's arguments for `weft.load`: random data, normalization and the order of vertices."""
    names = ("random_features", "random_classes", "seed", "normalize_features", "order")
    inverse = config.inverse_relations and config.task != "link"  # for links, they are added after links were held out
    return {name: getattr(config, name) for name in names} | {"inverse_relations": inverse}


def _check_folder(job: Job, graph: Graph) -> None:
    """Raise InputError if the requested folder is in use, or unsuitable for this run."""
    if job.out is not None:
        folder = RunFolder(job.out)
        folder.require_unlocked()
        _resume_point(job, folder, graph)


def _resume_point(job: Job, folder: RunFolder, graph: Graph) -> tuple[bool, Checkpoint | None]:
    """Return whether the run in a folder is resumed, and from which checkpoint.

    Raises:
        InputError: The folder contains a run but is not resumed, or its run does not match.
    """
    if job.resume and (folder.config.exists() or not job.restarted):
        return True, folder.resumed(job.config, graph)
    folder.require_empty()
    return False, None


def _open_folder(job: Job, work: Workload) -> RunFolder:
    """Create or reopen the folder of a run, locked until `release`, and write its configuration."""
    folder = RunFolder(job.out or new_folder(job.config.graph, job.config.model, job.config.strategy))
    folder.lock()
    try:
        resumes, saved = _resume_point(job, folder, work.graph)
        if saved:
            check_checkpoint(saved, job.config, work.model, job.functions)
        if resumes:
            folder.take_back(saved)
        folder.begin(job.config, job.idle, job.choices)
    except InputError:
        folder.release()
        with suppress(OSError):  # the folder is not empty
            folder.path.rmdir()
        raise
    return folder
