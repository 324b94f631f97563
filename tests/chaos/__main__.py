"""Random faults against real jobs: `make chaos`.

    python -m tests.chaos [--backend c10d|serve|etcd] [--faults N] [--seed N] [--logs FOLDER]

Each fault waits until the job is whole. A breach is printed with the events that led to it; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.chaos.faults import Backend, plan
from tests.chaos.invariants import breaches, current
from tests.chaos.job import LEASE, ChaosJob, NotWholeError

OVERLAP = LEASE + 5.0
"""Seconds for which a node that was cut off may still run an old round."""


def play(folder: Path, backend: Backend, faults: int, seed: int, seconds: dict[str, list[float]]) -> list[str]:
    """One job and its faults; returns what was broken, after what. `seconds` takes the recoveries by kind."""
    history: list[str] = []
    with ChaosJob(folder, backend) as job:
        try:
            job.whole_again(0.0)
            for fault in plan(backend, faults, seed):
                before = next(iter(current(job.read()).values())).failures
                history.append(f"{fault.kind.name}, {fault.after} s after all ran")
                took = job.whole_again(job.do(fault))
                seconds[fault.kind.name].append(took)
                added = next(iter(current(job.read()).values())).failures - before
                broken = list(breaches(job.read(), OVERLAP))
                if added not in fault.kind.failures:
                    broken.append(f"{added} failures were counted")
                if broken:
                    return [*history, *broken]
            return [*history, *wrong] if (wrong := job.finish()) else []
        except NotWholeError as error:
            return [*history, str(error)]


def main() -> int:
    """0 if no rule was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", type=Backend, action="append", choices=list(Backend), help="default: all")
    parser.add_argument("--faults", type=int, default=20, help="for each backend (default: 20)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--logs", type=Path, default=Path("build/chaos"), help="where what has failed is kept")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    seconds: dict[str, list[float]] = defaultdict(list)
    failed = False
    for backend in options.backend or list(Backend):
        with tempfile.TemporaryDirectory(prefix="rallypoint-chaos-") as name:
            wrong = play(Path(name), backend, options.faults, options.seed, seconds)
            if wrong:
                failed = True
                kept = options.logs / f"{backend}-{options.seed}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(Path(name) / "logs", kept)
                print(f"{backend}, seed {options.seed}: BROKEN after", *wrong, f"logs: {kept}", sep="\n  ", flush=True)
    print(f"\n{'fault':40} {'number':>6} {'median':>8} {'worst':>8}")
    for kind, each in sorted(seconds.items()):
        print(f"{kind:40} {len(each):6} {statistics.median(each):7.2f}s {max(each):7.2f}s")
    print(f"{sum(map(len, seconds.values()))} faults were survived")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
