"""`python -m tests.fuzz.guided TARGET [libFuzzer's arguments]`: one target under atheris, guided by coverage."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["rallypoint"]):
    from tests.fuzz.table import TARGETS
    from tests.fuzz.target import run_bounded


def main(name: str, *arguments: str) -> None:
    """Fuzz until libFuzzer ends the process."""
    target = TARGETS[name]

    def run(data: bytes) -> None:
        run_bounded(name, target, "this input", data, measure=False)

    atheris.Setup([sys.argv[0], *arguments], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
