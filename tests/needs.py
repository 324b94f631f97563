"""Markers for what a test needs besides Python: `process`, `torch`, `etcd` and `root`.

1. Folders and fixtures mark their tests. Any other test that starts a process carries the marker itself.
2. A test that starts a process or etcd, or imports torch, without the marker fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from os import path

import pytest

MARKERS = {
    "process": "starts processes: launchers, workers or others",
    "torch": "runs real torch or torchrun beside ours, or reads their recorded answers",
    "etcd": "runs a real etcd",
    "root": "creates namespaces, which needs root",
}

BY_FOLDER = {
    "aarch64": ("process",),
    "causes": ("process",),
    "conformance": ("process", "torch"),
    "deploy": ("process",),
    "documents": ("process",),
    "faults": ("process", "root"),
    "gpu": ("process", "torch"),
    "frameworks": ("process", "torch"),
    "jobs": ("process",),
    "packaging": ("process",),
    "slurm": ("process", "root"),
}
BY_FIXTURE = {**dict.fromkeys(("etcd", "secured"), ("process", "etcd")), "reaper": ("process",)}

_STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"}


def of(item: pytest.Item) -> Iterable[str]:
    """The markers that a test gets from its folder and its fixtures."""
    parts = item.path.relative_to(item.config.rootpath).parts
    yield from BY_FOLDER.get(parts[1] if len(parts) > 1 else "", ())
    for fixture in getattr(item, "fixturenames", ()):
        yield from BY_FIXTURE.get(fixture, ())


class Watch:
    """Records what this process starts and imports, from audit events."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, about: tuple[object, ...]) -> None:
        if event in _STARTS:
            self._seen.add("process")
            if about and path.basename(str(about[0])) == "etcd":
                self._seen.add("etcd")
        elif event == "import" and about[0] == "torch":
            self._seen.add("torch")

    def taken(self) -> set[str]:
        """The markers needed since the last call."""
        seen, self._seen = self._seen, set()
        return seen
