"""What is imported on the way to the first worker, room by room: lists and budgets, and no timer.

A module more on this way costs every start some tenths of a millisecond, a heavy one some milliseconds. Who needs one
raises the budget here, and so says that it is worth that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

pytestmark = pytest.mark.process

HELP = {"": 1, "base": 2, "cli": 5}
"""Modules of each room, its own package counted, that `rallyrun --help` may import; "" is the package itself."""

FIRST_WORKER = {
    "": 1,
    "agent": 14,
    "base": 12,
    "cli": 9,
    "failures": 5,
    "launch": 3,
    "logs": 11,
    "notices": 1,
    "ranks": 2,
    "rendezvous": 28,
    "store": 2,
    "telemetry": 2,
    "workers": 10,
}
"""The same for a job of one worker on one node, until its process is asked for."""

STANDARD_HELP = {"argparse", "contextlib", "enum", "fnmatch", "functools", "gettext", "keyword", "locale", "operator"}
STANDARD_HELP |= {"re", "reprlib", "shutil", "textwrap", "types", "typing", "warnings", "collections", "copyreg"}
STANDARD_HELP |= {"atexit", "bz2", "lzma", "zlib", "errno", "itertools", "importlib", "threading"}
"""Modules of the standard library that `--help` may need. `argparse` itself brings `shutil`, and that the packers."""

STANDARD = STANDARD_HELP | {"array", "ast", "copy", "dataclasses", "dis", "inspect", "opcode", "token"}
STANDARD |= {"faulthandler", "fcntl", "heapq", "json", "linecache", "logging", "math", "queue"}
STANDARD |= {"select", "selectors", "signal", "socket", "string", "stringprep", "tokenize", "traceback", "unicodedata"}
STANDARD |= {"weakref", "encodings", "pwd", "grp", "struct"}
"""The same for a first worker. `dataclasses` brings `inspect`, and that most of the others."""

_TELL = """
import json, sys
def tell():
    print("MODULES " + json.dumps(sorted(sys.modules.keys() - before)), flush=True)
"""

_HELP = """
import sys
before = set(sys.modules)
sys.argv = ["rallyrun", "--help"]
from rallypoint.cli.rallyrun import main
try:
    main()
finally:
    tell()
"""

_FIRST_WORKER = """
import sys
before = set(sys.modules)
sys.argv = ["rallyrun", "--standalone", sys.argv[1]]
from rallypoint.workers.reaper.client import Guardian
spawn = Guardian.spawn
def first(*args, **more):
    tell()
    Guardian.spawn = spawn
    return spawn(*args, **more)
Guardian.spawn = first
from rallypoint.cli.rallyrun import main
sys.exit(main())
"""


def imported(program: str, *arguments: str) -> set[str]:
    """What a program has imported beyond what any interpreter has, at the moment when it tells."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", _TELL + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (told,) = [line for line in ran.stdout.splitlines() if line.startswith("MODULES ")]
    return set(json.loads(told.removeprefix("MODULES ")))


def rooms(modules: set[str]) -> Counter[str]:
    ours = [name.split(".") for name in modules if name.split(".")[0] == "rallypoint"]
    return Counter(parts[1] if len(parts) > 1 else "" for parts in ours)


def over_budget(modules: set[str], budget: dict[str, int]) -> dict[str, list[str]]:
    """The modules of each room that has more than it may."""
    spent = rooms(modules)
    rich = [room for room, count in spent.items() if count > budget.get(room, 0)]
    return {room: sorted(name for name in modules if f"{name}..".split(".")[1] == room) for room in rich}


def foreign(modules: set[str], allowed: set[str]) -> set[str]:
    """Modules that are neither ours, nor allowed, nor the inner parts of such."""
    names = {name.split(".")[0] for name in modules} - {"rallypoint"}
    return {name for name in names if not name.startswith("_") and name not in allowed}


@pytest.fixture(scope="module")
def for_help() -> set[str]:
    return imported(_HELP)


@pytest.fixture(scope="module")
def for_first_worker(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    worker = tmp_path_factory.mktemp("script") / "worker.py"
    worker.write_text("print('here')\n")
    return imported(_FIRST_WORKER, str(worker))


def test_help_imports_what_it_shows(for_help: set[str]) -> None:
    assert over_budget(for_help, HELP) == {}
    assert foreign(for_help, STANDARD_HELP) == set()


def test_the_way_to_the_first_worker(for_first_worker: set[str]) -> None:
    assert over_budget(for_first_worker, FIRST_WORKER) == {}
    assert foreign(for_first_worker, STANDARD) == set()


@pytest.mark.parametrize("heavy", ["asyncio", "hashlib", "_hashlib", "hmac", "msgspec", "uvloop", "subprocess"])
def test_what_is_heavy_waits(for_first_worker: set[str], heavy: str) -> None:
    assert heavy not in for_first_worker


def test_the_budgets_are_not_slack(for_help: set[str], for_first_worker: set[str]) -> None:
    """A room that has become leaner keeps it."""
    assert rooms(for_help) == HELP
    assert rooms(for_first_worker) == FIRST_WORKER
