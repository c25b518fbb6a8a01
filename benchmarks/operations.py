"""Profile an epoch with PyTorch's profiler, with the operations in groups such as "dense products"."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

EPOCHS = 10
LISTED_SHARE = 0.01  # of the epoch: an operation above it is listed by name within its group

# All operations that run inside of these events belong to the phase, whatever their group.
PHASES = {"loss": r"loss", "optimiser": r"Optimizer\..*"}

# Patterns of names without the prefixes of PyTorch (aten::, autograd::engine::evaluate_function:). The first match
# counts. Kernels appear under the names of the functions in weft/kernels/autograd.py.
GROUPS = {
    "sparse product, forward": r"Spmm(Max)?Function",
    "sparse product, backward": r"Spmm(Max)?FunctionBackward",
    "attention, forward": r"Attend(Edges)?Function",
    "attention, backward": r"Attend(Edges)?FunctionBackward",
    "activation and dropout": r"_?(relu|threshold|elu|leaky_relu|clamp_min)\w*|\w+Dropout(Backward)?"
    r"|(Relu|Elu|LeakyRelu)Backward\d",
    "dense products": r"(add)?mm|(add)?bmm|matmul|linear|conv2d|_?convolution\w*|\w*mkldnn\w*(::\w+)?"
    r"|_Convolution(Backward)?|(Add)?MmBackward\d|BmmBackward\d",
    "copies and fills": r"copy_|clone|contiguous|to|_to_copy|cat|stack|fill_|zero_|zeros\w*|ones\w*|index_select|index"
    r"|(Clone|Cat|Copy|ToCopy)\w*Backward\d",
    "sums and scaling": r"(add|sub|mul|div|sum|mean|sqrt|rsqrt|square|neg)_?|(Add|Mul|Div|Sum|Mean)Backward\d",
}
PREFIX = re.compile(r"^(autograd::engine::evaluate_function: )?(torch::autograd::|aten::)?")


def profile(epoch: Callable[[], object]) -> dict[str, Any]:
    """Profile `EPOCHS` epochs, and return the seconds and operations of the fastest one.

    The fastest, since the profiler allocates memory between operations, which slows some epochs down. Time counts for
    the innermost operation. Time in Python between operations is a separate group.

    Args:
        epoch: Function that trains an epoch.

    Returns:
        Seconds of the epoch; for each group, the longest first, its name, share, seconds, calls and longest operations.
    """
    return min((profile_once(epoch) for _ in range(EPOCHS)), key=itemgetter("seconds"))


def profile_once(epoch: Callable[[], object]) -> dict[str, Any]:
    """Profile one epoch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = perf_counter()
        epoch()
        total = perf_counter() - start
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    names: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in profiler.events():
        group = group_of(event)
        seconds[group] += event.self_cpu_time_total / 1e6
        calls[group] += event.cpu_parent is None or group_of(event.cpu_parent) != group
        names[group][event.name] += event.self_cpu_time_total / 1e6
    seconds["between operations"] = total - sum(seconds.values())
    return {
        "seconds": total,
        "operations": [
            {
                "name": group,
                "share": spent / total,
                "seconds": spent,
                "calls": calls[group],
                "names": {name: part / total for name, part in most(names[group]) if part / total > LISTED_SHARE},
            }
            for group, spent in most(seconds)
        ],
    }


def most(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Return names and seconds, the longest first."""
    return sorted(seconds.items(), key=itemgetter(1), reverse=True)


def group_of(event: FunctionEvent) -> str:
    """Return the outermost phase around an event; else the group of the innermost event around it that has one."""
    names = [PREFIX.sub("", name) for name in around(event)]
    phases = [phase for name in names for phase, pattern in PHASES.items() if re.fullmatch(pattern, name)]
    groups = [group for name in names for group, pattern in GROUPS.items() if re.fullmatch(pattern, name)]
    return next(iter(phases[-1:] + groups), "other")


def around(event: FunctionEvent | None) -> Iterator[str]:
    """Yield the name of an event and of the events around it, from the inside out."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


def table(measured: dict[str, Any], unprofiled: float) -> str:
    """Return a profile as text, with the names of the operations in no group.

    Args:
        measured: Result of `profile`.
        unprofiled: Seconds of an epoch without the profiler.
    """
    times = f"{measured['seconds']:.4f} s under the profiler, the fastest of {EPOCHS}; {unprofiled:.4f} s without"
    lines = [f"weft's epoch: {times}"]
    for row in measured["operations"]:
        lines.append(f"{row['name']:26} {row['share']:6.1%} {row['seconds'] * 1e3:10.2f} ms {row['calls']:4} calls")
        if row["name"] == "other":
            lines += [f"    {name} {share:.1%}" for name, share in row["names"].items()]
    return "\n".join(lines)
