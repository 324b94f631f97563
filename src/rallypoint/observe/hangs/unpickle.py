"""Turns the pickle of a flight recorder into JSON, in a process of its own: `unpickled` starts it.

Laws:

1. A pickle is read by something that admits containers, numbers and texts only: whatever class or function it names is
   refused. torch writes no other.
2. A few bytes can make pickle take all memory and time even so: that is the child's, which may take `_MEMORY` and
   `_SECONDS`, and ends with them. The agent never unpickles. Values that refer to one another many times can be small
   as a pickle and large as JSON: what comes out has at most `MAX_JSON` bytes.
3. The child imports nothing but Python's own modules.
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
"""Bytes of the JSON."""
_SECONDS = 10
"""Of processor time."""
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_BOOTSTRAP = """import sys
sys.path.insert(0, sys.argv.pop(1))
from rallypoint.observe.hangs.unpickle import main_of_child
main_of_child()"""


class PlainUnpickler(pickle.Unpickler):
    """Reads what has no classes and no functions in it."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it names something outside of it")


def unpickled(file: IO[bytes], timeout: float) -> bytes:
    """The value of a pickle as JSON, within `timeout` seconds.

    Raises:
        ValueError: it is no whole pickle of plain values, or takes too long.
        OSError: no process can be started.
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
    """Read a pickle on standard input, write JSON on standard output; exits with another code than 0 if that fails."""
    for what, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    value = PlainUnpickler(sys.stdin.buffer).load()
    _check_size(value)
    text = json.dumps(value)
    if len(text) > MAX_JSON:
        raise ValueError(f"as JSON it has {len(text)} bytes")
    sys.stdout.write(text)


def _check_size(value: object) -> None:
    """Raises: ValueError: as JSON the value would have more than `MAX_JSON` bytes: found before any of it is made."""
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
