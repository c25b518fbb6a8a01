"""What runs were of: the graph, the model, and who has which vertices."""

from __future__ import annotations

import statistics
from typing import Any

from weft.reporting import figures
from weft.reporting.figures import Data, FigureGroup
from weft.reporting.page_parts import Figure, PageTable, Runs, Section, by_run, rank_name
from weft.reporting.records import RunRecords


def graph(runs: Runs) -> Section:
    """What the runs were of."""
    begun = [run for run in runs if run.begun]
    lacking = {run.name: "the beginning is not recorded" for run in runs if not run.begun}
    facts = [
        {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in _of_graph(run).items()}
        for run in begun
    ]
    parts: list[Figure | PageTable] = [by_run(begun, "Graph and model", facts)] if begun else []
    found: dict[str, FigureGroup] = {}
    for run in begun:
        degrees = run.begun.get("degrees")
        if not degrees:
            lacking[run.name] = "degrees are not recorded"
        elif (mark := str(run.begun["graph"].get("fingerprint"))) not in found:
            ranges = {"degree": [_range(number) for number in range(len(degrees))], "vertices": degrees}
            found[mark] = FigureGroup(alike={"graph": run.config.graph or run.name}, columns=ranges)
    if found:
        data = Data(name="degrees", groups=[*found.values()])
        chart = figures.columns(data, "degree", "in-degree", "vertices", "vertices", by="graph")
        caption = "How many vertices have how many in-edges."
        parts.append(Figure(name="degrees", title="Degrees", caption=caption, data=data, chart=chart))
    return Section(name="graph", title="Graph", parts=parts, lacking=lacking)


def _of_graph(run: RunRecords) -> dict[str, Any]:
    begun = run.begun
    known = {name: begun["graph"].get(name) for name in ("vertices", "edges", "fingerprint")}
    shape: Any = begun.get("shape") or {}
    more = {name.removeprefix("num_"): shape[name] for name in ("num_features", "num_classes") if name in shape}
    model = str(begun.get("own_model") or run.config.model)
    return {"graph": run.config.graph, **known, **more, "model": model, "parameters": begun["num_parameters"]}


def _range(number: int) -> str:
    """The degrees that are counted at a place: 0, 1, 2 to 3, 4 to 7, ..."""
    if number < 2:
        return str(number)
    least = 1 << number - 1
    return f"{least:,} to {2 * least - 1:,}"


PARTS = {"vertices": "vertices", "in_edges": "in-edges", "remote": "remote sources"}


def partition(runs: Runs) -> Section:
    """Who has which vertices, and what lies between them."""
    groups, facts, shown, lacking = [], [], [], {}
    for run in runs:
        quality = run.begun.get("partition")
        if not quality:
            lacking[run.name] = "vertices are not divided, or it is not recorded how"
            continue
        shown.append(run)
        edges = max(sum(quality["in_edges"]), 1)
        facts.append(
            {
                "method": run.config.partition or "the strategy's own",
                "cut edges": f"{quality['cut']:,} of {edges:,} ({quality['cut'] / edges:.1%})",
                "replication": f"{quality['replication']:.3f}",
            }
        )
        for load in ("vertices", "in_edges", "remote"):
            values, who = quality[load], [rank_name(run, part, runs) for part in range(len(quality[load]))]
            mean = statistics.fmean(values)
            if mean:
                columns = {"who": who, "value": values, "share": [value / mean for value in values]}
                groups.append(FigureGroup(alike={"load": PARTS[load]}, columns=columns))
    parts: list[Figure | PageTable] = [by_run(shown, "Partition", facts)] if shown else []
    if groups:
        data = Data(name="parts", groups=groups)
        chart = figures.grouped_bars(data, "share", "share of the parts' mean; 1 is even", by="load", mark=1.0)
        caption = "Vertices, in-edges and distinct remote sources of each part, as shares of the mean over the parts."
        parts.append(Figure(name="parts", title="How even the parts are", caption=caption, data=data, chart=chart))
    return Section(name="partition", title="Partition", parts=parts, lacking=lacking)
