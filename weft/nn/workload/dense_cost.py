"""FLOPs of a model's dense layers, and memory of a step on a rank, from running the model on meta tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from weft.nn.aggregate.aggregate import Aggregate
from weft.nn.convert.unconverted import Unconverted, WholeModel
from weft.nn.graph_view import GraphView, Inputs, ViewTraits
from weft.nn.layers.pyg_conv import PyGConv
from weft.nn.layers.relation_convs import RelationBlock
from weft.nn.layers.typed_input import embeddings, is_embedded
from weft.nn.sparse_rows import SparseRows
from weft.nn.workload.flops import CountedConv, DenseFlops, FlopCounter, FlopPosition, RowKind
from weft.nn.workload.layer_sizes import BlockSize, LayerSizes, TypeCounts, TypedBlockSize, type_numbers
from weft.nn.workload.outline import MetaModel, RunModel, run_whole, typed_rows_of
from weft.nn.workload.outline_view import MetaExchange, OutlineState, OutlineView
from weft.nn.workload.workload import DenseFlopsKey, Workload
from weft.runtime.kernel_call import merged
from weft.runtime.memory.tensor_peak import TensorPeak


def dense_flops(work: Workload, traits: ViewTraits, sizes: LayerSizes, *, training: bool) -> tuple[DenseFlops, ...]:
    """Return the FLOPs of a rank's dense layers in a training step or an evaluation; computed once for each workload.

    Args:
        work: The workload.
        traits: Traits of the strategy's views.
        sizes: Number of rows of the rank at each layer.
        training: True for a training step, False for an evaluation.

    Returns:
        The FLOPs before the first operation of the outline, between each two, and after the last one.
    """
    key = DenseFlopsKey(traits, training, sizes)
    if key not in work.dense_flops:
        counter = FlopCounter()
        count = _run_step(work, traits, sizes, counter, training=training)
        positions = [(FlopPosition(i), FlopPosition(i, backward=True)) for i in range(count + 1)]
        work.dense_flops[key] = tuple(
            DenseFlops(
                counter.flops[forward],
                counter.flops[backward],
                merged(counter.calls[forward]),
                merged(counter.calls[backward]) if training else (),
            )
            for forward, backward in positions
        )
    return work.dense_flops[key]


def step_memory(
    work: Workload,
    traits: ViewTraits,
    sizes: LayerSizes,
    exchanges: Sequence[MetaExchange],
    *,
    training: bool,
    sums_gradients: bool,
    run_model: RunModel = run_whole,
) -> TensorPeak:
    """Return the memory of the tensors that a step creates on a rank.

    Args:
        work: The workload.
        traits: Traits of the strategy's views.
        sizes: Number of rows of the rank at each layer.
        exchanges: Exchange of each stage on the meta device.
        training: True for a training step, False for an evaluation.
        sums_gradients: True if a training step sums the gradients of parameters over ranks.
        run_model: Function that runs the model.
    """
    if sizes.blocks:  # costs of PyG convolutions are measured before the step, not in it
        dense_flops(work, traits, sizes, training=training)
    peak = TensorPeak()
    num_summed = work.num_summed * (training and sums_gradients)
    _run_step(
        work,
        traits,
        sizes,
        FlopCounter(),
        training=training,
        exchanges=exchanges,
        observer=peak,
        num_summed=num_summed,
        run_model=run_model,
    )
    return peak


def _run_step(
    work: Workload,
    traits: ViewTraits,
    sizes: LayerSizes,
    counter: FlopCounter,
    *,
    training: bool,
    exchanges: Sequence[MetaExchange] = (),
    observer: AbstractContextManager[Any] | None = None,
    num_summed: int = 0,
    run_model: RunModel = run_whole,
) -> int:
    """Run a step on meta tensors, and return its number of graph operations.

    Args:
        work: The workload.
        traits: Traits of the strategy's views.
        sizes: Number of rows of the rank at each layer.
        counter: Counts the FLOPs.
        training: True for a training step, False for an evaluation.
        exchanges: Exchange of each stage on the meta device; empty: aggregates only have a shape.
        observer: Context manager that is active during the step, after its inputs have been created.
        num_summed: Number of elements of the gradients that are summed over ranks.
        run_model: Function that runs the model.
    """
    meta_model = make_counting_model(work, counter, training=training)
    typed = work.stats.typed
    typed_rows = None
    if typed.has_input:
        counts, densities = sizes.types[0].counts, work.typed_densities
        typed_rows = typed_rows_of(typed, counts, meta_model.dtype, densities, counter.add_sparse)
    rows = SparseRows.of(meta_model.features(sizes.rows[0]), work.density, counter.add_sparse)
    inputs = Inputs(rows=rows, typed=typed_rows, optimisations=work.optimisations, sparse_first=work.sparse_first)
    state = OutlineState(
        sizes.rows[-1],
        count_steps(work, traits, training=training),
        traits.shrinks_rows,
        counter,
        [""],  # no names of layers, whose hooks would keep the layers' inputs in memory
        num_relations=typed.num_relations,
        sizes=sizes,
        exchanges=exchanges,
    )
    for weight in embeddings(meta_model.model).values() if exchanges else ():  # a rank stores only some of their rows
        weight.data = weight.new_empty(sizes.num_stored, weight.shape[1])
    with observer or nullcontext():
        logits = meta_model.run(traits, state, inputs, "the model cannot run on a rank's rows ({})", run_model)
        logits, count = logits.to(work.dtype), len(state.operations)
        backward_flops(counter, count, [logits])
        torch.empty(2, num_summed, dtype=work.dtype, device="meta")  # a message, and the sums of all ranks
    return count


def preparation_memory(
    work: Workload, traits: ViewTraits, sizes: LayerSizes, exchanges: Sequence[MetaExchange], *, training: bool
) -> int:
    """Return the peak temporary bytes of the aggregates of constant features, which a run computes once and keeps.

    Args:
        work: The workload.
        traits: Traits of the strategy's views.
        sizes: Number of rows of the rank at each layer.
        exchanges: Exchange of each stage on the meta device.
        training: True for the aggregates of training steps.
    """
    shape = sizes.rows[0], work.stats.num_features
    rows = torch.empty(shape, dtype=work.row_dtype, device="meta")
    inputs, temporary = Inputs(rows=rows, optimisations=work.optimisations), 0
    for op in filter(work.is_cached, work.outline(traits, training=training)):
        assert isinstance(op.op, Aggregate)
        exchange = exchanges[op.stage]
        view = GraphView(exchange.topology, inputs=inputs)
        with TensorPeak() as peak, FlopCounter(), torch.no_grad():
            result = exchange.aggregate(view, op.op, {op.op.first: rows}, op.steps)
        temporary = max(temporary, peak.most - result.nbytes)
    return temporary


def make_layer_sizes(
    work: Workload,
    vertices: Sequence[slice | Tensor],
    blocks: Sequence[BlockSize],
    typed_blocks: Sequence[TypedBlockSize],
    stored: slice | Tensor,
    *,
    has_all_sources: bool,
) -> LayerSizes:
    """Return the sizes of each layer on a rank.

    Without the graph itself, vertices of all types are assumed to be spread evenly.

    Args:
        work: The workload.
        vertices: The rank's vertices before each aggregate, and those of the result; each a range or int64.
        blocks: Size of the block of each aggregate; empty if no layer reads the edges itself.
        typed_blocks: Their size by vertex type and relation; empty if no layer calls convolutions by relation.
        stored: Vertices whose embedding rows the rank stores, a range or int64.
        has_all_sources: True if the rank has the rows of all sources.
    """
    typed, stats = work.stats.typed, work.stats
    rows = tuple(
        len(range(stats.num_vertices)[selection]) if isinstance(selection, slice) else len(selection)
        for selection in vertices
    )
    if not work.has_graph:
        shares = [count / max(stats.num_vertices, 1) for count in rows]
        of_types = (*(count for count, _ in typed.featured), typed.num_embedded)
        types = [TypeCounts.spread(count, of_types) for count in rows if typed.has_input]
        relation_rows = [tuple(round(count * share) for count in stats.relation_rows) for share in shares[1:]]
        num_own = len(range(stats.num_vertices)[stored]) if isinstance(stored, slice) else len(stored)
        num_stored = round(typed.num_embedded * num_own / max(stats.num_vertices, 1))
    else:
        number_of = type_numbers(work.graph) if typed.has_input else torch.empty(0)
        types = [TypeCounts.of(number_of[each], len(typed.featured) + 1) for each in vertices if typed.has_input]
        relation_rows = [work.graph.count_relation_rows(each) for each in vertices[1:]]
        num_stored = int(is_embedded(work.graph)[stored].sum()) if typed.num_embedded else 0
    return LayerSizes(
        rows=rows,
        num_stored=num_stored,
        relation_rows=tuple(relation_rows),
        types=tuple(types),
        blocks=tuple(blocks),
        typed_blocks=tuple(typed_blocks),
        has_all_sources=has_all_sources,
    )


def count_steps(work: Workload, traits: ViewTraits, *, training: bool) -> Counter[int]:
    """Return the number of layers of message passing of each stage.

    Args:
        work: The workload.
        traits: Traits of the strategy's views.
        training: True for a training step, False for an evaluation.
    """
    steps: Counter[int] = Counter()
    for op in work.outline(traits, training=training):
        steps[op.stage] = max(steps[op.stage], len(op.hops))
    return steps


def backward_flops(counter: FlopCounter, segment: int, results: list[Tensor]) -> None:
    """Count the backward pass from the results of a segment.

    Args:
        counter: Counts the FLOPs.
        segment: Number of the segment.
        results: Results of the segment; those without a gradient are ignored.
    """
    results = [result for result in results if result.requires_grad]
    counter.position = FlopPosition(segment, backward=True)
    with counter, torch.device("meta"):
        torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def make_counting_model(work: Workload, counter: FlopCounter, *, training: bool) -> MetaModel:
    """Return a workload's model on meta tensors, whose PyG convolutions are replaced by counted costs.

    PyG convolutions cannot run on meta tensors, because they read the ids of edges. Nor can a model without conversion.

    Args:
        work: The workload.
        counter: Counts the FLOPs.
        training: True for training mode.
    """
    stats = work.stats
    meta_model = MetaModel(
        work.model,
        stats.num_features,
        stats.num_edge_features,
        stats.typed,
        weighted=stats.weighted,
        training=training,
    )
    whole = [("layer", meta_model.model.layer)] if isinstance(meta_model.model, Unconverted) else []
    for name, layer in [*meta_model.model.named_modules(), *whole]:
        if isinstance(layer, PyGConv | WholeModel):
            layer.forward = partial(run_counted_conv, layer, name, work, counter)  # type: ignore[method-assign]
    return meta_model


def run_counted_conv(
    layer: PyGConv | WholeModel,
    name: str,
    work: Workload,
    counter: FlopCounter,
    view: OutlineView | RelationBlock,
    x: Tensor,
    *others: Tensor,
) -> Any:
    """Return the result of a PyG convolution on a rank's block, as a meta tensor, and count its cost.

    Args:
        layer: The layer, or a model without conversion.
        name: Path of the layer in the model.
        work: The workload.
        counter: Counts the FLOPs.
        view: The rank's view.
        x: Rows of the rank, or of the first vertex type for a `TypedConv`.
        *others: Rows of its other types.
    """
    sources, _, num_targets = view.block(x)
    assert view.block_size is not None
    targets: Tensor | None = getattr(view, "target_rows", None)
    position, counter.position = counter.position, None
    shape = num_targets, layer.result_width(sources)
    try:
        costs = work.block_cost(
            name,
            tuple(map(RowKind.of, (sources, *others))),
            target_rows=None if targets is None else RowKind.of(targets),
            types=getattr(view, "types", None),
            has_edges=getattr(view.block_size, "edges", 1) > 0,
            training=torch.is_grad_enabled(),
        )
    except Exception:
        if isinstance(layer, PyGConv):
            raise
        return layer.without_data(sources)  # a model that runs on its own graph alone has no known cost
    finally:
        counter.position = position
    cost = costs.on(view.block_size)
    for rows, widths in zip((sources, *others, targets), costs.products, strict=True):
        for width in widths:
            counter.add_sparse(cast(SparseRows, rows), width)
    read = (sources, *others, *layer.tensors_read(sources)[1:], *(() if targets is None else (targets,)))
    return CountedConv.apply(counter, cost, shape, 1 + len(others), *read)  # type: ignore[no-untyped-call]
