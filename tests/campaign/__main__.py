"""Run attempts until the time is over, and print a table of their outcomes."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.campaign.lanes import CLASSES, lane, report, run_attempt
from tests.campaign.scene import Stage


def campaign(seconds: float, seed: int, names: list[str], lanes: int) -> int:
    """Run attempts on several lanes, print a table of all outcomes, and return the number of broken promises."""
    with ProcessPoolExecutor(lanes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(lane, number, lanes, seconds, seed, names) for number in range(lanes)]
        tallies = [future.result() for future in futures]
    counts, spent, misses = (sum(parts, Counter()) for parts in zip(*tallies, strict=True))
    print(f"{'class':14}{'tried':>7}{'faults':>8}{'held':>7}{'missed':>8}{'broken':>8}{'seconds':>9}")
    for name in names:
        numbers = {kind: counts[name, kind] for kind in ("held", "missed", "broken", "faults")}
        tries = numbers["held"] + numbers["missed"] + numbers["broken"]
        print(
            f"{name:14}{tries:7}{numbers['faults']:8}{numbers['held']:7}{numbers['missed']:8}{numbers['broken']:8}"
            f"{spent[name]:9.0f}"
        )
    for reason, times in misses.most_common():
        print(f"missed {times} times, {reason}")
    return sum(count for (_, kind), count in counts.items() if kind == "broken")


def main() -> int:
    """Run the command and return its exit code: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    environment = os.environ.get
    parser.add_argument("--seconds", type=float, default=float(environment("WEFT_CAMPAIGN_SECONDS", "3600")))
    parser.add_argument("--seed", type=int, default=int(environment("WEFT_CAMPAIGN_SEED", "0")))
    parser.add_argument("--only", choices=CLASSES, action="append", help="class to run; may be repeated (default: all)")
    parser.add_argument(
        "--lanes", type=int, default=os.cpu_count(), help="number of concurrent attempts (default: one per core)"
    )
    parser.add_argument("--repeat", type=int, help="run a single attempt of the class --only with the printed seed")
    options = parser.parse_args()
    names = options.only or list(CLASSES)
    if options.repeat is None:
        print(f"seed {options.seed}, {options.seconds:.0f} s", flush=True)
        return 1 if campaign(options.seconds, options.seed, names, options.lanes) else 0
    with Stage() as stage:
        outcome = run_attempt(names[0], options.repeat, stage)
    report(names[0], options.repeat, outcome)
    return 1 if outcome.kind == "broken" else 0


if __name__ == "__main__":
    sys.exit(main())
