"""Train the same model on the same graph under several strategies, or with the parts of NeutronTP added one by one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from weft.config.config import Config
from weft.data import Graph, GraphShape
from weft.experiments.runs import Runs
from weft.nn import Workload
from weft.strategies import Plan, get_strategy
from weft.training.arguments import CompareArguments
from weft.training.artifacts.run_folder import new_folder
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, extract_functions
from weft.training.flag_checks import refuse_foreign_flags, strategy_flags, without_foreign_flags
from weft.training.input_checks import check
from weft.training.launch.launcher import Launcher, launcher_for
from weft.training.launch.processes import require_guard
from weft.training.launch.torchrun import is_main_process, on_present_ranks, under_torchrun
from weft.training.progress import waiting
from weft.training.rank import make_plan, make_workload, prepare_process
from weft.training.run import make_job, parse_call, prepared_graph, run_checked
from weft.training.signature import listing
from weft.training.tasks.scores import with_registered
from weft.training.tasks.task import requested_model, task_model
from weft.utils.errors import InputError
from weft.utils.files.jsonl import Recorder

ABLATION_CHUNKS = 4
"""Number of chunks of an ablation without `--chunks` or a memory limit."""


Contenders = Sequence[str] | Mapping[str, Mapping[str, Any]]
"""Names of strategies; or, by any name, a mapping with `strategy` and other fields of the configuration."""


@listing(CompareArguments)
def compare(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    strategies: Contenders,
    out: str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[CompareArguments],
) -> Runs:
    """Train the same model on the same graph once per strategy.

    Each run has its own processes, which import your script again, or uses the ranks of torchrun. `single` runs on one
    rank.

    Args:
        graph: As for `weft.train`.
        model: As for `weft.train`. A custom module is not changed: each run trains a copy of it.
            `weft.load_model(run.folder, model)` loads the best weights of a run.
        strategies: Names of strategies, or a mapping such as {"two": {"strategy": "tensor", "chunks": 2}}, which gives
            a run a name and other values of some fields.
        out: New folder for the runs and compare.jsonl. Default: a folder in runs/.
        quiet: Print no progress.
        **options: Fields of `weft.Config`, for all runs.

    Returns:
        The runs by name.

    Raises:
        InputError: An argument is wrong.
        RunError: A rank failed.
        Stopped: SIGTERM or Ctrl-C ended a run.
    """
    if "strategy" in options or isinstance(strategies, str):
        raise InputError('weft.compare: strategies must be a list of names, such as strategies=["single", "tensor"]')
    incomplete = [name for name in strategies if isinstance(strategies, Mapping) and "strategy" not in strategies[name]]
    if incomplete:
        raise InputError(f"strategies: {incomplete[0]} has no field 'strategy': add it")
    functions, fields = extract_functions(options)
    config, whole, module = parse_call(graph, model, fields, "weft.compare")
    return compare_as(config, strategies, Path(out) if out else None, whole, module, functions, quiet=quiet)


def compare_as(
    config: Config,
    strategies: Contenders,
    out: Path | None,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    functions: OwnFunctions = NO_FUNCTIONS,
    *,
    quiet: bool = False,
) -> Runs:
    """Train once per strategy, as `compare`, with the options of a configuration.

    Args:
        config: The configuration of all runs.
        strategies: See `Contenders`.
        out: New folder for the runs. None: a folder in runs/.
        graph: The graph. None: the configuration names it.
        model: A custom model. None: the configuration names it.
        functions: Custom functions of the runs.
        quiet: Print no progress.

    Returns:
        The runs by name.

    Raises:
        InputError: A strategy is unknown or named twice, or an option does not fit to the strategies.
    """
    if isinstance(strategies, Mapping):
        fields_by_name = {name: dict(fields) for name, fields in strategies.items()}
    else:
        fields_by_name = {name: {"strategy": name} for name in strategies}
    if not strategies or len(fields_by_name) < len(strategies):
        raise InputError(f"--strategies {','.join(strategies)}: give different names, separated by commas")
    plans = {name: get_strategy(fields["strategy"]) for name, fields in fields_by_name.items()}
    refuse_foreign_flags(config, tuple(dict.fromkeys(plan.name for plan in plans.values())))
    contenders = {}
    for name, plan in plans.items():
        if foreign := fields_by_name[name].keys() - {"strategy", "disable", *strategy_flags(plan)}:
            flag = "--" + min(foreign).replace("_", "-")
            raise InputError(
                f"--strategies {name}: {flag} is not specific to strategy {plan.name}: set it for all runs"
            )
        workers = min(config.workers, plan.max_ranks or config.workers)
        contenders[name] = replace(without_foreign_flags(config, plan.name), workers=workers, **fields_by_name[name])
        refuse_foreign_flags(contenders[name])
    return run_all(contenders, out, graph, model, functions, quiet=quiet)


def ablate(config: Config, out: Path | None = None, *, quiet: bool = False) -> Runs:
    """Train with the parts of NeutronTP added one by one (NeutronTP, section 5.4, figure 11).

    The first run is vertex-parallel; the last two train the decoupled model.

    Args:
        config: The configuration of all runs.
        out: New folder for the runs. None: a folder in runs/.
        quiet: Print no progress.

    Returns:
        The runs by name.

    Raises:
        InputError: None of the runs has one of the flags.
    """
    without = ",".join(dict.fromkeys(filter(None, (*config.disable.split(","), "pipeline"))))
    steps: dict[str, dict[str, Any]] = {
        "vertex-parallel": {"strategy": "communicated"},
        "tensor": {"strategy": "tensor", "disable": without},
        "decoupled": {"strategy": "tensor", "disable": without, "decoupled": True},
        "pipeline": {"strategy": "tensor", "decoupled": True},
    }
    refuse_foreign_flags(config, tuple(dict.fromkeys(step["strategy"] for step in steps.values())))
    chunks = config.chunks or (0 if config.device_memory else ABLATION_CHUNKS)
    common = {"decoupled": False, "chunks": chunks}
    configs = {name: replace(config, **(common | step)) for name, step in steps.items()}
    return run_all(
        {name: without_foreign_flags(step_config, step_config.strategy) for name, step_config in configs.items()},
        out,
        quiet=quiet,
    )


def run_all(
    contenders: dict[str, Config],
    out: Path | None,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    functions: OwnFunctions = NO_FUNCTIONS,
    *,
    quiet: bool = False,
) -> Runs:
    """Train once per configuration into `out`/NAME, one run after the other, and write `out`/compare.jsonl.

    Each run has its own processes, even on one rank, so that its peak memory does not include earlier runs. Under
    torchrun, all runs use the ranks of torchrun, for comparisons on a cluster.

    Args:
        contenders: Configurations by name, all of the same graph.
        out: New folder for the runs. None: a folder in runs/.
        graph: The graph. None: the configurations name it.
        model: A custom model, of which each run trains a copy. None: the configurations name it.
        functions: Custom functions of the runs.
        quiet: Print no progress.

    Returns:
        The runs by name.

    Raises:
        InputError: An argument is wrong.
    """
    require_guard()
    if under_torchrun() and out is None:
        raise InputError(
            "weft compare under torchrun needs --out: the same folder on all ranks, which rank 0 can write"
        )
    if out and out.exists() and not under_torchrun() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is not empty: choose another folder")
    contenders = {name: on_present_ranks(contender) for name, contender in contenders.items()}
    config = next(iter(contenders.values()))
    functions = with_registered(functions, config)
    jobs = {
        name: make_job(contender, graph, model, functions, out=None, quiet=quiet, name=name)
        for name, contender in contenders.items()
    }
    with waiting(f"loading {config.graph}", quiet=quiet):
        whole = launcher_for(config).load(lambda: prepared_graph(config, graph, model))
    shape = GraphShape.of(whole, config.task)
    custom = requested_model(model, config)
    if custom is not None:
        custom = task_model(copy.deepcopy(custom), shape, config, strategy=config.strategy)
    prepared: dict[str, tuple[Launcher, Workload, Plan | None]] = {}
    for name, contender in contenders.items():
        prepare_process(contender)
        copied = task_model(copy.deepcopy(custom), shape, contender, strategy=contender.strategy)
        work, plan = make_workload(contender, whole, copied), None
        launcher = launcher_for(contender, in_subprocess=True, quiet=quiet)
        check(contender, work, functions, launched=launcher.starts_ranks, own_model=bool(jobs[name].own_model))
        if launcher.starts_ranks:  # under torchrun, rank 0 plans just before the run
            with waiting(f"planning {name}", quiet=quiet):
                plan = make_plan(contender, work)
            plan.release()
        prepared[name] = launcher, work, plan
    out = out or new_folder(config.graph, "compare")
    runs = Runs()
    for name, job in jobs.items():
        prepare_process(job.config)
        finished = run_checked(replace(job, out=out / name), *prepared.pop(name), last=not prepared)
        runs[name] = replace(finished, module=model)
    if not is_main_process():
        return runs
    recorder = Recorder(out / "compare.jsonl")
    for name, finished in runs.items():
        recorder.write("comparison", strategy=name, workers=len(finished.summary["ranks"]), summary=finished.summary)
    recorder.close()
    return runs
