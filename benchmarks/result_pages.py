"""Write the pages docs/results/*.md: tables of the measurements in benchmarks/results/*.json.

    python benchmarks/result_pages.py            writes the pages
    python benchmarks/result_pages.py --check    writes nothing, and exits with 1 if a page is out of date

result_pages.toml describes the pages. A table has `files` (patterns of names in results/), `rows` (the place of the
rows in such a file, "rows" by default), and `columns`: a heading, an expression, and optionally a format. An expression
names a field of the row, or of the file's options:

    seconds dgl         the field `dgl` of the field `seconds`
    rows:0              the first item of the list `rows`
    seconds, most       the values of both fields, as one list
    seconds | missing   the second field if the row does not have the first
    seconds / told      the ratios of two fields, item by item

A list of numbers becomes its median with its smallest and its largest item. Formats are the functions in FORMATS; a
field that ends in "seconds" or "bytes" is a time or a size unless the column says otherwise. `group` names fields: rows
that agree in these become one, with lists of their other fields. `base` names fields, too: of the rows that agree in
these, each but the first one gets the `seconds` of the first one as its field "base seconds".
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"
SPEC = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PROCESSORS = {"zen4": "AMD EPYC (Zen 4)", "^(epoch|kernels).*-epyc": "AMD EPYC (Zen 5)", "xeon": "Intel Xeon"}
"""Processors by a pattern of the file's name, as the JSON files call both generations of EPYC "AMD EPYC"."""

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    texts = {PAGES / f"{page['name']}.md": page_text(page) for page in SPEC["page"]}
    outdated = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if check:
        for path in outdated:
            print(f"{path.relative_to(ROOT)} is out of date: run python benchmarks/result_pages.py")
        return bool(outdated)
    PAGES.mkdir(exist_ok=True)
    for path in outdated:
        path.write_text(texts[path])
    return 0


def page_text(page: Row) -> str:
    """Return the Markdown text of a page."""
    parts = [f"# {page['title']}", page["text"].strip(), SPEC["about"].strip()]
    for table in page["table"]:
        parts += [f"## {table['title']}", table["text"].strip(), *table_parts(table)]
    return "\n\n".join(parts) + "\n"


def table_parts(table: Row) -> Iterator[str]:
    """Yield a table's settings, its rows, and the files and machines that they come from.

    Raises:
        ValueError: No file matches, or a column is empty in every row.
    """
    paths = [path for pattern in table["files"] for path in sorted(RESULTS.glob(f"{pattern}.json"))]
    files = {path: json.loads(path.read_text()) for path in paths}
    rows = [row for path, data in files.items() for row in rows_of(path, data, table.get("rows", "rows"))]
    rows = merged(rows, table["group"]) if "group" in table else rows
    bases: dict[tuple[Any, ...], Row] = {}
    for row in rows if "base" in table else ():
        base = bases.setdefault(tuple(row.get(key) for key in table["base"]), row)
        if base is not row:
            row["base seconds"] = base.get("seconds")
    columns = [(*column, "")[:3] for column in table["columns"]]
    cells = [[cell(row, expression, kind) for _, expression, kind in columns] for row in rows]
    empty = [heading for (heading, *_), *column in zip(columns, *cells, strict=True) if not any(column)]
    if empty or not rows:
        raise ValueError(f"{table['title']}: no values for {empty}")
    if settings := common_settings(list(files.values()), [expression for _, expression, _ in columns]):
        yield f"Settings: {settings}."
    lines = [[heading for heading, *_ in columns], ["---"] * len(columns), *filter(any, cells)]
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
    places: dict[str, list[str]] = {}
    for path, data in files.items():
        places.setdefault(hardware(path, data), []).append(f"`benchmarks/results/{path.name}`")
    yield "\n".join(f"- {place}: {', '.join(names)}" for place, names in places.items())


def rows_of(path: Path, data: Row, place: str) -> Iterator[Row]:
    """Yield the rows of a file, flat, with the fields of its options; an object of objects has a row for each."""
    section: Any = data
    for key in place.split("."):
        section = section[key]
    items = section if isinstance(section, list) else [{"name": name} | item for name, item in section.items()]
    for item in items:
        options = data.get("options", {}) | {"machine": processor(path, data)}
        yield options | dict(flat(item)) if not item.get("absent") else {}


