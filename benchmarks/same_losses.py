"""Compares the losses of the working tree with those of another commit, bit for bit.

    python benchmarks/same_losses.py 996accb

Trains every strategy with five models on one to three ranks in float64, in both trees (see trees.py). The models are
weft's GCN, GAT, GATv2 and R-GCN, and a converted one of PyG's SAGEConv, GINConv and GATConv.

Exit code 0: the losses of all cells are equal. 1: some differ, or only one of the trees runs them. 2: bad input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path

from trees import BadInputError, RunFailedError, install

STRATEGIES = (
    "single",
    "communicated",
    "cached",
    "hybrid",
    "tensor",
    "stale",
    "offload",
    "pipeline",
    "split",
    "sampled",
)
IN_CHUNKS = ("offload", "pipeline")
MODELS = ("gcn", "gat", "gatv2", "rgcn", "pyg")
RUN = """
import json, sys, torch, weft
from torch import nn
from torch_geometric.nn import GATConv, GINConv, SAGEConv, Sequential

VERTICES, EDGES, COLUMNS, CLASSES = 600, 5000, 24, 5

def random_graph(typed):
    random = torch.Generator().manual_seed(0)
    skewed = (torch.rand(EDGES, generator=random) ** 2 * VERTICES).long()
    relations = {"edge_type": torch.randint(3, (EDGES,), generator=random), "relations": ("v|a|v", "v|b|v", "v|c|v"),
                 "vertex_types": ("v",), "type_offsets": (0, VERTICES)} if typed else {}
    return weft.Graph.from_edges(
        skewed, torch.randint(VERTICES, (EDGES,), generator=random), num_vertices=VERTICES,
        x=torch.randn(VERTICES, COLUMNS, generator=random), y=torch.randint(CLASSES, (VERTICES,), generator=random),
        train_mask=torch.rand(VERTICES, generator=random) < 0.5, **relations)

def converted():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    layers = [(SAGEConv(COLUMNS, 16), "x, edge_index -> x"), nn.ReLU(), (GINConv(mlp), "x, edge_index -> x"), nn.ReLU()]
    layers.append((GATConv(16, CLASSES, heads=2, concat=False), "x, edge_index -> x"))
    return Sequential("x, edge_index", layers).double()

if __name__ == "__main__":
    for strategy, model, ranks, options in json.loads(sys.argv[1]):
        try:
            run = weft.train(random_graph(model == "rgcn"), converted() if model == "pyg" else model, epochs=5,
                             strategy=strategy, workers=ranks, dtype="float64", quiet=True, out=sys.argv[2] + "/" +
                             "-".join([strategy, model, str(ranks)]), **options)
            result = [each["loss"].hex() for each in run.history]
        except Exception as error:
            result = str(error)
        print("cell", json.dumps([[strategy, model, ranks], result]), flush=True)
"""


def cells(models: list[str]) -> list[tuple[str, str, int, dict[str, int]]]:
    """Return the cells: strategy, model, number of ranks and further options.

    Args:
        models: Names of the models.
    """
    return [
        (strategy, model, ranks, {"chunks": 3} if strategy in IN_CHUNKS else {})
        for strategy, model, ranks in itertools.product(STRATEGIES, models, (1, 2, 3))
        if not (strategy == "single" and ranks > 1)
    ]


def losses(tree: str, models: list[str]) -> dict[str, list[str] | str]:
    """Return the losses of each cell in a tree, as hexadecimal numbers, or the message with which it refuses it.

    Args:
        tree: The tree.
        models: Names of the models.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "run.py"
        script.write_text(RUN)
        output = install(tree).run([str(script), json.dumps(cells(models)), folder], 2, Path(folder))
    lines = [json.loads(line.removeprefix("cell ")) for line in output.splitlines() if line.startswith("cell ")]
    return {" ".join(map(str, cell)): result for cell, result in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", help="a commit, or the path of a checkout")
    parser.add_argument("--models", default=",".join(MODELS), help="names of models, separated by commas")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    try:
        before, now = (losses(tree, models) for tree in (arguments.tree, str(Path(__file__).resolve().parent.parent)))
    except (BadInputError, RunFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    refused = [cell for cell in before if isinstance(before[cell], str) and isinstance(now[cell], str)]
    different = [cell for cell in before if cell not in refused and before[cell] != now[cell]]
    for cell in different:
        print(f"{cell}: {before[cell]} before, {now[cell]} now")
    for cell in refused:
        print(f"{cell}: refused by both, now with: {now[cell]}")
    print(f"{len(before) - len(refused) - len(different)} of {len(before) - len(refused)} cells have equal losses")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
