"""Runs the checks of this node side by side, and never waits longer than `DEADLINE`.

Laws:

1. Checks that only wait for the network run on threads that are not waited for. Checks that may hang in the kernel (a
   dead network file system, a driver) run in a process of their own: a thread that hangs there would keep this process
   from ending.
2. What has not answered by the deadline is a result as well (`Reading.silence`).
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from rallypoint.base.clock import Deadline
from rallypoint.preflight.checks import READINGS
from rallypoint.preflight.results import CheckResult, Status, warned
from rallypoint.preflight.table import CheckInputs, Reading

DEADLINE = 16.0
"""Seconds that all checks together may take. Where nothing hangs they take some tenths of one."""

_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from rallypoint.preflight.run import main_of_child; "
    "main_of_child()"
)

_Answers = queue.SimpleQueue[tuple[int, list[CheckResult]]]
"""The number of each reading that was done, with its results."""


def run_checks(
    inputs: CheckInputs, seconds: float = DEADLINE, readings: Sequence[Reading[Any]] | None = None
) -> list[CheckResult]:
    """Run all checks, or some.

    Args:
        inputs: what is to be checked.
        seconds: until when what has not answered is given up.
        readings: those of the table whose checks are wanted; None for all.

    Returns:
        One result for each check, in the order of the table.
    """
    deadline = Deadline.after(seconds)
    answers = _Answers()
    wanted = {number: each for number, each in enumerate(READINGS) if readings is None or each in readings}
    hanging = {number: reading for number, reading in wanted.items() if reading.may_hang}
    child = _start_child(inputs, hanging, answers) if hanging else None
    for number in wanted.keys() - hanging.keys():
        try:
            _start_thread(_answer, number, wanted[number], inputs, answers)
        except RuntimeError:  # there may be no more threads, which is one of the things to be told
            _answer(number, wanted[number], inputs, answers)
    found: dict[int, list[CheckResult]] = {}
    while len(found) < len(wanted):
        try:
            number, results = answers.get(timeout=deadline.remaining())
        except queue.Empty:
            break
        found.setdefault(number, results)
    if child is not None:
        child.kill()
        assert child.stdin is not None
        child.stdin.close()
    return [each for number, reading in wanted.items() for each in found.get(number) or reading.silent()]


def _answer(number: int, reading: Reading[Any], inputs: CheckInputs, answers: _Answers) -> None:
    answers.put((number, _results(reading, inputs)))


def _results(reading: Reading[Any], inputs: CheckInputs) -> list[CheckResult]:
    try:
        return reading.results(inputs)
    except Exception as error:
        broken = warned(f"the check itself failed ({type(error).__name__}: {error})", "please report it")
        return [broken.of(each.name) for each in reading.checks]


def _start_thread(work: Any, *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True, name="preflight").start()


# The process for what may hang


def _start_child(
    inputs: CheckInputs, readings: dict[int, Reading[Any]], answers: _Answers
) -> subprocess.Popen[bytes] | None:
    told = json.dumps([list(readings), inputs._replace(coordinators=None)])
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, _FOLDER, told],
            stdin=subprocess.PIPE,  # which ends with this process, and the child with it
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        _give_up(f"the process that checks cannot be started ({error.strerror})", "see `processes`", readings, answers)
        return None
    assert child.stdout is not None
    try:
        _start_thread(_read_child, child, child.stdout, readings, answers)
    except RuntimeError:
        child.kill()
        _read_child(child, child.stdout, readings, answers)
    return child


def _read_child(
    child: subprocess.Popen[bytes], output: IO[bytes], readings: dict[int, Reading[Any]], answers: _Answers
) -> None:
    with output:
        for line in output:
            if not line.endswith(b"\n"):  # it was ended in the middle of it
                break
            number, results = json.loads(line)
            answers.put((number, [CheckResult(name, Status(status), *rest) for name, status, *rest in results]))
    code = child.wait()
    _give_up(
        f"the process that checks ended with code {code} before it answered", "please report it", readings, answers
    )


def _give_up(why: str, remedy: str, readings: dict[int, Reading[Any]], answers: _Answers) -> None:
    """Answer for what the child has not."""
    for number, reading in readings.items():
        answers.put((number, [warned(why, remedy).of(each.name) for each in reading.checks]))


def main_of_child() -> None:
    """The process: each reading on a thread of its own, and a line of JSON for each that is done. It ends at the end of
    its standard input at the latest, whatever hangs."""
    _start_thread(_end_with_parent)
    numbers, told = json.loads(sys.argv[1])
    inputs = CheckInputs(*told)
    answers = _Answers()
    for number in numbers:
        _start_thread(_answer, number, READINGS[number], inputs, answers)
    for _ in numbers:
        print(json.dumps(answers.get()), flush=True)
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
