"""Classifies failures by their texts: whether another failure caused it, whether a restart can help, and whether two
failures are the same. Pure.

Laws:

1. A *consequence* is the effect of one failure on another process: its collective times out or is aborted, its peer or
   its store is gone, its watchdog ends it. Everything else, including everything not in the table, is an *original*.
2. A failure is identified by its last line without the parts that differ between processes: pids, ports, addresses,
   descriptor numbers, uuids, temporary names. The rank is ignored, since all ranks run the same program.
3. A restart cannot fix a failure whose cause is in the program's files, its interpreter or its arguments.
"""

from __future__ import annotations

import re

from rallypoint.failures.cause import Cause
from rallypoint.failures.texts import first_line
from rallypoint.failures.tracebacks import exception_line, is_said_after, last_traceback

_MAX_LINE = 512
"""Maximum characters of a last line that identify a failure."""

_CONSEQUENCES = (
    # gloo
    r"Connection closed by peer \[",
    r"(?:Read|Write) error \[[^]]*\](?::\d+)?: (?:Connection reset by peer|Broken pipe)",
    r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
    r"Application timeout caused pair closure",
    r"Rank \d+ (?:successfully reached monitoredBarrier, but received errors|failed to pass monitoredBarrier)",
    r"Ranks? [\d, ]+ failed to pass monitoredBarrier",
    # NCCL and UCC, as torch reports them
    r"Watchdog caught collective operation timeout",
    r"NCCL (?:communicator was aborted|watchdog thread terminated|timeout)",
    r"nccl(?:RemoteError|InProgress)",
    r"remote process exited or there was a network error",
    r"Some NCCL operations have failed or timed out",
    r"To avoid data inconsistency, we are taking the entire process down",
    r"ProcessGroup(?:NCCL|Gloo|UCC)[^\n]*(?:timed out|timeout|aborted)",
    r"The rendezvous has expired|collective operation[^\n]* timed out",
    # the worker store
    r"(?:DistNetworkError|DistStoreError)\b",
    r"TCPStore[^\n]*(?:Broken pipe|closed|timed out|reset)|(?:recvValue|sendBytes) failed",
    r"Socket Timeout|wait timeout after \d+ms, keys:",
    # MPI, and launchers below us
    r"MPI_ABORT was invoked|(?:mpirun|prterun)[^\n]* noticed that process",
    # JAX
    r"(?:coordination service|Coordination service)[^\n]*(?:heartbeat|unavailable|disconnected|shut down)",
    r"Terminating process because the (?:coordinator|JAX distributed service) detected fatal errors",
)
_IS_CONSEQUENCE = re.compile("|".join(_CONSEQUENCES))
_IS_LOST_PEER = re.compile(r"\b(?:ConnectionResetError|BrokenPipeError|ConnectionAbortedError|EOFError)\b")
"""Errors that might be a consequence, or might come from a service that failed."""

_CANNOT_CHANGE = re.compile(
    r"^(?:\[[^]]{1,40}\]:? ?)?(?:"
    r"ModuleNotFoundError: |ImportError: (?:cannot import name|attempted relative import)"
    r"|(?:SyntaxError|IndentationError|TabError): |NameError: name "
    r"|\S*python\S*: (?:can't open file|No module named|Error while finding module))"
)
_USAGE_ERROR = re.compile(r"^[^\n]*: error: ", re.MULTILINE)
_USAGE_CODE = 2
"""Exit code of argument parsers: argparse, click, most uses of getopt."""

_VARIABLE = (
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "<uuid>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<address>"),
    (re.compile(r"(?:/[^\s'\":,]*)?/(?:tmp|shm)[^\s'\":,]*"), "<temporary path>"),
    (re.compile(r"\[?(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-f]*:[0-9a-f:]*:[0-9a-f]*)\]?:\d+", re.IGNORECASE), "<peer>"),
    (
        re.compile(r"\b((?:pids?|process(?:es)?|port|fd|rank|worker|node)\W{0,3})\d+", re.IGNORECASE),
        r"\1<n>",
    ),
    (re.compile(r"\b(at|after|for|in) \d+(?:\.\d+)? ?(ms|s|sec|seconds)\b"), r"\1 <n> \2"),
)


def is_consequence(cause: Cause) -> bool:
    """Whether another failure caused this one (law 1)."""
    if cause.rank < 0:
        return False
    # A library that ends its process with a signal wrote the reason somewhere above the stacks.
    text = f"{cause.message}\n{cause.traceback}" if cause.exitcode < 0 else _last_line(cause)
    return _IS_CONSEQUENCE.search(text) is not None


def is_consequence_text(line: str) -> bool:
    """Whether a line that names an exception might belong to a consequence."""
    return _IS_CONSEQUENCE.search(line) is not None or _IS_LOST_PEER.search(line) is not None


def may_be_consequence(cause: Cause) -> bool:
    """Whether another failure might have caused this one, so that a short search for it is worthwhile."""
    return is_consequence(cause) or (cause.exitcode > 0 and _IS_LOST_PEER.search(_last_line(cause)) is not None)


def cannot_change(cause: Cause) -> bool:
    """Whether the program will fail in the same way after every restart (law 3)."""
    if cause.rank < 0 or cause.exitcode < 0:
        return False
    if _CANNOT_CHANGE.match(_last_line(cause)):
        return True
    return cause.exitcode == _USAGE_CODE and _USAGE_ERROR.search(cause.traceback) is not None


def signature(cause: Cause) -> str:
    """The text that two failures share if they are the same (law 2)."""
    if cause.exitcode < 0:
        return f"signal {-cause.exitcode}"  # this message might name the process, which differs
    line = _last_line(cause)
    for pattern, word in _VARIABLE:
        line = pattern.sub(word, line)
    return line[:_MAX_LINE]


def _last_line(cause: Cause) -> str:
    """The line that names the exception, or the last words after a survived one; else the last line."""
    lines = (cause.traceback or cause.message).rstrip().splitlines()
    if is_said_after(cause.message, cause.traceback):
        return first_line(cause.message)
    if traceback := last_traceback(lines):  # our own notes might follow it
        return exception_line(traceback)
    return lines[-1].strip() if lines else ""
