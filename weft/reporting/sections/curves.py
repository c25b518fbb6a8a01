"""Sections of a report about results: state and scores, curves over the epochs, configuration."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from weft.reporting import figures
from weft.reporting.drawing import Plot
from weft.reporting.page_parts import (
    NO_EPOCH,
    Code,
    Figure,
    PageTable,
    Runs,
    Section,
    facts_table,
    seconds_text,
)
from weft.reporting.records import RunRecords, rank_summaries, score_names
from weft.reporting.rerun import rerun_command
from weft.reporting.run_table import EXCHANGES
from weft.reporting.sections.curve_data import coinciding, describe, epoch_data, loss_data, score_data
from weft.utils.errors import InputError
from weft.utils.optional_packages import import_extra
from weft.utils.units import format_bytes


def overview(runs: Runs) -> Section:
    """Return the section with the state and the scores of each run."""
    facts = [run_facts(run) for run in runs]
    table = facts_table(runs, "The runs, and the scores of the best epoch", facts)
    return Section(name="overview", title="The runs", parts=[table])


def origin(runs: Runs) -> PageTable:
    """Return the table for a report's header: when, where and how each run started. Older runs recorded less."""
    facts = []
    for run in runs:
        line = run.config_line
        versions = [f"{name} {line[key]}" for key, name in VERSIONS.items() if line.get(key)]
        texts = {name: str(line.get(name, "")) for name in ("date", "host", "processor", "gpu", "commit", "command")}
        facts.append({name: text for name, text in {**texts, "versions": ", ".join(versions)}.items() if text})
    return facts_table(runs, "Origin of the runs", facts)


VERSIONS = {"weft": "weft", "torch": "PyTorch", "python": "Python"}
"""Names of software, by the field of the record that has its version."""


def run_facts(run: RunRecords) -> dict[str, str]:
    """Return the state, scores, time and bytes of a run as texts, by their names."""
    newest = run.summary or (run.epochs or [{}])[-1]
    names = [*score_names(run.epochs), "val_loss"]
    scores = [name for name in names if isinstance(newest.get(name), int | float)]
    ranks, suffix = rank_summaries(run.rank_lines), "" if run.summary else ", newest"
    seconds = [line["seconds"] for line in run.epochs]
    facts = {
        "state": state(run),
        "strategy": run.config.strategy,
        "ranks": str(run.config_line.get("ranks", "-")),
        **{name.replace("_", " ") + suffix: f"{newest[name]:.6g}" for name in scores},
        "best epoch": str(run.summary["best_epoch"] + 1) if run.summary else "-",
        "last loss": f"{run.epochs[-1]['loss']:.6g}" if run.epochs else "-",
        "training seconds per epoch (median)": seconds_text(statistics.median(seconds)) if seconds else "-",
    }
    if ranks:
        facts["exchanges per epoch"] = str(
            max(sum(rank["collectives"].get(tag, 0) for tag in EXCHANGES) for rank in ranks)
        )
        facts["sent per epoch, all ranks"] = format_bytes(sum(rank["bytes_sent"] for rank in ranks))
        facts["peak memory of a rank"] = format_bytes(max(rank["peak_memory_bytes"] for rank in ranks))
    if "choices" in run.config_line:
        facts["kernel selection"] = run.config_line["choices"]["origin"]
    if forecast := run.summary.get("forecast"):
        facts["training seconds per epoch (estimated)"] = seconds_text(forecast["told"]["epoch_seconds"])
        facts["memory of all ranks (estimated, measured)"] = ", ".join(
            format_bytes(forecast[side]["host_bytes"]) for side in ("told", "seen")
        )
    return facts


def state(run: RunRecords) -> str:
    """Return how a run ended, or how far it is."""
    if run.summary:
        return f"finished after {run.summary['epochs']:,} epochs"
    done = len(run.epochs)
    last = next((line for line in reversed(run.lines) if line["kind"] in ("event", "epoch")), {})
    if last.get("event") == "stopped":
        return f"stopped after {done:,} epochs"
    progress = "running" if (run.folder / "lock").exists() else "interrupted"
    return f"{progress}: {done:,} of {run.config.epochs:,} epochs"


