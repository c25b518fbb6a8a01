"""Schedules of chunks, simulated on all ranks with numbers as rows, and compared with sets in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from random import Random

import pytest
import torch
from torch import Tensor

from weft.cost import Rates
from weft.data import Adjacency, Graph
from weft.parallel.chunks.cut.ranges import RankHop, chunk_sources, reorder
from weft.parallel.chunks.cut.residency import NEVER, ChunkSources, Kept, Volumes, keep_rows
from weft.parallel.chunks.run.rounds import Round, Schedule
from weft.partition import Caching, make_dependencies, range_bounds, range_parts
from weft.runtime.native import _native
from weft.storage.unnamed_files import ArrayFile

NUM_VERTICES = 41
OPTIONS = [dict(zip(("share", "keep", "ahead"), flags, strict=True)) for flags in product([True, False], repeat=3)]
Row = tuple[int, int]
"""A rank and one of its local rows."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An aggregate on all ranks, with the sets of the paper by definition."""

    parts: list[RankHop]
    owned: list[list[int]]
    """Vertices of each rank."""
    bounds: list[tuple[int, ...]]
    orders: list[list[int]]
    loops: bool

    def schedules(self, *, ahead: bool = True, **options: bool) -> list[Planned]:
        ranks = range(len(self.parts))
        return [Planned.of(self.chunk_sources(ahead=ahead).schedule(rank, **options)) for rank in ranks]

    def chunk_sources(self, *, ahead: bool = True) -> ChunkSources:
        sources = ChunkSources(self.parts, self.bounds, loops=self.loops, ahead=ahead, arrays=self.arrays)
        return sources.in_order(self.orders)

    @property
    def arrays(self) -> ArrayFile | None:
        """Return a file for some of the problems; None: memory."""
        return ArrayFile() if self.loops else None

    @property
    def num_batches(self) -> int:
        return len(self.orders[0])

    def vertex(self, rank: int) -> Tensor:
        """Return the vertex of each source number."""
        hop = self.parts[rank].hop
        return torch.cat([self.parts[rank].rows[: hop.num_inputs], hop.fetched])

    @cached_property
    def sources(self) -> list[list[set[int]]]:
        """Return S of the paper: the source numbers that each round of each rank reads."""
        result = []
        for part, bounds, order in zip(self.parts, self.bounds, self.orders, strict=True):
            indptr, indices = part.hop.block.indptr.tolist(), part.hop.block.indices.tolist()
            ranges = [(bounds[chunk], bounds[chunk + 1]) for chunk in order]
            loops = [set(range(first, end)) if self.loops else set() for first, end in ranges]
            read = [set(indices[indptr[first] : indptr[end]]) for first, end in ranges]
            result.append([targets | sources for targets, sources in zip(loops, read, strict=True)])
        return result

    def local(self, rank: int, round_: int) -> set[int]:
        return {s for s in self.sources[rank][round_] if s < self.parts[rank].hop.num_inputs}

    def remote(self, rank: int, round_: int) -> set[int]:
        return self.sources[rank][round_] - self.local(rank, round_)

    def owner(self, rank: int, source: int) -> Row:
        """Return the rank of the vertex of a remote source, and its row on that rank."""
        vertex = int(self.vertex(rank)[source])
        owners = list(enumerate(self.owned))
        return next((q, owned.index(vertex)) for q, owned in owners if vertex in owned)

    @cached_property
    def transits(self) -> list[list[set[int]]]:
        """Return U of the paper: the rows that each rank loads for all ranks, in each round."""
        ranks, rounds = range(len(self.parts)), range(self.num_batches)
        result = [[self.local(rank, round_) for round_ in rounds] for rank in ranks]
        for rank, round_ in product(ranks, rounds):
            for source in self.remote(rank, round_):
                owner, row = self.owner(rank, source)
                result[owner][round_].add(row)
        return result

    def retaining(self, rank: int, *, share: bool, ahead: bool) -> list[set[int]]:
        """Return the resident local rows of each round: rows it reads or sends, and rows that stay for later rounds."""
        rounds = range(self.num_batches)
        local = self.transits[rank] if share else [self.local(rank, j) for j in rounds]
        remote = [self.remote(rank, j) for j in rounds]
        following = [[*each[1:], set()] if ahead else [set()] * len(each) for each in (local, remote)]
        taken = [len(local[j] | following[0][j]) + len(remote[j] | following[1][j]) for j in rounds]
        return belady(local, [max(taken) - num_taken for num_taken in taken], ahead=ahead)


