"""The page of log lines: which there are is read from the source, what they mean stands in log_lines.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from docs.generate.markdown import literal
from docs.generate.source import Said, logged

HEAD = """\
# Log lines

What agents, coordinators and `rallyctl` write to standard error, by subject. `…` stands for a value. A line begins
with its level (`E`, `W`, `I`), date, time, process and source line; `LOGLEVEL` says from which level on lines are
written (default `WARNING`, `INFO` for each step). Lines that are called printed have no such beginning.

Lines at `DEBUG` are for those who work on Rallypoint. Sentences that end a command are errors.
"""

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
LINES: Mapping[str, list[str]] = _TABLE["lines"]
"""Texts to what they mean, and what to do, if there is something."""
COMPOSED: Mapping[str, Mapping[str, list[str]]] = _TABLE["composed"]
"""Files to parts of texts that others log, to the level, what they mean, and what to do."""
PASSED_ON: Mapping[str, str] = _TABLE["passed_on"]
"""Files that log what they are given, to what that is."""

SUBJECTS = {
    "Rounds and workers": ("agent", "workers", "failures", "launch", "ranks"),
    "Rendezvous and control plane": ("rendezvous", "client", "coordinator", "membership", "protocol", "base"),
    "etcd and election": ("election", "etcd"),
    "Worker store": ("store",),
    "Output, events and health": ("logs", "telemetry", "health", "observe"),
    "Hangs, timers and in-process recovery": ("hangs", "watchdog", "inprocess"),
    "Command line, clusters and checks": ("cli", "cluster", "preflight", "remote"),
    "Programs written for torch's API": ("compat", "data", "notices"),
}
"""Sections to the packages whose texts they have."""

IGNORED = ("demo/",)
"""What is not of a job's log: the demonstration tells what it does."""


@cache
def lines() -> tuple[Said, ...]:
    """The calls that log, each with one text that it may have."""
    return tuple(sorted(each for each in logged() if not each.file.startswith(IGNORED)))


def is_passed_on(text: str) -> bool:
    """Whether a text says nothing by itself."""
    return not any(letter.isalpha() for letter in text)


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for subject, packages in SUBJECTS.items():
        parts += [f"## {subject}\n", *_section(packages), ""]
    return "\n".join(parts)


def _section(packages: tuple[str, ...]) -> Iterator[str]:
    levels: dict[str, set[str]] = {}
    for each in lines():
        if package_of(each.file) in packages and not is_passed_on(each.text):
            levels.setdefault(each.text, set()).add(each.kind)
    for text, kinds in levels.items():
        yield entry(text, ", ".join(sorted(kinds)), *LINES[text])
    for file, texts in COMPOSED.items():
        if package_of(file) in packages:
            for text, (level, *more) in texts.items():
                yield entry(text, level, *more)


def package_of(file: str) -> str:
    """The first part of a path, without the ending of a module."""
    return file.partition("/")[0].removesuffix(".py")


def entry(text: str, kind: str, meaning: str, remedy: str = "") -> str:
    """One text: what it means and what to do about it, or that nothing has to be done."""
    todo = f"\n  *What to do:* {remedy}" if remedy else ""
    return f"- {literal(text)} ({kind})\n\n  {meaning}{todo}\n"
