"""Mini-batches: `split` on P ranks equals `split` on one and `sampled` on P; one batch of all equals `single`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.cases import Case, cases, pyg_cases, typed_cases
from tests.lib.convolutions import make_net
from tests.lib.graphs import NUM_FEATURES, make_graph
from tests.lib.matrix import MINIBATCH, Point, params
from tests.lib.pairwise import hash_of, param
from tests.lib.ranks import on_ranks
from tests.lib.session import STEPS, Flops, Given, check_close, check_counts, check_flops, part_by, reference, workload
from tests.training.test_link_prediction import CASES as LINK_CASES
from tests.training.test_link_prediction import WIDTH
from tests.training.test_link_prediction import Case as LinkCase
from weft.comm import Group, Route
from weft.cost import Operation, Trace
from weft.data import negative_key
from weft.data.sampling import layer_key
from weft.nn import MODELS, BatchNorm, Stack, Sum, View, Workload, convert, embeddings
from weft.nn.aggregate.topology import Norm
from weft.nn.models.model_zoo import ATTENTION
from weft.parallel.blocks.blocks import Block
from weft.strategies import CandidateLinks
from weft.strategies.split import sampler
from weft.strategies.split.batch_blocks import SampledBlock
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.task import make_task
from weft.utils.errors import InputError

SHORT = 1
"""Number of steps in core depth; full depth runs `STEPS`."""
EPOCHS = 8
NUM_SAMPLES = 300
CASE = Case(model="gcn")
PLAIN = Given(batch_size="4", fanout="2", seed=5, prefetch_batches=0)
AnyCase = Case | LinkCase


@dataclass(frozen=True)
class Results:
    """Results from all ranks: logits and loss of each step, and gradients of the first step."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]
    losses: Tensor


def link_operations(links: CandidateLinks) -> list[Operation]:
    """Return the exchanges of the link task in a step on a mini-batch: rows and gradients of the endpoints."""
    if links.route is None:
        return []
    sent, received = (sum(counts) * WIDTH * 8 for counts in (links.route.sent, links.route.received))
    rows = Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received)
    return [rows, rows.adjoint()]