def belady(sets: list[set[int]], free_slots: list[int], *, ahead: bool) -> list[set[int]]:
    """Return the resident rows of each round. Of the rows that are read again, those read soonest stay."""
    resident: list[set[int]] = []
    for j, now in enumerate(sets):
        waiting = []
        for row in resident[-1] - now if resident else ():
            later = [k for k in range(j + 1, len(sets)) if row in sets[k]]
            waiting += [(later[0], row)] if later else []
        prefetched = {row for k, row in waiting if ahead and k == j + 1}
        candidates = [row for _, row in sorted(waiting) if row not in prefetched]
        resident.append(now | prefetched | set(candidates[: free_slots[j]]))
    return resident


def rows_in_buffer(sets: list[set[int]], free_slots: list[int], *, ahead: bool) -> list[Kept]:
    """Return the resident rows of each round, by weft."""
    before = Kept(*(torch.empty(0, dtype=kind) for kind in (torch.int32, torch.int32, torch.bool, torch.bool)))
    result = []
    for j, now in enumerate(sets):
        uses = [next((k for k in range(j + 1, len(sets)) if row in sets[k]), NEVER) for row in sorted(now)]
        loads, next_uses = (torch.tensor(numbers, dtype=torch.int32) for numbers in (sorted(now), uses))
        before = keep_rows(before, loads, next_uses, j, free_slots[j], ahead=ahead)
        result.append(before)
    return result


def make_problem(num_ranks: int, num_chunks: int, seed: int, *, loops: bool) -> Problem:
    """Return a graph with isolated vertices, self-loops and duplicate edges. One of three ranks may have no vertex."""
    random = torch.Generator().manual_seed(seed)
    source, target = torch.randint(0, NUM_VERTICES - 2, (2, 130), generator=random)
    adj = Graph.from_edges(source, target, num_vertices=NUM_VERTICES).in_edges
    part = range_parts(adj, num_ranks)
    if seed % 2:
        part = torch.randint(0, max(num_ranks - 1, 2), (NUM_VERTICES,), generator=random, dtype=torch.int32) % num_ranks
    costs = torch.rand(3, 5, generator=random, dtype=torch.float64)
    caching = Caching(costs=costs, ratio=0.5 if seed % 3 else 0.0)
    needed = [make_dependencies(adj, part, rank, num_ranks, caching) for rank in range(num_ranks)]
    hop = seed % 2
    parts = [RankHop(each.hops[hop], each.rows) for each in needed]
    return Problem(
        parts=parts,
        owned=[each.owned.tolist() for each in needed],
        bounds=[range_bounds(each.hop.block, num_chunks) for each in parts],
        orders=[torch.randperm(num_chunks, generator=random).tolist() for _ in parts],
        loops=loops,
    )


PROBLEMS = [
    make_problem(num_ranks, num_chunks, seed, loops=seed % 4 < 2)
    for num_ranks, num_chunks, seed in product([1, 2, 3], [1, 3, 7], range(6))
]