def curves(runs: Runs) -> Section:
    """Return the section with loss, scores, and (if it changes) learning rate over the epochs."""
    shown = [run for run in runs if run.epochs]
    missing = {run.name: NO_EPOCH for run in runs if not run.epochs}
    parts = []
    if shown:
        data = loss_data(shown)
        split = [] if data.shows_all else [f"Split {data.default_split}."]
        note = [LOSS_NOTE, *split] if "val" in data.splits else []
        parts.append(
            Figure(
                name="loss",
                title="Loss",
                caption=" ".join([*note, describe(data, "loss"), *coinciding(data, "loss")]),
                data=data,
                chart=figures.curves(data, "loss", "loss", log=True),
                zoom="epoch",
            )
        )
    for number, (kind, data) in enumerate(score_data(shown).items()):
        ends = " ".join([describe(data, "value"), *coinciding(data, "value")])
        parts.append(
            Figure(
                name=f"score-{number}",
                title=f"Score: {kind.replace('_', ' ')}",
                caption=f"Split {data.default_split}. {ends}",
                data=data,
                chart=figures.curves(data, "value", kind.replace("_", " ")),
                zoom="epoch",
            )
        )
    if any(len({line.get("lr") for line in run.epochs}) > 1 for run in shown):
        data = epoch_data(shown, "lr")
        chart = figures.curves(data, "lr", "learning rate")
        caption = "Learning rate of the steps of each epoch."
        parts.append(Figure(name="lr", title="Learning rate", caption=caption, data=data, chart=chart, zoom="epoch"))
    return Section(name="curves", title="Loss and scores", parts=parts, missing=missing)


LOSS_NOTE = (
    "The training loss is that of the epoch's steps, with dropout; the validation loss is computed after the epoch, "
    "without dropout."
)
"""Text above the figure of losses, if there are validation losses."""


def plot(run: RunRecords) -> Plot:
    """Return the curves of one run as a chart.

    Raises:
        InputError: The run has no epoch yet.
    """
    if not run.epochs:
        raise InputError(f"{run.folder} has no finished epoch yet, so there is nothing to plot: wait for the first one")
    kinds = {"loss": (loss_data([run]), "loss")} | {kind: (data, "value") for kind, data in score_data([run]).items()}
    charts = [figures.curves(data, field, kind.replace("_", " "), inline=True) for kind, (data, field) in kinds.items()]
    return Plot(
        import_extra("altair", "a chart").vconcat(*charts).resolve_scale(color="independent", strokeDash="independent")
    )


def configuration(runs: Runs) -> Section:
    """Return the section with the configuration of each run, and the command that repeats it."""
    changed = dict.fromkeys(name for run in runs for name in run.config.non_defaults(("graph", "model")))
    names = [spec.name for spec in dataclasses.fields(runs[0].config)]
    relevant = ["graph", "model", *(name for name in names if name in changed)]
    texts = [{name: _text(getattr(run.config, name)) for name in names} for run in runs]
    parts: list[PageTable | Code] = []
    for run in runs:
        own_model, own_graph = str(run.config_line.get("own_model", "")), bool(run.config_line.get("own_graph"))
        config, fields = run.config, run.config.non_defaults(("graph", "model"))
        _, text = rerun_command(config.graph, config.model, fields, own_model=own_model, own_graph=own_graph)
        parts.append(Code(title=f"Command that repeats {run.name}", text=text))
    picked = [{name: text[name] for name in relevant} for text in texts]
    caption = "Options that are not the default in every run"
    parts.append(dataclasses.replace(facts_table(runs, caption, picked), code=True))
    return Section(name="configuration", title="Configuration, and how to repeat the runs", parts=parts)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "-"
