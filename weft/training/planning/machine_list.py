"""Machines to plan for: hosts like this one, and the machines of `weft plan --machines`."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.autotune import Cluster
from weft.config.config import PlacementOptions
from weft.cost import GPUS, Network, Profile, nominal_network, nominal_prices
from weft.cost.datasheets import GIB
from weft.runtime.memory.limit import memory_limit_bytes
from weft.utils.errors import InputError, readable, unknown
from weft.utils.files.file_reading import MAX_OPTIONS_BYTES, read_text
from weft.utils.units import parse_bytes

FLAG = "--machines"
EXAMPLE = "such as 1x24GB, 4x24GB@1gbit, 8xT4@15gbit or 4x8xA100@100gbit"
PATTERN = re.compile(r"(?P<hosts>\d{1,6})x(?:(?P<gpus>\d{1,4})x)?(?P<what>[^@]+?)(?:@(?P<network>.*))?", re.IGNORECASE)
RATE = re.compile(r"(\d{1,12}(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNLIMITED_BYTES = 1 << 60
"""Memory of a host whose memory is not specified."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Identical hosts to plan for."""

    hosts: int = 1
    """Number of hosts."""
    gpu: str = ""
    """Name of a GPU in `GPUS`. Empty: hosts without GPUs, like this machine."""
    gpus: int = 1
    """Number of GPUs of each host."""
    memory: str = ""
    """Memory of each host, such as '24GB'. Empty: not specified."""
    network: str = ""
    """Rate of the network between hosts, such as '10gbit'. Empty: none."""

    def __str__(self) -> str:
        what = self.gpu if self.gpu else self.memory
        each = f"{self.gpus}x" if self.gpu and self.gpus > 1 and self.hosts > 1 else ""
        count = self.gpus if self.gpu and self.hosts == 1 else self.hosts
        memory = f" of {self.memory}" if self.gpu and self.memory else ""
        return f"{count}x{each}{what}{memory}" + (f"@{self.network}" if self.network else "")


def machines_of(value: str) -> list[Machines]:
    """Return the alternatives in the value of `--machines`: a comma-separated list, or the path of a TOML file.

    Raises:
        InputError: The value cannot be parsed, or names machines that cannot exist.
    """
    if value.endswith(".toml"):
        return _read_file(Path(value))
    return [_checked(_parse(words.strip())) for words in value.split(",")]


def _parse(words: str) -> Machines:
    """Return the machines of one 'COUNTxWHAT[@NETWORK]'. GPUs without a network are on one host."""
    match = PATTERN.fullmatch(words)
    if match is None or not match["what"].strip():
        raise InputError(
            f"{FLAG} '{words}' cannot be read: write COUNTxMEMORY or COUNTxGPU, and @NETWORK between hosts, {EXAMPLE}"
        )
    count, what, network = int(match["hosts"]), match["what"].strip(), (match["network"] or "").strip()
    if what[0].isdigit():
        if match["gpus"]:
            raise InputError(
                f"{FLAG} '{words}': {match['gpus']}x needs the name of a GPU, not an amount of memory, {EXAMPLE}"
            )
        return Machines(hosts=count, memory=what, network=network)
    if match["gpus"] or network:
        return Machines(hosts=count, gpu=what, gpus=int(match["gpus"] or 1), network=network)
    return Machines(gpu=what, gpus=count)


def _read_file(path: Path) -> list[Machines]:
    """Return the machines in the tables [[machines]] of a TOML file."""
    with readable(path, "give a TOML file with tables [[machines]]"):
        tables = tomllib.loads(read_text(path, MAX_OPTIONS_BYTES)).get("machines", [])
    specs = {spec.name: spec for spec in dataclasses.fields(Machines)}
    if not tables or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path} has no table [[machines]]: write one for each alternative, with {', '.join(specs)}")
    alternatives = []
    for table in tables:
        for name, value in table.items():
            if name not in specs:
                raise unknown("key of [[machines]]", name, specs)
            if type(value) is not type(specs[name].default):
                kind = "a whole number" if isinstance(specs[name].default, int) else "a string in quotes"
                raise InputError(f"{path}: {name} = {value!r} has the wrong type: write {kind}")
        alternatives.append(_checked(Machines(**table)))
    return alternatives


def _checked(machines: Machines) -> Machines:
    """Return the machines with the GPU's name as in `GPUS`. InputError for machines that cannot exist."""
    name = machines.gpu.upper().replace(" ", "").replace("-", "")
    names = {gpu.upper().replace("-", ""): gpu for gpu in GPUS}
    if machines.gpu and name not in names:
        raise unknown(f"GPU of {FLAG}", machines.gpu, GPUS)
    checked = replace(machines, gpu=names.get(name, ""))
    if checked.hosts < 1 or checked.gpus < 1:
        raise InputError(f"{FLAG} {checked}: the number of machines and of GPUs must be at least 1")
    if not checked.gpu and checked.gpus != 1:
        raise InputError(f"{FLAG}: gpus = {checked.gpus} has no effect without gpu: add the GPU's name, or remove gpus")
    if not checked.gpu and not checked.memory:
        raise InputError(f"{FLAG}: neither memory nor gpu is specified: give at least one of them")
    if checked.memory and parse_bytes(checked.memory, FLAG) < 1:
        raise InputError(f"{FLAG} {checked}: the memory must be more than 0: give an amount such as 24GB")
    if checked.network:
        _bytes_per_second(checked.network)
    elif checked.hosts > 1:
        raise InputError(f"{FLAG} {checked}: several hosts need a network: write {checked}@10gbit")
    return checked


