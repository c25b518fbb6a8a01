"""Attacks the program until the time is spent; the table at the end counts what held."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.campaign.lanes import CLASSES, lane, tell, tried
from tests.campaign.scene import Stage


def campaign(seconds: float, seed: int, names: list[str], lanes: int) -> int:
    """What all lanes came to, as a table; the number of promises broken."""
    with ProcessPoolExecutor(lanes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(lane, number, lanes, seconds, seed, names) for number in range(lanes)]
        tallies = [future.result() for future in futures]
    counts, spent, misses = (sum(parts, Counter()) for parts in zip(*tallies, strict=True))
    print(f"{'class':14}{'tried':>7}{'faults':>8}{'held':>7}{'missed':>8}{'broken':>8}{'seconds':>9}")
    for name in names:
        of = {kind: counts[name, kind] for kind in ("held", "missed", "broken", "faults")}
        tries = of["held"] + of["missed"] + of["broken"]
        print(f"{name:14}{tries:7}{of['faults']:8}{of['held']:7}{of['missed']:8}{of['broken']:8}{spent[name]:9.0f}")
    for said, times in misses.most_common():
        print(f"missed {times} times, {said}")
    return sum(count for (_, kind), count in counts.items() if kind == "broken")


def main() -> int:
    """The command: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    given = os.environ.get
    parser.add_argument("--seconds", type=float, default=float(given("WEFT_CAMPAIGN_SECONDS", "3600")))
    parser.add_argument("--seed", type=int, default=int(given("WEFT_CAMPAIGN_SEED", "0")))
    parser.add_argument("--only", choices=CLASSES, action="append", help="classes (all)")
    parser.add_argument("--lanes", type=int, default=os.cpu_count(), help="attempts side by side (one a core)")
    parser.add_argument("--repeat", type=int, help="a single attempt of the class --only, by the seed that was told")
    options = parser.parse_args()
    names = options.only or list(CLASSES)
    if options.repeat is None:
        print(f"seed {options.seed}, {options.seconds:.0f} s", flush=True)
        return 1 if campaign(options.seconds, options.seed, names, options.lanes) else 0
    with Stage() as stage:
        outcome = tried(names[0], options.repeat, stage)
    tell(names[0], options.repeat, outcome)
    return 1 if outcome.kind == "broken" else 0


if __name__ == "__main__":
    sys.exit(main())
