"""What keeps a process from being forked, asked of a fresh one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.workers.warm import checks

ASKING = "from rallypoint.workers.warm import checks\n{}\nprint(checks.why_unfit())"


@pytest.mark.parametrize(
    ("done", "said"),
    [
        ("", "None"),
        ("import threading; threading.Thread(target=int).start()", "None"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 thread"),
        ("import subprocess; process = subprocess.Popen(['true'])", "started a process"),
        ("import subprocess; subprocess.run(['true'])", "None"),
        ("import socket; kept = socket.socket()", "share (socket:["),
        ("import asyncio; kept = asyncio.new_event_loop()", "that copies would share"),
        ("import select; kept = select.epoll()", "share (anon_inode:[eventpoll])"),
        ("checks._DEVICES = ('/dev/full',); kept = open('/dev/full')", "opened the device /dev/full"),
        ("kept = open('/dev/urandom')", "None"),
        ("import os; kept = os.pipe()", "share (pipe:["),
        ("import os; kept = os.eventfd(0)", "share (anon_inode:[eventfd])"),
        ("import multiprocessing; kept = multiprocessing.Lock()", "mapped memory that copies would share (/dev/shm/"),
        ("import mmap; kept = mmap.mmap(-1, 4096)", "mapped memory that copies would share (/dev/zero"),
        ("import mmap; kept = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)", "None"),
        ("import mmap; file = open(mmap.__file__); kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)", "None"),
    ],
)
def test_what_is_found(done: str, said: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASKING.format(done)], capture_output=True, text=True, check=True
    )
    assert said in shown.stdout


def test_every_python_understands_the_hook() -> None:
    """One that did not would go on to the script, in no round."""
    text = (Path(checks.__file__).parent / "hook" / "sitecustomize.py").read_text("ascii")
    found = list(ast.walk(ast.parse(text)))
    assert not [each for each in found if isinstance(each, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Match))]
    functions = [each for each in found if isinstance(each, ast.FunctionDef)]
    assert functions
    assert not [each for each in functions if each.returns or [arg for arg in each.args.args if arg.annotation]]
