"""Generated graphs of any size from one line: R-MAT for structure, stochastic blocks for accuracy, papers for size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.edges import build
from weft.data.fields import GraphFields
from weft.data.io.citations import citation_graph
from weft.data.io.graph_parts import gather_parts
from weft.data.splits import RMAT, SBM, Masks, balanced_classes, random_matrix, random_split, stream
from weft.runtime.memory.limit import check_fits_memory
from weft.utils.errors import InputError, unknown
from weft.utils.recipe import parse, whole_number

BLOCK_EDGES = 1 << 20
"""Edges drawn together, from one random stream per block: memory is bounded, and only the seed decides the result."""

QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Probabilities that an edge falls into the (low, low), (low, high), (high, low), (high, high) halves of (sources,
targets), at every level of the recursion: Chakrabarti, Zhan, Faloutsos 2004, with the values of Graph500.
"""

CLASS_DISTANCE = 2.0
"""Distance of two class means in units of the noise: features alone separate classes badly, neighbours' means well."""

BLOCK_ROWS = 1 << 14
"""Number of rows to which the means of their classes are added at a time."""

VERTEX_BYTES, EDGE_BYTES = 16, 16
"""Least memory while a graph is generated: per vertex row pointers both ways; per edge two ids, source, position."""


def generate(spec: str, seed: int = 0) -> GraphFields:
    """Return a graph from a recipe of one line.

    `rmat:vertices=100k,edges=1m[,features=128][,classes=16][,seed=0][,undirected=1]`
    `sbm:vertices=10k,degree=10,classes=8[,homophily=0.8][,features=64][,seed=0]`
    `cites:vertices=111m,edges=1.6b,features=128,classes=172[,labelled=1.09%][,flipped=10%][,seed=0]`

    Values may stand without their keys, in this order. k, m and g (or b) are thousands, millions and billions.

    Args:
        spec: The recipe.
        seed: Seed if the recipe has none.

    Raises:
        InputError: The recipe is invalid. The message names the key, and suggests a known one.
    """
    kind, _, text = spec.partition(":")
    if kind not in GENERATORS:
        raise unknown("generator", kind, GENERATORS)
    return GENERATORS[kind](text, seed)


def rmat_spec(text: str, seed: int) -> GraphFields:
    """Return the R-MAT graph of a recipe.

    Args:
        text: The recipe after `rmat:`.
        seed: Seed if the recipe has none.
    """
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
    """Return the stochastic block model of a recipe.

    Args:
        text: The recipe after `sbm:`.
        seed: Seed if the recipe has none.
    """
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


def cites_spec(text: str, seed: int) -> GraphFields:
    """Return the citation-like graph of a recipe.

    Args:
        text: The recipe after `cites:`.
        seed: Seed if the recipe has none.
    """
    graph = citation_graph(text, seed)
    require_room(graph.num_papers, graph.num_references)
    return gather_parts(graph.parts())


