"""What runs came to: how they ended, their curves, what was asked for."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from weft.reporting import figures
from weft.reporting.figures import Data, FigureGroup
from weft.reporting.page_parts import NO_EPOCH, Code, Figure, PageTable, Runs, Section, by_run, course, seconds_text
from weft.reporting.records import RunRecords, rank_summaries, score_names
from weft.reporting.rerun import changed_fields, repeating
from weft.reporting.run_table import EXCHANGES
from weft.utils.errors import InputError
from weft.utils.optional_packages import import_extra
from weft.utils.units import format_bytes


def overview(runs: Runs) -> Section:
    """How each run ended, and its scores."""
    facts = [run_facts(run) for run in runs]
    table = by_run(runs, "The runs, and the scores of the best epoch", facts)
    return Section(name="overview", title="The runs", parts=[table])


def run_facts(run: RunRecords) -> dict[str, str]:
    """How a run ended, or how far it is, by what is said of it."""
    newest = run.summary or (run.epochs or [{}])[-1]
    scores = [name for name in score_names(run.epochs) if isinstance(newest.get(name), int | float)]
    ranks, when = rank_summaries(run.rank_lines), "" if run.summary else ", newest"
    seconds = [line["seconds"] for line in run.epochs]
    facts = {
        "state": state(run),
        "strategy": run.config.strategy,
        "ranks": str(run.begun.get("ranks", "-")),
        **{name.replace("_", " ") + when: f"{newest[name]:.6g}" for name in scores},
        "best epoch": str(run.summary.get("best_epoch", "-")),
        "last loss": f"{run.epochs[-1]['loss']:.6g}" if run.epochs else "-",
        "seconds of an epoch's training, median": seconds_text(statistics.median(seconds)) if seconds else "-",
    }
    if ranks:
        facts["exchanges of an epoch"] = str(
            max(sum(one["collectives"].get(tag, 0) for tag in EXCHANGES) for one in ranks)
        )
        facts["sent by all ranks in an epoch"] = format_bytes(sum(one["bytes_sent"] for one in ranks))
        facts["most memory of a rank"] = format_bytes(max(one["peak_memory_bytes"] for one in ranks))
    if "choices" in run.begun:
        facts["implementations of kernels"] = run.begun["choices"]["origin"]
    if forecast := run.summary.get("forecast"):
        facts["seconds of an epoch's training, as told"] = seconds_text(forecast["told"]["epoch_seconds"])
        facts["memory of all ranks, told and seen"] = " and ".join(
            format_bytes(forecast[side]["host_bytes"]) for side in ("told", "seen")
        )
    return facts


def state(run: RunRecords) -> str:
    """How a run ended, or how far it is."""
    if run.summary:
        return f"finished after {run.summary['epochs']:,} epochs"
    done = len(run.epochs)
    last = next((line for line in reversed(run.lines) if line["kind"] in ("event", "epoch")), {})
    if last.get("event") == "stopped":
        return f"stopped after {done:,} epochs"
    doing = "under way" if (run.folder / "lock").exists() else "interrupted"
    return f"{doing}: {done:,} of {run.config.epochs:,} epochs"


def curves(runs: Runs) -> Section:
    """Loss, scores, and rates that change, over the epochs."""
    shown = [run for run in runs if run.epochs]
    lacking = {run.name: NO_EPOCH for run in runs if not run.epochs}
    parts = []
    if shown:
        data = loss_data(shown)
        parts.append(
            Figure(
                name="loss",
                title="Training loss",
                caption=" ".join(course(run, "loss") for run in shown),
                data=data,
                chart=figures.curves(data, "loss", "loss"),
                zoom="epoch",
            )
        )
    for number, (kind, data) in enumerate(score_data(shown).items()):
        parts.append(
            Figure(
                name=f"score-{number}",
                title=f"Score: {kind.replace('_', ' ')}",
                caption=" ".join(course(run, f"val_{kind}") for run in shown),
                data=data,
                chart=figures.curves(data, "value", kind.replace("_", " ")),
                zoom="epoch",
            )
        )
    if any(len({line.get("lr") for line in run.epochs}) > 1 for run in shown):
        data = loss_data(shown)
        chart = figures.curves(data, "lr", "learning rate")
        caption = "Of the steps of each epoch."
        parts.append(Figure(name="lr", title="Learning rate", caption=caption, data=data, chart=chart, zoom="epoch"))
    return Section(name="curves", title="Loss and scores", parts=parts, lacking=lacking)


def loss_data(runs: Runs) -> Data:
    """Loss, learning rate and seconds of each epoch."""
    names = ("epoch", "loss", "lr", "seconds")
    return Data(
        name="epochs",
        groups=[
            FigureGroup(
                alike={"run": run.name},
                columns={name: [finite(line.get(name)) for line in run.epochs] for name in names},
            )
            for run in runs
        ],
    )


def score_data(runs: Runs) -> dict[str, Data]:
    """By kind of score, such as accuracy, its values of each split where they were evaluated."""
    groups: dict[str, list[FigureGroup]] = {}
    for run in runs:
        for name in score_names(run.epochs):
            split, _, kind = name.partition("_")
            lines = [line for line in run.epochs if isinstance(line.get(name), int | float)]
            if kind and lines:
                columns = {"epoch": [one["epoch"] for one in lines], "value": [finite(one[name]) for one in lines]}
                groups.setdefault(kind, []).append(
                    FigureGroup(alike={"run": run.name, "split": split}, columns=columns)
                )
    return {kind: Data(name=f"scores-{number}", groups=found) for number, (kind, found) in enumerate(groups.items())}


def finite(value: Any) -> Any:
    """A number as JSON and charts have it: None where it is no finite one."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(run: RunRecords) -> Any:
    """The curves of one run as a chart by itself. InputError where it has no epoch yet."""
    if not run.epochs:
        raise InputError(f"{run.folder} has no epoch yet: there is nothing to draw")
    kinds = {"loss": (loss_data([run]), "loss")} | {kind: (data, "value") for kind, data in score_data([run]).items()}
    charts = [figures.curves(data, field, kind.replace("_", " "), inline=True) for kind, (data, field) in kinds.items()]
    return import_extra("altair", "a chart").vconcat(*charts).resolve_scale(color="independent")


def configuration(runs: Runs) -> Section:
    """What was asked for, and how to do it again."""
    changed = dict.fromkeys(name for run in runs for name in changed_fields(run.config))
    every = [spec.name for spec in dataclasses.fields(runs[0].config)]
    short = ["graph", "model", *(name for name in every if name in changed)]
    texts = [{name: _shown(getattr(run.config, name)) for name in every} for run in runs]
    parts: list[PageTable | Code] = []
    for run in runs:
        own_model, own_graph = str(run.begun.get("own_model", "")), bool(run.begun.get("own_graph"))
        _, text = repeating(run.config, changed_fields(run.config), own_model=own_model, own_graph=own_graph)
        parts.append(Code(title=f"To repeat {run.name}", text=text))
    picked = [{name: text[name] for name in short} for text in texts]
    caption = "Configuration, where it is not the default in all runs"
    parts.append(dataclasses.replace(by_run(runs, caption, picked), code=True))
    return Section(name="configuration", title="Configuration, and how to repeat it", parts=parts)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "-"
