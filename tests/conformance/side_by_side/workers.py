"""The workers of the cases. Each is a whole program in plain Python; torch is imported only where noted."""

from __future__ import annotations

NOTE = """
import json, os, signal, sys, time

def note(**more):
    e = dict(os.environ)
    facts = {"argv": sys.argv, "env": e, "cwd": os.getcwd(), "leads a session": os.getsid(0) == os.getpid(),
             "__name__": __name__, "unbuffered": sys.stdout.write_through, "python": sys.executable, **more}
    name = "-".join((e["NODE"], e["RANK"], more.pop("start", e["TORCHELASTIC_RESTART_COUNT"])))
    with open(os.path.join(e["FOUND"], name + ".tmp"), "x") as file:
        json.dump(facts, file)
    os.rename(os.path.join(e["FOUND"], name + ".tmp"), os.path.join(e["FOUND"], name))

def others_have_noted(start=os.environ["TORCHELASTIC_RESTART_COUNT"]):
    e = os.environ
    deadline = time.monotonic() + 50
    while sum(name.endswith("-" + start) for name in os.listdir(e["FOUND"])) < int(e["WORLD_SIZE"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)

rank = int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""

SHOW = f"{NOTE}\nnote()\n"
"""Says what it finds around it, and succeeds."""

ONCE = f"{NOTE}\nnote()\nothers_have_noted()\nsys.exit(attempt == 0)\n"
"""All workers fail at the first attempt, when each has said what it found."""

FIRST_FAILS = f"""{NOTE}
note()
others_have_noted()
if rank == 0:
    sys.exit(3)
signal.pause()
"""
"""Rank 0 fails, the others wait to be stopped."""

FIRST_FAILS_ONCE = FIRST_FAILS.replace("if rank == 0:", "if attempt:\n    sys.exit(0)\nif rank == 0:")

HEARS = f"""{NOTE}
def hear(number, frame):
    note(heard=signal.Signals(number).name)
    os._exit(code)
code = int(sys.argv[1]) if len(sys.argv) > 1 else 0
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hear)
os.write(1, b"up\\n")
while True:
    time.sleep(0.02)  # a signal right before a pause would not end it
"""
"""Says which signal it was sent, and exits with the code that it was given."""

NODE_FAILS_ONCE = f"""{NOTE}
mine = os.path.join(os.environ["FOUND"], f"{{os.environ['NODE']}}-{{rank}}-first")
start = "second" if os.path.exists(mine) else "first"
note(start=start)
others_have_noted(start)
if start == "second":
    sys.exit(0)
if rank == 0:
    sys.exit(3)
signal.pause()
"""
"""As FIRST_FAILS_ONCE, where the restart count is not to be trusted."""

FIRST_FAILS_SOON = FIRST_FAILS.replace("signal.pause()", "time.sleep(3)")
"""Rank 0 fails, the others end well a while later, unless they are stopped."""

DEAF = f"""{NOTE}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note()
os.write(1, b"up\\n")
while True:
    signal.pause()
"""

TALK = r"""
import os
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"out {rank} {attempt}\nüñ\n\n  indented\r\n{'z' * 5000}\n".encode())
os.write(2, f"err {rank}\nTraceback? no\n".encode())
"""

ODD_BYTES = r"""
import os
os.write(1, b"caf\xe9 \xff\xfe\nlast line, without an end")
os.write(2, b"\x00\x01\n\xf0\x9f\n")
"""

GRANDCHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(\"from below\")'], check=True)"

TALK_AND_FAIL_ONCE = TALK + "import sys\nsys.exit(attempt == '0')\n"

RAISES = "def main():\n    raise ValueError('boom')\nmain()\n"

RECORDS = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("boom")
main()
"""
RECORDS_OURS = RECORDS.replace("torch.distributed.elastic.multiprocessing.errors", "rallypoint.failures.record")

RECORDED_EXIT = RECORDS_OURS.replace('raise ValueError("boom")', "raise SystemExit(7)")

BY_HAND = """
import os, sys
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write(sys.argv[1])
sys.exit(int(sys.argv[2]))
"""

NESTED = """
import os, subprocess, sys
sys.exit(subprocess.run([*sys.argv[1:], "--log-dir=inner", "inner.py"]).returncode)
"""


def exits(code: str) -> str:
    """A worker that notes what it finds and exits so; `code` is Python."""
    return f"{NOTE}\nnote()\nsys.exit({code})\n"


def dies(number: str) -> str:
    """A worker that ends itself by a signal, as if it knew nothing of it."""
    return f"""{NOTE}
note()
number = signal.{number}
if number != signal.SIGKILL:
    signal.signal(number, signal.SIG_DFL)
os.kill(os.getpid(), number)
signal.pause()
"""
