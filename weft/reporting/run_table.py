"""Tables about runs, plans, sweeps and partitions for the terminal, made from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from weft.utils.units import format_bytes

EXCHANGES = ("rows_to_cols", "cols_to_rows", "halo")
"""Tags of the collectives that exchange rows."""
STAGES = ("batches", "negatives", "encode", "decode", "loss", "captured", "update")
"""Stages of a training step, in order."""


def run_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of a run: scores, seconds of an epoch and its stages in the title, and a row for each rank."""
    stages = ", ".join(f"{stage} {_seconds(seconds)}" for stage, seconds in _stages(summary).items())
    goal = f"goal {_goal(summary)}\n" if "goal_seconds" in summary else ""
    title = (
        f"{_scores(summary)} (best epoch: {summary['best_epoch'] + 1} of {summary['epochs']})\n"
        f"{goal}epoch {_seconds(summary['epoch_seconds'])}; seconds of its stages, each on the slowest rank:\n"
        f"{stages}\n"
        f"{_estimate_line(summary['forecast']) if 'forecast' in summary else ''}"
        "per rank and training epoch (medians of seconds):"
    )
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "rank",
        "sent",
        "received",
        "exchanges",
        "edges x width",
        "compute",
        "network",
        "waiting",
        "memory",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in summary["ranks"]:
        collectives = rank["collectives"]
        table.add_row(
            str(rank["rank"]),
            format_bytes(rank["bytes_sent"]),
            format_bytes(rank["bytes_received"]),
            str(sum(collectives.get(tag, 0) for tag in EXCHANGES)),
            f"{rank['edges']:,}",
            _seconds(rank["compute_seconds"]),
            _seconds(rank["communication_seconds"]),
            _seconds(rank["waiting_seconds"]),
            format_bytes(rank["peak_memory_bytes"]),
        )
    return table


def _estimate_line(forecast: Mapping[str, Mapping[str, float]]) -> str:
    """Return the estimated and the measured time and memory of an epoch, in a line."""
    estimated, measured = forecast["told"], forecast["seen"]
    pairs = {
        kind: (_seconds(estimated[f"{kind}_seconds"]), _seconds(measured[f"{kind}_seconds"]))
        for kind in ("epoch", "compute", "network", "waiting")
    } | {"memory": (format_bytes(int(estimated["host_bytes"])), format_bytes(int(measured["host_bytes"])))}
    estimate, measurement = pairs.pop("epoch")
    parts = ", ".join(f"{kind} {before} / {after}" for kind, (before, after) in pairs.items())
    ratio = measured["epoch_seconds"] / estimated["epoch_seconds"]
    return f"epoch estimated {estimate}, measured {measurement} ({ratio:.2f} x); estimated / measured: {parts}\n"


