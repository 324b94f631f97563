"""Reads incident bundles: what `rallyctl report` shows of those that a folder holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rallypoint.base.log import printable
from rallypoint.observe.bundle import SUMMARY, VERSION

_MAX_SUMMARY = 1024 * 1024
_MAX_BUNDLES = 100_000


class Incident(NamedTuple):
    """What one node has kept of one failure. `at` is in seconds since 1970, by the clock of that node."""

    job: str
    round: int
    at: float
    why: str
    headline: str
    host: str
    pid: int
    group_rank: int
    ranks: tuple[int, ...]
    folder: str


class Incidents(NamedTuple):
    """The bundles that were found, oldest first, and what could not be read, in sentences."""

    found: tuple[Incident, ...]
    notes: tuple[str, ...]


def read_incidents(paths: Iterable[str]) -> Incidents:
    """The bundles below some folders."""
    found: list[Incident] = []
    notes: list[str] = []
    for path in _summaries(paths):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                found.append(_incident(json.loads(file.read(_MAX_SUMMARY)), os.path.dirname(path)))
        except OSError as error:
            notes.append(f"{path} cannot be read: {error.strerror}")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            notes.append(f"{path} is no summary of an incident that this version can read")
        if len(found) >= _MAX_BUNDLES:
            notes.append(f"there are more than {_MAX_BUNDLES} incidents; the others are left out")
            break
    return Incidents(tuple(sorted(found, key=lambda each: (each.at, each.group_rank))), tuple(notes))


def incident_lines(found: Sequence[Incident]) -> list[str]:
    """The incidents for people: each with its cause once, and the nodes that have kept something of it."""
    groups: dict[tuple[str, int, str], list[Incident]] = {}
    for each in found:
        groups.setdefault((each.job, each.round, os.path.dirname(each.folder)), []).append(each)
    lines: list[str] = []
    for (job, round_, folder), nodes in groups.items():
        first = next((each for each in nodes if each.headline), nodes[0])
        lines.append(f"job {job}, round {round_}: {first.why}{f': {first.headline}' if first.headline else ''}")
        lines.append(f"    {len(nodes)} node{'' if len(nodes) == 1 else 's'} in {printable(folder, 400)}")
    return lines


def incidents_json(incidents: Incidents) -> str:
    """The incidents as JSON: `docs/reference/incident-bundle.md`."""
    rows = [each._asdict() for each in incidents.found]
    return json.dumps({"version": VERSION, "incidents": rows, "notes": incidents.notes}, indent=2)


def _summaries(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if os.path.isfile(path) and os.path.basename(path) == SUMMARY:
            yield path
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(each for each in folders if not each.startswith("."))
            if SUMMARY in files:
                folders.clear()
                yield os.path.join(folder, SUMMARY)


def _incident(fields: dict[str, Any], folder: str) -> Incident:
    if fields["version"] != VERSION:
        raise ValueError("another version")
    node = fields["node"]
    return Incident(
        job=printable(str(fields["job"]), 200),
        round=int(fields["round"]),
        at=float(fields["at"]),
        why=printable(str(fields["why"]), 200),
        headline=printable(str(fields["headline"]), 1000),
        host=printable(str(node["host"]), 255),
        pid=int(node["pid"]),
        group_rank=int(node["group_rank"]),
        ranks=tuple(int(each) for each in node["ranks"]),
        folder=folder,
    )
