"""What torchrun and rallyrun both say on standard error, read out of their words: usage, report, events and more."""

from __future__ import annotations

import json
import re
from typing import Any

_BLOCK = re.compile(
    r"^\[\d+\]:\n  time      : (?P<time>.*)\n  host      : (?P<host>.*)\n  rank      : (?P<rank>\d+) "
    r"\(local_rank: (?P<local_rank>\d+)\)\n  exitcode  : (?P<exitcode>-?\d+) \(pid: \d+\) (?: \((?P<signal>\S+)\))?\n"
    r"  error_file: (?P<error_file>.*)\n  traceback : (?P<traceback>(?:.*\n)*?)(?=[=-]{4,}|\[\d+\]:)",
    re.MULTILINE,
)
_REPORT = re.compile(
    r"^={3,}\n(?P<title>.+ FAILED)\n-{3,}\nFailures:\n(?P<others>(?:.*\n)*?)Root Cause .*\n(?P<root>(?:.*\n)*?={3,})",
    re.MULTILINE,
)
_STOPPED = re.compile(r"^Stopped by rallyrun: ranks? (.*)$", re.MULTILINE)
_INFO = re.compile(r"^I\d{4} .*?\]   (\w+)(?: *: |=)(.*)$", re.MULTILINE)
"""At LOGLEVEL=INFO: what is launched, and what a round is like."""
_SPOKEN = re.compile(r"(^|\]:)(err \d|Traceback\? no)")
"""Lines of workers."""
_STOPPING = {"-15", "-9"}
"""How workers end that their launcher stops; torchrun calls those failures."""


def facts_of_stderr(text: str) -> dict[str, object]:
    """Everything that both say."""
    facts: dict[str, object] = {"usage": "usage:" in text}
    facts["spoken"] = sorted(line for line in text.splitlines() if _SPOKEN.search(line))
    facts |= {f"info/{name}": value for name, value in _INFO.findall(text)}
    if (report := _REPORT.search(text)) is not None:
        facts |= {f"report/{name}": fact for name, fact in _report(report).items()}
    if events := _events(text):
        facts["events"] = events
    return facts


def _report(report: re.Match[str]) -> dict[str, object]:
    root = _BLOCK.search(report["root"])
    assert root is not None, report[0]
    others = [each.groupdict() for each in _BLOCK.finditer(report["others"])]
    stopped = {int(each["rank"]) for each in others if each["exitcode"] in _STOPPING}
    if (ours := _STOPPED.search(report["others"])) is not None:
        stopped |= _ranks(ours[1])
    failed = sorted((each["rank"], each["exitcode"]) for each in others if int(each["rank"]) not in stopped)
    facts: dict[str, object] = {
        "title": report["title"],
        "stopped": sorted(stopped),
        "others": [list(each) for each in failed],
    }
    for name, fact in root.groupdict().items():
        if name != "time":
            facts[f"root/{name}"] = fact
    facts["root/traceback"] = re.sub(r"PID \d+", "PID", root["traceback"].rstrip().split("\n")[-1].strip())
    return facts


def _ranks(text: str) -> set[int]:
    found: set[int] = set()
    for part in re.split(r",| and ", text):
        low, _, high = part.strip().partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def _events(text: str) -> list[Any]:
    """Events of the console handler: state, source, rank, and whether something was raised; in no order."""
    shown = []
    for line in text.splitlines():
        if line.startswith('{"name": "torchelastic.'):
            event = json.loads(line)
            about: dict[str, Any] = event["metadata"]
            shown.append(
                [event["name"], event["source"], about["global_rank"], about["raw_error"] is not None, sorted(about)]
            )
    return sorted(shown, key=str)
