"""The drives of `raw_load` and `startup_replay` in C (`raw_drive.c`), for where there is a compiler.

A load in Python costs more than the fastest server: it would be the bottleneck, and all servers look alike under it.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.programs.raw_wire import LoadError, Step
from benchmarks.recording import Dialogue

_SOURCE = Path(__file__).with_suffix(".c")
_MOST_LATENCIES = 4_000_000
FAILURES = {
    -1: "the server closed a connection",
    -2: "the server answered wrongly, or more than it was asked",
    -3: "the server answered nobody for long",
    -4: "a client's socket could not be had",
}


class _Step(ctypes.Structure):
    _fields_ = (
        ("message", ctypes.c_char_p),
        ("size", ctypes.c_int),
        ("requests", ctypes.c_int),
        ("reply_size", ctypes.c_int),
        ("reply", ctypes.c_char_p),
    )


class _Dialogue(ctypes.Structure):
    _fields_ = (
        ("messages", ctypes.POINTER(ctypes.c_char_p)),
        ("sizes", ctypes.POINTER(ctypes.c_int)),
        ("replies", ctypes.POINTER(ctypes.c_int)),
        ("count", ctypes.c_int),
    )


def build(source: Path = _SOURCE) -> ctypes.CDLL | None:
    """The library, built now; None where there is no compiler that can."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/drive.so"
        return ctypes.CDLL(target) if compile_library(source, target) else None


def compile_library(source: Path, target: str) -> bool:
    """Whether there is a compiler that can."""
    command = ["cc", "-std=c11", "-O2", "-Wall", "-fPIC", "-shared", str(source), "-o", target]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def drive(
    library: ctypes.CDLL, descriptors: Sequence[int], cycles: Sequence[Sequence[Step]], seconds: float
) -> tuple[int, float, list[float]]:
    """As `raw_load.TimerClients.drive`. Raises LoadError."""
    steps = [step for cycle in cycles for step in cycle]
    table = (_Step * len(steps))(
        *[_Step(step.message, len(step.message), step.requests, step.reply_length, step.reply) for step in steps]
    )
    requests, elapsed, taken = ctypes.c_long(), ctypes.c_double(), ctypes.c_long()
    latencies = (ctypes.c_float * _MOST_LATENCIES)()
    failure = library.drive(
        len(descriptors),
        (ctypes.c_int * len(descriptors))(*descriptors),
        table,
        ctypes.c_double(seconds),
        ctypes.byref(requests),
        ctypes.byref(elapsed),
        latencies,
        ctypes.c_long(_MOST_LATENCIES),
        ctypes.byref(taken),
    )
    if failure:
        raise LoadError(FAILURES[failure])
    return requests.value, elapsed.value, latencies[: taken.value]


def replay(library: ctypes.CDLL, descriptors: Sequence[int], dialogues: Sequence[Dialogue]) -> list[float]:
    """Each of these connections says what was recorded. Latencies of what is answered at once. Raises LoadError."""
    table = (_Dialogue * len(dialogues))()
    for place, dialogue in enumerate(dialogues):
        count = len(dialogue.messages)
        table[place] = _Dialogue(
            (ctypes.c_char_p * count)(*dialogue.messages),
            (ctypes.c_int * count)(*map(len, dialogue.messages)),
            (ctypes.c_int * count)(*dialogue.replies),
            count,
        )
    latencies = (ctypes.c_float * _MOST_LATENCIES)()
    taken = ctypes.c_long()
    failure = library.replay(
        len(descriptors),
        (ctypes.c_int * len(descriptors))(*descriptors),
        table,
        latencies,
        ctypes.c_long(_MOST_LATENCIES),
        ctypes.byref(taken),
    )
    if failure:
        raise LoadError(FAILURES[failure])
    return latencies[: taken.value]
