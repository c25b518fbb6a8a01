"""An emulated cluster on one machine: ranks in network namespaces of their own, joined by links of a given rate.

    python benchmarks/cluster.py --ranks 4 --rate 200mbit -- -m weft train cora --strategy tensor --epochs 20
    python benchmarks/cluster.py --ranks 4 --rate 5gbit --measure
    python benchmarks/cluster.py --clean

A rank's link goes to a switch and carries the rate in either direction at once; a distance (latency) is not emulated.
All is inside of namespaces, so the machine's own network stays as it is. What killed runs left is removed by the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from namespaces import Unavailable, clean, do, kill_all, mine, remove

from weft.runtime.cores import cores_per_rank, rank_cores

INTERFACE, SUBNET, PORT = "eth0", "10.0.0", 29500
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST_SECONDS, BURST_BYTES = 2.5e-4, 4_000  # sent at once after a pause; with less, busy cores do not reach the rate
PACKET_BYTES = 65_536  # Linux's largest; one larger than the burst would be cut up at the link, at half the rate
QUEUE_SECONDS = 20e-3  # waits before a link; what comes on top is dropped
CONGESTION = "cubic"  # fixed, since BBR, which some machines choose, shares a link in another way
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
MEASURED_SECONDS = 0.2
TAIL_LINES, TORCHRUN_ADDS = 30, re.compile(r"^.*torch/distributed/elastic/multiprocessing/api\.py", re.MULTILINE)
File = IO[bytes]


class RankFailed(RuntimeError):
    """The first rank that ended with an error, and the last lines it wrote."""


class Cluster:
    """`ranks` namespaces, whose links carry `rate` in either direction, while the `with` lasts.

    rate: a number and kbit, mbit or gbit. Raises Unavailable. SIGTERM and SIGHUP are turned into SystemExit where they
    would have ended the process, so that they end the `with`.
    """

    def __init__(self, *, ranks: int, rate: str) -> None:
        if ranks < 1:
            raise ValueError(f"a cluster of {ranks} ranks: give at least 1")
        bits_per_second(rate)
        self.ranks, self.rate = ranks, rate
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Cluster:
        clean()
        stem = mine()
        self.switch, self.members = f"{stem}switch", [f"{stem}r{rank}" for rank in range(self.ranks)]
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self.handlers[number] = signal.signal(number, leave)
        try:
            self.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def build(self) -> None:
        do("ip netns add", self.switch)
        do("ip -n", self.switch, "link add switch type bridge")
        do("ip -n", self.switch, "link set switch up")
        for rank, member in enumerate(self.members):
            do("ip netns add", member)
            do(f"ip -n {self.switch} link add port{rank} type veth peer name {INTERFACE} netns {member}")
            do(f"ip -n {self.switch} link set port{rank} master switch up")
            do(f"ip -n {member} link set lo up")
            do(f"ip -n {member} address add {address(rank)}/24 dev {INTERFACE}")
            do(f"ip -n {member} link set {INTERFACE} up")
            do(f"ip -n {member} route replace {SUBNET}.0/24 dev {INTERFACE} src {address(rank)} congctl {CONGESTION}")
        self.set_rate(self.rate)

    def close(self) -> None:
        """Ends what runs in the namespaces, and removes them with their links."""
        for name in (*self.members, self.switch):
            remove(name)
        while self.handlers:
            signal.signal(*self.handlers.popitem())

    def set_rate(self, rate: str) -> None:
        """Gives all links another rate."""
        bits = bits_per_second(rate)
        burst = max(int(bits / 8 * BURST_SECONDS), BURST_BYTES)
        packet = min(burst // 2, PACKET_BYTES)
        limit = f"root tbf rate {bits}bit burst {burst} latency {QUEUE_SECONDS * 1e3:.0f}ms"
        for rank, member in enumerate(self.members):
            do(f"ip -n {member} link set {INTERFACE} gso_max_size {packet}")
            do(f"tc -n {member} qdisc replace dev {INTERFACE}", limit)
            do(f"tc -n {self.switch} qdisc replace dev port{rank}", limit)
        self.rate = rate

    def run(self, command: Sequence[str | Path], *, timeout: float | None = None, show: bool = False) -> str:
        """Runs `python *command` on every rank under torchrun, and returns what rank 0 wrote to its standard output.

        command: a script, or -m and a module, and arguments. timeout: seconds. show: rank 0 writes to this process's
        output instead, and "" is returned. Raises RankFailed or TimeoutError; no process is left either way.
        """
        defaults = {
            "OMP_NUM_THREADS": str(cores_per_rank(self.ranks)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else warns that no name is found
        }
        environment = {**defaults, **os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        with contextlib.ExitStack() as files:
            output, *errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(self.ranks + 1))
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank, error in enumerate(errors):
                    streams = (None, None) if show and rank == 0 else (error if rank else output, error)
                    processes.append(
                        subprocess.Popen(
                            self.launch(rank, command),
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=streams[0],
                            stderr=streams[1],
                            start_new_session=True,  # Ctrl-C is for the owner alone
                        )
                    )
                wait(processes, errors, timeout)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
                for member in self.members:
                    kill_all(member)
            return read(output)

    def launch(self, rank: int, command: Sequence[str | Path]) -> list[str | Path]:
        cores = ",".join(map(str, rank_cores(rank, self.ranks)))  # a host has its own
        inside = [*DIE_WITH_PARENT, "taskset", "-c", cores, "ip", "netns", "exec", self.members[rank]]
        options = f"--nnodes {self.ranks} --node-rank {rank} --nproc-per-node 1 --no-python"
        store = f"--master-addr {address(0)} --master-port {PORT}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split(), *store.split()]
        return [*inside, *torchrun, *DIE_WITH_PARENT, sys.executable, "-u", *command]


def wait(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[File], timeout: float | None) -> None:
    """Waits until all have ended well, one has not, or it took too long."""
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RankFailed(f"rank {rank} failed (exit code {code}):\n{tail(errors[rank])}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks did not end within {timeout} s; rank 0 wrote:\n{tail(errors[0])}")
        time.sleep(0.05)


def read(file: File) -> str:
    """All of a file that others may be writing at its end."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def tail(file: File) -> str:
    """The last lines of a rank, without what torchrun adds about its end."""
    text = read(file)
    own = TORCHRUN_ADDS.split(text)[0]
    return "\n".join((own or text).splitlines()[-TAIL_LINES:])