def pieces(tensor: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    assert sum(counts) == len(tensor)
    return tensor.split(list(counts))


@dataclass(frozen=True)
class Planned:
    """A schedule with all of its rounds."""

    num_slots: int
    rounds: Sequence[Round]

    @classmethod
    def of(cls, schedule: Schedule) -> Planned:
        rounds = tuple(schedule.make_rounds())
        assert [round_.sizes for round_ in rounds] == list(schedule.sizes)
        for round_ in rounds:
            sizes = round_.sizes
            assert len(round_.load) == len(round_.load_slots) == sizes.num_loads
            assert len(round_.write_back) == len(round_.write_back_slots) == sizes.num_write_backs
            forward = round_.load, round_.load_slots, round_.recv_row_slots, round_.send_rows
            assert sum(map(len, forward)) == sizes.num_forward_ids
            backward = round_.write_back, round_.write_back_slots, round_.send_grad_slots, round_.recv_grads
            assert sum(map(len, backward)) == sizes.num_backward_ids
        return cls(schedule.num_slots, rounds)


class Forward:
    """Buffers of the forward pass, with the vertex of each row, or -1 in slots that must not be read."""

    def __init__(self, problem: Problem, schedules: list[Planned]) -> None:
        self.problem, self.schedules = problem, schedules
        self.buffers = [torch.full((schedule.num_slots,), -1) for schedule in schedules]

    def run(self, *, share: bool, ahead: bool) -> None:
        count = self.problem.num_batches
        for j in range(count):
            if j == 0 or not ahead:
                self.move(j, share=share)
            if ahead and j + 1 < count:
                self.move(j + 1, share=share)
            self.compute(j)
            for buffer, schedule in zip(self.buffers, self.schedules, strict=True):
                if j + 1 < count:
                    buffer[schedule.rounds[j + 1].slot_sources < 0] = -1

    def move(self, j: int, *, share: bool) -> None:
        rounds = [schedule.rounds[j] for schedule in self.schedules]
        for part, buffer, round_ in zip(self.problem.parts, self.buffers, rounds, strict=True):
            buffer[round_.load_slots] = part.rows[round_.load]
        sent_rows = []
        for part, buffer, round_ in zip(self.problem.parts, self.buffers, rounds, strict=True):
            rows = buffer[round_.send_rows] if share else part.rows[round_.send_rows]
            sent_rows.append(pieces(rows, round_.sizes.send_row_counts))
        for rank, (buffer, round_) in enumerate(zip(self.buffers, rounds, strict=True)):
            assert round_.sizes.recv_row_counts == tuple(len(rows[rank]) for rows in sent_rows)
            buffer[round_.recv_row_slots] = torch.cat([rows[rank] for rows in sent_rows])

    def compute(self, j: int) -> None:
        for rank, (part, buffer) in enumerate(zip(self.problem.parts, self.buffers, strict=True)):
            round_, vertex = self.schedules[rank].rounds[j], self.problem.vertex(rank)
            assert round_.indices.dtype == part.hop.block.indices.dtype
            assert torch.equal(buffer[round_.indices], vertex[part.hop.block.indices[round_.sizes.edges]])
            if self.problem.loops:
                assert torch.equal(buffer[round_.target_slots], vertex[round_.sizes.targets])
            is_filled = round_.slot_sources >= 0
            assert torch.equal(buffer[is_filled], vertex[round_.slot_sources[is_filled]])


class Backward:
    """Gradients in buffers and on hosts during the backward pass, and the expected ones on hosts."""

    def __init__(self, problem: Problem, schedules: list[Planned]) -> None:
        self.problem, self.schedules = problem, schedules
        self.random = torch.Generator().manual_seed(0)
        self.buffers = [torch.full((schedule.num_slots,), 10**9) for schedule in schedules]
        self.hosts = [torch.zeros(part.hop.num_inputs, dtype=torch.int64) for part in problem.parts]
        self.expected = [host.clone() for host in self.hosts]

    def run(self, *, share: bool, ahead: bool) -> None:
        count = self.problem.num_batches
        for j in range(count):
            if j == 0 or not ahead:
                self.clear(j)
            if ahead and j + 1 < count:
                self.clear(j + 1)
            for rank in range(len(self.buffers)):
                self.compute(rank, j)
            self.move(j, share=share)
        for host, expected in zip(self.hosts, self.expected, strict=True):
            assert torch.equal(host, expected)

    def clear(self, j: int) -> None:
        for buffer, schedule in zip(self.buffers, self.schedules, strict=True):
            round_ = schedule.rounds[j]
            buffer[round_.load_slots] = 0
            buffer[round_.recv_row_slots] = 0

    def compute(self, rank: int, j: int) -> None:
        round_, hop = self.schedules[rank].rounds[j], self.problem.parts[rank].hop
        numbers = torch.tensor(sorted(self.problem.sources[rank][j]), dtype=torch.int64)
        gradient = torch.randint(-99, 99, numbers.shape, generator=self.random)
        slot = torch.full((hop.block.num_sources,), -1)
        slot[round_.slot_sources[round_.slot_sources >= 0]] = (round_.slot_sources >= 0).nonzero()[:, 0]
        self.buffers[rank][slot[numbers]] += gradient
        for number, value in zip(numbers.tolist(), gradient.tolist(), strict=True):
            owner, row = (rank, number) if number < hop.num_inputs else self.problem.owner(rank, number)
            self.expected[owner][row] += value

    def move(self, j: int, *, share: bool) -> None:
        rounds = [schedule.rounds[j] for schedule in self.schedules]
        sent_grads = [
            pieces(buffer[round_.send_grad_slots], round_.sizes.send_grad_counts)
            for buffer, round_ in zip(self.buffers, rounds, strict=True)
        ]
        for rank, round_ in enumerate(rounds):
            assert round_.sizes.recv_grad_counts == tuple(len(values[rank]) for values in sent_grads)
            values = torch.cat([values[rank] for values in sent_grads])
            if share:
                self.buffers[rank].index_add_(0, round_.recv_grads, values)
            else:
                self.hosts[rank].index_add_(0, round_.recv_grads, values)
        for buffer, host, round_ in zip(self.buffers, self.hosts, rounds, strict=True):
            host[round_.write_back] += buffer[round_.write_back_slots]
            buffer[round_.write_back_slots] = 10**9


def simulate(problem: Problem, schedules: list[Planned], *, share: bool, keep: bool, ahead: bool) -> None:
    """Run forward and backward pass, and check that each rank moves the rows of the definition."""
    Forward(problem, schedules).run(share=share, ahead=ahead)
    Backward(problem, schedules).run(share=share, ahead=ahead)
    for rank, schedule in enumerate(schedules):
        check_moves(problem, schedule, rank, share=share, keep=keep, ahead=ahead)
        check_slots(schedule, keep=keep, ahead=ahead)


def check_moves(problem: Problem, schedule: Planned, rank: int, *, share: bool, keep: bool, ahead: bool) -> None:
    ranks, count = range(len(problem.parts)), problem.num_batches
    part, order, bounds = problem.parts[rank], problem.orders[rank], problem.bounds[rank]
    local = problem.transits[rank] if share else [problem.local(rank, j) for j in range(count)]
    local = problem.retaining(rank, share=share, ahead=ahead) if keep else local
    remote = [problem.remote(rank, j) for j in range(count)]
    for j, round_ in enumerate(schedule.rounds):
        before, after = j - 1 if keep and j > 0 else None, j + 1 if keep and j + 1 < count else None
        assert round_.sizes.targets == slice(bounds[order[j]], bounds[order[j] + 1])
        first, end = part.hop.block.indptr[[round_.sizes.targets.start, round_.sizes.targets.stop]].tolist()
        assert round_.sizes.edges == slice(first, end)
        assert {number for number in round_.slot_sources.tolist() if number >= 0} == local[j] | remote[j]
        assert round_.load.tolist() == sorted(local[j] - (set() if before is None else local[before]))
        assert round_.write_back.tolist() == sorted(local[j] - (set() if after is None else local[after]))
        fetched = sorted(remote[j] - (set() if before is None else remote[before]))
        returned = sorted(remote[j] - (set() if after is None else remote[after]))
        assert round_.slot_sources[round_.recv_row_slots].tolist() == fetched
        assert round_.slot_sources[round_.send_grad_slots].tolist() == returned
        assert round_.slot_sources[round_.write_back_slots].tolist() == round_.write_back.tolist()
        for numbers, counts in ((fetched, round_.sizes.recv_row_counts), (returned, round_.sizes.send_grad_counts)):
            assert list(counts) == [sum(problem.owner(rank, s)[0] == q for s in numbers) for q in ranks]
        if not problem.loops:
            assert len(round_.target_slots) == 0


def check_slots(schedule: Planned, *, keep: bool, ahead: bool) -> None:
    """Check that a schedule has no more slots than needed at once."""
    resident = [{number for number in round_.slot_sources.tolist() if number >= 0} for round_ in schedule.rounds]
    most = max(len(numbers) for numbers in resident)
    if ahead:
        both = [len(a | b) if keep else len(a) + len(b) for a, b in pairwise(resident)]
        most = max([most, *both])
    assert schedule.num_slots == most


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(key for key, on in options.items() if on))
def test_schedules_on_all_ranks(options: dict[str, bool]) -> None:
    for problem in PROBLEMS:
        simulate(problem, problem.schedules(**options), **options)


