"""Estimate the seconds of an epoch and the memory of a plan, from the profile of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from weft.cost import Disk, MemoryUse, Profile, Steps
from weft.cost.simulate import Hosts, StepTime, simulate
from weft.data import is_symmetric
from weft.nn import Workload
from weft.runtime.kernel_call import KernelCall
from weft.strategies import Plan


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks on identical hosts, and the profile that estimates their time and memory."""

    profile: Profile
    """Profile of a host and of the network."""
    ranks: int
    """Number of ranks."""
    hosts: int
    """Number of hosts, each with the same number of ranks."""
    threads: int
    """Number of threads of each rank."""
    memory_bytes: int
    """Memory of each host in bytes."""
    emulated: bool = False
    """True if one machine stands for all hosts, which then share its cores."""
    device_bytes: int | None = None
    """Memory of each rank's device. None: the device is the host's processor."""
    machines: str = ""
    """Name of the machines in `--machines`. Empty: this machine."""
    assumed: str = ""
    """Parts of the profile that were assumed instead of measured. Empty: none."""

    @property
    def slots(self) -> int:
        """Number of ranks that a host has cores for."""
        return max(1, self.profile.cores // self.threads)

    @property
    def ranks_each(self) -> int:
        """Number of ranks that share cores and memory."""
        return self.ranks if self.emulated else self.ranks // self.hosts

    @property
    def ranks_on_core(self) -> int:
        """Largest number of ranks that share the cores of one slot."""
        return -(-self.ranks_each // self.slots)


def epoch_time(plan: Plan, cluster: Cluster, memory: MemoryUse | None = None) -> StepTime:
    """Estimate the seconds of an epoch's training steps.

    Args:
        plan: The plan.
        cluster: Ranks and machines.
        memory: Result of `plan_memory`. None: it is computed here.
    """
    steps = [plan.epoch_steps(rank) for rank in range(plan.size)]
    return steps_time(steps, [untraced_calls(plan)] * plan.size, cluster, memory or plan_memory(plan, cluster))


def steps_time(
    steps: Sequence[Sequence[Steps]],
    untraced_calls: Sequence[Sequence[KernelCall]],
    cluster: Cluster,
    memory: MemoryUse,
) -> StepTime:
    """Estimate the seconds of an epoch from the traces of its steps.

    Args:
        steps: Training steps of each rank.
        untraced_calls: Kernel calls of each rank in a step that are not in its trace.
        cluster: Ranks and machines.
        memory: Result of `cluster_memory`: decides which files have to be read from the disk.
    """
    size = len(steps)
    alone, busy = cluster.profile.prices_of(cluster.threads)
    network = cluster.profile.network_of(size, cluster.hosts) if size > 1 else None
    hosts = Hosts(
        ranks_each=cluster.ranks_each,
        slots=cluster.slots,
        alone=alone,
        busy=busy,
        network=network,
        disk=disk_of(memory, cluster, steps),
    )
    total = StepTime(total=0.0, compute=0.0, network=0.0, waiting=0.0)
    for step in zip(*steps, strict=True):
        total += step[0].number * simulate([rank_step.trace for rank_step in step], untraced_calls, hosts)
    return total


def disk_of(memory: MemoryUse, cluster: Cluster, steps: Sequence[Sequence[Steps]]) -> Disk:
    """Return the seconds per byte that steps read from and write to temporary files.

    Files that fit in the free memory of the host cost nothing, since the system caches them. The ranks of a host share
    its disk. If the device has its own memory, rows are in host memory instead of files; see `cluster_memory`.

    Args:
        memory: Result of `cluster_memory`.
        cluster: Ranks and machines.
        steps: Training steps of each rank.
    """
    # Bytes of the files that do not fit next to the resident bytes.
    missing = min(memory.disk, memory.host + memory.disk - cluster.memory_bytes)
    if missing <= 0 or cluster.device_bytes is not None:
        return Disk()
    if not any(step.trace.to_device or step.trace.to_host for rank_steps in steps for step in rank_steps):
        return Disk()
    return Disk(*(missing / memory.disk * cluster.ranks_each * seconds for seconds in cluster.profile.disk))


CONTEXT_BYTES = 512 << 20
"""Bytes of a GPU that a process with CUDA needs before it has any rows (nominal)."""


class GraphBytes(NamedTuple):
    """Bytes of a graph on each host."""

    memory: int
    """Bytes in memory."""
    store: int
    """Bytes of the files by which a launcher shares the graph with its ranks; 0: the graph is in files already."""


def untraced_calls(plan: Plan) -> list[KernelCall]:
    """Return the kernel calls of a rank in a step that are not in its trace: the loss and the optimizer's step."""
    work, (rows, read) = plan.work, plan.step_rows
    width = work.num_classes or work.graph.num_classes
    # Zeros for the gradient of all rows; read and write of the rows that the loss reads, and of their gradients.
    moved = (rows + 4 * read) * work.dtype.itemsize * width
    return [
        KernelCall("pass", (moved,)),
        KernelCall("loss", (read, width)),
        KernelCall("update", (work.num_shared,)),
    ]


def step_calls(plan: Plan, rank: int) -> list[KernelCall]:
    """Return all kernel calls of a rank in a training step.

    Args:
        plan: The plan.
        rank: Number of the rank.
    """
    operations = plan.trace(rank, training=True).operations
    return [*chain.from_iterable(operation.calls for operation in operations), *untraced_calls(plan)]


def plan_memory(plan: Plan, cluster: Cluster) -> MemoryUse:
    """Estimate the peak memory of a plan: see `cluster_memory`.

    Args:
        plan: The plan.
        cluster: Ranks and machines.
    """
    return cluster_memory([plan.peak_memory(rank) for rank in range(plan.size)], graph_bytes(plan.work), cluster)


def cluster_memory(ranks: Sequence[MemoryUse], graph: GraphBytes, cluster: Cluster) -> MemoryUse:
    """Estimate the peak memory of a run: of the device that needs most, and of the first host with all its ranks.

    Host memory has three parts:

    1. processes: a launcher and its ranks if several ranks are all on this host, else the ranks without a launcher;
    2. graphs: one copy if the graph is in files or a launcher shares it, else one for each rank;
    3. rows: what each rank allocates. If the device is the host's processor, device memory counts; else the rows that
       would be in files are in host memory.

    Args:
        ranks: Peak memory of each rank.
        graph: Bytes of the graph.
        cluster: Ranks and machines.
    """
    own_device, sizes = cluster.device_bytes is not None, cluster.profile.processes
    local = ranks[: cluster.ranks_each]
    launched = len(local) == len(ranks) > 1
    processes = sizes.launcher + sizes.rank * len(local) if launched else sizes.alone + sizes.rank * (len(local) - 1)
    store = graph.store if launched else 0
    graphs = store + graph.memory * (1 if not graph.store or launched else len(local))
    rows = sum(max(0, (rank.disk if own_device else rank.device) + rank.host - rank.shared) for rank in local)
    disk = 0 if own_device else sum(rank.disk for rank in local)
    return MemoryUse(max(rank.device for rank in ranks), processes + graphs + rows, disk + store)


def graph_bytes(work: Workload) -> GraphBytes:
    """Return the bytes of a workload's graph."""
    stored = work.has_graph and work.graph.path is not None
    return GraphBytes(work.stats.num_bytes, 0 if stored else store_bytes(work))


def store_bytes(work: Workload) -> int:
    """Return the bytes of a graph's arrays in a store.

    It has a symmetric adjacency only once, and the edges of the transpose's entries only if edges have data.
    """
    stats = work.stats
    once = work.has_graph and is_symmetric(work.graph.in_edges)
    without_ids = stats.stores_edge_ids and not (stats.weighted or stats.num_edge_features or stats.typed.num_relations)
    return stats.num_bytes - 4 * (once + without_ids) * stats.num_edges - 8 * once * stats.num_vertices