def address(rank: int) -> str:
    return f"{SUBNET}.{rank + 1}"


def bits_per_second(rate: str) -> int:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not parts:
        raise ValueError(f"a rate is a number and {', '.join(UNITS)}, not {rate!r}")
    return int(float(parts[1]) * UNITS[parts[2]])


def leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def measure(cluster: Cluster) -> dict[str, list[float]]:
    """Mbit/s of payload that links reach, by what was done (see link_rates.py)."""
    num_bytes = int(bits_per_second(cluster.rate) / 8 * MEASURED_SECONDS)
    output = cluster.run([Path(__file__).with_name("link_rates.py"), str(num_bytes)])
    return dict(json.loads(output.splitlines()[-1]))


def main() -> int:
    options = parse()
    try:
        if options.clean:
            print("\n".join(f"removed {name}" for name in clean()) or "nothing was left")
        else:
            emulate(options)
    except (Unavailable, ValueError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except (RankFailed, TimeoutError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def emulate(options: argparse.Namespace) -> None:
    with Cluster(ranks=options.ranks, rate=options.rate) as cluster:
        if not options.measure:
            cluster.run(options.command, timeout=options.timeout, show=True)
            return
        for what, rates in measure(cluster).items():
            print(f"{what}: {', '.join(f'{rate:,.0f}' for rate in rates)} Mbit/s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of a link: a number and kbit, mbit or gbit")
    parser.add_argument("--timeout", type=float, help="seconds that the command may take")
    parser.add_argument("--measure", action="store_true", help="print the rates that are reached")
    parser.add_argument("--clean", action="store_true", help="remove what killed runs left")
    parser.add_argument("command", nargs="*", help="after --: a script, or -m and a module, and arguments")
    options = parser.parse_args()
    if options.measure and options.ranks < 2:
        parser.error("a rate is measured between ranks: give at least 2")
    if not (options.command or options.measure or options.clean):
        parser.error("nothing to run: give -- and a command, --measure or --clean")
    return options


if __name__ == "__main__":
    sys.exit(main())
