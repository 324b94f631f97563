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

1. Values of the environment are in messages only, and never on a command line.
2. Before `Start`, a supervisor's lines begin with `MARK`, so that what a login shell prints is told from them. After
   it, its standard output is the command's, and `Ended` stands at the very end, behind `end_mark`.
3. What comes from the other side is bounded and checked against these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated

import msgspec

from rallypoint.control.protocol.validation import decoded

MARK = b"rallypoint-supervisor "
LONGEST_ANSWER = 64 * 1024
"""Bytes of what a supervisor says before the start, and of what a login shell prints before it."""
LONGEST_REQUEST = 8 * 1024 * 1024
"""Bytes of a launcher's line; an environment of more than a quarter of the stack's limit cannot be handed on anyway."""
LONGEST_END = 4096
CANNOT_START = 126
"""The shell's code for a command that is there and cannot be run."""


class SupervisorHello(msgspec.Struct, frozen=True, tag=True):
    """`address` is that at which the supervisor was reached; empty where sshd does not say."""

    version: str
    address: str


class EndpointFound(msgspec.Struct, frozen=True, tag=True):
    """Where the job's control plane can listen on this host."""

    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Ready(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It cannot, and why: the end of a sentence that begins with the host."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The command has ended, and all that it left.

    `code` is its exit code, -N for death by signal N; `why` says why it was ended, where the supervisor did that.
    """

    code: Annotated[int, msgspec.Meta(ge=-64, le=255)]
    why: str = ""


class FindEndpoint(msgspec.Struct, frozen=True, tag=True):
    """Name an address of this host, and a free port. `towards` is the address of another host, empty for none."""

    towards: str


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """The command that will be started.

    `lost_after` are the seconds of silence after which the launcher counts as lost; `grace` those between SIGTERM and
    SIGKILL then; `nonce` is for `end_mark`.
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
    """Send the command a signal; with `kill_after`, end all that is left so many seconds later."""

    number: int
    kill_after: float | None = None


Request = FindEndpoint | Prepare | Start | Alive | Signal
Answer = SupervisorHello | EndpointFound | Ready | Refused | Ended

_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    return msgspec.json.encode(message)


def decode_request(line: bytes) -> Request:
    """Raises ValueError if it is no message."""
    return decoded(_REQUESTS, line)


def decode_answer(line: bytes) -> Answer:
    """Raises ValueError if it is no message."""
    answer = decoded(_ANSWERS, line)
    if isinstance(answer, SupervisorHello | EndpointFound) and answer.address:
        ip_address(answer.address)
    return answer


def end_mark(nonce: str) -> bytes:
    """What stands before `Ended` in the output of a command."""
    return b"\0" + MARK + nonce.encode() + b" "


def portable(text: str) -> str:
    """An argument, a path or a variable, which may be any bytes, as a text that a message can hold: byte by byte."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")
