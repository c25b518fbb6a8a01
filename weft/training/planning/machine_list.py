"""The machines that plans are made for: some like this one, and those of `weft plan --machines`."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.autotune import Cluster
from weft.config.config import Config
from weft.cost import GPUS, Network, Profile, nominal_network, nominal_prices
from weft.cost.datasheets import GIB
from weft.runtime.memory import memory_limit_bytes
from weft.utils.errors import InputError, readable, unknown
from weft.utils.units import parse_bytes

FLAG = "--machines"
EXAMPLE = "such as 1x24GB, 4x24GB@1gbit, 8xT4@15gbit or 4x8xA100@100gbit"
PATTERN = re.compile(r"(?P<hosts>\d{1,6})x(?:(?P<gpus>\d{1,4})x)?(?P<what>[^@]+?)(?:@(?P<network>.*))?", re.IGNORECASE)
RATE = re.compile(r"(\d{1,12}(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
ANY_MEMORY = 1 << 60
"""Of a host whose memory nobody has said."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Hosts that are alike."""

    hosts: int = 1
    gpu: str = ""
    """Of GPUS; '': hosts like this one."""
    gpus: int = 1
    """On each host."""
    memory: str = ""
    """Of a host, as '24GB'; '': not said."""
    network: str = ""
    """Between hosts, as '10gbit'."""

    def __str__(self) -> str:
        what = self.gpu if self.gpu else self.memory
        each = f"{self.gpus}x" if self.gpu and self.gpus > 1 and self.hosts > 1 else ""
        count = self.gpus if self.gpu and self.hosts == 1 else self.hosts
        beside = f" of {self.memory}" if self.gpu and self.memory else ""
        return f"{count}x{each}{what}{beside}" + (f"@{self.network}" if self.network else "")


def machines_of(said: str) -> list[Machines]:
    """The alternatives of a line, or of a TOML file. InputError names what is wrong."""
    if said.endswith(".toml"):
        return _of_file(Path(said))
    return [_checked(_of_words(words.strip())) for words in said.split(",")]


def _of_words(words: str) -> Machines:
    """Those that 'COUNTxWHAT[@NETWORK]' names: GPUs that no network joins are of one host."""
    match = PATTERN.fullmatch(words)
    if match is None or not match["what"].strip():
        raise InputError(f"{FLAG} '{words}': give COUNTxMEMORY or COUNTxGPU and @NETWORK, {EXAMPLE}")
    count, what, network = int(match["hosts"]), match["what"].strip(), (match["network"] or "").strip()
    if what[0].isdigit():
        if match["gpus"]:
            raise InputError(f"{FLAG} '{words}': {match['gpus']} of what: give a GPU's name, {EXAMPLE}")
        return Machines(hosts=count, memory=what, network=network)
    if match["gpus"] or network:
        return Machines(hosts=count, gpu=what, gpus=int(match["gpus"] or 1), network=network)
    return Machines(gpu=what, gpus=count)


def _of_file(path: Path) -> list[Machines]:
    """Those of a file's tables [[machines]]."""
    with readable(path, "give a TOML file with tables [[machines]]"):
        tables = tomllib.loads(path.read_text()).get("machines", [])
    known = {spec.name: spec for spec in dataclasses.fields(Machines)}
    if not tables or not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise InputError(f"{path}: has no table [[machines]]: give one for each alternative, with {', '.join(known)}")
    found = []
    for table in tables:
        for name, value in table.items():
            if name not in known:
                raise unknown("key of [[machines]]", name, known)
            if type(value) is not type(known[name].default):
                raise InputError(f"{path}: {name} = {value!r}: give it as {known[name].default!r} is written")
        found.append(_checked(Machines(**table)))
    return found


def _checked(machines: Machines) -> Machines:
    """The same with its GPU's name as the table has it. InputError for what cannot be."""
    name = machines.gpu.upper().replace(" ", "").replace("-", "")
    names = {known.upper().replace("-", ""): known for known in GPUS}
    if machines.gpu and name not in names:
        raise unknown(f"GPU of {FLAG}", machines.gpu, GPUS)
    found = replace(machines, gpu=names.get(name, ""))
    if found.hosts < 1 or found.gpus < 1:
        raise InputError(f"{FLAG} {found}: nobody is there: give a count of at least 1")
    if not found.gpu and found.gpus != 1:
        raise InputError(f"{FLAG}: gpus = {found.gpus} has no effect without gpu: give its name, or leave gpus out")
    if not found.gpu and not found.memory:
        raise InputError(f"{FLAG}: neither memory nor gpu is given: give one of them")
    if found.memory and parse_bytes(found.memory, FLAG) < 1:
        raise InputError(f"{FLAG} {found}: a machine without memory: give an amount such as 24GB")
    if found.network:
        _bytes_per_second(found.network)
    elif found.hosts > 1:
        raise InputError(f"{FLAG} {found}: several hosts need a network: write {found}@10gbit")
    return found


