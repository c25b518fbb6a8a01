"""The same model on the same graph under several strategies, or with a strategy's parts added one by one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from weft.config.config import Config
from weft.data import Graph, GraphShape
from weft.nn import Workload
from weft.strategies import Plan, get_strategy
from weft.training.artifacts.run_folder import new_folder
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, extract_functions
from weft.training.flag_checks import strategy_flags, refuse_foreign_flags, without_foreign_flags
from weft.training.input_checks import check
from weft.training.launch.joined_ranks import make_on_all_ranks
from weft.training.launch.processes import require_guard
from weft.training.launch.torchrun import is_main_process, on_present_ranks, under_torchrun
from weft.training.progress import waiting
from weft.training.rank import make_plan, make_workload, prepare_process
from weft.training.run import Run, parse_call, make_job, prepared_graph, run_checked
from weft.training.tasks.task import requested_model, task_model
from weft.utils.errors import InputError
from weft.utils.jsonl import Recorder

ABLATION_CHUNKS = 4


Contenders = Sequence[str] | Mapping[str, Mapping[str, Any]]
"""Names of strategies; or, by names of one's own, the `strategy` and fields of the configuration that belong to it."""


def compare(
    graph: Graph | str | Path,
    model: nn.Module | str = "gcn",
    *,
    strategies: Contenders,
    out: str | Path | None = None,
    quiet: bool = False,
    **options: Any,
) -> dict[str, Run]:
    """Trains the same model on the same graph once per strategy, `single` on one rank; the runs by name.

    graph, model, options: as of `weft.train`. A module of one's own stays as it is: each strategy starts from a copy,
    with its weights. `weft.load_model(run.folder, model)` gives it the best ones of a run.
    strategies: see Contenders; {"two": {"strategy": "tensor", "chunks": 2}} gives a contender another value of a field.
    out: a new folder with a run for each, and compare.jsonl; by default one in runs/.
    Each runs in processes of its own, which import the script anew, or on torchrun's ranks. Raises as `weft.train`.
    """
    if "strategy" in options or isinstance(strategies, str):
        raise InputError('weft.compare: give strategies=["single", "tensor"], a list of names')
    bare = [name for name in strategies if isinstance(strategies, Mapping) and "strategy" not in strategies[name]]
    if bare:
        raise InputError(f"strategies: {bare[0]} names no strategy: give its fields one")
    own, options = extract_functions(options)
    config, whole, module = parse_call(graph, model, options, "weft.compare")
    return compare_as(config, strategies, Path(out) if out else None, whole, module, own, quiet=quiet)


def compare_as(
    config: Config,
    strategies: Contenders,
    out: Path | None,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    own: OwnFunctions = NO_FUNCTIONS,
    *,
    quiet: bool = False,
) -> dict[str, Run]:
    """`compare` for a configuration; without a graph or a model, those that it names. See `run_all`."""
    if isinstance(strategies, Mapping):
        given = {name: dict(fields) for name, fields in strategies.items()}
    else:
        given = {name: {"strategy": name} for name in strategies}
    if not strategies or len(given) < len(strategies):
        raise InputError(f"--strategies {','.join(strategies)}: give different names, separated by commas")
    plans = {name: get_strategy(fields["strategy"]) for name, fields in given.items()}
    refuse_foreign_flags(config, tuple(dict.fromkeys(plan.name for plan in plans.values())))
    contenders = {}
    for name, plan in plans.items():
        if foreign := given[name].keys() - {"strategy", "disable", *strategy_flags(plan)}:
            flag = "--" + min(foreign).replace("_", "-")
            raise InputError(f"--strategies {name}: {flag} is no flag of {plan.name} alone: give it to all contenders")
        workers = min(config.workers, plan.max_ranks or config.workers)
        contenders[name] = replace(without_foreign_flags(config, plan.name), workers=workers, **given[name])
        refuse_foreign_flags(contenders[name])
    return run_all(contenders, out, graph, model, own, quiet=quiet)


def ablate(config: Config, out: Path | None = None, *, quiet: bool = False) -> dict[str, Run]:
    """Trains with the parts of NeutronTP one by one, each on top of the one before (section 5.4, figure 11).

    The first is vertex-parallel; the last two train the decoupled model. See `run_all`. InputError for a flag that
    none of them has.
    """
    without = ",".join(dict.fromkeys(filter(None, (*config.disable.split(","), "pipeline"))))
    rungs: dict[str, dict[str, Any]] = {
        "vertex-parallel": {"strategy": "communicated"},
        "tensor": {"strategy": "tensor", "disable": without},
        "decoupled": {"strategy": "tensor", "disable": without, "decoupled": True},
        "pipeline": {"strategy": "tensor", "decoupled": True},
    }
    refuse_foreign_flags(config, tuple(dict.fromkeys(rung["strategy"] for rung in rungs.values())))
    chunks = config.chunks or (0 if config.device_memory else ABLATION_CHUNKS)
    common = {"decoupled": False, "chunks": chunks}
    made = {name: replace(config, **(common | rung)) for name, rung in rungs.items()}
    return run_all(
        {name: without_foreign_flags(one, one.strategy) for name, one in made.items()},
        out,
        quiet=quiet,
    )


def run_all(
    contenders: dict[str, Config],
    out: Path | None,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    own: OwnFunctions = NO_FUNCTIONS,
    *,
    quiet: bool = False,
) -> dict[str, Run]:
    """Trains once per contender into `out`/NAME, one after the other, and records the summaries in `out`/compare.jsonl.

    contenders: configurations of one graph by name. Each runs in processes of its own, even on one rank, so that its
    memory is its own; under torchrun, on the ranks that are there, which is how a cluster is measured. model: of which
    each has a copy. InputError for a mistake of the caller.
    """
    require_guard()
    if under_torchrun() and out is None:
        raise InputError("compare under torchrun needs --out: a folder that rank 0 can write, the same for all ranks")
    if out and out.exists() and not under_torchrun() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} holds another run: give another folder")
    contenders = {name: on_present_ranks(one) for name, one in contenders.items()}
    config, launched = next(iter(contenders.values())), not under_torchrun()
    jobs = {
        name: make_job(one, graph, model, own, out=None, quiet=quiet, name=name) for name, one in contenders.items()
    }
    with waiting(f"loading {config.graph}", quiet=quiet or not is_main_process()):
        whole = make_on_all_ranks(config, lambda: prepared_graph(config, graph, model))
    shape = GraphShape.of(whole)
    custom = requested_model(model, config)
    custom = None if custom is None else task_model(copy.deepcopy(custom), shape, config)
    made: dict[str, tuple[Workload, Plan | None]] = {}
    for name, one in contenders.items():
        prepare_process(one)
        work, plan = make_workload(one, whole, task_model(copy.deepcopy(custom), shape, one)), None
        check(one, work, own, launched=launched, own_model=bool(jobs[name].own_model))
        if launched:  # else rank 0 plans when it comes to it
            with waiting(f"planning {name}", quiet=quiet):
                plan = make_plan(one, work)
            plan.release()
        made[name] = work, plan
    out = out or new_folder(config.graph, "compare")
    runs: dict[str, Run] = {}
    for name, job in jobs.items():
        prepare_process(job.config)
        runs[name] = run_checked(replace(job, out=out / name), *made.pop(name), launched=launched, last=not made)
    if not is_main_process():
        return runs
    recorder = Recorder(out / "compare.jsonl")
    for name, done in runs.items():
        recorder.write("comparison", strategy=name, workers=len(done.summary["ranks"]), summary=done.summary)
    recorder.close()
    return runs
