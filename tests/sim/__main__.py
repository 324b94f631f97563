"""Run many seeds, or replay one.

python -m tests.sim --seeds 10000              so many seeds from one that is drawn; exit 1 if one breaks a rule
python -m tests.sim --seeds 10000 --from 0     every seed from 0
python -m tests.sim --seed 4711                one seed, with all that happens in it
python -m tests.sim --seed 4711 --shrink       the same, cut down to what it takes to break the rule
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from tests.sim.job import run
from tests.sim.runner import run_many, summary, traces
from tests.sim.scenario import generate
from tests.sim.shrink import shrink, trace


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Whole jobs in virtual time.")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds to run")
    parser.add_argument("--from", type=int, dest="first", help="the first of them; by default one that is drawn")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many to run side by side")
    parser.add_argument("--seed", type=int, help="run this one only, and tell all that happens")
    parser.add_argument("--shrink", action="store_true", help="with --seed: cut it down first")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        result = run(generate(asked.seed))
        if asked.shrink and result.violation is not None:
            print(trace(shrink(result)))
        else:
            print(trace(result.scenario))
        return int(result.violation is not None)
    first = random.SystemRandom().randrange(10**9) if asked.first is None else asked.first
    print(f"seeds from {first}", flush=True)
    started = time.monotonic()
    tally = run_many(first, asked.seeds, asked.jobs)
    print(summary(tally, time.monotonic() - started))
    if tally.broken:
        print(traces(tally))
    return int(bool(tally.broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
