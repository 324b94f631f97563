"""How long a surviving worker takes from another's death into the next round, for many deaths of one job.

    python -m tests.inprocess_kills.recoveries [--kills N]

The workers only wait, so the time is all ours. On a quiet machine, the worst takes at most three times the median;
beyond that, a wake-up was lost, or the disk was slow.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from tests.jobs.launching import Launcher, launching

MOST = 3.0
"""The worst recovery, in medians."""
WORKER = """
import os, time
from rallypoint import inprocess

@inprocess.resumable
def train(round):
    os.write(pipe, f"{os.environ['RANK']} {os.getpid()} {time.monotonic()}\\n".encode())
    time.sleep(1000)

pipe = os.open("entries", os.O_WRONLY)
train()
"""


def recoveries(rallyrun: Launcher, kills: int) -> list[float]:
    """Seconds from each kill of one of two workers until the other is in the next round."""
    path = rallyrun.folder / "entries"
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), encoding="ascii") as entries:
        job = rallyrun("--standalone", "--nproc-per-node=2", f"--max-restarts={kills}", rallyrun.script(WORKER))
        took = []
        pids, _ = _both(entries)
        for _ in range(kills):
            time.sleep(random.uniform(0.0, 0.05))  # at no particular moment of the round
            began = time.monotonic()
            os.kill(pids.pop(random.choice(("0", "1"))), signal.SIGKILL)
            (survivor,) = pids
            pids, entered = _both(entries)
            took.append(entered[survivor] - began)
        job.stop()
    return took


def _both(entries: TextIO) -> tuple[dict[str, int], dict[str, float]]:
    """Wait until both workers are in a round: their pids, and when they came."""
    pids, entered = dict[str, int](), dict[str, float]()
    while len(pids) < 2:
        rank, pid, at = entries.readline().split()
        pids[rank], entered[rank] = int(pid), float(at)
    return pids, entered


def main() -> int:
    """0 if the worst recovery took at most `MOST` times the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="rallypoint-recoveries-") as folder,
        launching(Path(folder)) as rallyrun,
    ):
        took = sorted(recoveries(rallyrun, options.kills))
    median, worst = statistics.median(took), took[-1]
    print(
        f"{len(took)} kills: the survivor was back after {median:.3f} s (median), {took[-len(took) // 100]:.3f} s "
        f"(99 of 100), {worst:.3f} s at most: {worst / median:.1f} medians (at most {MOST:g} expected); "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    )
    return 1 if worst > MOST * median else 0


if __name__ == "__main__":
    sys.exit(main())
