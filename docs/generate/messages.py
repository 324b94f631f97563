"""Pages of texts that users may see: which there are is read from the source, what they mean stands in a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from docs.generate.markdown import literal
from docs.generate.source import Said

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
"""What is not of a job: the demonstration tells what it does."""


class Catalogue:
    """Texts of the source with what they mean.

    Args:
        table: the TOML file.
        said: the texts.

    Attributes:
        texts: texts to what they mean, and what to do, if there is something.
        composed: files to parts of texts that others use, to the kind, what they mean, and what to do.
        passed_on: files that use texts which they are given, to what these are about.
        said: the texts that say something by themselves.
        passing: the files of the others.
    """

    def __init__(self, table: Path, said: Iterable[Said]) -> None:
        read = tomllib.loads(table.read_text())
        self.texts: Mapping[str, list[str]] = read["texts"]
        self.composed: Mapping[str, Mapping[str, list[str]]] = read["composed"]
        self.passed_on: Mapping[str, str] = read["passed_on"]
        found = sorted(each for each in said if not each.file.startswith(IGNORED))
        self.said = [each for each in found if _says_something(each.text)]
        self.passing = {each.file for each in found if not _says_something(each.text)}

    def sections(self) -> str:
        """All texts by subject, in Markdown."""
        parts: list[str] = []
        for subject, packages in SUBJECTS.items():
            if entries := [*self._entries(packages)]:
                parts += [f"## {subject}\n", *entries]
        return "\n".join(parts)

    def _entries(self, packages: tuple[str, ...]) -> Iterator[str]:
        kinds: dict[str, set[str]] = {}
        for each in self.said:
            if package_of(each.file) in packages and each.text in self.texts:
                kinds.setdefault(each.text, set()).add(each.kind)
        for text, of_text in kinds.items():
            yield _entry(text, ", ".join(sorted(of_text)), *self.texts[text])
        for file, texts in self.composed.items():
            if package_of(file) in packages:
                for text, (kind, *more) in texts.items():
                    yield _entry(text, kind, *more)


def package_of(file: str) -> str:
    """The first part of a path, without the ending of a module."""
    return file.partition("/")[0].removesuffix(".py")


def _says_something(text: str) -> bool:
    return any(letter.isalpha() for letter in text)


def _entry(text: str, kind: str, meaning: str, remedy: str = "") -> str:
    todo = f"\\\n  *What to do:* {remedy}" if remedy else ""
    return f"- {literal(text)} ({kind})\n\n  {meaning}{todo}\n"
