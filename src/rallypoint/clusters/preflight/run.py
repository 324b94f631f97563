"""The table of all checks, and a parallel run of them that never takes longer than `DEADLINE`.

Laws:

1. Checks that only wait for the network run on threads that nobody waits for. Checks that can hang in the kernel (a
   dead network file system, a driver) run in a separate process: a hung thread would prevent this process from exiting.
2. A check that does not answer by the deadline has a result too (`Check.silence`).
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
from rallypoint.clusters.preflight import machine, network
from rallypoint.clusters.preflight.results import Check, CheckInputs, CheckResult, Status, failed, skipped, warned


def _no_answer(what: str) -> CheckResult:
    remedy = "if it is a network file system, check that its server is up; otherwise use another folder"
    return failed(f"{what} does not answer", remedy)


LOG_SPACE = Check(("log-space",), machine.log_space, _no_answer("the log folder"), may_hang=True)

CHECKS = (
    Check(("shared-memory",), machine.shared_memory, _no_answer("shared memory"), may_hang=True),
    Check(("temp-space",), machine.temp_space, _no_answer("the temporary folder"), may_hang=True),
    LOG_SPACE,
    Check(("kernel",), machine.kernel, skipped("the kernel could not be asked in time")),
    Check(
        ("open-files", "locked-memory", "processes"),
        machine.process_limits,
        skipped("the limits could not be read in time"),
    ),
    Check(("cpus",), machine.cpus, skipped("the processors could not be counted in time"), may_hang=True),
    Check(
        ("host-name",),
        network.own_name,
        warned("the lookup of this machine's own name was not answered", "check the DNS servers"),
    ),
    Check(
        ("endpoint", "control-plane", "port", "clock"),
        network.endpoint,
        warned("the endpoint could not be checked in time", "check whether DNS and the endpoint answer"),
    ),
    Check(("proxy",), network.proxy, skipped("the environment could not be read in time")),
    Check(
        ("gpus", "gpu-memory"),
        machine.gpus,
        warned(
            "the NVIDIA driver does not answer", "check `nvidia-smi`, and enable persistence mode (`nvidia-smi -pm 1`)"
        ),
        may_hang=True,
    ),
    Check(("xid",), machine.xid, skipped("the kernel log could not be read in time")),
)
"""All checks, in the order in which they are shown; `docs/how-to/preflight.md` describes each."""

NAMES = tuple(name for check in CHECKS for name in check.names)

DEADLINE = 16.0
"""Seconds for all checks together. Unless something hangs, they take a few tenths of a second."""

_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from rallypoint.clusters.preflight.run import main_of_child; "
    "main_of_child()"
)

_Answers = queue.SimpleQueue[tuple[int, list[CheckResult]]]
"""The number of each finished check, with its results."""


def run_checks(
    inputs: CheckInputs, seconds: float = DEADLINE, checks: Sequence[Check] | None = None
) -> list[CheckResult]:
    """Run all checks, or some; do not wait longer than `seconds` for any.

    Returns:
        One result per name, in the order of the table.
    """
    deadline = Deadline.after(seconds)
    answers = _Answers()
    selected = {number: check for number, check in enumerate(CHECKS) if checks is None or check in checks}
    hanging = {number: check for number, check in selected.items() if check.may_hang}
    child = _start_child(inputs, hanging, answers) if hanging else None
    for number in selected.keys() - hanging.keys():
        try:
            _start_thread(_answer, number, selected[number], inputs, answers)
        except RuntimeError:  # no more threads, which one of the findings reports
            _answer(number, selected[number], inputs, answers)
    by_check: dict[int, list[CheckResult]] = {}
    while len(by_check) < len(selected):
        try:
            number, results = answers.get(timeout=deadline.remaining())
        except queue.Empty:
            break
        by_check.setdefault(number, results)
    if child is not None:
        child.kill()
        assert child.stdin is not None
        child.stdin.close()
    return [
        result
        for number, check in selected.items()
        for result in by_check.get(number) or check.for_all_names(check.silence)
    ]


def _answer(number: int, check: Check, inputs: CheckInputs, answers: _Answers) -> None:
    answers.put((number, check.results(inputs)))


def _start_thread(work: Any, *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True, name="preflight").start()


# The process for checks that can hang


def _start_child(inputs: CheckInputs, checks: dict[int, Check], answers: _Answers) -> subprocess.Popen[bytes] | None:
    arguments = json.dumps([list(checks), inputs._replace(coordinators=None)])
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, _FOLDER, arguments],
            stdin=subprocess.PIPE,  # its end ends the child when this process is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        _give_up(
            f"the process that checks cannot be started ({error.strerror})",
            "see the check `processes`",
            checks,
            answers,
        )
        return None
    assert child.stdout is not None
    try:
        _start_thread(_read_child, child, child.stdout, checks, answers)
    except RuntimeError:
        child.kill()
        _read_child(child, child.stdout, checks, answers)
    return child


def _read_child(child: subprocess.Popen[bytes], output: IO[bytes], checks: dict[int, Check], answers: _Answers) -> None:
    with output:
        for line in output:
            if not line.endswith(b"\n"):  # the child was killed while writing a line
                break
            number, results = json.loads(line)
            answers.put((number, [CheckResult(name, Status(status), *rest) for name, status, *rest in results]))
    code = child.wait()
    _give_up(f"the process that checks exited with code {code} before it answered", "please report it", checks, answers)


def _give_up(why: str, remedy: str, checks: dict[int, Check], answers: _Answers) -> None:
    for number, check in checks.items():
        answers.put((number, check.for_all_names(warned(why, remedy))))


def main_of_child() -> None:
    """Run each check on a separate thread in the child process, and write one line of JSON per finished check. Returns
    when standard input ends or earlier, even if checks hang.
    """
    _start_thread(_end_with_parent)
    numbers, fields = json.loads(sys.argv[1])
    inputs = CheckInputs(*fields)
    answers = _Answers()
    for number in numbers:
        _start_thread(_answer, number, CHECKS[number], inputs, answers)
    for _ in numbers:
        print(json.dumps(answers.get()), flush=True)
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
