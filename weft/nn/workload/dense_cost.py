"""The flops of a model's maps between graph operations, and a step's memory: a run on tensors without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.nn.aggregate.kernel_memory import KernelMemory
from weft.nn.graph_view import ViewTraits
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.workload.flops import CountedConv, FlopCounter, FlopPosition, DenseFlops
from weft.nn.workload.layer_sizes import BlockSize, LayerSizes
from weft.nn.workload.outline import MetaModel, typed_rows_of
from weft.nn.workload.outline_view import OutlineState, OutlineView
from weft.nn.workload.workload import DenseFlopsKey, Workload
from weft.runtime.kernel_call import merged
from weft.runtime.tensor_peak import TensorPeak


def dense_flops(work: Workload, traits: ViewTraits, levels: LayerSizes, *, training: bool) -> tuple[DenseFlops, ...]:
    """Those of a rank's maps, which has so much of everything, in one training step or one evaluation.

    Before the first of the outline's operations, between two, and behind the last. Found out once for each workload.
    """
    key = DenseFlopsKey(traits, training, levels)
    if key not in work.maps:
        counter = FlopCounter()
        footprints = [KernelMemory()] * len(work.outline(traits, training=training))
        count = _run_step(work, traits, levels, counter, footprints, training=training)
        places = [(FlopPosition(i), FlopPosition(i, backward=True)) for i in range(count + 1)]
        work.maps[key] = tuple(
            DenseFlops(
                counter.found[there],
                counter.found[back],
                merged(counter.calls[there]),
                merged(counter.calls[back]) if training else (),
            )
            for there, back in places
        )
    return work.maps[key]


def step_memory(
    work: Workload, traits: ViewTraits, levels: LayerSizes, footprints: Sequence[KernelMemory], *, training: bool
) -> TensorPeak:
    """The memory of all that a step makes on a rank, whose operations take so much."""
    peak = TensorPeak()
    _run_step(work, traits, levels, FlopCounter(), footprints, training=training, followed=peak)
    return peak


def _run_step(
    work: Workload,
    traits: ViewTraits,
    levels: LayerSizes,
    counter: FlopCounter,
    footprints: Sequence[KernelMemory],
    *,
    training: bool,
    followed: AbstractContextManager[Any] | None = None,
) -> int:
    """A step on tensors without data; how many graph operations it has. followed: the step, but not its inputs."""
    twin = make_counting_model(work, counter, training=training)
    typed = work.stats.typed
    rows = typed_rows_of(typed, levels.featured, levels.num_embedded, twin.dtype) if typed.has_input else None
    inputs = twin.inputs(
        levels.rows[0], rows, optimisations=work.optimisations, sparse=work.sparse, sparse_first=work.sparse_first
    )
    notes = OutlineState(
        levels.rows[-1],
        steps_of(work, traits, training=training),
        traits.shrinks_rows,
        counter,
        twin.running,
        density=work.stats.density,
        num_relations=typed.num_relations,
        levels=levels,
        footprints=footprints,
    )
    with followed or nullcontext():
        logits = twin.run(traits, notes, inputs, "the model cannot run on a rank's rows ({})")
        count = len(notes.operations)
        backward_flops(counter, count, [logits])
    return count


def make_layer_sizes(work: Workload, vertices: Sequence[slice | Tensor], blocks: Sequence[BlockSize]) -> LayerSizes:
    """The sizes of a rank's share, from the vertices before each aggregate and in the end, and each one's block.

    blocks: none where no layer asks for them. Where the graph is not there, its types are taken to be spread evenly.
    """
    typed, stats = work.stats.typed, work.stats
    rows = tuple(len(range(stats.num_vertices)[one]) if isinstance(one, slice) else len(one) for one in vertices)
    if not work.has_graph:
        shares = [count / max(stats.num_vertices, 1) for count in rows]
        featured = [round(count * shares[0]) for count, _ in typed.featured]
        relation_rows = [round(stats.num_relation_rows * share) for share in shares[1:]]
    else:
        spans = [work.graph.type_range(name) for name in work.graph.vertex_types if name in work.graph.features]
        ids = torch.arange(stats.num_vertices)[vertices[0]] if spans else torch.empty(0)
        featured = [int(((ids >= span.start) & (ids < span.stop)).sum()) for span in spans]
        counts = work.graph.num_relations_in if typed.num_relations else torch.zeros(stats.num_vertices)
        relation_rows = [int(counts[one].sum()) for one in vertices[1:]]
    return LayerSizes(
        rows=rows,
        featured=tuple(featured),
        num_embedded=rows[0] - sum(featured) if typed.num_embedded else 0,
        relation_rows=tuple(relation_rows),
        blocks=tuple(blocks),
    )


def steps_of(work: Workload, traits: ViewTraits, *, training: bool) -> Counter[int]:
    """The aggregates of each stage."""
    steps: Counter[int] = Counter()
    for op in work.outline(traits, training=training):
        steps[op.stage] = max(steps[op.stage], len(op.hops))
    return steps


def backward_flops(counter: FlopCounter, segment: int, results: list[Tensor]) -> None:
    """Counts the backward pass from some results of a segment."""
    results = [one for one in results if one.requires_grad]
    counter.place = FlopPosition(segment, backward=True)
    with counter, torch.device("meta"):
        torch.autograd.backward(results, [torch.empty_like(one) for one in results])


def make_counting_model(work: Workload, counter: FlopCounter, *, training: bool) -> MetaModel:
    """A model's twin, of which convolutions that need the edges' values count what they would do."""
    stats = work.stats
    twin = MetaModel(
        work.model,
        stats.num_features,
        stats.num_edge_features,
        stats.typed,
        weighted=stats.weighted,
        training=training,
    )
    for name, layer in twin.model.named_modules():
        if isinstance(layer, PyGConv):
            layer.forward = partial(counted, layer, name, work, counter)  # type: ignore[method-assign]
    return twin


def counted(layer: PyGConv, name: str, work: Workload, counter: FlopCounter, view: OutlineView, x: Tensor) -> Any:
    """What a convolution without data gives on the block of a rank, while its flops are counted."""
    sources, _, num_targets = view.block(x)
    assert view.block_size is not None
    place, counter.place = counter.place, None
    flops = work.block_flops(
        name, sources.shape[1], training=torch.is_grad_enabled(), gradient=sources.requires_grad
    ).on(view.block_size)
    counter.place = place
    read = (sources, *layer.parameters())
    return CountedConv.apply(counter, flops, (num_targets, layer.out_width), *read)  # type: ignore[no-untyped-call]