def train(group: Group, case: AnyCase, name: str, options: Given, num_steps: int = STEPS) -> Results:
    """Run steps of Adam, and compare the counts of each step with its trace."""
    of_links = isinstance(case, LinkCase)
    work = link_workload(case) if of_links else workload(case)
    plan = options.plan(name, work, group.size)
    placed = plan.place(group, seed=7)
    meter, model = group.meter, placed.model
    task = make_task(case.config, placed) if of_links else NodeTask(work.graph, placed.rows, group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    logits, losses, gradients = list[Tensor](), list[float](), dict[str, Tensor]()
    meter.take("train")
    for epoch in range(EPOCHS):
        steps = enumerate(placed.steps(epoch))
        while len(losses) < num_steps:
            model.zero_grad()
            with meter.during("train"), Flops() if num_steps == STEPS else nullcontext() as flops:
                if (numbered_step := next(steps, None)) is None:
                    break
                number, step = numbered_step
                rows = placed.forward(step)
                loss, grad = task.loss(rows, step)
                placed.backward(rows, grad)
            vertices, counts = placed.rows if step.vertices is None else step.vertices, meter.take("train")
            if step.vertices is not None:
                trace = plan.trace(group.rank, training=True, epoch=epoch, number=number)
                if step.links:
                    trace = Trace(operations=(*trace.operations, *link_operations(step.links)))
                check_counts(counts, trace, case)
                if flops is not None:
                    check_flops(flops, trace, case)
            gradients = gradients or {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            whole = rows.new_zeros(work.graph.num_vertices, rows.shape[1] + 1)
            whole[vertices] = torch.cat([rows.detach(), rows.new_ones(len(rows), 1)], 1)
            whole = group.all_reduce(whole, tag="test")
            logits.append(whole[:, :-1] / whole[:, -1:].clamp(min=1))  # endpoints may be on several ranks
            losses.append(float(group.all_reduce(loss, tag="test")))
            optimizer.step()
    for parameter in embeddings(model):
        whole = torch.zeros(work.graph.typed.num_embedded, gradients[parameter].shape[1], dtype=torch.float64)
        whole[placed.embedded] = gradients[parameter]
        gradients[parameter] = group.all_reduce(whole, tag="test")
    return Results(logits, gradients, torch.tensor(losses, dtype=torch.float64))


def link_workload(case: LinkCase) -> Workload:
    graph, model = case.build()
    return Workload(model, graph)


def check_same(seen: Results, expected: Results, what: str) -> None:
    check_close(seen.losses, expected.losses, f"{what}: losses")
    for number, (actual_logits, expected_logits) in enumerate(zip(seen.logits, expected.logits, strict=True)):
        check_close(actual_logits, expected_logits, f"{what}: logits of step {number}")
    assert seen.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        check_close(seen.gradients[name], gradient, f"{what}: gradient of {name}")


def check_rank(group: Group, case: AnyCase, name: str, options: Given, expected: Results) -> None:
    seen = train(group, case, name, options, len(expected.losses))
    check_same(seen, expected, f"{name}-{case.id}-P{group.size}")


def train_alone(group: Group, case: AnyCase, options: Given, num_steps: int) -> Results | None:
    """Return the results of `split` on one rank; None on all ranks but rank 0."""
    if group.rank:
        return None
    return train(Group(), case, "split", Given(**{**options, "partition": None}), num_steps)


def check(case: AnyCase, name: str, size: int, options: Given, num_steps: int = STEPS) -> None:
    """Compare a strategy with `split` on one rank, which is rank 0: it is forked with the models of quick cases."""
    expected = on_ranks(size, train_alone, case, options, num_steps)[0]
    on_ranks(size, check_rank, case, name, options, expected)


def has_batch_norm(case: Case) -> bool:
    return any(isinstance(part, BatchNorm) for part in workload(case).model.modules())


@pytest.mark.parametrize(("point", "full"), params(MINIBATCH))
def test_equals_one_rank(point: Point, full: bool) -> None:
    name, size, (case, resolved) = point.strategy, point.size, point.resolved()
    num_steps = STEPS if full else SHORT
    options = Given(
        **{"partition": part_by("random", case, size), **resolved},
        batch_size="3" if case.num_vertices > 9 and case.labels != 1 else "1",
        fanout="2",
        seed=5,
        prefetch_batches=0,
    )
    if case.model == "pyg-to-hetero":
        with pytest.raises(InputError, match=r"the model sums the edges of each relation.*: give --fanout all"):
            options.plan(name, workload(case), size)
        check(case, name, size, Given(**options | {"fanout": "all"}), num_steps)
        return
    embedded = case.typed in ("some", "none", "one") and not case.by_type
    if name == "sampled" and size > 1 and (has_batch_norm(case) or embedded):
        with pytest.raises(InputError, match="give --strategy split"):
            options.plan(name, workload(case), size)
        return
    if name == "split" and size > 1 and case.decoupled and case.model in ATTENTION:
        with pytest.raises(InputError, match="no --decoupled model with attention"):
            options.plan(name, workload(case), size)
        return
    check(case, name, size, options, num_steps)


def whole_cases() -> list[Any]:
    """Return every case without batch norm; the first of each model is quick."""
    every = [case for case in [*cases(), *pyg_cases(), *typed_cases()] if case.norm != "batch"]
    first = {case.model: case for case in reversed(every)}
    return [param(case, name=case.id, quick=case is first[case.model]) for case in every]


@pytest.mark.parametrize("case", whole_cases())
def test_one_batch_of_everything_is_single(case: Case) -> None:
    """Dropout is the same as well: the first step of an epoch has the masks of a full-graph step."""
    options = Given(batch_size="all", fanout="all", seed=5, prefetch_batches=0)
    seen, expected = train(Group(), case, "split", options), reference(case, full=True)
    vertices = seen.logits[0].abs().sum(1).nonzero().view(-1)
    ids = workload(case).graph.ids
    rows = vertices if ids is None else ids[vertices]
    check_close(seen.logits[0][vertices], expected.logits[rows], "logits")
    check_close(seen.losses, expected.losses, "losses")
    for name, gradient in expected.gradients.items():
        check_close(seen.gradients[name], gradient, f"gradient of {name}")


def link_options(case: LinkCase, **options: Any) -> Given:
    config = case.config
    return Given(
        task="link", negatives=config.negatives, loss=config.loss, seed=config.seed, prefetch_batches=0, **options
    )


def link_cases() -> list[LinkCase]:
    """Return the cases of the full-graph tests, and every model on some graph."""
    graphs = ("directed", "knowledge", "bipartite", "symmetric")
    of_models = [LinkCase(graph=graph, model=model) for model, graph in zip(MODELS, cycle(graphs), strict=False)]
    return [*LINK_CASES, *of_models, LinkCase(graph="knowledge", model="rgcn", decoder="distmult", negatives=2)]


def link_matrix() -> list[Any]:
    named = {
        f"{name}-{case.id}-P{size}": (name, case, size)
        for name, size, case in product(("split", "sampled"), (1, 2, 3, 4), link_cases())
        if name == "split" or case.model != "lightgcn"  # whose embeddings `sampled` does not support
    }
    return [
        param(*values, name=name, quick=values[2] in (2, 3) and hash_of(name, 12) == 0)
        for name, values in named.items()
    ]


@pytest.mark.parametrize(("name", "case", "size"), link_matrix())
def test_links_equal_one_rank(name: str, case: LinkCase, size: int) -> None:
    part = part_by("random", case, size) if size > 1 else None
    check(case, name, size, link_options(case, batch_size="60", fanout="2", partition=part))


@pytest.mark.parametrize("case", link_cases(), ids=lambda case: case.id)
def test_one_batch_of_all_links_is_single(case: LinkCase) -> None:
    """Dropout and negative links are the same as well."""
    seen = train(Group(), case, "split", link_options(case, batch_size="all", fanout="all"))
    expected = train(Group(), case, "single", Given())
    for number, (logits, single_logits) in enumerate(zip(seen.logits, expected.logits, strict=True)):
        endpoints = logits.abs().sum(1).nonzero().view(-1)
        check_close(logits[endpoints], single_logits[endpoints], f"rows of step {number}")
    check_same(replace(seen, logits=[]), replace(expected, logits=[]), case.id)


def losses_of_two_epochs(group: Group, case: Case, options: Given) -> list[float]:
    """Return the losses of two whole epochs without an optimizer."""
    work = workload(case)
    placed = options.plan("split", work, group.size).place(group, seed=7)
    task, losses = NodeTask(work.graph, placed.rows, group), []
    for epoch in range(2):
        for step in placed.steps(epoch):
            rows = placed.forward(step)
            loss, grad = task.loss(rows, step)
            placed.backward(rows, grad)
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", [param(name, name=name, quick=name == "split") for name in ("split", "sampled")])
def test_accumulated_batches(name: str) -> None:
    """Each of the batches of an optimizer step has the results of one rank, and the counts of its trace."""
    check(CASE, name, 2, Given(**PLAIN | {"accumulate_grad_batches": 2}))


@pytest.mark.parametrize("size", [1, 2])
def test_prefetched_batches_are_the_same(size: int) -> None:
    case = Case(model="sage")
    losses = [
        on_ranks(
            size, losses_of_two_epochs, case, Given(batch_size="4", fanout="2", seed=5, prefetch_batches=num_prefetched)
        )
        for num_prefetched in (0, 1, 3)
    ]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0][0]) > 2


