"""The messages between `rallyctl launch` and its supervisor on a host over ssh: one JSON object per line. Pure.

    supervisor                      launcher
    SupervisorHello           ->
                              <-    FindEndpoint      to the first host only
    EndpointFound             ->
                              <-    Prepare           the command, its folder and environment
    Ready or Refused          ->
                              <-    Start             when all hosts are ready
    the command's output      ->
                              <-    Alive, Signal
    Ended                     ->

Laws:

1. Values of the environment are only sent in messages, never on a command line.
2. Before `Start`, a supervisor's lines begin with `MARK`, which distinguishes them from a login shell's output. After
   it, the supervisor's standard output is the command's, and ends with `Ended`, after `end_mark`.
3. Data from the other side is limited in size and checked against these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated

import msgspec

from rallypoint.control.protocol.validation import decoded

MARK = b"rallypoint-supervisor "
LONGEST_ANSWER = 64 * 1024
"""Maximum bytes of a supervisor's answer before the start, and of a login shell's output before it."""
LONGEST_REQUEST = 8 * 1024 * 1024
"""Maximum bytes of a launcher's line. Environments larger than a quarter of the stack's limit are impossible anyway.
"""
LONGEST_END = 4096
CANNOT_START = 126
"""The shell's code if a command exists but cannot run."""


class SupervisorHello(msgspec.Struct, frozen=True, tag=True):
    """`address` is where the supervisor was reached; empty if sshd does not provide it."""

    version: str
    address: str


class EndpointFound(msgspec.Struct, frozen=True, tag=True):
    """The address at which this host could run the job's control plane."""

    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Ready(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request is refused. The reason continues a sentence that begins with the host."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The command and all its leftover processes have ended.

    `code` is its exit code, -N after signal N; `why` is the supervisor's reason for ending it, if it did.
    """

    code: Annotated[int, msgspec.Meta(ge=-64, le=255)]
    why: str = ""


class FindEndpoint(msgspec.Struct, frozen=True, tag=True):
    """Ask for an address of this host and a free port. `towards` is another host's address, empty for none."""

    towards: str


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """The command to start.

    `lost_after` is how many seconds of silence mean that the launcher is lost; `grace` is then the time between SIGTERM
    and SIGKILL in seconds; `nonce` is for `end_mark`.
    """

    command: list[str]
    folder: str
    environment: Mapping[str, str]
    lost_after: float
    grace: float
    nonce: str


class Start(msgspec.Struct, frozen=True, tag=True):
    pass


class Alive(msgspec.Struct, frozen=True, tag=True):
    pass


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send the command a signal; with `kill_after`, kill all remaining processes after that many seconds."""

    number: int
    kill_after: float | None = None


Request = FindEndpoint | Prepare | Start | Alive | Signal
Answer = SupervisorHello | EndpointFound | Ready | Refused | Ended

_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    return msgspec.json.encode(message)


def decode_request(line: bytes) -> Request:
    """Decode a launcher's message. Raises ValueError if it is malformed."""
    return decoded(_REQUESTS, line)


def decode_answer(line: bytes) -> Answer:
    """Decode a supervisor's message. Raises ValueError if it is malformed."""
    answer = decoded(_ANSWERS, line)
    if isinstance(answer, SupervisorHello | EndpointFound) and answer.address:
        ip_address(answer.address)
    return answer


def end_mark(nonce: str) -> bytes:
    """The mark that precedes `Ended` in a command's output."""
    return b"\0" + MARK + nonce.encode() + b" "


def portable(text: str) -> str:
    """Convert an argument, path or variable with any bytes to text for a message, byte by byte."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")
