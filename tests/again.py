"""Runs what has failed in the last test run once more, alone: `python -m tests.again`.

A test with processes can fail because others share its two cores. If it passes alone, there is a race all the same, in
the product or in the test: it does not fail the run, and is named at the run's end as a defect to mend next. Laws:

1. Only tests that start processes get a second run: any other test gives the same answer each time.
2. Only a few do. If many fail, the change is at fault and not the machine.
3. Nothing is run a third time.
"""

from __future__ import annotations

import subprocess
import sys

from tests import outcomes
from tests.outcomes import Ended

_MOST = 5


def deserving(ended: list[Ended]) -> list[str]:
    """The names of the tests that are run once more: all that have failed, or none."""
    failed = [each for each in ended if each.outcome == "failed"]
    if len(failed) > _MOST or any("process" not in each.needs for each in failed):
        return []
    return [each.name for each in failed]


def main() -> int:
    """Returns the exit code: 0 if all that had failed has passed now."""
    names = deserving(outcomes.read())
    if not names:
        return 1
    print(f"\n{len(names)} failed that start processes; they are run once more, alone", flush=True)
    alone = [sys.executable, "-m", "pytest", "--outcomes=build/again.txt", *names]
    code = subprocess.run(alone, check=False).returncode
    if code == 0:
        print("DEFECTS TO MEND NEXT: these failed beside other tests, and passed alone:", *names, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main())
