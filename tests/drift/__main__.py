"""Prints what torch has new, gone or changed compared with Rallypoint: `make drift TORCH=2.15.0`.

    python -m tests.drift [TORCH] [--answered]   a version, a wheel, or a folder with torch/; else the installed one
    python -m tests.drift --between OLD NEW      compare two versions of torch

If a version is not installed, its wheel is downloaded and read without running it. The exit code is 1 if a difference
is neither in the contract nor in its differences. `--answered` records that the contract answers this version.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tests.drift.compare import ANSWERED, changes, compare
from tests.drift.theirs import Torch, facts, installed, read


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="?", default=version("torch").partition("+")[0])
    parser.add_argument("--answered", action="store_true")
    parser.add_argument("--between", nargs=2)
    options = parser.parse_args()
    if options.between:
        with _found(options.between[0]) as old, _found(options.between[1]) as new:
            for line in changes(facts(read(old)), facts(read(new))):
                print(f"{line.change:<8}{line.fact}{line.about and f': {line.about}'}")
        return 0
    with _found(options.torch) as where:
        torch = read(where)
    if options.answered:
        ANSWERED.write_text(json.dumps({"version": torch.version, "facts": facts(torch)}, indent=1) + "\n")
    return _report(torch)


def _report(torch: Torch) -> int:
    lines = compare(torch)
    open_lines = [line for line in lines if not line.place]
    print(f"torch {torch.version}: {len(torch.flags)} flags, {len(torch.calls)} names")
    print("\n".join(map(str, lines)))
    print(f"{len(lines)} differences, {len(open_lines)} of them in no place")
    return 1 if open_lines else 0


@contextmanager
def _found(name: str) -> Iterator[Path]:
    """The folder or wheel of a torch."""
    path = Path(name)
    if path.exists():
        yield path
    elif name == version("torch").partition("+")[0]:
        yield installed()
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
            subprocess.run([*command, "--dest", folder, f"torch=={name}"], check=True)
            yield next(Path(folder).glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main())
