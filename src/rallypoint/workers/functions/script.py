"""A script as a function: `--run-path` (contract section 1.7)."""

from __future__ import annotations

import sys


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this process, as its main program.

    Args:
        training_script: its path.
        training_script_args: its arguments.
    """
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")
