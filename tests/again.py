"""Runs the failed tests of the last run once more, alone: `python -m tests.again`.

A test with processes can fail because other tests share its two cores. If it then passes alone, the product or the test
has a race. Such a test does not fail the run; the end of the output lists it as a defect to fix next. Laws:

1. Only tests that start processes run again: any other test gives the same result each time.
2. Only a few tests run again. If many fail, the change is the cause and not the machine.
3. No test runs a third time.
"""

from __future__ import annotations

import subprocess
import sys

from tests import outcomes
from tests.outcomes import Ended

_MOST = 5


def deserving(ended: list[Ended]) -> list[str]:
    """The names of the tests to run again: all that failed, or none."""
    failed = [each for each in ended if each.outcome == "failed"]
    if len(failed) > _MOST or any("process" not in each.needs for each in failed):
        return []
    return [each.name for each in failed]


def main() -> int:
    """Returns the exit code: 0 if every failed test passed now."""
    names = deserving(outcomes.read())
    if not names:
        return 1
    print(f"\n{len(names)} tests with processes failed; running them once more, alone", flush=True)
    alone = [sys.executable, "-m", "pytest", "--outcomes=build/again.txt", *names]
    code = subprocess.run(alone, check=False).returncode
    if code == 0:
        print("DEFECTS TO FIX NEXT: these tests failed beside others and passed alone:", *names, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main())