@pytest.mark.slow
def test_volumes_equal_the_definition() -> None:
    for problem in PROBLEMS:
        ranks, count = range(len(problem.parts)), problem.num_batches
        remote = [[problem.remote(rank, j) for j in range(count)] for rank in ranks]

        def fresh(sets: list[list[set[int]]]) -> int:
            return sum(len(now - before) for each in sets for before, now in pairwise([set(), *each]))

        expected = Volumes(
            neighbours=sum(len(each) for sets in problem.sources for each in sets),
            shared=sum(len(each) for sets in problem.transits for each in sets),
            loaded=fresh([problem.retaining(rank, share=True, ahead=True) for rank in ranks]),
            fetched=fresh(remote),
        )
        assert problem.chunk_sources().volumes == expected
        rounds = [round_ for schedule in problem.schedules() for round_ in schedule.rounds]
        assert sum(len(round_.load) for round_ in rounds) == expected.loaded
        assert sum(len(round_.recv_row_slots) for round_ in rounds) == expected.fetched


def least_loads(sets: list[set[int]], free_slots: list[int], *, ahead: bool) -> int:
    """Return the least number of loads, after trying all rows that each round may keep."""
    costs = {frozenset[int](): 0}
    for j, now in enumerate(sets):
        prefetched = sets[j + 1] if ahead and j + 1 < len(sets) else set()
        next_costs: dict[frozenset[int], int] = {}
        for resident, cost in costs.items():
            loads = cost + len(now - resident)
            for count in range(len(resident - now) + 1):
                for retained in combinations(resident - now, count):
                    if len(set(retained) - prefetched) <= free_slots[j]:
                        after = frozenset(now | set(retained))
                        next_costs[after] = min(loads, next_costs.get(after, loads))
        costs = next_costs
    return min(costs.values())


