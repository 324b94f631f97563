"""`python -m tests.fuzz [SECONDS]`: fuzz the store in C; what is found to be new is kept in `.fuzz/`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fuzz.store import CannotFuzzError, build, run, seeds


def main(seconds: str = "60") -> None:
    """Build, and fuzz for so many seconds."""
    folder = Path(".fuzz")
    folder.mkdir(exist_ok=True)
    try:
        build(folder / "store")
    except CannotFuzzError as error:
        sys.exit(f"NOT FUZZED: the store in C: {error}")
    seeds(folder / "corpus")
    try:
        count = run(folder / "store", folder / "corpus", int(seconds))
    except AssertionError as error:
        sys.exit(f"{error}\nBROKEN: the input that broke it is in {folder}/")
    print(f"the store in C: {count} inputs in {seconds} s, none of which broke it")


if __name__ == "__main__":
    main(*sys.argv[1:])