def dependent_options(kappa: int, **options: Any) -> Given:
    return Given(fanout="2", sampling="labor", batch_dependency=kappa, seed=5, prefetch_batches=0, **options)


@pytest.mark.parametrize("name", ["split", "sampled"])
def test_dependent_batches_equal_one_rank(name: str) -> None:
    case = replace(CASE, num_vertices=40)
    check(case, name, 2, dependent_options(3, batch_size="4", partition=part_by("random", case, 2)))


def test_dependent_batches_sample_the_same_edges() -> None:
    """The next batch samples most of the edges again; `kappa` batches later, no more than by chance."""
    work = workload(Case(model="gcn", num_vertices=3000))

    def num_sampled_again(kappa: int, steps_on: int) -> int:
        plan: Any = dependent_options(kappa, batch_size="all").plan("split", work, 1)
        first, second = (plan.sample_batch(epoch, 0)[0].hops[-1].edge_ids for epoch in (0, steps_on))
        return int(torch.isin(first, second).sum())

    by_chance = num_sampled_again(1, 1)
    assert num_sampled_again(16, 1) > 1.8 * by_chance
    assert 0.9 * by_chance < num_sampled_again(16, 16) < 1.1 * by_chance


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "uniform"}, "has no effect on --sampling uniform"),
        ({"sampling": "labor", "fanout": "all"}, "--fanout all samples nothing"),
    ],
)
def test_a_dependency_without_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^--batch-dependency 2.*{message}.*leave"):
        Given(batch_dependency=2, **options).plan("split", workload(CASE), 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("FAConv", {"fanout": "10"}, r"--fanout 10: FAConv reads sums over in-edges, .*: give --fanout 10,all$"),
        ("FAConv", {"fanout": "10,25"}, "give --fanout 10,all$"),
        ("ChebConv", {"fanout": "5", "sampling": "weighted"}, "--sampling weighted: edges are sampled with different"),
    ],
)
def test_sums_that_a_sample_would_change_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    """In-edge sums of sources need all in-edges, and a Laplacian without edge weights needs even probabilities."""
    work = Workload(convert(make_net(name)), make_graph(23, weighted=True))
    with pytest.raises(InputError, match=message):
        Given(**options).plan("split", work)
    Given(fanout="10,all" if name == "FAConv" else "5").plan("split", work)


