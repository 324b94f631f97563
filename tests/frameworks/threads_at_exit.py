"""Runs a script like a worker, then reports which threads of gloo are left when the interpreter is about to end.

    rallyrun --nproc-per-node=2 tests/frameworks/threads_at_exit.py SCRIPT ARGUMENT...

It needs nothing but the standard library, as it runs in the environment of the script.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path

DEADLINE = 5.0
"""Seconds for threads that have been joined to leave /proc, which the kernel does a moment later."""


def gloo_threads() -> list[str]:
    """Names of the threads of this process that are gloo's, or run its collectives for torch."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if "gloo" in name)


def main() -> None:
    """The arguments are those of a command line of Python."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code:
            raise
    until = time.monotonic() + DEADLINE
    while (left := gloo_threads()) and time.monotonic() < until:
        time.sleep(0.005)
    # In one write, so that the lines of the workers stay whole.
    sys.stdout.write(f"rank {os.environ['RANK']}, threads of gloo: {' '.join(left) or 'none'}\n")


if __name__ == "__main__":
    main()
