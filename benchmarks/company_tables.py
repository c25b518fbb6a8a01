"""Import of company tables with planted structure, and predictions next to scikit-learn and the best possible.

`write_tables` writes users, merchants, items and transactions as a company might have them: missing numbers, few and
many categories, booleans, dates and text labels. A user's risk depends on the user's own columns and on the merchants
that the user pays, whose rating shows their risk with noise; so a graph model can know more than one of users alone.

    python benchmarks/company_tables.py --out results.json                    # 20,000 users, 200,000 transactions
    python benchmarks/company_tables.py --users 5m --transactions 50m --import-only
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import save
from numpy.typing import NDArray
from pyarrow import parquet, table

import weft
from weft.training.tasks.ranking import auc
from weft.utils.recipe import number

COUNTRIES = np.array(["DE", "FR", "IT", "ES", "PL", "NL", "AT", "SE", "PT", "GR", "IE", "FI"])
CATEGORIES = np.array(["food", "travel", "games", "fashion", "crypto", "books", "tools", "music"])
FIRST_DAY, LAST_DAY = np.datetime64("2019-01-01"), np.datetime64("2026-10-31")
PART_ROWS = 1 << 20
"""Number of rows of a table that are generated at once."""


def write_tables(
    folder: Path,
    *,
    users: int = 20_000,
    merchants: int = 2_000,
    items: int = 5_000,
    transactions: int = 200_000,
    seed: int = 0,
    month: int = 0,
) -> NDArray[np.float64]:
    """Write the four tables as Parquet files, and return the true probability that a user's risk is "high", [users].

    Args:
        folder: An existing folder.
        users: Number of users.
        merchants: Number of merchants.
        items: Number of items.
        transactions: Number of transactions.
        seed: Seed of the company: merchants and what they cause are the same in each month.
        month: Number of the month; each has other users and transactions.
    """
    company, rng = np.random.default_rng(seed), np.random.default_rng([seed, month + 1])
    category = company.integers(0, len(CATEGORIES), merchants)
    hidden = company.normal(0, 1.5, merchants) + np.where(CATEGORIES[category] == "crypto", 1.5, 0)
    country_effect = company.normal(0, 0.5, len(COUNTRIES))
    rating = with_nulls(3 - 0.7 * hidden + company.normal(0, 0.5, merchants), company, 0.1)
    merchant_ids = np.arange(merchants) + 10_000
    write_parts(
        folder / "merchants.parquet",
        [{"merchant_id": merchant_ids, "category": CATEGORIES[category], "rating": rating}],
    )
    prices = company.lognormal(3, 1, items)
    brands = np.char.add("brand ", company.integers(0, max(items // 10, 2), items).astype(str))
    write_parts(
        folder / "items.parquet", [{"item_id": ids_of("i", np.arange(items)), "price": prices, "brand": brands}]
    )
    age = rng.integers(18, 90, users).astype(float)
    balance, country = rng.lognormal(7, 2, users), rng.choice(len(COUNTRIES), users, p=zipf(len(COUNTRIES)))
    signup = FIRST_DAY + rng.integers(0, int((LAST_DAY - FIRST_DAY).astype(int)), users)
    newsletter = rng.random(users) < 0.3
    loyal = rng.integers(0, merchants, users)  # most of a user's payments go to a few merchants
    paid, who, paid_at = np.zeros(users), np.zeros(users), []
    for first in range(0, transactions, PART_ROWS):
        size = min(PART_ROWS, transactions - first)
        user = rng.integers(0, users, size)
        merchant = (loyal[user] + rng.integers(0, 3, size)) % merchants
        np.add.at(paid, user, hidden[merchant])
        np.add.at(who, user, 1)
        paid_at.append((user, merchant))
    logit = (
        -0.5
        - 0.5 * (age - 54) / 21
        - 0.6 * (np.log(balance) - 7) / 2
        + country_effect[country]
        + 0.8 * (signup > np.datetime64("2025-06-01"))
        + 1.2 * paid / np.maximum(who, 1)
    )
    probability: NDArray[np.float64] = 1 / (1 + np.exp(-logit))
    risk = np.where(rng.random(users) < probability, "high", "low").astype(object)
    risk[rng.random(users) < 0.3] = None
    columns: dict[str, Any] = {
        "user_id": ids_of(f"u{month}-", np.arange(users)),
        "age": np.where(rng.random(users) < 0.08, np.nan, age),
        "balance": balance,
        "country": with_nulls(COUNTRIES[country], rng, 0.05),
        "city": np.char.add("city ", rng.integers(0, 2_000, users).astype(str)),
        "newsletter": with_nulls(newsletter, rng, 0.1),
        "signup": signup,
        "risk": risk,
    }
    write_parts(
        folder / "users.parquet",
        ({n: c[first : first + PART_ROWS] for n, c in columns.items()} for first in range(0, users, PART_ROWS)),
    )
    write_parts(
        folder / "transactions.parquet",
        (
            {
                "user_id": ids_of(f"u{month}-", user),
                "merchant_id": merchant + 10_000,
                "item_id": ids_of("i", rng.integers(0, items, len(user))),
                "amount": rng.lognormal(3, 1, len(user)),
                "time": LAST_DAY.astype("M8[s]") - rng.integers(0, 86_400 * 365, len(user)),
            }
            for user, merchant in paid_at
        ),
    )
    return probability


def ids_of(prefix: str, numbers: NDArray[np.int64]) -> NDArray[np.str_]:
    """Return ids such as u17."""
    return np.char.add(prefix, numbers.astype(str))


def zipf(size: int) -> NDArray[np.float64]:
    """Return probabilities that fall as 1 / rank."""
    weights = 1.0 / np.arange(1, size + 1)
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


def with_nulls(values: NDArray[Any], rng: np.random.Generator, share: float) -> NDArray[np.object_]:
    """Return values of which a share is None."""
    result = values.astype(object)
    result[rng.random(len(values)) < share] = None
    return result


def write_parts(path: Path, parts: Any) -> None:
    """Write a table that comes in parts, each a dictionary of columns, as a Parquet file."""
    writer = None
    for part in parts:
        rows = table(part)
        writer = writer or parquet.ParquetWriter(path, rows.schema)
        writer.write_table(rows)
    assert writer is not None
    writer.close()


IMPORT = """import sys
from weft.cli.main import main
from weft.runtime.memory.limit import peak_memory_bytes
code = main(sys.argv[1:])
print(peak_memory_bytes())
sys.exit(code)
"""
"""Program that runs a command of weft and prints the peak of the memory that its process used."""
SCHEMA = """predict = "user"
[vertices.user]
table = "users.parquet"
id = "user_id"
features = ["age", "BALANCE", "country", "city", "newsletter", "signup"]
label = "risk"
split = "60,20,20"
[vertices.merchant]
table = "merchants.parquet"
id = "merchant_id"
features = ["category", "rating"]
[vertices.item]
table = "items.parquet"
id = "item_id"
features = ["price:log", "brand"]
[edges.pays]
table = "transactions.parquet"
source = "user.user_id"
target = "merchant.merchant_id"
features = ["amount:log", "time"]
[edges.buys]
table = "transactions.parquet"
source = "user.user_id"
target = "item.item_id"
"""
"""Schema of the tables, in which BALANCE stands for the column and its transform."""


def import_tables(folder: Path, balance: str, out: Path) -> dict[str, Any]:
    """Import the tables by `weft data import` in its own process; return its seconds and its peak memory.

    Args:
        folder: Folder of the tables.
        balance: Column of the balance, with or without a transform.
        out: Folder of the graph.
    """
    (folder / "schema.toml").write_text(SCHEMA.replace("BALANCE", balance))
    start = time.perf_counter()
    words = ["data", "import", str(folder / "schema.toml"), "--out", str(out), "--overwrite"]
    process = subprocess.run([sys.executable, "-c", IMPORT, *words], check=True, stdout=subprocess.PIPE, text=True)
    print(process.stdout)
    return {"seconds": time.perf_counter() - start, "peak_bytes": int(process.stdout.split()[-1])}


def scores(graph: weft.Graph, probability: NDArray[np.float64], out: Path, epochs: int) -> dict[str, Any]:
    """Train a model on the graph; return its AUC on the test users, and those of two other predictions.

    Args:
        graph: The graph.
        probability: True probability of each user.
        out: Folder of the run.
        epochs: Number of epochs.
    """
    from sklearn.linear_model import LogisticRegression

    users = graph.type_range("user")
    assert graph.y is not None
    y, high = graph.y[users.start : users.stop], graph.class_names.index("high")
    masks = {name: graph.labelled(name) for name in ("train", "test")}
    train, test = (mask[users.start : users.stop] for mask in masks.values() if mask is not None)
    run = weft.train(
        graph, "rgcn", out=out, epochs=epochs, hidden=32, layers=2, lr=0.01, dropout=0.3, inverse_relations=True
    )
    rows = weft.predict(run, graph).double().log_softmax(1)[users.start : users.stop, high]
    x = graph.features["user"][:]
    regression = LogisticRegression(max_iter=2_000).fit(x[train].numpy(), y[train].numpy())
    alone = torch.from_numpy(regression.decision_function(x.numpy())) * (1 if regression.classes_[1] == high else -1)
    predictions = {"weft": rows, "logistic_regression": alone, "best_possible": torch.from_numpy(probability)}
    of_class = {name: value[test] for name, value in predictions.items()}
    positive = y[test] == high
    result: dict[str, Any] = {name: auc(rows[positive], rows[~positive]) for name, rows in of_class.items()}
    return result | {"first_loss": run.history[0]["loss"], "last_loss": run.history[-1]["loss"]}


def size(text: str) -> int:
    """Return a number of rows such as 20k or 5m."""
    return int(number("tables", "rows", text))


def main() -> None:
    """Run the benchmark and print or write its result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--users", type=size, default=20_000)
    parser.add_argument("--transactions", type=size, default=200_000)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--import-only", action="store_true", help="measure only the import")
    parser.add_argument("--out", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        probability = write_tables(folder, users=options.users, transactions=options.transactions)
        rows: list[dict[str, Any]] = []
        for balance in ("balance",) if options.import_only else ("balance", "balance:raw"):
            row = {"features": balance, **import_tables(folder, balance, folder / "graph")}
            if not options.import_only:
                graph = weft.Graph.open(folder / "graph")
                row |= scores(graph, probability, folder / f"run-{balance[8:]}", options.epochs)
            rows.append(row)
            print(json.dumps(row))
        if options.out:
            save(options.out, {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