def sampled_aggregate(case: Case, model: Stack, number: int, fanout: str, sampling: str) -> Tensor:
    """Return the aggregate over a sample of the in-neighbours of training vertices."""
    work = Workload(model, case.build()[0])
    options = Given(batch_size="all", fanout=fanout, sampling=sampling, seed=number, prefetch_batches=0)
    placed = options.plan("split", work).place(Group())
    (step,) = placed.steps(0)
    with torch.no_grad():
        return placed.forward(step)


NORMS_AND_SAMPLERS = list(product((None, "gcn", "mean"), ("uniform", "labor", "weighted")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "sampling"),
    [param(*pair, name=f"{pair[0]}-{pair[1]}", quick=pair == ("gcn", "uniform")) for pair in NORMS_AND_SAMPLERS],
)
def test_sums_over_samples_have_no_bias(norm: Norm, sampling: str) -> None:
    case = Case(model="gcn", weighted=True, num_vertices=60)
    graph, _ = case.build()
    model = Stack([Sums(norm)]).double()
    samples = torch.stack([sampled_aggregate(case, model, number, "3", sampling) for number in range(NUM_SAMPLES)])
    whole = sampled_aggregate(case, model, 0, "all", "uniform")
    error = (samples.mean(0) - whole).abs() / (samples.std(0) / NUM_SAMPLES**0.5 + 1e-12)
    assert samples.std(0).max() > 0.01
    assert error.max() < 5, f"{graph.name}: an estimate is {error.max():.1f} standard errors off"
    assert sampling == "weighted" or (error**2).mean() < 1.5


class Sums(nn.Module):
    """A layer that sums over in-neighbours and does nothing else."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm, self.out_width = norm, NUM_FEATURES
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, view: View, x: Tensor) -> Tensor:
        y: Tensor = view.aggregate(Sum(self.norm, weighted=True), {"x": x * self.scale})
        return y


def check_planted(group: Group, case: AnyCase, error: str, options: Given, expected: Results) -> None:
    """Check that an error on the last rank fails a check or changes results."""
    patch = pytest.MonkeyPatch()
    if group.rank == group.size - 1:
        plant(error, patch)
    try:
        seen = train(group, case, "split", options)
    except AssertionError:
        return
    finally:
        patch.undo()
    with pytest.raises(AssertionError):
        check_same(seen, expected, error)


def plant(error: str, patch: pytest.MonkeyPatch) -> None:
    if error == "another draw":
        patch.setattr(sampler, "layer_key", lambda *parts: layer_key(*parts) ^ 1)
    elif error == "a row of another vertex":
        patch.setattr(sampler, "Route", lambda *, rows, **rest: Route(rows=rows.flip(0), **rest))
    elif error == "other negatives":
        patch.setattr(sampler, "negative_key", lambda *parts: negative_key(*parts) ^ 1)
    elif error == "an end of another link":
        patch.setattr(sampler, "CandidateLinks", with_another_endpoint)
    else:
        patch.setattr(SampledBlock, "_scale", Block._scale)


@pytest.mark.parametrize("error", ["another draw", "a row of another vertex", "no scale"])
def test_a_planted_error_shows(error: str) -> None:
    # The partition is given, since the error would otherwise change pre-sampling too.
    options = Given(**PLAIN, partition=part_by("metis", CASE, 2))
    on_ranks(2, check_planted, CASE, error, options, train(Group(), CASE, "split", PLAIN))


def with_another_endpoint(*, pairs: Tensor, route: Route) -> CandidateLinks:
    return CandidateLinks(pairs=pairs, route=replace(route, rows=route.rows.flip(0)))


@pytest.mark.parametrize("error", ["other negatives", pytest.param("an end of another link", marks=pytest.mark.slow)])
def test_an_error_planted_in_links_shows(error: str) -> None:
    case = LINK_CASES[0]
    # The partition is given, since the error would otherwise change pre-sampling too.
    options = link_options(case, batch_size="60", fanout="2", partition=part_by("metis", case, 2))
    on_ranks(2, check_planted, case, error, options, train(Group(), case, "split", options))