def _bytes_per_second(network: str) -> float:
    """Return a rate such as '10gbit' in bytes per second."""
    match = RATE.fullmatch(network)
    if match is None or not float(match[1]):
        raise InputError(f"{FLAG}: network '{network}': give a rate such as 10gbit or 200mbit")
    return float(match[1]) * BITS[match[2].lower()] / 8


def clusters_of(options: PlacementOptions, profile: Profile, hosts: int = 1) -> list[Cluster]:
    """Return the clusters to plan for, of hosts like a measured machine.

    Args:
        options: Where to train. If they set `workers`, there is one cluster, with that number of ranks in all; else
            one for each of 1, 2, 4, ... ranks on each host, up to its number of cores.
        profile: Profile of the machine.
        hosts: Number of hosts.

    Raises:
        InputError: The ranks cannot be divided evenly over the hosts.
    """
    if hosts < 1 or (options.workers != PlacementOptions().workers and options.workers % hosts):
        raise InputError(f"--hosts {hosts}: give a number of at least 1 that divides --workers {options.workers}")
    powers = range(profile.cores.bit_length())
    each = (
        [options.workers // hosts]
        if options.workers != PlacementOptions().workers
        else [1 << power for power in powers]
    )
    return [
        Cluster(
            profile=profile,
            ranks=hosts * count,
            hosts=hosts,
            threads=max(1, profile.cores // count),
            memory_bytes=int(profile.host.get("memory_bytes", memory_limit_bytes())),
        )
        for count in each
    ]


def clusters_on(alternatives: Sequence[Machines], options: PlacementOptions, profile: Profile | None) -> list[Cluster]:
    """Return the clusters to plan for, of the machines of `--machines`.

    Args:
        alternatives: The machines. Hosts with GPUs have a rank for each GPU, other hosts the ranks that `options` set,
            or 1, 2, 4, ... ranks up to the number of cores.
        options: Where to train.
        profile: Profile of this machine, which hosts without GPUs are assumed to be like. None: all have GPUs.

    Raises:
        InputError: The number of ranks does not match the machines.
    """
    return [cluster for machines in alternatives for cluster in _clusters(machines, options, profile)]


def _clusters(machines: Machines, options: PlacementOptions, profile: Profile | None) -> list[Cluster]:
    ranks = options.workers if options.workers != PlacementOptions().workers else None
    if ranks is not None and ranks % machines.hosts:
        raise InputError(f"{FLAG} {machines}: --workers {ranks} must be a multiple of the {machines.hosts} hosts")
    if machines.gpu:
        if ranks not in (None, machines.hosts * machines.gpus):
            raise InputError(f"{FLAG} {machines} has one rank for each GPU: leave --workers {ranks} out")
        return [_gpu_cluster(machines)]
    assert profile is not None
    counts = [ranks // machines.hosts] if ranks else [1 << power for power in range(profile.cores.bit_length())]
    return [_cpu_cluster(machines, count, profile) for count in counts]


def _gpu_cluster(machines: Machines) -> Cluster:
    """Return a cluster with one rank for each GPU, with prices from the datasheet."""
    gpu, ranks = GPUS[machines.gpu], machines.hosts * machines.gpus
    rate = gpu.peer_gbps * 1e9
    if machines.network:
        rate = min(rate, _bytes_per_second(machines.network) / machines.gpus)
    assumed = f"kernels, links and memory from the datasheet ({gpu.source})"
    return Cluster(
        profile=Profile(
            host={"processor": machines.gpu, "cores": machines.gpus},
            prices=[nominal_prices(gpu)],
            networks=[nominal_network(ranks, machines.hosts, rate)],
        ),
        ranks=ranks,
        hosts=machines.hosts,
        threads=1,
        memory_bytes=parse_bytes(machines.memory, FLAG) if machines.memory else UNLIMITED_BYTES,
        device_bytes=round(gpu.memory_gib * GIB),
        machines=str(machines),
        assumed=assumed + (f", the network {machines.network}" if machines.network else ""),
    )


def _cpu_cluster(machines: Machines, ranks_each: int, profile: Profile) -> Cluster:
    """Return a cluster of hosts like the measured one, with a nominal network between them."""
    ranks = machines.hosts * ranks_each
    networks: Sequence[Network] = profile.networks
    if machines.hosts > 1:
        # The fixed costs of a message are those of the measured network with the nearest number of ranks.
        nearest = min(networks, key=lambda network: (abs(network.ranks - ranks), network.ranks), default=None)
        rate = _bytes_per_second(machines.network) / ranks_each
        networks = [nominal_network(ranks, machines.hosts, rate, nearest)]
    return Cluster(
        profile=replace(profile, networks=networks),
        ranks=ranks,
        hosts=machines.hosts,
        threads=max(1, profile.cores // ranks_each),
        memory_bytes=parse_bytes(machines.memory, FLAG),
        machines=str(machines),
        assumed=f"the network {machines.network}" if machines.hosts > 1 else "",
    )
