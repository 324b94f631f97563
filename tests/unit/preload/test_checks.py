"""Obstacles to forking a process, found in a fresh one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rallypoint.features.preload import imports
from rallypoint.features.preload.imports import EnvironRecorder
from tests.processes import completed

pytestmark = pytest.mark.process

CHECK = """from rallypoint.features.preload import imports as checks
{}
print(checks.fork_obstacle() or checks.thread_obstacle())"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("", "None"),
        ("import threading; thread = threading.Thread(target=int); thread.start(); thread.join()", "None"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "it starts 1 thread that stays: Thread-1 (wait)",
        ),
        ("import subprocess; process = subprocess.Popen(['true'])", "it starts a process that continues"),
        ("import subprocess; subprocess.run(['true'])", "None"),
        ("import socket; kept = socket.socket()", "share (socket:["),
        ("import asyncio; kept = asyncio.new_event_loop()", "that copies would share"),
        ("import select; kept = select.epoll()", "share (anon_inode:[eventpoll])"),
        ("checks._DEVICES = ('/dev/full',); kept = open('/dev/full')", "opens the device /dev/full"),
        ("kept = open('/dev/urandom')", "None"),
        ("import os; kept = os.pipe()", "share (pipe:["),
        ("import os; kept = os.eventfd(0)", "share (anon_inode:[eventfd])"),
        (
            "import multiprocessing; kept = multiprocessing.get_context('fork').Lock()",
            "maps memory that copies would share (/dev/shm/",
        ),
        ("import mmap; kept = mmap.mmap(-1, 4096)", "maps memory that copies would share (/dev/zero"),
        ("import mmap; kept = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)", "None"),
        ("import mmap; file = open(mmap.__file__); kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)", "None"),
    ],
)
def test_obstacles(code: str, found: str) -> None:
    shown = completed([sys.executable, "-W", "ignore", "-c", CHECK.format(code)], check=True)
    assert found in shown.stdout


THREADS = """
import threading
from rallypoint.features.preload import imports

def mine():
    begun.release(); done.wait()

begun, done = threading.Semaphore(0), threading.Event()
{}
print(imports._describe_threads())
done.set()
"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("threading.Thread(target=mine, name='own').start(); begun.acquire()", r"own at <string>:6"),
        (
            "for _ in range(4): threading.Thread(target=mine, name='own').start(); begun.acquire()",
            r"(own at <string>:6, ){3}\.\.\.",
        ),
        ("import _thread; _thread.start_new_thread(mine, ()); begun.acquire()", r"python\S*"),
    ],
)
def test_descriptions_of_threads(code: str, found: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", THREADS.format(code)]
    assert re.fullmatch(found, completed(command, check=True, env=environ).stdout.strip())


class Refused(Exception):
    """A forbidden variable was read."""


def recorded(folder: Path, text: str, own: tuple[str, ...] = ()) -> EnvironRecorder:
    path = folder / "reader.py"
    path.write_text(text)

    def refuse(where: str, what: str) -> None:
        raise Refused(f"{where} {what}")

    module = types.ModuleType("reader")
    code = compile(text, str(path), "exec")
    with EnvironRecorder(own, refuse) as recording:
        exec(code, module.__dict__)
    return recording


@pytest.mark.parametrize(
    "text", ["os.environ.get('RANK')", "os.getenv('RANK')", "'RANK' in os.environ", "os.environ.setdefault('RANK', '')"]
)
def test_reads_of_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RANK", "0")
    assert recorded(tmp_path, f"import os\n\n{text}\n").read == {"RANK": f"{tmp_path}/reader.py:3"}
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Refused, match=r"^reader.py:3 reads RANK$"):
        recorded(tmp_path, f"import os\n\n{text}\n", own=("RANK",))


@pytest.mark.parametrize(
    "text", ["dict(os.environ)", "[name for name in os.environb]", "{n: v for n, v in os.environ.items() if n == 'A'}"]
)
def test_a_loop_reads_all_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Per-worker variables do not count: code that copies all variables looks like code that filters them."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("A", "1")
    recording = recorded(tmp_path, f"import os\n\nKEPT = {text}\n", own=("RANK",))
    assert set(recording.read) == set(os.environ)
    assert set(recording.read.values()) == {f"{tmp_path}/reader.py:3"}


@pytest.mark.parametrize("given", ["", "narenas:1", "background_thread:true"])
def test_settings_for_imports_do_not_reach_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """They are visible to C code during the imports, and not to Python code."""
    (tmp_path / "reader.py").write_text(
        "import os, subprocess\nprint(os.environ.get(N), subprocess.getoutput(f'echo ${N}'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if given:
        monkeypatch.setenv("JE_ARROW_MALLOC_CONF", given)
    code = (
        "import builtins, os\nbuiltins.N = 'JE_ARROW_MALLOC_CONF'\nbefore = dict(os.environ)\n"
        "from rallypoint.features.preload.imports import Imports\n"
        "Imports(['reader'], (), '/', None, {0, 1, 2, *map(int, os.listdir('/proc/self/fd'))}).run((), print, int)\n"
        "import subprocess\nprint(subprocess.getoutput(f'echo ${N}'), dict(os.environ) == before)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    inside = {"": "background_thread:false", "narenas:1": "narenas:1,background_thread:false"}.get(given, given)
    assert shown.splitlines() == [f"{given or None} {inside}", f"{given} True"]


def test_old_interpreters_can_parse_the_hook() -> None:
    """Otherwise they would run the script outside of a round."""
    text = (Path(imports.__file__).parent / "hook" / "sitecustomize.py").read_text("ascii")
    found = list(ast.walk(ast.parse(text)))
    assert not [node for node in found if isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Match))]
    functions = [node for node in found if isinstance(node, ast.FunctionDef)]
    assert functions
    assert not [node for node in functions if node.returns or [arg for arg in node.args.args if arg.annotation]]