def compare_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table that compares runs on one graph with the first run."""
    title = "max/min: largest over smallest rank, of edges x width, bytes sent and compute seconds"
    goal = any("goal_seconds" in summary for summary in summaries.values())
    if goal:
        title += "; goal: seconds of training until it was reached"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "strategy",
        "ranks",
        "test",
        "loss",
        "loss - first",
        "epoch",
        "network",
        "sent, all ranks",
        "max/min",
        "memory",
        *(("epochs", "goal") if goal else ()),
    ):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    first = next(iter(summaries.values()))
    test = next((name for name, value in first.items() if name.startswith("test_") and value is not None), None)
    for name, summary in summaries.items():
        ranks = summary["ranks"]
        loads = ([rank[load] for rank in ranks] for load in ("edges", "bytes_sent", "compute_seconds"))
        table.add_row(
            name,
            str(len(ranks)),
            f"{summary[test]:.4f}" if test else "-",
            f"{summary['loss']:.6f}",
            f"{summary['loss'] - first['loss']:+.1e}",
            _seconds(summary["epoch_seconds"]),
            _seconds(max(rank["communication_seconds"] + rank["waiting_seconds"] for rank in ranks)),
            format_bytes(sum(rank["bytes_sent"] for rank in ranks)),
            " ".join(f"{max(load) / min(load):.2f}" if min(load) else "-" for load in loads),
            format_bytes(max(rank["peak_memory_bytes"] for rank in ranks)),
            *((str(summary["epochs"]), _goal(summary)) if goal else ()),
        )
    return table


def stage_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of a training step's seconds by stage under each strategy, each stage on its slowest rank.

    Shares are of the sum of the stages (NeutronTP, table 4).
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    stages_by_name = {name: _stages(summary) for name, summary in summaries.items()}
    recorded = [stage for stage in STAGES if any(stage in stages for stages in stages_by_name.values())]
    for name in ("strategy", *recorded):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for name, stages in stages_by_name.items():
        seconds = [stages.get(stage, 0.0) for stage in recorded]
        table.add_row(name, *(f"{_seconds(value)} {value / sum(seconds):4.0%}" for value in seconds))
    return table


def plan_table(plans: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of a plan file's rows: the estimate of each strategy, or the reason why it is impossible.

    Without estimated seconds, it has only the columns of bytes.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    machines = ["machines"] if any(plan["machines"] for plan in plans) else []
    device = ["device memory"] if any("device" in plan["options"] for plan in plans) else []
    disk = ["disk"] if any(plan["disk_seconds"] for plan in plans) else []
    timed = any(plan["epoch_seconds"] for plan in plans)
    parts = ("epoch", "compute", "network", *disk, "waiting") if timed else ()
    columns = (*parts, "sent, all ranks", "host memory", *device)
    for name in ("strategy", *machines, "ranks", *columns, ""):
        left = name in ("strategy", "machines", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=bool(name))
    for plan in plans:
        options = [f"{name}={value}" for name, value in plan["options"].items() if name != "device"]
        numbers = [
            *(_seconds(plan[f"{part}_seconds"]) for part in parts),
            format_bytes(plan["sent_bytes"]),
            format_bytes(plan["host_bytes"]),
            *([format_bytes(plan["device_bytes"])] if device else []),
        ]
        cells = numbers if plan["host_bytes"] else [""] * len(numbers)
        names = [" ".join([plan["strategy"], *options]), *([plan["machines"]] if machines else [])]
        table.add_row(*names, str(plan["workers"]), *cells, plan["reason"])
    return table


def calibration_line(calibration: Mapping[str, float]) -> str:
    """Return a line about the factors by which earlier runs calibrate the estimates of a machine."""
    factors = [f"{kind} {factor:.2f} x" for kind, factor in calibration.items() if kind != "runs"]
    return f"calibrated by {calibration['runs']} runs: {', '.join(factors)} the seconds of the probe"


def sweep_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of a sweep: a row for each combination of options, with statistics over its seeds."""
    title = "mean +- standard deviation over the seeds"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    numbers_of_first: Mapping[str, Any] = next((point["numbers"] for point in points if point["numbers"]), {})
    scores = [name for split in ("test", "val") for name in numbers_of_first if name.startswith(f"{split}_")]
    for name in ("options", "runs", *(score.replace("_", " ") for score in scores), "loss", "epochs", "epoch"):
        table.add_column(name, justify="left" if name == "options" else "right", no_wrap=True)
    for point in points:
        options, numbers = point["options"], point["numbers"]
        ended, runs = point["ended"], len(point["runs"])
        table.add_row(
            ", ".join(f"{name}={value}" for name, value in options.items()) or "all",
            str(runs) if ended == runs else f"{ended} of {runs}",
            *(_spread(numbers.get(name), "{:.4f}") for name in (*scores, "loss")),
            _spread(numbers.get("epochs"), "{:.1f}"),
            _seconds(numbers["epoch_seconds"]["mean"]) if numbers else "-",
        )
    return table


def _spread(number: Mapping[str, Any] | None, form: str) -> str:
    """Return a mean, and the standard deviation if there is one, as a text."""
    if number is None:
        return "-"
    spread = "" if number["std"] is None else f" +- {form.format(number['std'])}"
    return f"{form.format(number['mean'])}{spread}"


def partition_table(quality: Mapping[str, Any]) -> Table:
    """Return the table of a partition: cut and replication in the title, a row for each part, and the balance."""
    cut, num_edges = quality["cut"], sum(quality["in_edges"])
    title = (
        f"cut {cut:,} of {num_edges:,} edges ({cut / max(num_edges, 1):.1%})\n"
        f"replication {quality['replication']:.3f}, {_seconds(quality['seconds'])}"
    )
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    loads = [quality[name] for name in ("vertices", "in_edges", "remote")]
    for name in ("part", "vertices", "in-edges", "remote vertices"):
        table.add_column(name, justify="right", no_wrap=True)
    for part, values in enumerate(zip(*loads, strict=True)):
        table.add_row(str(part), *(f"{value:,}" for value in values))
    table.add_section()
    table.add_row("max/mean", *(f"{max(load) * len(load) / max(sum(load), 1):.3f}" for load in loads))
    table.add_row("min/max", *(f"{min(load) / max(load) if max(load) else 1:.3f}" for load in loads))
    return table


def _stages(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each stage on its slowest rank."""
    recorded = summary["ranks"][0]["stages"]
    return {stage: max(rank["stages"][stage] for rank in summary["ranks"]) for stage in STAGES if stage in recorded}


def _scores(summary: Mapping[str, Any]) -> str:
    """Return a line for each kind of score, such as 'auc test 0.9120, val 0.9203'."""
    kinds: dict[str, list[str]] = {}
    for split in ("test", "val", "train"):
        for name, value in summary.items():
            if name.startswith(f"{split}_") and value is not None:
                kinds.setdefault(name.removeprefix(f"{split}_"), []).append(f"{split} {value:.4f}")
    return "\n".join(f"{kind} {', '.join(values)}" for kind, values in kinds.items()) or "no score"


def _goal(summary: Mapping[str, Any]) -> str:
    seconds = summary.get("goal_seconds")
    return "not reached" if seconds is None else f"reached in {_seconds(seconds)}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.2f} ms"
