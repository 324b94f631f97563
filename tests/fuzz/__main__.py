"""`python -m tests.fuzz [TARGET ...] [--seconds N] [--seed N]`: fuzz; what is found to be new is kept in `.fuzz/`.

A target is fuzzed by libFuzzer, guided by coverage: the store in C with sanitizers, those in Python by atheris. Where
there is no atheris for this Python, a target runs over mutations without guidance.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.store import CannotFuzzError, build, run, seeds
from tests.fuzz.table import TARGETS
from tests.fuzz.target import BrokenError, run_many, valid_inputs

FOLDER = Path(".fuzz")
IN_C = "store-in-c"


def main() -> None:
    """Fuzz each target for a while, one after the other; the exit code is 1 if one is broken."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help=f"one or more of: {' '.join([IN_C, *TARGETS])} (default: all)")
    parser.add_argument("--seconds", type=int, default=int(os.environ.get("FUZZ_SECONDS") or 10), help="for each (10)")
    parser.add_argument("--seed", type=int, default=1, help="of what is random (1)")
    options = parser.parse_args()
    unknown = [each for each in options.target if each not in (IN_C, *TARGETS)]
    if unknown:
        parser.error(f"there is no target {unknown[0]!r}; there are: {' '.join([IN_C, *TARGETS])}")
    FOLDER.mkdir(exist_ok=True)
    broken = 0
    for name in options.target or [IN_C, *TARGETS]:
        try:
            told = _in_c(options.seconds) if name == IN_C else _fuzz(name, options.seconds, options.seed)
            print(f"{name:16} {told}", flush=True)
        except AssertionError as error:
            broken += 1
            print(f"{name:16} BROKEN: {error}\nThe input is in {FOLDER}/, if it is not named above.", flush=True)
    sys.exit(1 if broken else 0)


def _in_c(seconds: int) -> str:
    try:
        build(FOLDER / "store")
    except CannotFuzzError as error:
        return f"NOT FUZZED: {error}"
    seeds(FOLDER / "corpus")
    return f"{run(FOLDER / 'store', FOLDER / 'corpus', seconds)} inputs in {seconds} s"


def _fuzz(name: str, seconds: int, seed: int) -> str:
    if importlib.util.find_spec("atheris") is None:
        began = time.monotonic()
        count = run_many(name, TARGETS[name], seed, float("inf"), seconds)
        return f"{count} inputs in {time.monotonic() - began:.0f} s, without guidance: there is no atheris here"
    found, valid = FOLDER / name, FOLDER / f"{name}.valid"
    for folder in (found, valid):
        folder.mkdir(exist_ok=True)
    for what, data in valid_inputs(name, TARGETS[name]).items():
        (valid / what).write_bytes(data)
    limits = [f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=30", "-rss_limit_mb=1024", "-max_len=4096"]
    command = [sys.executable, "-m", "tests.fuzz.guided", name, *limits, "-print_final_stats=1"]
    command += [f"-artifact_prefix={FOLDER}/{name}-", str(found), str(valid)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        raise BrokenError((ran.stdout + ran.stderr)[-6000:])
    (count,) = re.findall(r"stat::number_of_executed_units:\s+(\d+)", ran.stderr)
    covered = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", ran.stderr)
    edges, features, corpus = covered[-1] if covered else ("?", "?", "?")
    return f"{count} inputs in {seconds} s, {edges} edges covered, {features} features, {corpus} inputs tell them apart"


if __name__ == "__main__":
    main()