@pytest.mark.parametrize("ahead", [False, True])
def test_keeping_the_rows_read_soonest_loads_least(ahead: bool) -> None:
    random = Random(0)
    for _ in range(60):
        sets = [{row for row in range(7) if random.random() < 0.35} for _ in range(6)]
        free_slots = [random.randrange(3) for _ in sets]
        buffers = rows_in_buffer(sets, free_slots, ahead=ahead)
        assert [set(each.rows.tolist()) for each in buffers] == belady(sets, free_slots, ahead=ahead)
        assert sum(int(each.fresh.sum()) for each in buffers) == least_loads(sets, free_slots, ahead=ahead)
        for before, after in pairwise(buffers):
            left = set(before.rows.tolist()) - set(after.rows.tolist())
            assert set(before.rows[after.leaving].tolist()) == left


@pytest.mark.parametrize(
    "field", ["indices", "load_slots", "recv_row_slots", "send_rows", "send_grad_slots", "write_back"]
)
def test_the_simulation_detects_a_wrong_number(field: str) -> None:
    """Two swapped entries in any of these tensors of a round are detected."""
    problem, options = make_problem(3, 3, 0, loops=True), OPTIONS[0]
    schedules = problem.schedules(**options)
    rounds = list(schedules[0].rounds)
    most = max(range(3), key=lambda j: len(getattr(rounds[j], field)))
    tensor = getattr(rounds[most], field).clone()
    assert tensor[0] != tensor[-1]
    tensor[[0, -1]] = tensor[[-1, 0]]
    rounds[most] = replace(rounds[most], **{field: tensor})
    with pytest.raises(AssertionError):
        simulate(problem, [replace(schedules[0], rounds=tuple(rounds)), *schedules[1:]], **options)


