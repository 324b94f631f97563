"""Reads the files that `--event-log-handler=jsonl:PATH` has written.

Laws:

1. A line that cannot be read costs that line and a sentence, never the others.
2. What a file says is checked here: nothing behind has to ask whether a number can be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.base.errors import UserError
from rallypoint.base.log import printable
from rallypoint.observe.telemetry.agent_events import KINDS, AgentEvent, PhaseBegan, ProgressMade, TorchEvent

_MAX_LINE = 1 << 20
"""Characters of a line; what is longer is none of ours."""
_YEARS = 100 * 366 * 86400.0
_NUMBERED = re.compile(r"\.jsonl(\.[0-9]+)?$")
_UNKNOWN_KIND = re.compile(r"Invalid value '.*' - at `\$\.event`$")


@dataclass
class EventFiles:
    """Events by job, and sentences about what could not be read."""

    events: dict[str, list[KINDS]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_events(paths: Sequence[str]) -> EventFiles:
    """The events in files (with those beside them that were rotated away: PATH.1, PATH.2, ...) and folders of files.

    Raises:
        UserError: one is not there, cannot be read, or there is no event in any.
    """
    found = EventFiles()
    files = list(dict.fromkeys(os.path.realpath(each) for path in paths for each in _files(path)))
    for path in files:
        _read(path, found)
    if not any(found.events.values()):
        why = found.notes[0] if found.notes else f"there is no *.jsonl file in {', '.join(paths)}"
        raise UserError(f"{why}; give files that rallyrun --event-log-handler=jsonl:PATH has written")
    return found


def _files(path: str) -> list[str]:
    """Oldest first."""
    try:
        if os.path.isdir(path):
            names = [os.path.join(path, each) for each in os.listdir(path) if _NUMBERED.search(each)]
        else:
            folder, name = os.path.split(path)
            beside = re.compile(re.escape(name) + r"\.[0-9]+")
            older = [each for each in os.listdir(folder or ".") if beside.fullmatch(each)]
            names = [path, *(os.path.join(folder, each) for each in older)]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return sorted(names, key=lambda each: (_stem(each), -_age(each)))


def _stem(path: str) -> str:
    stem, _, number = path.rpartition(".")
    return stem if number.isdecimal() else path


def _age(path: str) -> int:
    number = path.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


class _Complaints:
    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def add(self, number: int, why: str) -> None:
        self.count += 1
        self.first = self.first or f"line {number}: {why}"


def _read(path: str, found: EventFiles) -> None:
    bad, newer, good, line = _Complaints(), 0, 0, b""
    number = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            event = _checked(_decoder.decode(line))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            if _UNKNOWN_KIND.search(str(error)):
                newer += 1
            elif line.strip():
                bad.add(number, "it is cut off" if not line.endswith(b"\n") else printable(str(error)))
            continue
        good += 1
        if not isinstance(event, TorchEvent):
            found.events.setdefault(event.job, []).append(event)
    if not number:
        found.notes.append(f"{path} is empty")
    elif not good and not newer:
        found.notes.append(f"{path} holds no events of rallyrun ({bad.first})")
    elif bad.count:
        which = "a line is" if bad.count == 1 else f"{bad.count} lines are"
        found.notes.append(f"{which} left out of {path}, which cannot be read ({bad.first})")
    if newer:
        found.notes.append(f"{newer} lines of {path} are of kinds that a newer version writes, and left out")


def _lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while line := file.readline(_MAX_LINE):
                yield line
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


_decoder: msgspec.json.Decoder[KINDS] = msgspec.json.Decoder(KINDS)


def _checked(event: KINDS) -> KINDS:
    _check(event, "elapsed", event.elapsed)
    _check(event, "time", event.time)
    if isinstance(event, ProgressMade):
        _check(event, "age", event.age)
    elif isinstance(event, PhaseBegan):
        _check(event, "seconds", event.seconds)
    return event


def _check(event: AgentEvent, name: str, seconds: float) -> None:
    if not 0 <= seconds <= _YEARS:
        raise ValueError(f"its {name} is {seconds}")