def flat(item: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object; those of objects in it under both names, joined by a space."""
    for key, value in item.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key} ")
        else:
            yield prefix + key, value


def merged(rows: list[Row], keys: list[str]) -> list[Row]:
    """Return a row for each combination of the values of `keys`, with lists of the other fields."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    lists = ({key: [row.get(key) for row in group] for key in group[0]} for group in groups.values())
    return [fields | dict(zip(keys, values, strict=True)) for values, fields in zip(groups, lists, strict=True)]


def cell(row: Row, expression: str, kind: str) -> str:
    """Return the text of a table's cell; empty if the row lacks a field."""
    top, _, bottom = expression.partition(" / ")
    values = field(row, top)
    if bottom and values is not None:
        other = field(row, bottom)
        values = None if other is None else [a / b for a, b in zip(as_list(values), as_list(other), strict=True)]
    if values is None:
        return ""
    numbers = [value for value in as_list(values) if isinstance(value, int | float)]
    if not numbers or (isinstance(numbers[0], bool) and not kind):
        return ", ".join(words(value) for value in as_list(values))
    unit = re.search(r"\b(?:\w+_)?(seconds|bytes)(?!_)\b", expression)
    return FORMATS[kind or ("times" if bottom else unit[1] if unit else "number")](numbers)


def field(row: Row, expression: str) -> Any:
    """Return the value of an expression without a ratio; None if the row lacks it."""
    if "|" in expression:
        return next((value for name in expression.split("|") if (value := field(row, name)) is not None), None)
    if ", " in expression:
        values = [field(row, name) for name in expression.split(", ")]
        return None if None in values else [number for value in values for number in as_list(value)]
    name, _, index = expression.strip().partition(":")
    if index.isdigit():
        items = row.get(name, [])
        return items[int(index)] if int(index) < len(items) else None
    return row.get(expression.strip())


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def words(value: Any) -> str:
    """Return a graph, a contender or a rate in words: a name of SPEC["words"], or its parts."""
    text = str(value)
    if value is True or value is False:
        return "yes" if value else "no"
    if text in SPEC["words"]:
        return str(SPEC["words"][text])
    if rate := re.fullmatch(r"(\d+)([kmg]bit)", text):
        return f"{int(rate[1]) * {'kbit': 1e-3, 'mbit': 1, 'gbit': 1e3}[rate[2]]:,.0f} Mbit/s"
    if size := re.fullmatch(r"(\d+)/(\d+)", text):
        return f"R-MAT, {int(size[1]):,} vertices, {int(size[2]):,} edges"
    if graph := re.fullmatch(r"(rmat|sbm):(.*)", text):
        return ", ".join([{"rmat": "R-MAT", "sbm": "stochastic block model"}[graph[1]], *sizes(graph[2])])
    return contender_words(text.removeprefix("topo_"))


def sizes(options: str) -> Iterator[str]:
    """Yield a generator's options in words: "edges=4.65m" as "4.65 million edges"."""
    for option in options.split(","):
        name, _, amount = option.partition("=")
        if name != "undirected":
            yield f"{re.sub('m$', ' million', amount)} {'edges per vertex' if name == 'degree' else name}"


def contender_words(text: str) -> str:
    """Return a contender in words: "pipeline#8:metis-eager" as "pipeline, 8 chunks, metis partition, without eager"."""
    without = ""
    if strategy := re.fullmatch(r"(tensor|communicated|hybrid|pipeline|offload)([@#:+].*?)?((?:-\w+)*)", text):
        parts = re.findall(r"([@#:+])([\w.]+)", strategy[2] or "")
        text = ", ".join([strategy[1], *(MARKS[mark].format(value) for mark, value in parts)])
        without = strategy[3][1:].replace("-", ", ")
    else:
        text, _, without = text.partition("-without-")
    return f"{text}, without {without}" if without else text


MARKS = {"@": "cached fraction {}", "#": "{} chunks", ":": "{} partition", "+": "{}"}
"""Marks that follow a strategy's name in a contender of benchmarks/dependencies.py, and their meaning."""


def summary(numbers: list[float], form: Callable[[float], str]) -> str:
    """Return the median, with the smallest and the largest number if there are several."""
    middle = form(statistics.median(numbers))
    return middle if len(numbers) == 1 else f"{middle} ({form(min(numbers))} to {form(max(numbers))})"


def scaled(numbers: list[float], units: dict[str, float]) -> str:
    """Return `summary` in the largest unit that the median reaches."""
    middle = statistics.median(numbers)
    unit, factor = next(((unit, factor) for unit, factor in units.items() if middle >= factor), [*units.items()][-1])
    return f"{summary([number / factor for number in numbers], digits)} {unit}"


def digits(number: float) -> str:
    """Return a number with three significant digits, and all digits before the point."""
    if isinstance(number, int) or abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if abs(number) >= 1e-3 else f"{number:.1e}" if number else "0"


def error(ratios: list[float]) -> str:
    """Return how far ratios of estimates to measurements are from 1."""
    errors = [abs(ratio - 1) for ratio in ratios]
    near = sum(each <= 0.2 for each in errors) / len(errors)
    return f"median {statistics.median(errors):.1%}, largest {max(errors):.0%}, {near:.0%} of cells within 20%"


FORMATS: dict[str, Callable[[list[float]], str]] = {
    "number": lambda numbers: summary(numbers, digits),
    "seconds": lambda numbers: scaled(numbers, {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}),
    "bytes": lambda numbers: scaled(numbers, {"GB": 1e9, "MB": 1e6, "kB": 1e3}),
    "rate": lambda numbers: scaled(numbers, {"GB/s": 1e9}),
    "millions": lambda numbers: summary([number / 1e6 for number in numbers], digits),
    "times": lambda numbers: summary(numbers, lambda ratio: f"{digits(ratio)}x"),
    "percent": lambda numbers: summary(numbers, lambda share: f"{share:.1%}"),
    "score": lambda numbers: f"{statistics.mean(numbers):.3f} ± {statistics.stdev(numbers):.3f}",
    "count": lambda numbers: str(len(numbers)),
    "largest over mean": lambda numbers: f"{max(numbers) / statistics.mean(numbers):.2f}",
    "total": lambda numbers: digits(sum(numbers)),
    "error": error,
    "true": lambda numbers: f"{sum(numbers)} of {len(numbers)}",
}


def common_settings(files: list[Row], shown: list[str]) -> str:
    """Return the options that all files of a table share and no column shows."""
    options = [data.get("options", {}) for data in files]
    full_graph = any(
        not file.get("fanout") or not (file.get("batch_size") or file.get("batch_sizes")) for file in options
    )
    parts = []
    for name, title in SPEC["settings"].items():
        values = {str(file.get(name, "")) for file in options}
        value = values.pop() if len(values) == 1 and name not in shown else ""
        unused = value in ("", "None", "0", "0.0", "auto") or (full_graph and name in ("fanout", "batch_size"))
        if not unused and ";" not in value:
            parts.append(f"{title} {words(value)}")
    return "; ".join(parts)


def processor(path: Path, data: Row) -> str:
    """Return the name of the processor, or of the GPU."""
    device = data.get("gpu", {}).get("name")
    names = (name for pattern, name in PROCESSORS.items() if re.search(pattern, path.name))
    return str(device or next(names, data["machine"]["processor"])).replace("Intel(R) Xeon(R) Processor", "Intel Xeon")


def hardware(path: Path, data: Row) -> str:
    """Return the machine, the version of PyTorch, the commit, and the date if the file has it."""
    machine = data.get("machine") or data["gpu"]
    parts = [
        processor(path, data),
        f"CUDA {data['gpu']['cuda']}" if "gpu" in data else "",
        f"{machine['logical_processors']} CPU cores",
        machine["instruction_set"].upper().replace("AVX", "AVX-"),
        f"PyTorch {machine['torch']}",
        f"commit {machine['commit'][:7]}",
        data.get("profile", {}).get("date", ""),
    ]
    return ", ".join(filter(None, parts))


if __name__ == "__main__":
    sys.exit(main())