def test_the_simulation_detects_early_transfers() -> None:
    """Slots that are free only after a round must not be filled before it."""
    problem, options = make_problem(3, 7, 2, loops=True), OPTIONS[0]
    for moves in (Forward, Backward):
        with pytest.raises(AssertionError):
            moves(problem, problem.schedules(**{**options, "ahead": False})).run(share=True, ahead=True)


def test_seconds_of_transfers() -> None:
    volumes = Volumes(neighbours=100, shared=60, loaded=40, fetched=30)
    assert volumes.seconds(Rates(host=10, ranks=20, inplace=80)) == 4 + 2 + 0.25


def test_orders_are_checked() -> None:
    problem = make_problem(2, 3, 0, loops=True)
    with pytest.raises(ValueError, match="same number of chunks"):
        ChunkSources(problem.parts, [problem.bounds[0], (0, 5)], loops=True)
    with pytest.raises(ValueError, match="once"):
        ChunkSources(problem.parts, problem.bounds, loops=True, orders=[[0, 1, 2], [0, 0, 2]])


def plain_reorder(sets: list[list[set[int]]]) -> list[list[int]]:
    """Return the orders of Algorithm 4, implemented literally."""
    count = len(sets[0])
    unions, chosen = [set(each) for each in sets[0]], [list(range(count))]
    for chunks in sets[1:]:
        left, taken = list(range(count)), []
        for union in unions:
            taken.append(max(left, key=lambda chunk: (len(union & chunks[chunk]), -chunk)))
            left.remove(taken[-1])
            union |= chunks[taken[-1]]
        chosen.append(taken)
    sequence, left = [0], list(range(1, count))
    while left:
        sequence.append(max(left, key=lambda round_: (len(unions[round_] & unions[sequence[-1]]), -round_)))
        left.remove(sequence[-1])
    return [[taken[round_] for round_ in sequence] for taken in chosen]


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(1, 1), (3, 1), (1, 9), (2, 2), (2, 7), (4, 8), (3, 40)])
@pytest.mark.parametrize("num_vertices", [30, 12000])
def test_reorder_equals_plain_python(num_ranks: int, num_chunks: int, num_vertices: int) -> None:
    """Orders are the same for sets of all sizes, with vertices in few sets or in most."""
    random = torch.Generator().manual_seed(num_chunks)
    shares = torch.rand(num_ranks, num_chunks, generator=random).square() * 0.8
    often = torch.rand(num_vertices, generator=random).square() * 2
    member = torch.rand(num_ranks, num_chunks, num_vertices, generator=random) < shares[..., None] * often
    sets = [[chunk.nonzero()[:, 0] for chunk in chunks] for chunks in member]
    orders = reorder(sets, num_vertices)
    assert orders == plain_reorder([[set(chunk.tolist()) for chunk in chunks] for chunks in sets])
    assert all(sorted(order) == list(range(num_chunks)) for order in orders)


