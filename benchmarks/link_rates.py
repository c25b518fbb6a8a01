"""Measure the rates between ranks; each rank of `cluster.py --measure` runs this script.

Usage: link_rates.py BYTES, the bytes that leave or reach a rank in one round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

ROUNDS = 5


def main(num_bytes: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    block = torch.zeros(num_bytes, dtype=torch.uint8)
    sent = torch.zeros(num_bytes // (ranks - 1) * ranks, dtype=torch.uint8)
    received = torch.empty_like(sent)
    outgoing, incoming = sent.chunk(ranks), received.chunk(ranks)
    others = [(rank + step) % ranks for step in range(1, ranks)]

    def pass_on(sender: int) -> None:
        if rank == sender:
            dist.send(block, (sender + 1) % ranks)
        elif rank == (sender + 1) % ranks:
            dist.recv(block, sender)

    def exchange() -> None:
        receives = [dist.irecv(incoming[other], other) for other in others[::-1]]
        for work in (*receives, *(dist.isend(outgoing[other], other) for other in others)):
            if work:
                work.wait()

    def collective() -> None:
        dist.all_to_all_single(received, sent)

    def mbits(step: Callable[[], None]) -> float:
        step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(ROUNDS):
            step()
        dist.barrier()
        return num_bytes * ROUNDS * 8 / (time.perf_counter() - start) / 1e6

    rates = {
        "one rank to the next, in turn": [mbits(partial(pass_on, sender)) for sender in range(ranks)],
        "all to all, receives posted first, in and out at once": [mbits(exchange)],
        "all to all, gloo's collective, in and out at once": [mbits(collective)],
    }
    if rank == 0:
        print(json.dumps(rates))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
