"""Graphs of any size from a short line: R-MAT for structure and speed, stochastic blocks where accuracy counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.edges import build
from weft.data.fields import GraphFields
from weft.data.splits import RMAT, SBM, Masks, balanced_classes, random_matrix, random_split, stream
from weft.runtime.memory import check_fits_memory
from weft.utils.errors import InputError, unknown

# Edges drawn together, from a random stream of their own: memory stays bounded, the result depends on the seed alone.
BLOCK_EDGES = 1 << 20

# Chances that an edge falls into the (low, low), (low, high), (high, low) and (high, high) halves of (sources,
# targets), at every level: Chakrabarti, Zhan, Faloutsos 2004 with the values that Graph500 made usual.
QUADRANTS = (0.57, 0.19, 0.19, 0.05)

# Distance between two class means in units of the noise: features alone separate classes badly, neighbours' means well.
CLASS_DISTANCE = 2.0

# Rows that get their class mean together.
BLOCK_ROWS = 1 << 14

# At least, while a graph is made: row pointers both ways; two drawn ids, and the stored source and position.
VERTEX_BYTES, EDGE_BYTES = 16, 16

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def generate(spec: str, seed: int = 0) -> GraphFields:
    """A graph from `rmat:...` or `sbm:...`, with `seed` where the line gives none.

    `rmat:vertices=100k,edges=1m[,features=128][,classes=16][,seed=0][,undirected=1]`
    `sbm:vertices=10k,degree=10,classes=8[,homophily=0.8][,features=64][,seed=0]`
    Values may stand without their key, in this order. k, m and g (or b) are thousands, millions and billions.

    Raises InputError that names the key, and the nearest known one.
    """
    kind, _, text = spec.partition(":")
    if kind not in GENERATORS:
        raise unknown("generator", kind, GENERATORS)
    return GENERATORS[kind](text, seed)


def rmat_spec(text: str, seed: int) -> GraphFields:
    """The R-MAT graph that a line describes."""
    defaults = {"vertices": None, "edges": None, "features": 0, "classes": 0, "seed": seed, "undirected": 0}
    values = parse("rmat", text, defaults)
    return rmat(
        vertices=whole_number("rmat", values, "vertices"),
        edges=whole_number("rmat", values, "edges"),
        features=whole_number("rmat", values, "features"),
        classes=whole_number("rmat", values, "classes"),
        seed=whole_number("rmat", values, "seed"),
        undirected=bool(whole_number("rmat", values, "undirected")),
    )


def sbm_spec(text: str, seed: int) -> GraphFields:
    """The stochastic block model that a line describes."""
    defaults = {"vertices": None, "degree": None, "classes": None, "homophily": 0.8, "features": 64, "seed": seed}
    values = parse("sbm", text, defaults)
    return sbm(
        vertices=whole_number("sbm", values, "vertices"),
        degree=values["degree"],
        classes=whole_number("sbm", values, "classes"),
        homophily=values["homophily"],
        features=whole_number("sbm", values, "features"),
        seed=whole_number("sbm", values, "seed"),
    )


EXAMPLES = {"rmat": "rmat:vertices=100k,edges=1m", "sbm": "sbm:vertices=10k,degree=10,classes=8"}
GENERATORS: dict[str, Callable[[str, int], GraphFields]] = {"rmat": rmat_spec, "sbm": sbm_spec}


def parse(kind: str, text: str, defaults: Mapping[str, float | None], *, example: str = "") -> dict[str, float]:
    """The numbers of `key=value,...`, keys optional for leading values. None as a default: the key must be given."""
    values: dict[str, float | None] = dict(defaults)
    named = False
    for i, item in enumerate(part.strip() for part in text.split(",")):
        key, equals, value = item.partition("=")
        if equals:
            named = True
        else:
            if named or i >= len(defaults):
                raise InputError(f"{kind}: '{item}' has no key: write it as key=value, with {', '.join(defaults)}")
            key, value = list(defaults)[i], item
        if key not in defaults:
            raise unknown(f"{kind} key", key, defaults)
        values[key] = number(kind, key, value)
    for key, given in values.items():
        if given is None:
            raise InputError(f"{kind}: '{key}' is missing: add {key}=..., for example '{example or EXAMPLES[kind]}'")
    return {key: given for key, given in values.items() if given is not None}


def number(kind: str, key: str, text: str) -> float:
    """A number that is not negative, with a suffix k, m or g if need be."""
    factor = SUFFIXES.get(text[-1:].lower(), 1)
    try:
        value = float(Decimal(text[:-1] if factor > 1 else text) * factor)
    except (InvalidOperation, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InputError(f"{kind}: {key}={text} is no number from 0 on: write it like {key}=5, or 100k, 1m, 2g")
    return value


def whole_number(kind: str, values: dict[str, float], key: str) -> int:
    """A value as an integer; InputError if it is none."""
    if values[key] != int(values[key]):
        raise InputError(f"{kind}: {key}={values[key]:g} is no whole number: round it")
    return int(values[key])


def rmat(
    *,
    vertices: int,
    edges: int,
    features: int = 0,
    classes: int = 0,
    seed: int = 0,
    undirected: bool = False,
    quadrants: Sequence[float] = QUADRANTS,
) -> GraphFields:
    """A recursive-matrix graph with exactly `edges` stored edges; duplicates and self loops stay, as they fall.

    `undirected` stores every edge both ways (and counts it twice). Low ids have the high degrees. Features and labels
    are random, labels with a 60/20/20 split; 0 leaves them out. quadrants: see QUADRANTS.
    Raises InputError for no vertices, or an odd undirected count.
    """
    if vertices < 1:
        raise InputError("rmat: vertices=0 leaves nowhere to put edges: ask for one or more")
    if undirected and edges % 2:
        raise InputError(f"rmat: edges={edges} is odd, but undirected edges are stored both ways: make it even")
    require_room(vertices, edges)
    wanted = edges // 2 if undirected else edges
    levels = (vertices - 1).bit_length()
    dtype = np.int32 if levels < 32 else np.int64
    pairs = np.empty((2, edges), dtype=dtype)
    filled = block = 0
    while filled < wanted:
        drawn = rmat_block(levels, min(BLOCK_EDGES, 2 * wanted), stream(seed, RMAT, block), dtype, quadrants)
        kept = drawn[:, (drawn < vertices).all(0)][:, : wanted - filled]
        pairs[:, filled : filled + kept.shape[1]] = kept
        filled, block = filled + kept.shape[1], block + 1
    if undirected:
        pairs[:, wanted:] = pairs[::-1, :wanted]
    y = balanced_classes(vertices, classes, seed) if classes else None
    x = random_matrix(vertices, features, seed) if features else None
    return labelled(pairs, vertices, x, y, f"rmat-{vertices}-{edges}", seed)


def rmat_block(
    levels: int,
    size: int,
    random: np.random.Generator,
    dtype: type[np.signedinteger],
    quadrants: Sequence[float] = QUADRANTS,
) -> NDArray[np.signedinteger]:
    """`size` edges (2, size) over 2**levels vertices. One 16-bit draw settles two levels, to 1 in 65,536."""
    ends = np.zeros((2, size), dtype=dtype)
    for bits in (1,) * (levels % 2) + (2,) * (levels // 2):
        drawn = quadrant_table(bits, quadrants)[:, random.integers(0, 1 << 16, size, dtype=np.uint16)]
        ends <<= bits
        ends |= drawn
    return ends


def quadrant_table(bits: int, quadrants: Sequence[float] = QUADRANTS) -> NDArray[np.uint8]:
    """Source and target bits (2, 65536) of `bits` levels: each combination as often as it is likely."""
    chances = np.ones((1, 1))
    for _ in range(bits):
        chances = np.kron(chances, np.reshape(quadrants, (2, 2)))
    edges = np.rint(np.cumsum(chances.reshape(-1)) * (1 << 16)).astype(np.int64)
    codes = np.repeat(np.arange(chances.size), np.diff(edges, prepend=0))
    return np.stack(np.divmod(codes, 1 << bits)).astype(np.uint8)


def sbm(
    *, vertices: int, degree: float, classes: int, homophily: float = 0.8, features: int = 64, seed: int = 0
) -> GraphFields:
    """A stochastic block model, undirected, with `degree` in-edges per vertex on average and one block per class.

    An edge stays within its class with chance `homophily`, else it ends at a vertex of any other class. Classes are
    equally large; features are their class's mean plus noise; the split is 60/20/20. No self loops; duplicates stay, as
    they fall.
    Raises InputError for fewer than two classes, or two vertices per class, or a homophily above 1.
    """
    if classes < 2 or vertices < 2 * classes:
        raise InputError(
            f"sbm: classes={classes} of vertices={vertices}: ask for two classes or more, of two vertices or more"
        )
    if homophily > 1:
        raise InputError(f"sbm: homophily={homophily:g} is a chance: choose it from 0 to 1")
    num_pairs = round(vertices * degree / 2)
    require_room(vertices, 2 * num_pairs)
    y = balanced_classes(vertices, classes, seed)
    pairs = np.empty((2, 2 * num_pairs), dtype=np.int64)
    for block, start in enumerate(range(0, num_pairs, BLOCK_EDGES)):
        stop = min(start + BLOCK_EDGES, num_pairs)
        pairs[:, start:stop] = sbm_block(y.numpy(), classes, homophily, stop - start, stream(seed, SBM, block))
    pairs[:, num_pairs:] = pairs[::-1, :num_pairs]
    x = None
    if features:
        x = random_matrix(vertices, features, seed)
        means = random_matrix(classes, features, seed, part=1) * (CLASS_DISTANCE / (2 * features) ** 0.5)
        for start in range(0, vertices, BLOCK_ROWS):
            x[start : start + BLOCK_ROWS] += means[y[start : start + BLOCK_ROWS]]
    return labelled(pairs, vertices, x, y, f"sbm-{vertices}-{classes}", seed)


def sbm_block(
    y: NDArray[np.int64], classes: int, homophily: float, size: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """`size` edges (2, size), each from a uniformly drawn vertex to another one."""
    members = np.argsort(y, kind="stable")  # one class after the other
    place = np.empty_like(members)
    place[members] = np.arange(len(y))
    sizes = np.bincount(y, minlength=classes)
    starts = np.cumsum(sizes) - sizes
    source = random.integers(0, len(y), size)
    start, count = starts[y[source]], sizes[y[source]]
    chance = random.random(size)
    within = start + (place[source] - start + 1 + (chance * (count - 1)).astype(np.int64)) % count
    outside = (chance * (len(y) - count)).astype(np.int64)
    outside += (outside >= start) * count
    return np.stack([source, members[np.where(random.random(size) < homophily, within, outside)]])


def require_room(num_vertices: int, num_edges: int) -> None:
    """Raises InputError for vertices and edges that take more memory than there is."""
    num_bytes = VERTEX_BYTES * num_vertices + EDGE_BYTES * num_edges
    check_fits_memory(num_bytes, f"{num_vertices} vertices and {num_edges} edges", "ask for fewer")


def labelled(
    pairs: NDArray[np.signedinteger], num_vertices: int, x: Tensor | None, y: Tensor | None, name: str, seed: int
) -> GraphFields:
    """The generated graph, with a random split where it has labels."""
    masks = Masks() if y is None else random_split(torch.ones(num_vertices, dtype=torch.bool), seed)
    edges = build(torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1]), num_vertices=num_vertices)
    return replace(edges, x=x, y=y, name=name, **masks._asdict())