def test_reorder_is_the_same_on_all_threads() -> None:
    random = torch.Generator().manual_seed(0)
    member = (torch.rand(500, 3 * 12, generator=random) < 0.2).nonzero()
    starts = torch.searchsorted(member[:, 0].contiguous(), torch.arange(501))
    results = []
    for num_threads in (1, 2, 5):
        orders = torch.empty(3, 12, dtype=torch.int64)
        _native.reorder_chunks(starts, member[:, 1].contiguous(), orders, num_threads)
        results.append(orders.tolist())
    assert results[0] == results[1] == results[2]


def test_reorder_joins_chunks_with_common_vertices() -> None:
    """Rank 1 has the chunks of rank 0 in another order; chunks 0 and 2 have common vertices, and so do 2 and 1."""
    chunks = [torch.tensor(ids) for ids in ([0, 1, 2], [6, 7, 8], [2, 3, 6])]
    assert reorder([chunks, [chunks[2], chunks[0], chunks[1]]], 9) == [[0, 2, 1], [1, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("loops", [True, False])
def test_sources_equal_sets(dtype: torch.dtype, loops: bool) -> None:
    for problem in PROBLEMS:
        blocks = [replace(part.hop.block, indices=part.hop.block.indices.to(dtype)) for part in problem.parts]
        parts = [
            RankHop(replace(part.hop, block=block), part.rows)
            for part, block in zip(problem.parts, blocks, strict=True)
        ]
        stored = ChunkSources(parts, problem.bounds, loops=loops)
        for rank, (part, block, bounds) in enumerate(zip(parts, blocks, problem.bounds, strict=True)):
            chunks, vertices = list(chunk_sources(block, bounds, loops=loops)), list(stored.chunk_vertices(rank))
            assert len(chunks) == len(bounds) - 1
            for (first, end), sources, ids in zip(pairwise(bounds), chunks, vertices, strict=True):
                read = set(block.indices[block.indptr[first] : block.indptr[end]].tolist())
                assert sources.tolist() == sorted(read | set(range(first, end)) if loops else read)
                assert ids.tolist() == torch.cat([part.rows[: part.hop.num_inputs], part.hop.fetched])[sources].tolist()


@pytest.mark.parametrize("vertex_weight", [1, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 60])
def test_cut_is_even(count: int, vertex_weight: int) -> None:
    random = torch.Generator().manual_seed(count)
    degree = torch.randint(0, 9, (23,), generator=random)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    block = Adjacency(indptr=indptr, indices=torch.zeros(int(indptr[-1]), dtype=torch.int32), num_sources=23)
    bounds = range_bounds(block, count, vertex_weight)
    cost = (vertex_weight + degree).tolist()
    assert len(bounds) == count + 1
    assert (bounds[0], bounds[-1]) == (0, 23)
    assert all(first <= end for first, end in pairwise(bounds))
    assert max(sum(cost[first:end]) for first, end in pairwise(bounds)) <= sum(cost) / count + max(cost)


def test_empty_schedules() -> None:
    """Ranks without rows and chunks without targets have empty schedules."""
    adj = Graph.from_edges(*torch.zeros(2, 0, dtype=torch.int64), num_vertices=2).in_edges
    part = torch.zeros(2, dtype=torch.int32)
    caching = Caching(costs=torch.zeros(1, 5, dtype=torch.float64), ratio=0.0)
    needed = [make_dependencies(adj, part, rank, 2, caching) for rank in range(2)]
    parts = [RankHop(each.hops[0], each.rows) for each in needed]
    bounds = [range_bounds(each.hop.block, 5) for each in parts]
    owned = [each.owned.tolist() for each in needed]
    problem = Problem(parts=parts, owned=owned, bounds=bounds, orders=[list(range(5))] * 2, loops=False)
    for options in OPTIONS:
        schedules = problem.schedules(**options)
        assert [schedule.num_slots for schedule in schedules] == [0, 0]
        simulate(problem, schedules, **options)
    sources = problem.chunk_sources()
    assert reorder([list(sources.chunk_vertices(rank)) for rank in range(2)], 2) == [list(range(5))] * 2
