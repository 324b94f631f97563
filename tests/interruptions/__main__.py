"""Interrupts a training step many times, and counts the leftovers: `python -m tests.interruptions [--number N]`."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.interruptions import interrupt


def main() -> int:
    """0 if no switch was wrong and no lock held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=5000, help="of interruptions (default: 5000)")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes of the data loader (default: 0)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the moments")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rallypoint-interruptions-") as folder:
        began = time.monotonic()
        found = interrupt(
            options.number, options.loader_workers, Path(folder), options.seed, lambda line: print(line, flush=True)
        )
        seconds = time.monotonic() - began
    print(f"{options.number} interruptions in {seconds:.0f} s left {dict(found) or 'nothing'} (nothing expected)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
