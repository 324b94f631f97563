"""A job that trains in process, and many kills: `make inprocess-kills`.

    python -m tests.inprocess_kills [--kills N] [--seed N]

First on two nodes with two workers each, then on two or three nodes with one, each without and with standby workers.
The final loss must be that of an undisturbed job.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import statistics
import sys
import tempfile
from pathlib import Path

from tests.inprocess_kills import PRELOAD, STANDBY, Kills, Outcome, Plan
from tests.jobs.launching import launching

TOLERANCE = 1e-6
STEPS = 400
"""Rounding differs between one worker and four, and training magnifies that: to 1e-3 in 1,500 undisturbed steps."""


def run(plan: Plan) -> Outcome:
    """One job, of which nothing is left."""
    with tempfile.TemporaryDirectory(prefix="rallypoint-kills-") as folder, launching(Path(folder)) as rallyrun:
        return Kills(rallyrun, plan).run()


def main() -> int:
    """0 if each job has ended with the loss of the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="in each job (default: 25)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"to train (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of victims and moments")
    parser.add_argument("--logs", type=Path, help="folder for what the jobs print")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    common = {"kills": options.kills, "steps": options.steps, "seed": options.seed}
    calm = run(Plan(kills=0, nodes=1, least=1, workers=1, steps=options.steps, batch=12, seed=0, agents=0.0)).loss
    print(f"undisturbed: final loss {calm:.9f}", flush=True)
    failed = False
    shapes = {
        "2 nodes of 2 workers": Plan(nodes=2, least=2, workers=2, batch=12, agents=0.2, **common),
        "2 or 3 nodes of 1 worker": Plan(nodes=3, least=2, workers=1, batch=12, agents=0.3, **common),
    }
    for flag, (shape, plan) in itertools.product((PRELOAD, STANDBY), shapes.items()):
        name = f"{shape}, {flag.partition('=')[0]}"
        found = run(plan._replace(flag=flag))
        if options.logs is not None:
            (options.logs / f"{name.replace(' ', '-')}.log").write_text(found.log)
        difference = abs(found.loss - calm)
        failed |= not difference <= TOLERANCE
        typical = statistics.median(found.recoveries)
        print(
            f"{name}: final loss {found.loss:.9f}, a difference of {difference:.1e}; "
            f"{found.killed_workers} workers and {found.killed_agents} agents killed, {found.rounds} rounds; "
            f"{found.processes} workers started, {found.kept} times one went on, "
            f"{found.entered} times a standby worker entered; {found.lost_steps} steps done again; "
            f"kill to the next step: median {typical:.2f} s, at most {max(found.recoveries):.2f} s",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