GENERATORS: dict[str, Callable[[str, int], GraphFields]] = {"rmat": rmat_spec, "sbm": sbm_spec, "cites": cites_spec}


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
    """Return a recursive-matrix (R-MAT) graph with exactly `edges` stored edges, duplicates and self-loops included.

    Low ids have high degrees. Features and labels are random; the split is 60/20/20.

    Args:
        vertices: Number of vertices.
        edges: Number of stored edges.
        features: Number of features; 0: none.
        classes: Number of classes; 0: no labels.
        seed: Seed of everything.
        undirected: Store every edge in both directions, and count it twice.
        quadrants: Probabilities; see QUADRANTS.

    Raises:
        InputError: If there are no vertices, or an odd number of undirected edges.
    """
    if vertices < 1:
        raise InputError("rmat: vertices=0: give at least 1")
    if undirected and edges % 2:
        raise InputError(f"rmat: edges={edges} is odd, but undirected edges are stored both ways: make it even")
    require_room(vertices, edges)
    num_drawn = edges // 2 if undirected else edges
    # Draw edges over 2^levels ids, and drop those with an id that is no vertex, until there are enough.
    levels = (vertices - 1).bit_length()
    dtype = np.int32 if levels < 32 else np.int64
    pairs = np.empty((2, edges), dtype=dtype)
    filled = block = 0
    while filled < num_drawn:
        drawn = rmat_block(levels, min(BLOCK_EDGES, 2 * num_drawn), stream(seed, RMAT, block), dtype, quadrants)
        accepted = drawn[:, (drawn < vertices).all(0)][:, : num_drawn - filled]
        pairs[:, filled : filled + accepted.shape[1]] = accepted
        filled, block = filled + accepted.shape[1], block + 1
    if undirected:
        pairs[:, num_drawn:] = pairs[::-1, :num_drawn]
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
    """Draw edges over 2^levels vertices.

    One 16-bit random number decides two levels at once, so probabilities are rounded to multiples of 1 / 65,536.

    Args:
        levels: Number of bits of an id.
        size: Number of edges.
        random: The random generator.
        dtype: Dtype of the ids.
        quadrants: Probabilities; see QUADRANTS.

    Returns:
        Sources and targets, [2, size].
    """
    ids = np.zeros((2, size), dtype=dtype)
    for bits in (1,) * (levels % 2) + (2,) * (levels // 2):
        next_bits = quadrant_table(bits, quadrants)[:, random.integers(0, 1 << 16, size, dtype=np.uint16)]
        ids <<= bits
        ids |= next_bits
    return ids


def quadrant_table(bits: int, quadrants: Sequence[float] = QUADRANTS) -> NDArray[np.uint8]:
    """Return a table from 16-bit random numbers to source and target bits of one or two levels, uint8 [2, 65536].

    Args:
        bits: Number of levels.
        quadrants: Probabilities; see QUADRANTS.
    """
    probabilities = np.ones((1, 1))
    for _ in range(bits):
        probabilities = np.kron(probabilities, np.reshape(quadrants, (2, 2)))
    edges = np.rint(np.cumsum(probabilities.reshape(-1)) * (1 << 16)).astype(np.int64)
    codes = np.repeat(np.arange(probabilities.size), np.diff(edges, prepend=0))
    return np.stack(np.divmod(codes, 1 << bits)).astype(np.uint8)


def sbm(
    *, vertices: int, degree: float, classes: int, homophily: float = 0.8, features: int = 64, seed: int = 0
) -> GraphFields:
    """Return a stochastic block model: undirected, with one block of equal size per class.

    Features are the mean of the vertex's class plus noise; the split is 60/20/20. There are no self-loops; duplicates
    stay.

    Args:
        vertices: Number of vertices.
        degree: Mean number of in-edges per vertex.
        classes: Number of classes.
        homophily: Probability that an edge stays within its class; else it ends at a vertex of another class.
        features: Number of features; 0: none.
        seed: Seed of everything.

    Raises:
        InputError: If there are fewer than two classes or two vertices per class, or homophily is above 1.
    """
    if classes < 2 or vertices < 2 * classes:
        raise InputError(
            f"sbm: classes={classes}, vertices={vertices}: give at least two classes, and two vertices per class"
        )
    if homophily > 1:
        raise InputError(f"sbm: homophily={homophily:g} is a probability: give a number from 0 to 1")
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
    """Draw edges, each from a uniformly drawn vertex to another one.

    Args:
        y: Class of each vertex, int64 [N].
        classes: Number of classes.
        homophily: Probability that an edge stays within its class.
        size: Number of edges.
        random: The random generator.

    Returns:
        Sources and targets, [2, size].
    """
    members = np.argsort(y, kind="stable")  # one class after the other
    position = np.empty_like(members)
    position[members] = np.arange(len(y))
    sizes = np.bincount(y, minlength=classes)
    starts = np.cumsum(sizes) - sizes
    source = random.integers(0, len(y), size)
    start, count = starts[y[source]], sizes[y[source]]
    uniform = random.random(size)
    # The vertices of a class are consecutive in `members`. Within the class: a later member, cyclically, so that no
    # vertex draws itself. Outside: a position among all others, moved past the class's range.
    within = start + (position[source] - start + 1 + (uniform * (count - 1)).astype(np.int64)) % count
    outside = (uniform * (len(y) - count)).astype(np.int64)
    outside += (outside >= start) * count
    return np.stack([source, members[np.where(random.random(size) < homophily, within, outside)]])


def require_room(num_vertices: int, num_edges: int) -> None:
    """Check that a graph fits in memory.

    Args:
        num_vertices: Number of vertices.
        num_edges: Number of edges.

    Raises:
        InputError: If it does not.
    """
    num_bytes = VERTEX_BYTES * num_vertices + EDGE_BYTES * num_edges
    check_fits_memory(num_bytes, f"{num_vertices} vertices and {num_edges} edges", "ask for fewer")


def labelled(
    pairs: NDArray[np.signedinteger], num_vertices: int, x: Tensor | None, y: Tensor | None, name: str, seed: int
) -> GraphFields:
    """Return the fields of a generated graph, with a random split if it has labels.

    Args:
        pairs: Sources and targets, [2, E].
        num_vertices: Number of vertices.
        x: Features, or None.
        y: Labels, or None.
        name: Name of the graph.
        seed: Seed of the split.
    """
    masks = Masks() if y is None else random_split(torch.ones(num_vertices, dtype=torch.bool), seed)
    edges = build(torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1]), num_vertices=num_vertices)
    return replace(edges, x=x, y=y, name=name, **masks._asdict())
