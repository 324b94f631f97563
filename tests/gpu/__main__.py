"""What Rallypoint does on GPUs, in one table: `python -m tests.gpu`.

Takes any Linux machine with an NVIDIA GPU, and the Python that has torch there; nothing is fetched or installed. Prints
a row for each check, writes all of them as JSON, and exits with the number of failures; with 77 where there is no GPU.

    --only TEXT        the checks whose names contain it
    --rehearse         on processors: proves the command, and of GPUs nothing
    --nnodes, --rdzv-endpoint
                       as for rallyrun, the same on each node: the checks between nodes
    --page JSON        keep results as docs/gpu.json, make docs/gpu.md of them, and exit
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.gpu import cost, devices, failures, page, recovery, several, training
from tests.gpu.machine import ROOT, describe
from tests.gpu.rows import FAILED, Bench, Row, as_text, rows_of, write_results

NO_GPU = 77
"""What test harnesses take for "skipped"."""
LIMIT = 470.0
CHECKS = (
    *(*devices.CHECKS, *training.CHECKS, *recovery.CHECKS),
    *(*failures.CHECKS, *cost.CHECKS, *several.CHECKS),
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Try Rallypoint on this machine's GPUs.")
    parser.add_argument("--only", metavar="TEXT", action="append", help="checks whose names contain this; repeatable")
    parser.add_argument("--rehearse", action="store_true", help="run on processors what they can show")
    parser.add_argument("--json", type=Path, default=Path("build/gpu.json"), help="results (default: build/gpu.json)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which no check begins")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes that run this command now")
    parser.add_argument("--rdzv-endpoint", default="", help="HOST:PORT where they meet, as for rallyrun")
    parser.add_argument("--page", type=Path, metavar="JSON", help="make docs/gpu.md of these results, and exit")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    if options.page is not None:
        results = options.page.read_text()
        (ROOT / "docs" / "gpu.md").write_text(page.page_of(results))
        (ROOT / "docs" / "gpu.json").write_text(results)
        return 0
    if options.nnodes > 1 and not options.rdzv_endpoint:
        print("--nnodes needs --rdzv-endpoint=HOST:PORT, the same on all nodes", file=sys.stderr)
        return 2
    try:
        machine = describe()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if not machine.gpus and not options.rehearse:
        print("there is no NVIDIA GPU that torch can use here; nothing was tried", file=sys.stderr)
        return NO_GPU
    began, at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    nodes = [f"--nnodes={options.nnodes}", f"--rdzv-endpoint={options.rdzv_endpoint}", "--rdzv-backend=c10d"]
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        print(as_text(row), flush=True)
        write_results(options.json, machine, rows, at, rehearsed=options.rehearse)

    with tempfile.TemporaryDirectory(prefix="rallypoint-gpu-") as folder:
        bench = Bench(
            machine,
            "cpu" if options.rehearse else "cuda",
            Path(folder),
            nodes if options.nnodes > 1 else (),
        )
        wanted = [check for check in CHECKS if any(text in check.name for text in options.only or [""])]
        rows_of(wanted, bench, options.nnodes, began + options.limit, note)
    failed = sum(row.state == FAILED for row in rows)
    print(f"{len(rows)} checks, {failed} failed, in {time.monotonic() - began:.0f} s; {options.json}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
