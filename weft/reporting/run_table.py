"""Tables of finished runs. Reads records only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from weft.utils.units import format_bytes

EXCHANGES = ("rows_to_cols", "cols_to_rows", "halo")  # collectives that move rows
STAGES = ("batches", "negatives", "encode", "decode", "loss", "captured", "update")


def run_table(summary: Mapping[str, Any]) -> Table:
    """One run: scores, epoch time and its stages above, a line for each rank below."""
    stages = ", ".join(f"{stage} {_seconds(seconds)}" for stage, seconds in _stages(summary).items())
    goal = f"goal {_goal(summary)}\n" if "goal_seconds" in summary else ""
    title = (
        f"{_scores(summary)} (after {summary['best_epoch'] + 1} of {summary['epochs']} epochs, the best)\n"
        f"{goal}epoch {_seconds(summary['epoch_seconds'])}; its stages, each in the rank that is longest at it:\n"
        f"{stages}\n"
        f"{_foretold(summary['forecast']) if 'forecast' in summary else ''}"
        "per rank and epoch of training, seconds as medians:"
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


def _foretold(forecast: Mapping[str, Mapping[str, float]]) -> str:
    """What was told of an epoch, and what it took, in a line."""
    told, seen = forecast["told"], forecast["seen"]
    both = {
        kind: (_seconds(told[f"{kind}_seconds"]), _seconds(seen[f"{kind}_seconds"]))
        for kind in ("epoch", "compute", "network", "waiting")
    } | {"memory": (format_bytes(int(told["host_bytes"])), format_bytes(int(seen["host_bytes"])))}
    before, after = both.pop("epoch")
    parts = ", ".join(f"{kind} {one} and {other}" for kind, (one, other) in both.items())
    times = seen["epoch_seconds"] / told["epoch_seconds"]
    return f"told {before} an epoch, took {after} ({times:.2f} x): {parts}\n"


def compare_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Runs on one graph, each against the first; and how even its ranks' loads are."""
    title = "max/min over the ranks: of edges x width, of bytes sent, of seconds of compute"
    goal = any("goal_seconds" in summary for summary in summaries.values())
    if goal:
        title += "; goal: in seconds of training"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "strategy",
        "ranks",
        "test",
        "loss",
        "loss - first",
        "epoch",
        "network",
        "sent by all",
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
    """Where a training step's seconds go under each strategy, each stage's in the rank that takes longest for it.

    Shares are of the stages' sum, as in table 4 of NeutronTP.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found = {name: _stages(summary) for name, summary in summaries.items()}
    known = [stage for stage in STAGES if any(stage in stages for stages in found.values())]
    for name in ("strategy", *known):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for name, stages in found.items():
        seconds = [stages.get(stage, 0.0) for stage in known]
        table.add_row(name, *(f"{_seconds(one)} {one / sum(seconds):4.0%}" for one in seconds))
    return table


def plan_table(plans: Sequence[Mapping[str, Any]]) -> Table:
    """What each strategy will take, the best first, and of those that cannot be why."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    where = ["machines"] if any(plan["machines"] for plan in plans) else []
    device = ["of a device"] if any("device" in plan["options"] for plan in plans) else []
    disk = ["disk"] if any(plan["disk_seconds"] for plan in plans) else []
    parts = ("epoch", "compute", "network", *disk, "waiting")
    columns = (*parts, "sent by all", "memory of a host", *device)
    for name in ("strategy", *where, "ranks", *columns, ""):
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
        known = numbers if plan["epoch_seconds"] else [""] * len(numbers)
        named = [" ".join([plan["strategy"], *options]), *([plan["machines"]] if where else [])]
        table.add_row(*named, str(plan["workers"]), *known, plan["reason"])
    return table


def calibration_line(learned: Mapping[str, float]) -> str:
    """What runs have taught the forecasts of a machine."""
    factors = [f"{kind} {factor:.2f} x" for kind, factor in learned.items() if kind != "runs"]
    return f"factors of {learned['runs']} runs on what the probe has measured: {', '.join(factors)}"


def sweep_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Combinations of options, each with means over its runs, and behind them the standard deviations."""
    title = "means over the seeds, and standard deviations"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    known: Mapping[str, Any] = next((point["numbers"] for point in points if point["numbers"]), {})
    scores = [name for split in ("test", "val") for name in known if name.startswith(f"{split}_")]
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
    """A mean, and behind it the standard deviation where there is one."""
    if number is None:
        return "-"
    spread = "" if number["std"] is None else f" +- {form.format(number['std'])}"
    return f"{form.format(number['mean'])}{spread}"


def partition_table(quality: Mapping[str, Any]) -> Table:
    """A partition: what lies between the parts above, a line for each part below, the evenness last."""
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
    """Seconds of each stage, in the rank that takes longest for it."""
    known = summary["ranks"][0]["stages"]
    return {stage: max(rank["stages"][stage] for rank in summary["ranks"]) for stage in STAGES if stage in known}


def _scores(summary: Mapping[str, Any]) -> str:
    """A line for each kind of score: 'auc test 0.9120, val 0.9203'."""
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
