"""What is imported on the way to the first worker, package by package: lists and budgets, and no timer.

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

HELP = {"": 1, "base": 3, "cli": 6}
"""Modules of each package, its `__init__` counted, that `rallyrun --help` may import; "" is the package itself."""

FIRST_WORKER = {
    "": 1,
    "agent": 18,
    "base": 14,
    "cli": 10,
    "coordinator": 10,
    "failures": 5,
    "launch": 3,
    "logs": 11,
    "membership": 7,
    "notices": 1,
    "protocol": 4,
    "ranks": 2,
    "rendezvous": 11,
    "store": 2,
    "telemetry": 2,
    "workers": 11,
}
"""The same for a job of one worker on one node, until its process is asked for."""

STANDARD_HELP = {"argparse", "contextlib", "enum", "fnmatch", "functools", "gettext", "keyword", "locale", "operator"}
STANDARD_HELP |= {"re", "reprlib", "types", "warnings", "collections", "copyreg"}
STANDARD_HELP |= {"atexit", "errno", "gc", "itertools", "importlib", "threading"}
"""Modules of the standard library that `--help` may need."""

STANDARD = STANDARD_HELP | {"array", "contextlib", "token"}
STANDARD |= {"faulthandler", "fcntl", "heapq", "json", "linecache", "logging", "math", "queue"}
STANDARD |= {"select", "selectors", "signal", "socket", "string", "textwrap", "tokenize", "traceback"}
STANDARD |= {"weakref", "pwd", "grp", "struct"}
"""The same for a first worker."""


_PRINT = """
import json, sys
def print_modules():
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
    print_modules()
"""

_FIRST_WORKER = """
import sys
before = set(sys.modules)
sys.argv = ["rallyrun", "--standalone", sys.argv[1]]
from rallypoint.workers.reaper.client import ReaperClient
spawn = ReaperClient.spawn
def first_spawn(*args, **more):
    print_modules()
    ReaperClient.spawn = spawn
    return spawn(*args, **more)
ReaperClient.spawn = first_spawn
from rallypoint.cli.rallyrun import main
sys.exit(main())
"""


def imported(program: str, *arguments: str) -> set[str]:
    """What a program has imported beyond what any interpreter has, at the moment when it prints them."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", _PRINT + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (answer,) = [line for line in ran.stdout.splitlines() if line.startswith("MODULES ")]
    return set(json.loads(answer.removeprefix("MODULES ")))


def packages(modules: set[str]) -> Counter[str]:
    ours = [name.split(".") for name in modules if name.split(".")[0] == "rallypoint"]
    return Counter(parts[1] if len(parts) > 1 else "" for parts in ours)


def over_budget(modules: set[str], budget: dict[str, int]) -> dict[str, list[str]]:
    """The modules of each package that has more than it may."""
    spent = packages(modules)
    rich = [package for package, count in spent.items() if count > budget.get(package, 0)]
    return {package: sorted(name for name in modules if f"{name}..".split(".")[1] == package) for package in rich}


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
    """A package that has become leaner stays so."""
    assert packages(for_help) == HELP
    assert packages(for_first_worker) == FIRST_WORKER