def _bytes_per_second(network: str) -> float:
    match = RATE.fullmatch(network)
    if match is None or not float(match[1]):
        raise InputError(f"{FLAG}: network '{network}': give a rate such as 10gbit or 200mbit")
    return float(match[1]) * BITS[match[2].lower()] / 8


def clusters_of(config: Config, profile: Profile, hosts: int = 1) -> list[Cluster]:
    """So many hosts with as many ranks as a configuration says, or with 1, 2, 4, ... on each up to its cores.

    InputError where the ranks cannot be as many on each.
    """
    if hosts < 1 or (config.workers != Config().workers and config.workers % hosts):
        raise InputError(f"--hosts {hosts}: give a number that --workers {config.workers} can be divided by")
    powers = range(profile.cores.bit_length())
    each = [config.workers // hosts] if config.workers != Config().workers else [1 << power for power in powers]
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


def clusters_on(alternatives: Sequence[Machines], config: Config, profile: Profile | None) -> list[Cluster]:
    """What a configuration may run on: a rank for each GPU, or 1, 2, 4, ... on each host up to its cores.

    profile: this machine's, which hosts without GPUs are like. InputError where there is none and one is needed, or
    where the configuration asks for another number of ranks.
    """
    return [cluster for one in alternatives for cluster in _clusters(one, config, profile)]


def _clusters(machines: Machines, config: Config, profile: Profile | None) -> list[Cluster]:
    asked = config.workers if config.workers != Config().workers else None
    if asked is not None and asked % machines.hosts:
        raise InputError(f"{FLAG} {machines}: --workers {asked} cannot be as many on each of {machines.hosts} hosts")
    if machines.gpu:
        if asked not in (None, machines.hosts * machines.gpus):
            raise InputError(f"{FLAG} {machines}: has a rank for each GPU: leave --workers {asked} out")
        return [_of_gpus(machines)]
    assert profile is not None
    counts = [asked // machines.hosts] if asked else [1 << power for power in range(profile.cores.bit_length())]
    return [_like_this(machines, count, profile) for count in counts]


def _of_gpus(machines: Machines) -> Cluster:
    """One rank for each GPU, all of it nominal."""
    gpu, ranks = GPUS[machines.gpu], machines.hosts * machines.gpus
    rate = gpu.peer_gbps * 1e9
    if machines.network:
        rate = min(rate, _bytes_per_second(machines.network) / machines.gpus)
    said = f"kernels, links and memory by the datasheet ({gpu.source})"
    return Cluster(
        profile=Profile(
            host={"processor": machines.gpu, "cores": machines.gpus},
            prices=[nominal_prices(gpu)],
            networks=[nominal_network(ranks, machines.hosts, rate)],
        ),
        ranks=ranks,
        hosts=machines.hosts,
        threads=1,
        memory_bytes=parse_bytes(machines.memory, FLAG) if machines.memory else ANY_MEMORY,
        device_bytes=round(gpu.memory_gib * GIB),
        machines=str(machines),
        assumed=said + (f", the network {machines.network}" if machines.network else ""),
    )


def _like_this(machines: Machines, ranks_each: int, profile: Profile) -> Cluster:
    """Hosts like that of a profile, with a nominal network between them."""
    ranks = machines.hosts * ranks_each
    networks: Sequence[Network] = profile.networks
    if machines.hosts > 1:
        like = min(networks, key=lambda one: (abs(one.ranks - ranks), one.ranks), default=None)
        rate = _bytes_per_second(machines.network) / ranks_each
        networks = [nominal_network(ranks, machines.hosts, rate, like)]
    return Cluster(
        profile=replace(profile, networks=networks),
        ranks=ranks,
        hosts=machines.hosts,
        threads=max(1, profile.cores // ranks_each),
        memory_bytes=parse_bytes(machines.memory, FLAG),
        machines=str(machines),
        assumed=f"the network {machines.network}" if machines.hosts > 1 else "",
    )
