"""Converts a flight recorder's pickle to JSON, in a child process that `unpickled` starts.

Laws:

1. The unpickler accepts only containers, numbers and texts, which is all that torch writes. It refuses any class or
   function.
2. Even so, a few bytes can make pickle use all memory and time. So the agent never unpickles; the child does, and ends
   at its limits `_MEMORY` and `_SECONDS`. Values that refer to each other many times can be small as a pickle and large
   as JSON, so the output has at most `MAX_JSON` bytes.
3. The child imports only Python's own modules.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from typing import IO, NoReturn

_MEMORY = 2 * 1024**3
"""Bytes of address space."""
MAX_JSON = 32 * 1024 * 1024
"""Maximum size of the JSON in bytes."""
_SECONDS = 10
"""Seconds of processor time."""
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_BOOTSTRAP = """import sys
sys.path.insert(0, sys.argv.pop(1))
from rallypoint.observe.hangs.unpickle import main_of_child
main_of_child()"""


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle that contains no classes or functions."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside of it")


def unpickled(file: IO[bytes], timeout: float) -> bytes:
    """Convert a pickle to JSON, within `timeout` seconds.

    Raises:
        ValueError: the pickle is incomplete, contains other than plain values, or takes too long.
        OSError: no process can start.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, _FOLDER],
            stdin=file,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError("reading it takes too long") from None
    if done.returncode:
        raise ValueError("it is not a pickle of plain values")
    return done.stdout


def main_of_child() -> None:
    """Read a pickle from standard input and write JSON to standard output; exit with a nonzero code on failure."""
    for what, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    value = PlainUnpickler(sys.stdin.buffer).load()
    _check_size(value)
    text = json.dumps(value)
    if len(text) > MAX_JSON:
        raise ValueError(f"as JSON it is {len(text)} bytes long")
    sys.stdout.write(text)


def _check_size(value: object) -> None:
    """Raise ValueError, before creating any JSON, if it would exceed `MAX_JSON` bytes."""
    size, pending = 0, [value]
    while pending:
        part = pending.pop()
        size += len(part) if isinstance(part, str) else 1
        if isinstance(part, dict):
            size += len(part)
            pending += part
            pending += part.values()
        elif isinstance(part, list | tuple):
            size += len(part)
            pending += part
        if size > MAX_JSON:
            raise ValueError("as JSON it is too large")
