"""`rallyctl report`: reads the files that `--event-log-handler=jsonl:PATH` wrote, and prints the account of a job's
time (`goodput`) as text or JSON.

Laws for reading:

1. An unreadable line costs only that line, and is mentioned in a sentence.
2. Values are checked here, so that later code can rely on them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rallypoint.base.errors import UserError
from rallypoint.base.log import printable
from rallypoint.observe.goodput import Loss, RecoveryTime, Report, RoundEntry
from rallypoint.observe.status import duration, moment, table
from rallypoint.observe.telemetry.agent_events import KINDS, AgentEvent, PhaseBegan, ProgressMade, TorchEvent

_MAX_LINE = 1 << 20
"""Maximum number of characters per line; a longer one is not ours."""
_YEARS = 100 * 366 * 86400.0
_NUMBERED = re.compile(r"\.jsonl(\.[0-9]+)?$")
_UNKNOWN_KIND = re.compile(r"Invalid value '.*' - at `\$\.event`$")


@dataclass
class EventFiles:
    """Events by job, and sentences about unreadable lines."""

    events: dict[str, list[KINDS]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_events(paths: Sequence[str]) -> EventFiles:
    """Read events from files (including rotated ones: PATH.1, PATH.2, ...) and folders of files. Raises UserError if
    one is missing or unreadable, or none has an event.
    """
    contents = EventFiles()
    files = list(dict.fromkeys(os.path.realpath(file) for path in paths for file in _files(path)))
    for path in files:
        _read(path, contents)
    if not any(contents.events.values()):
        why = contents.notes[0] if contents.notes else f"no *.jsonl file was found in {', '.join(paths)}"
        raise UserError(f"{why}; use files written by rallyrun --event-log-handler=jsonl:PATH")
    return contents


def _files(path: str) -> list[str]:
    """The files at a path, oldest first."""
    try:
        if os.path.isdir(path):
            names = [os.path.join(path, name) for name in os.listdir(path) if _NUMBERED.search(name)]
        else:
            folder, name = os.path.split(path)
            beside = re.compile(re.escape(name) + r"\.[0-9]+")
            older = [name for name in os.listdir(folder or ".") if beside.fullmatch(name)]
            names = [path, *(os.path.join(folder, name) for name in older)]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return sorted(names, key=lambda file: (_stem(file), -_age(file)))


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


def _read(path: str, contents: EventFiles) -> None:
    bad, newer, good, line = _Complaints(), 0, 0, b""
    number = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            event = _checked(_decoder.decode(line))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            if _UNKNOWN_KIND.search(str(error)):
                newer += 1
            elif line.strip():
                bad.add(number, "it is truncated" if not line.endswith(b"\n") else printable(str(error)))
            continue
        good += 1
        if not isinstance(event, TorchEvent):
            contents.events.setdefault(event.job, []).append(event)
    if not number:
        contents.notes.append(f"{path} is empty")
    elif not good and not newer:
        contents.notes.append(f"{path} contains no events of rallyrun ({bad.first})")
    elif bad.count:
        which = "a line was" if bad.count == 1 else f"{bad.count} lines were"
        contents.notes.append(f"{which} skipped in {path}: not readable ({bad.first})")
    if newer:
        contents.notes.append(f"{newer} lines of {path} were skipped: they are of kinds that a newer version writes")


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


VERSION = 1

_MAX_HOSTS = 10
"""How many hosts to list: those with the most restarts."""
_BRIEF = 0.005
"""Shorter parts of a recovery, in seconds, are omitted."""

LOSS_WORDS: Mapping[Loss, str] = {
    Loss.RENDEZVOUS: "waiting for nodes (rendezvous)",
    Loss.RESTART: "starting and stopping workers (restart)",
    Loss.LOST_WORK: "work after the last progress (lost work)",
    Loss.HELD_BACK: "held back after failures (back-off)",
    Loss.DOWN: "no agent running",
}
CAUSE_WORDS = {
    "failure": "worker failed",
    "lost": "node lost",
    "departed": "node left",
    "gave_up": "node gave up",
    "drained": "membership changed",
    "requested": "operator restart",
    "forgotten": "unknown",
}


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def cause_words(cause: str) -> str:
    return CAUSE_WORDS.get(cause, printable(cause))


def report_lines(report: Report) -> list[str]:
    return [*_head(report), "", *_times(report), *_restarts(report), *_slowest(report), *_notes(report)]


def summary(report: Report) -> list[tuple[str, str]]:
    between = report.mean_time_between_failures
    return [
        ("outcome", report.outcome + (f": {printable(report.detail)}" if report.detail else "")),
        ("wall time", duration(report.wall)),
        ("productive time", f"{duration(report.productive)} ({percent(report.productive, report.wall)})"),
        ("effective training time ratio", f"{report.ratio:.4f}"),
        ("rounds, restarts", f"{len(report.rounds)}, {len(report.restarts)}"),
        ("failures", str(report.failures)),
        ("mean time between failures", "-" if between is None else duration(between)),
    ]


def _head(report: Report) -> Iterator[str]:
    nodes = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
    yield f"job {printable(report.job)} on {nodes}, from {moment(report.began)}"
    yield from table([(f"  {name}", value) for name, value in summary(report)])


def _times(report: Report) -> Iterator[str]:
    yield "time"
    rows = [("  productive", f"{report.productive:.1f} s", percent(report.productive, report.wall))]
    rows += [
        (f"  {LOSS_WORDS[loss]}", f"{seconds:.1f} s", percent(seconds, report.wall))
        for loss, seconds in report.lost.items()
    ]
    yield from table([*rows, ("  wall time", f"{report.wall:.1f} s", "")])


def _restarts(report: Report) -> Iterator[str]:
    if not report.restarts:
        return
    yield ""
    yield "restarts by cause"
    yield from table([(f"  {cause_words(cause)}", str(count)) for cause, count in report.restarts_by_cause.items()])
    yield ""
    yield "restarts by host"
    hosts = list(report.restarts_by_host.items())
    yield from table([(f"  {printable(host)}", str(count)) for host, count in hosts[:_MAX_HOSTS]])
    if len(hosts) > _MAX_HOSTS:
        yield f"  and {len(hosts) - _MAX_HOSTS} more hosts"


def _slowest(report: Report) -> Iterator[str]:
    slowest = report.slowest_recoveries()
    if not slowest:
        return
    yield ""
    yield "slowest recoveries (end of a round to the start of the next round's workers)"
    yield from table([_recovery(round_) for round_ in slowest])


def recovery_parts(recovery: RecoveryTime) -> str:
    """The parts of a recovery, such as `stopping 1.02 s, starting 0.05 s`."""
    longest = {name: seconds for name, seconds in recovery.parts.items() if seconds >= _BRIEF}
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.2f} s" for name, seconds in longest.items())


def _recovery(entry: RoundEntry) -> tuple[str, ...]:
    assert entry.recovery is not None
    why = f"{cause_words(entry.cause)} on {printable(entry.host)}" if entry.host else cause_words(entry.cause)
    return f"  {entry.recovery.seconds:.2f} s", f"round {entry.number}", f"{why} ({recovery_parts(entry.recovery)})"


def _notes(report: Report) -> Iterator[str]:
    if report.notes:
        yield ""
        yield from (f"note: {printable(note, 1000)}" for note in report.notes)


def report_json(report: Report) -> str:
    """The report as JSON; see `docs/reference/report.md`."""
    return json.dumps(report_fields(report), indent=2)


def report_fields(report: Report) -> dict[str, Any]:
    between = report.mean_time_between_failures
    return {
        "version": VERSION,
        "job": report.job,
        "outcome": report.outcome,
        "detail": report.detail,
        "began": moment(report.began),
        "wall_seconds": _rounded(report.wall),
        "productive_seconds": _rounded(report.productive),
        "effective_training_time_ratio": round(report.ratio, 6),
        "lost_seconds": {loss.value: _rounded(seconds) for loss, seconds in report.lost.items()},
        "phase_seconds": {phase.value: _rounded(seconds) for phase, seconds in report.phases.items()},
        "failures": report.failures,
        "mean_time_between_failures_seconds": None if between is None else _rounded(between),
        "restarts_by_cause": dict(report.restarts_by_cause),
        "restarts_by_host": dict(report.restarts_by_host),
        "rounds": [_round(round_) for round_ in report.rounds],
        "nodes": [
            {"name": node.name, "failures": [{"seconds": _rounded(at), "failure": text} for at, text in node.failures]}
            for node in report.nodes
        ],
        "notes": list(report.notes),
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _round(entry: RoundEntry) -> dict[str, Any]:
    recovery = entry.recovery
    return {
        "round": entry.number,
        "started_seconds": _rounded(entry.started),
        "ended_seconds": None if entry.ended is None else _rounded(entry.ended),
        "nodes": entry.nodes,
        "world_size": entry.world_size,
        "running_seconds": _rounded(entry.running),
        "lost_work_seconds": _rounded(entry.lost),
        "cause": entry.cause or None,
        "host": entry.host or None,
        "rank": None if entry.rank < 0 else entry.rank,
        "detail": entry.detail,
        "recovery_seconds": None if recovery is None else _rounded(recovery.seconds),
        "recovery_parts": {}
        if recovery is None
        else {name: _rounded(seconds) for name, seconds in recovery.parts.items()},
    }
