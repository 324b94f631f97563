"""`--preload=auto`: when the zygote that reads the script starts, what it imports, and its messages."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.features.preload import client
from rallypoint.features.preload.client import PreloadManager
from rallypoint.workers.reaper.client import ReaperClient
from tests.unit.clocks import HandClock
from tests.unit.preload.test_manager import command, forked_with, forks, preloading, until

pytestmark = pytest.mark.process

INSTALLED = "site-packages"


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextmanager
def automatic(
    reaper: ReaperClient, folder: Path, monkeypatch: pytest.MonkeyPatch, argv: Sequence[str] = (), named: str = "auto"
) -> Iterator[tuple[PreloadManager, HandClock]]:
    monkeypatch.setenv("PYTHONPATH", str(folder / INSTALLED))
    clock = HandClock()
    with preloading(reaper, folder, named, clock, False, argv) as found:
        yield found, clock


def has_begun(found: PreloadManager) -> bool:
    return found.pid is not None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_it_begins_after_workers_have_run_for_some_time(
    reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        tmp_path,
        {
            "script.py": "import decimal, dist, own\nimport broken, nowhere\nfrom dist import part, thing",
            "own.py": "import fractions, dist2",
            f"{INSTALLED}/dist/__init__.py": "thing = 1",
            f"{INSTALLED}/dist/part.py": "",
            f"{INSTALLED}/dist2.py": "",
            f"{INSTALLED}/broken.py": "raise ImportError('half of it')",
        },
    )
    with automatic(reaper, tmp_path, monkeypatch) as (found, clock):
        assert not has_begun(found)
        assert found.wake_at() == client.AUTO_DELAY
        clock.now = 5.0
        found.ensure_zygote(reaper)  # workers were restarted
        assert found.wake_at() == 5.0 + client.AUTO_DELAY
        clock.now = client.AUTO_DELAY
        assert found.start(command(tmp_path), os.environ, None, None, ()) is None
        found.step()
        assert not has_begun(found)
        clock.now = 5.0 + client.AUTO_DELAY
        found.step()
        assert has_begun(found)
        assert not found.importing
        until(found, lambda: forks(found))
        names = "decimal", "dist", "dist.part", "dist2", "fractions", "own", "broken", "ast", "rallypoint"
        assert forked_with(found, tmp_path, *names) == [True] * 5 + [False] * 4
    assert warnings(caplog) == [
        "Preloaded for restarted workers: dist, dist2; not broken, for it raises ImportError: half of it"
    ]


def test_named_modules_and_an_unforkable_one(
    reaper: ReaperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        tmp_path,
        {
            "package/main.py": "import decimal, reads.inner, reads, dist",
            "own.py": "",
            f"{INSTALLED}/reads/__init__.py": "import os\nos.environ.get('RANK')\n",
            f"{INSTALLED}/reads/inner.py": "",
            f"{INSTALLED}/dist.py": "",
        },
    )
    monkeypatch.chdir(tmp_path)
    argv = [sys.executable, "-u", "-m", "package.main"]
    with automatic(reaper, tmp_path, monkeypatch, argv, named="own,auto") as (found, clock):
        clock.now = client.AUTO_DELAY
        found.step()
        until(found, lambda: forks(found))
        path = tmp_path / "names"
        (tmp_path / "package" / "main.py").write_text(
            "import os, sys\n"
            "os.write(1, str([name in sys.modules for name in ('own', 'decimal', 'dist', 'reads')]).encode())"
        )
        with path.open("wb") as file:
            started = found.start(argv, os.environ, file.fileno(), None, ())
        assert started is not None
        started.close()
        until(found, lambda: path.read_text() == "[True, True, True, False]")
    first, second = warnings(caplog)
    assert "reads cannot be preloaded: reads/__init__.py:2 reads RANK while it is imported" in first
    assert first.endswith("this lasts until own and what the script imports is preloaded without it")
    assert second == "Preloaded for restarted workers: own, dist"


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["/bin/sh", "broken.py"], "'/bin/sh' is not itself a Python interpreter"),
        ([sys.executable, "-c", "pass"], "-c runs a command"),
        ([sys.executable, "-u", "broken.py"], "the imports of broken.py cannot be read (SyntaxError: "),
        ([sys.executable, "-um", "none.such"], "the imports of none.such cannot be read (ValueError: the module"),
    ],
    ids=["no Python", "a command", "syntax", "no module"],
)
def test_scripts_that_cannot_be_read(
    reaper: ReaperClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    argv: list[str],
    why: str,
) -> None:
    write(tmp_path, {"broken.py": "1 +\n"})
    monkeypatch.chdir(tmp_path)
    with automatic(reaper, tmp_path, monkeypatch, argv) as (found, clock):
        clock.now = client.AUTO_DELAY
        found.step()
        until(found, lambda: not has_begun(found))
        found.ensure_zygote(reaper)
        assert found.wake_at() == math.inf
    (line,) = warnings(caplog)
    assert line.startswith(f"Workers will start without preloading: {why}")
