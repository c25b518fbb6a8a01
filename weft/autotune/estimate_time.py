"""What a plan will take: seconds of an epoch, by the profile of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from weft.cost import Disk, Profile, Steps
from weft.cost.simulate import Hosts, StepTime, simulate
from weft.data import is_symmetric
from weft.nn import Workload
from weft.runtime.kernel_call import KernelCall
from weft.strategies import MemoryUse, Plan


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks on hosts that are alike, of which a profile tells what they take."""

    profile: Profile
    ranks: int
    hosts: int
    """As many ranks on each."""
    threads: int
    """Of a rank."""
    memory_bytes: int
    """Of a host."""
    emulated: bool = False
    """Whether the hosts are one machine, whose cores they share."""
    device_bytes: int | None = None
    """Memory of a rank's device; None: that is its host's processor."""
    machines: str = ""
    """How a person has named them, if it is not the one that is there."""
    assumed: str = ""
    """What of the profile was not measured."""

    @property
    def slots(self) -> int:
        """How many ranks a host has cores for."""
        return max(1, self.profile.cores // self.threads)

    @property
    def ranks_each(self) -> int:
        """That share cores and memory."""
        return self.ranks if self.emulated else self.ranks // self.hosts

    @property
    def ranks_on_core(self) -> int:
        """How many share one slot of their host, at most."""
        return -(-self.ranks_each // self.slots)


def epoch_time(plan: Plan, cluster: Cluster, held: MemoryUse | None = None) -> StepTime:
    """The seconds of an epoch's training steps; held: see `bytes_held`, if that is known already."""
    steps = [plan.epoch_steps(rank) for rank in range(plan.size)]
    return time_of(steps, [besides(plan)] * plan.size, cluster, held or bytes_held(plan, cluster))


def time_of(
    steps: Sequence[Sequence[Steps]], besides: Sequence[Sequence[KernelCall]], cluster: Cluster, held: MemoryUse
) -> StepTime:
    """The seconds of an epoch in whose steps ranks do this.

    besides: see `simulate`, of each step. held: by the ranks, see `held_by_all`.
    """
    size = len(steps)
    alone, busy = cluster.profile.prices_of(cluster.threads)
    network = cluster.profile.network_of(size, cluster.hosts) if size > 1 else None
    where = Hosts(
        ranks_each=cluster.ranks_each,
        slots=cluster.slots,
        alone=alone,
        busy=busy,
        network=network,
        disk=disk_of(held, cluster, steps),
    )
    total = StepTime(total=0.0, compute=0.0, network=0.0, waiting=0.0)
    for together in zip(*steps, strict=True):
        total += together[0].number * simulate([one.trace for one in together], besides, where)
    return total


def disk_of(held: MemoryUse, cluster: Cluster, steps: Sequence[Sequence[Steps]]) -> Disk:
    """Seconds of a byte of files that steps move, as far as a host's memory has no room for them beside what it holds.

    All of its ranks read and write at the same time. Where a device is apart, rows are in memory, see `held_by_all`.
    """
    missing = min(held.disk, held.host + held.disk - cluster.memory_bytes)
    if missing <= 0 or cluster.device_bytes is not None:
        return Disk()
    if not any(one.trace.to_device or one.trace.to_host for some in steps for one in some):
        return Disk()
    return Disk(*(missing / held.disk * cluster.ranks_each * one for one in cluster.profile.disk))


CONTEXT_BYTES = 512 << 20
"""Of a GPU, what a process with CUDA takes before it has rows (nominal)."""


class GraphBytes(NamedTuple):
    """What a graph takes of each host that has it."""

    memory: int
    store: int
    """In files, where one process starts ranks that read it there; 0: it is in files already."""


def besides(plan: Plan) -> list[KernelCall]:
    """What a rank does in a step that its trace does not have: the loss of its rows, and the optimiser's step."""
    work, (rows, read) = plan.work, plan.step_rows
    width = work.num_classes or work.graph.num_classes
    moved = (rows + 4 * read) * work.dtype.itemsize * width  # zeros; chosen rows, their gradients
    return [
        KernelCall("pass", (moved,)),
        KernelCall("loss", (read, width)),
        KernelCall("update", (work.num_shared,)),
    ]


def step_calls(plan: Plan, rank: int) -> list[KernelCall]:
    """All that a rank does in a training step."""
    operations = plan.trace(rank, training=True).operations
    return [*chain.from_iterable(one.calls for one in operations), *besides(plan)]


def bytes_held(plan: Plan, cluster: Cluster) -> MemoryUse:
    """What the ranks of a plan hold at most: on a device, on a host, whose processors may be that, and in files.

    A host has its processes and the graph beside, of which ranks that one process starts share a copy in files.
    """
    return held_by_all([plan.held(rank) for rank in range(plan.size)], graph_bytes(plan.work), cluster)


def held_by_all(found: Sequence[MemoryUse], graph: GraphBytes, cluster: Cluster) -> MemoryUse:
    """The same of what each rank holds; beside a device of its own, rows of files are in the host's memory."""
    apart, sizes = cluster.device_bytes is not None, cluster.profile.processes
    here = found[: cluster.ranks_each]
    launched = len(here) == len(found) > 1
    processes = sizes.launcher + sizes.rank * len(here) if launched else sizes.alone + sizes.rank * (len(here) - 1)
    store = graph.store if launched else 0
    graphs = store + graph.memory * (1 if not graph.store or launched else len(here))
    rows = sum(max(0, (one.disk if apart else one.device) + one.host - one.shared) for one in here)
    disk = 0 if apart else sum(one.disk for one in here)
    return MemoryUse(max(one.device for one in found), processes + graphs + rows, disk + store)


def graph_bytes(work: Workload) -> GraphBytes:
    """Those of a workload's graph."""
    stored = work.has_graph and work.graph.path is not None
    return GraphBytes(work.stats.num_bytes, 0 if stored else store_bytes(work))


def store_bytes(work: Workload) -> int:
    """Of a graph's arrays in a store."""
    stats = work.stats
    once = work.has_graph and is_symmetric(work.graph.in_edges)
    return stats.num_bytes - once * (4 * stats.num_edges + 8 * stats.num_vertices)
