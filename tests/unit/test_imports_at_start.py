"""Imports on the way to the first worker: the size of our bytecode, and foreign modules.

A kilobyte of bytecode costs every start about 0.01 ms, a foreign module up to some milliseconds. A change that needs
more raises the budget here, and shows that it is worth it. The number of our modules does not count.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import rallypoint
from tests.environment import undisturbed
from tests.processes import completed

pytestmark = pytest.mark.process

HELP, FIRST_WORKER = 116_500, 1_364_000
"""Limits for our bytecode, in bytes under Python 3.11: for `rallyrun --help`, and until the first worker is started."""
LARGER = 1.0 if sys.version_info < (3, 12) else 1.1
"""Factor for newer versions: the bytecode of 3.14 is 9 % larger."""

STANDARD_HELP = {"argparse", "contextlib", "enum", "fnmatch", "functools", "gettext", "keyword", "locale", "operator"}
STANDARD_HELP |= {"re", "reprlib", "types", "warnings", "collections", "copyreg"}
STANDARD_HELP |= {"atexit", "errno", "gc", "itertools", "importlib", "threading"}
"""Modules of the standard library that `--help` may need."""

STANDARD = STANDARD_HELP | {"array", "contextvars", "token"}
STANDARD |= {"faulthandler", "fcntl", "heapq", "json", "linecache", "logging", "math", "queue"}
STANDARD |= {"select", "selectors", "signal", "socket", "string", "textwrap", "tokenize", "traceback"}
STANDARD |= {"weakref", "pwd", "grp", "struct"}
"""Also for a first worker."""

if sys.version_info >= (3, 14):  # imported by argparse and logging for colors
    STANDARD |= {"annotationlib", "ast", "copy", "dataclasses", "dis", "inspect", "io", "opcode"}
    STANDARD_HELP |= STANDARD


_PRINT = """
import json, sys
def print_modules():
    import marshal
    ours = (name for name in sys.modules if name.split(".")[0] == "rallypoint")
    codes = [sys.modules[name].__loader__.get_code(name) for name in ours]
    modules = sorted(sys.modules.keys() - before - {"marshal"})
    size = sum(len(marshal.dumps(code)) - len(code.co_filename) for code in codes)  # wherever the checkout is
    print("MODULES " + json.dumps([modules, size]), flush=True)
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

_WHOLE_JOB = _HELP.replace('"--help"', '"--standalone", sys.argv[1]')

_FAILURES = """
import sys
from rallypoint.agent.actions import Actions
fail = Actions._fail
before = set()
def first_fail(*args):
    before.update(before or sys.modules)
    return fail(*args)
Actions._fail = first_fail
sys.argv = ["rallyrun", "--standalone", "--max-restarts=1", "--no-python", "false"]
from rallypoint.cli.rallyrun import main
try:
    main()
finally:
    print_modules()
"""


class Imported(NamedTuple):
    """All modules that a program imported, and our bytes of bytecode."""

    modules: set[str]
    size: int


def imported(program: str, *arguments: str) -> Imported:
    """Run a program that prints its imports."""
    ran = completed([sys.executable, "-I", "-c", _PRINT + program, *arguments], check=True, env=undisturbed())
    (answer,) = [line for line in ran.stdout.splitlines() if line.startswith("MODULES ")]
    modules, size = json.loads(answer.removeprefix("MODULES "))
    return Imported(set(modules), size)


def foreign(modules: set[str], allowed: set[str]) -> set[str]:
    """Packages that are neither ours nor allowed."""
    names = {name.split(".")[0] for name in modules} - {"rallypoint"}
    return {name for name in names if not name.startswith("_") and name not in allowed}


@pytest.fixture(scope="module")
def for_help() -> Imported:
    return imported(_HELP)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = tmp_path_factory.mktemp("script") / "worker.py"
    script.write_text("print('here')\n")
    return str(script)


@pytest.fixture(scope="module")
def for_first_worker(worker: str) -> Imported:
    return imported(_FIRST_WORKER, worker)


def test_imports_of_help(for_help: Imported) -> None:
    assert 0 < for_help.size <= HELP * LARGER
    assert foreign(for_help.modules, STANDARD_HELP) == set()


def test_imports_of_the_first_worker(for_first_worker: Imported) -> None:
    assert 0 < for_first_worker.size <= FIRST_WORKER * LARGER
    assert foreign(for_first_worker.modules, STANDARD) == set()


_ON_A_NODE_WITH_A_GPU = """
from rallypoint.features import table
table.NVIDIA_DEVICES = ("/dev/null",)
"""


def test_a_gpu_needs_no_more_imports(worker: str, for_first_worker: Imported) -> None:
    found = imported(_ON_A_NODE_WITH_A_GPU + _FIRST_WORKER, worker)
    assert found.size == for_first_worker.size
    assert "ctypes" not in found.modules


def test_a_job_of_one_node_needs_no_event_loop(worker: str) -> None:
    assert not {"asyncio", "uvloop", "ssl", "typing"} & imported(_WHOLE_JOB, worker).modules


@pytest.mark.parametrize("node", ["", _ON_A_NODE_WITH_A_GPU], ids=["", "gpu"])
def test_a_failure_needs_no_more_imports(node: str) -> None:
    """Other nodes would wait for the imports, and an upgrade in place could break them."""
    ran = completed([sys.executable, "-I", "-c", _PRINT + node + _FAILURES], env=undisturbed())
    assert "Root Cause" in ran.stderr, ran.stderr
    (answer,) = [line for line in ran.stdout.splitlines() if line.startswith("MODULES ")]
    modules, _ = json.loads(answer.removeprefix("MODULES "))
    beside = "rallypoint.rendezvous.backends.command_server"  # imported by another thread at the same time
    assert not [name for name in modules if name.startswith("rallypoint") and name != beside]


def test_a_control_plane_imports_everything_at_start() -> None:
    """It runs for months, and its files may be replaced."""
    needed = set[str]()
    for folder in ("coordinator", "membership"):
        for path in (Path(rallypoint.__file__).parent / "control" / folder).glob("*.py"):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    found = [node.module for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
                    needed |= {module for module in found if module and module.startswith("rallypoint")}
    assert "rallypoint.control.membership.endings" in needed
    code = "from rallypoint.cli import serve\nserve.import_ahead()"
    # TLS is imported before listening, if used.
    assert needed - {"rallypoint.base.tls"} <= imported_by(code)


# The package itself


def imported_by(code: str) -> set[str]:
    shown = completed([sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], check=True)
    return set(shown.stdout.split())


def test_the_package_imports_little() -> None:
    assert all(getattr(rallypoint, name) is not None for name in rallypoint.__all__)
    imported = imported_by("import rallypoint")
    assert not imported & {"dataclasses", "enum", "re", "typing"}
    assert {name for name in imported if name.startswith("rallypoint")} == {"rallypoint"}


def test_counting_gpus_needs_no_ctypes() -> None:
    assert "ctypes" not in imported_by("from rallypoint.base.devices import cuda_count\ncuda_count({})")
