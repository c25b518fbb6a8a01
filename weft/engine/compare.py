"""The same model on the same graph under several strategies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.core.config import Config
from weft.core.errors import InputError
from weft.core.record import Recorder
from weft.data import require_trainable
from weft.engine.folder import new_folder
from weft.engine.run import Run, leads, load_graph, run, under_torchrun
from weft.strategies import get_strategy


def compare(config: Config, strategies: list[str], out: Path | None = None, *, quiet: bool = False) -> dict[str, Run]:
    """Trains once per strategy into `out`/NAME, one after the other, and records the summaries in `out`/compare.jsonl.

    `single` runs on one rank, the others on the configuration's workers, all in processes of their own. Under torchrun,
    all run on the ranks that are there, which is how a cluster is measured. InputError for a mistake of the caller.
    """
    if under_torchrun() and out is None:
        raise InputError("compare under torchrun needs --out: a folder that rank 0 can write, the same for all ranks")
    if not strategies or len(set(strategies)) < len(strategies):
        raise InputError(f"--strategies {','.join(strategies)}: give different names, separated by commas")
    for name in strategies:
        get_strategy(name)
    if out and out.exists() and not under_torchrun() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} holds another run: give another folder")
    graph = load_graph(config)
    require_trainable(graph, features=not graph.vertex_types)
    out = out or new_folder(f"{Path(config.graph).stem}-compare")
    runs: dict[str, Run] = {}
    for name in strategies:
        workers = 1 if name == "single" else config.workers
        runs[name] = run(
            replace(config, strategy=name, workers=workers),
            graph,
            None,
            out=out / name,
            quiet=quiet,
            apart=True,
            last=name == strategies[-1],
        )
    if not leads():
        return runs
    recorder = Recorder(out / "compare.jsonl")
    for name, done in runs.items():
        recorder.write("comparison", strategy=name, workers=len(done.summary["ranks"]), summary=done.summary)
    recorder.close()
    return runs
