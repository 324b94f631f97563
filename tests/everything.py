"""Everything that runs before a release: `make test-all`.

The parts run one after the other, even if one fails. A summary at the end lists how each part ended, and which tests
did not run on this machine, with the reason.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from typing import NamedTuple

from tests import denying, outcomes


class Part(NamedTuple):
    """A command: its purpose, its arguments to Python, and a variable to set to 1."""

    what: str
    command: str
    switch: str = ""


_JOBS = "test_endings test_signals test_nothing_left test_lost_reaper test_functions test_watchdog test_one_node"
_FAULTS = "test_kills test_memory test_pauses test_disks"


def _without_pidfds(what: str) -> str:
    """The command that runs some tests without these system calls."""
    files = [f"tests/jobs/{name}.py" for name in _JOBS.split()] + [
        f"tests/faults/{name}.py" for name in _FAULTS.split()
    ]
    words = [
        *denying.denying(what)[1:],
        sys.executable,
        *["-m", "pytest", "-n", "3", "--dist", "worksteal", "tests/unit/workers"],
    ]
    return shlex.join([*words, "tests/unit/watchdog", *files])


PARTS = (
    Part("all tests, with new seeds", "-m pytest -n 3 --dist worksteal --fresh --ignore=tests/aarch64"),
    Part("on an emulated aarch64 machine", "-m pytest tests/aarch64"),
    Part("10,000 simulated jobs", "-m tests.sim --seeds 10000"),
    Part(
        "the coordinator on etcd dies at each step",
        "-m pytest -n 2 tests/faults/test_etcd_steps.py",
        "RALLYPOINT_SWEEP",
    ),
    Part("where processes have no pidfds: one node", _without_pidfds(denying.OLD_KERNEL)),
    Part("where a sandbox denies them: one node", _without_pidfds(denying.OLD_SANDBOX)),
    Part("random kills of training in process", "-m tests.inprocess_kills"),
    Part("random faults against real jobs", "-m tests.chaos --faults 40"),
    Part("what runs on GPUs, rehearsed on processors", "-m tests.gpu --rehearse"),
    Part("decoders, guided by coverage", "-m tests.fuzz"),
    Part("every benchmark, in small", "-m benchmarks --quick"),
)


def main() -> int:
    """Run the parts whose purpose contains an argument, or all parts. Returns 1 if any part failed."""
    words = sys.argv[1:]
    rows, not_run = [], Counter[str]()
    for part in PARTS:
        if words and not any(word in part.what for word in words):
            continue
        print(f"\n== {part.what}: python {part.command}", flush=True)
        begun = time.monotonic()
        code = subprocess.run(
            [sys.executable, *shlex.split(part.command)],
            env=os.environ | ({part.switch: "1"} if part.switch else {}),
            check=False,
        ).returncode
        rows.append((code, f"{part.what}: {'passed' if code == 0 else f'FAILED ({code})'}", time.monotonic() - begun))
        if "pytest" in part.command:
            not_run.update(each.reason for each in outcomes.read() if each.outcome == "skipped")
    print("\n== summary")
    for _, text, seconds in rows:
        print(f"{seconds:7.0f} s  {text}")
    for reason, count in not_run.most_common():
        print(f"did not run: {count} tests: {reason}")
    return 1 if any(code for code, *_ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
