"""Sections of a report about the inputs of runs: graph, model and partition."""

from __future__ import annotations

import statistics
from typing import Any

from weft.reporting import figures
from weft.reporting.figures import Data, FigureGroup
from weft.reporting.page_parts import Figure, PageTable, Runs, Section, facts_table, rank_name
from weft.reporting.records import RunRecords


def graph(runs: Runs) -> Section:
    """Return the section with the graph and the model of each run."""
    recorded = [run for run in runs if run.config_line]
    missing = {run.name: "the configuration is not recorded" for run in runs if not run.config_line}
    facts = [
        {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in _of_graph(run).items()}
        for run in recorded
    ]
    parts: list[Figure | PageTable] = [facts_table(recorded, "Graph and model", facts)] if recorded else []
    graphs: dict[str, FigureGroup] = {}
    for run in recorded:
        degrees = run.config_line.get("degrees")
        if not degrees:
            missing[run.name] = "degrees are not recorded"
        elif (fingerprint := str(run.config_line["graph"].get("fingerprint"))) not in graphs:
            ranges = {"degree": [_range(number) for number in range(len(degrees))], "vertices": degrees}
            graphs[fingerprint] = FigureGroup(shared={"graph": run.config.graph or run.name}, columns=ranges)
    if graphs:
        data = Data(name="degrees", groups=[*graphs.values()])
        chart = figures.columns(data, "degree", "in-degree", "vertices", "vertices", by="graph")
        caption = "Number of vertices by in-degree."
        parts.append(Figure(name="degrees", title="Degrees", caption=caption, data=data, chart=chart))
    return Section(name="graph", title="Graph", parts=parts, missing=missing)


def _of_graph(run: RunRecords) -> dict[str, Any]:
    line = run.config_line
    sizes = {name: line["graph"].get(name) for name in ("vertices", "edges", "fingerprint")}
    shape: Any = line.get("shape") or {}
    widths = {name.removeprefix("num_"): shape[name] for name in ("num_features", "num_classes") if name in shape}
    model = str(line.get("own_model") or run.config.model)
    return {"graph": run.config.graph, **sizes, **widths, "model": model, "parameters": line["num_parameters"]}


def _range(number: int) -> str:
    """Return the degrees of a bin as a text: 0, 1, 2 to 3, 4 to 7, ..."""
    if number < 2:
        return str(number)
    first = 1 << number - 1
    return f"{first:,} to {2 * first - 1:,}"


LOADS = {"vertices": "vertices", "in_edges": "in-edges", "remote": "remote sources"}
"""Names of the loads of a part, by their names in the records."""


def partition(runs: Runs) -> Section:
    """Return the section with the sizes of the parts and the edges between them."""
    groups, facts, shown, missing = [], [], [], {}
    for run in runs:
        quality = run.config_line.get("partition")
        if not quality:
            missing[run.name] = "the vertices are not partitioned, or the partition is not recorded"
            continue
        shown.append(run)
        edges = max(sum(quality["in_edges"]), 1)
        facts.append(
            {
                "method": run.config.partition or "chosen by the strategy",
                "cut edges": f"{quality['cut']:,} of {edges:,} ({quality['cut'] / edges:.1%})",
                "replication": f"{quality['replication']:.3f}",
            }
        )
        for load in ("vertices", "in_edges", "remote"):
            values, labels = quality[load], [rank_name(run, part, runs) for part in range(len(quality[load]))]
            mean = statistics.fmean(values)
            if mean:
                columns = {"label": labels, "value": values, "share": [value / mean for value in values]}
                groups.append(FigureGroup(shared={"load": LOADS[load]}, columns=columns))
    parts: list[Figure | PageTable] = [facts_table(shown, "Partition", facts)] if shown else []
    if groups:
        data = Data(name="parts", groups=groups)
        chart = figures.grouped_bars(data, "share", "ratio to the mean of the parts (1: balanced)", by="load", mark=1.0)
        caption = "Vertices, in-edges and distinct remote sources of each part, divided by their means over the parts."
        parts.append(Figure(name="parts", title="Balance of the parts", caption=caption, data=data, chart=chart))
    return Section(name="partition", title="Partition", parts=parts, missing=missing)
