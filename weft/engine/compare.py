"""The same model on the same graph under several strategies, or with a strategy's parts added one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.config import Config
from weft.core.errors import InputError
from weft.core.record import Recorder
from weft.data import GraphShape
from weft.engine.check import check
from weft.engine.folder import new_folder
from weft.engine.joined import made_by_all
from weft.engine.options import own_flags, refuse_foreign_flags, without_foreign_flags
from weft.engine.progress import waiting
from weft.engine.rank import Job, make_plan, make_workload, prepare_process
from weft.engine.run import Run, load_graph, own_class, run_checked
from weft.engine.tasks import prepared, task_model
from weft.engine.torchrun import is_main_process, on_present_ranks, under_torchrun
from weft.nn import Workload
from weft.strategies import Plan, get_strategy

ABLATION_CHUNKS = 4


def compare(
    config: Config,
    strategies: Sequence[str] | Mapping[str, Mapping[str, Any]],
    out: Path | None = None,
    *,
    quiet: bool = False,
) -> dict[str, Run]:
    """Trains the same model once per strategy, `single` on one rank; see `run_all`. InputError for a wrong name.

    strategies: their names; or, by names of one's own, the `strategy` and fields of the configuration that belong to
    it, which this contender has another value of.
    """
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
        if foreign := given[name].keys() - {"strategy", "disable", *own_flags(plan)}:
            flag = "--" + min(foreign).replace("_", "-")
            raise InputError(f"--strategies {name}: {flag} is no flag of {plan.name} alone: give it to all contenders")
        workers = min(config.workers, plan.max_ranks or config.workers)
        contenders[name] = replace(without_foreign_flags(config, plan.name), workers=workers, **given[name])
        refuse_foreign_flags(contenders[name])
    return run_all(contenders, out, quiet=quiet)


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


def run_all(contenders: dict[str, Config], out: Path | None = None, *, quiet: bool = False) -> dict[str, Run]:
    """Trains once per contender into `out`/NAME, one after the other, and records the summaries in `out`/compare.jsonl.

    contenders: configurations of one graph by name. Each runs in processes of its own, even on one rank, so that its
    memory is its own; under torchrun, on the ranks that are there, which is how a cluster is measured. InputError for
    a mistake of the caller.
    """
    if under_torchrun() and out is None:
        raise InputError("compare under torchrun needs --out: a folder that rank 0 can write, the same for all ranks")
    if out and out.exists() and not under_torchrun() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} holds another run: give another folder")
    contenders = {name: on_present_ranks(one) for name, one in contenders.items()}
    config, launched = next(iter(contenders.values())), not under_torchrun()
    with waiting(f"loading {config.graph}", quiet=quiet or not is_main_process()):
        graph = made_by_all(config, lambda: prepared(load_graph(config), config))
    made: dict[str, tuple[Workload, Plan | None]] = {}
    for name, one in contenders.items():
        prepare_process(one)
        work, plan = make_workload(one, graph, task_model(None, GraphShape.of(graph), one)), None
        check(one, work, launched=launched, own_model=bool(own_class(one)))
        if launched:  # else rank 0 plans when it comes to it
            with waiting(f"planning {name}", quiet=quiet):
                plan = make_plan(one, work)
            plan.forget()
        made[name] = work, plan
    out = out or new_folder(f"{Path(config.graph).stem}-compare")
    runs: dict[str, Run] = {}
    for name, one in contenders.items():
        prepare_process(one)
        job = Job(config=one, out=out / name, resume=False, quiet=quiet, name=name, own_model=own_class(one))
        runs[name] = run_checked(job, *made.pop(name), launched=launched, last=not made)
    if not is_main_process():
        return runs
    recorder = Recorder(out / "compare.jsonl")
    for name, done in runs.items():
        recorder.write("comparison", strategy=name, workers=len(done.summary["ranks"]), summary=done.summary)
    recorder.close()
    return runs
