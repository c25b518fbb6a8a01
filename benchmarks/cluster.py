"""Emulate a cluster on one machine: each rank runs in its own network namespace, behind a link of a given rate.

    python benchmarks/cluster.py --ranks 4 --rate 200mbit -- -m weft train cora --strategy tensor --epochs 20
    python benchmarks/cluster.py --ranks 4 --rate 5gbit --measure
    python benchmarks/cluster.py --clean

Each rank's link connects it to a switch and is full duplex: it carries the rate in both directions at once. Latency is
not emulated. Everything is inside of namespaces, so the machine's network does not change. A run removes the namespaces
that killed runs have left behind. Emulation needs root, iproute2 and util-linux.
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

from weft.runtime.processes.cores import cores_per_rank, rank_cores

INTERFACE, SUBNET, PORT = "eth0", "10.0.0", 29500
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST_SECONDS, BURST_BYTES = 2.5e-4, 4_000  # sent at once after a pause; smaller bursts miss the rate on busy cores
PACKET_BYTES = 65_536  # Linux's limit; the link splits a packet larger than the burst, at half the rate
QUEUE_SECONDS = 20e-3  # of data that can wait for a link; further packets are dropped
CONGESTION = "cubic"  # fixed, since some machines default to BBR, which shares a link in another way
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
MEASURED_SECONDS = 0.2
TAIL_LINES, TORCHRUN_ADDS = 30, re.compile(r"^.*torch/distributed/elastic/multiprocessing/api\.py", re.MULTILINE)
File = IO[bytes]


class RankFailed(RuntimeError):
    """A rank ended with an error; the message has the last lines that it wrote."""


class Cluster:
    """Context manager with a network namespace for each rank, joined by links of one rate.

    SIGTERM and SIGHUP raise SystemExit inside of the `with` unless the process handles them itself, so that the
    namespaces are removed also when the process is terminated.

    Args:
        ranks: Number of ranks.
        rate: Rate of each link in either direction: a number and kbit, mbit or gbit.

    Raises:
        Unavailable: This machine cannot emulate a cluster (raised on entry).
    """

    def __init__(self, *, ranks: int, rate: str) -> None:
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: a cluster needs at least 1 rank")
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
        """Kill the processes in the namespaces, then remove the namespaces and their links."""
        for name in (*self.members, self.switch):
            remove(name)
        while self.handlers:
            signal.signal(*self.handlers.popitem())

    def set_rate(self, rate: str) -> None:
        """Change the rate of all links."""
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
        """Run `python *command` on every rank under torchrun and return the standard output of rank 0.

        No process of the ranks is left afterwards, also if the command fails.

        Args:
            command: A script, or -m and a module, followed by arguments.
            timeout: Seconds after which the ranks are killed. None: no limit.
            show: True to connect rank 0 to this process's output; the returned text is then empty.

        Raises:
            RankFailed: A rank ended with an error.
            TimeoutError: The ranks did not end within the timeout.
        """
        defaults = {
            "OMP_NUM_THREADS": str(cores_per_rank(self.ranks)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns that addresses have no host name
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
                            start_new_session=True,  # Ctrl-C reaches only this process, which ends the ranks
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
        cores = ",".join(map(str, rank_cores(rank, self.ranks)))  # the cores of a rank are separate, as those of a host
        inside = [*DIE_WITH_PARENT, "taskset", "-c", cores, "ip", "netns", "exec", self.members[rank]]
        options = f"--nnodes {self.ranks} --node-rank {rank} --nproc-per-node 1 --no-python"
        store = f"--master-addr {address(0)} --master-port {PORT}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split(), *store.split()]
        return [*inside, *torchrun, *DIE_WITH_PARENT, sys.executable, "-u", *command]


def wait(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[File], timeout: float | None) -> None:
    """Wait until all processes have ended.

    Args:
        processes: A process for each rank.
        errors: The standard error of each rank, as a file.
        timeout: Seconds to wait. None: no limit.

    Raises:
        RankFailed: A process ended with an error.
        TimeoutError: Some processes still run after `timeout` seconds.
    """
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
    """Return the text of a file that other processes may still append to; the file position does not move."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def tail(file: File) -> str:
    """Return the last lines that a rank wrote, without the report that torchrun adds when a rank fails."""
    text = read(file)
    before_report = TORCHRUN_ADDS.split(text)[0]
    return "\n".join((before_report or text).splitlines()[-TAIL_LINES:])


def address(rank: int) -> str:
    return f"{SUBNET}.{rank + 1}"


def bits_per_second(rate: str) -> int:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not parts:
        raise ValueError(f"rate {rate!r} must be a number followed by one of {', '.join(UNITS)}, such as 200mbit")
    return int(float(parts[1]) * UNITS[parts[2]])


def leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def measure(cluster: Cluster) -> dict[str, list[float]]:
    """Return the rates that the links reach, in Mbit/s of payload, by transfer pattern (see link_rates.py)."""
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
        for pattern, rates in measure(cluster).items():
            print(f"{pattern}: {', '.join(f'{rate:,.0f}' for rate in rates)} Mbit/s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks, each in its own namespace")
    parser.add_argument("--rate", default="1gbit", help="rate of each link: a number and kbit, mbit or gbit")
    parser.add_argument("--timeout", type=float, help="kill the command after so many seconds; default: no limit")
    parser.add_argument("--measure", action="store_true", help="measure and print the rates that the links reach")
    parser.add_argument("--clean", action="store_true", help="remove the namespaces that killed runs have left behind")
    parser.add_argument("command", nargs="*", help="after --: a script, or -m and a module, and arguments")
    options = parser.parse_args()
    if options.measure and options.ranks < 2:
        parser.error("--measure sends data between ranks: set --ranks to at least 2")
    if not (options.command or options.measure or options.clean):
        parser.error("nothing to run: give a command after --, or --measure, or --clean")
    return options


if __name__ == "__main__":
    sys.exit(main())
