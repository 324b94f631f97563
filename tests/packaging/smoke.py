"""What an installed package must do: a table of checks, each of which starts its commands and says what was wrong.

1. Nothing here imports the package. The checks run what is installed in another environment, as a user would.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

_TIMEOUT = float(os.environ.get("RALLYPOINT_TEST_TIMEOUT", "120"))
"""Seconds for one command; a job of these takes one, but for emulated machines."""
_OURS = re.compile(r"(RALLYPOINT|PET|TORCHELASTIC|PYTHON|LOGLEVEL|OMP_NUM_THREADS|VIRTUAL_ENV)")

WORKER = """
import os, socket
from rallypoint.store.client import TCPStore
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as intruder:
    intruder.sendall(bytes(100))
    intruder.recv(1)
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=30)
os.write(1, f"rank {os.environ['RANK']} of {store.add('world', 1) and os.environ['WORLD_SIZE']}\\n".encode())
"""
FAILING = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("boom at rank 1")
"""
FAILING_ONCE = """
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"attempt {attempt}\\n".encode())
sys.exit(attempt == "0" and 3)
"""
ASKING = """
import subprocess, sys
sys.exit(subprocess.run([sys.argv[1], "status", "--json", "--rdzv-id", sys.argv[2]]).returncode)
"""
TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("barrier", flush=True)
"""


class Installed(NamedTuple):
    """An environment in which the package is installed.

    `bin` is its folder of commands; `folder` is for files of the checks; `version` and `store` (`C`, `Python`, or empty
    where either will do) are what is expected of it.
    """

    bin: Path
    folder: Path
    version: str
    store: str


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


class SmokeError(Exception):
    """A check failed; the text says why."""


def run_command(env: Installed, *words: str, **variables: str) -> Ran:
    """Run a command of the environment, with more variables. Raises SmokeError where it does not end."""
    kept = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
    path = f"{env.bin}:{kept.get('PATH', '')}"
    command = [str(env.bin / words[0]), *words[1:]]
    try:
        done = subprocess.run(
            command,
            cwd=env.folder,
            env=kept | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SmokeError(f"{' '.join(words)} did not end within {_TIMEOUT:.0f} s") from None
    return Ran(done.returncode, done.stdout, done.stderr)


def _script(env: Installed, name: str, text: str) -> str:
    (env.folder / name).write_text(text)
    return name


def _expect(holds: object, what: str, ran: Ran) -> None:
    if not holds:
        raise SmokeError(f"{what}; exit code {ran.code}, stdout {ran.out[-500:]!r}, stderr {ran.err[-1000:]!r}")


def _versions(env: Installed) -> str:
    for command in ("rallyrun", "rallyctl"):
        ran = run_command(env, command, "--version")
        _expect((ran.code, ran.out) == (0, f"{command} {env.version}\n"), f"{command} --version is another", ran)
    ran = run_command(env, "python", "-c", "import rallypoint as r; print(r.__version__, r.__file__)")
    _expect(ran.out.startswith(f"{env.version} {env.bin.parent}"), "the module is another", ran)
    return env.version


def _job(env: Installed) -> str:
    """A job of two workers, which use the store, also as it should not be used; says which one serves."""
    script = _script(env, "worker.py", WORKER)
    ran = run_command(env, "rallyrun", "--standalone", "--nproc-per-node=2", script, LOGLEVEL="DEBUG")
    _expect(ran.code == 0, "the job failed", ran)
    _expect("Traceback" not in ran.err, "there is a traceback in the log", ran)
    _expect(sorted(ran.out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], "the workers said something else", ran)
    served = re.search(r"is served by the one in (C|Python)", ran.err)
    _expect(served is not None and served[1] == (env.store or served[1]), f"not the store in {env.store}", ran)
    assert served is not None
    return f"store in {served[1]}"


def _failing_job(env: Installed) -> str:
    script = _script(env, "failing.py", FAILING)
    ran = run_command(env, "rallyrun", "--standalone", "--nproc-per-node=2", script)
    _expect(ran.code == 1, "the job did not end with 1", ran)
    for words in ("failing.py FAILED", "Root Cause (first observed failure)", "rank      : 1", "boom at rank 1"):
        _expect(words in ran.err, f"the report lacks {words!r}", ran)
    return "exit code 1, reported"


def _restart(env: Installed) -> str:
    script = _script(env, "failing_once.py", FAILING_ONCE)
    ran = run_command(env, "rallyrun", "--standalone", "--max-restarts=1", script)
    _expect((ran.code, ran.out) == (0, "attempt 0\nattempt 1\n"), "it was not started again once", ran)
    return "restarted"


def _rallyctl(env: Installed) -> str:
    script = _script(env, "asking.py", ASKING)
    job = f"smoke-{secrets.token_hex(4)}"
    meet = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={job}")
    ran = run_command(env, "rallyrun", *meet, script, str(env.bin / "rallyctl"), job)
    try:
        shown = json.loads(ran.out)
    except ValueError:
        shown = {}
    _expect(ran.code == 0 and shown.get("phase") == "running", "rallyctl status does not see the job run", ran)
    ran = run_command(env, "rallyctl", "secret")
    _expect(ran.code == 0 and len(ran.out.strip()) > 20, "rallyctl secret makes none", ran)
    return "status, secret"


def _torch(env: Installed) -> str:
    """Only where torch is there already: nothing fetches it for this."""
    if run_command(env, "python", "-c", "import torch").code != 0:
        return "no torch"
    ran = run_command(env, "rallyrun", "--standalone", "--nproc-per-node=2", _script(env, "with_torch.py", TORCH))
    _expect((ran.code, ran.out.count("barrier")) == (0, 2), "a barrier of torch failed", ran)
    return "torch"


CHECKS: tuple[Callable[[Installed], str], ...] = (_versions, _job, _failing_job, _restart, _rallyctl, _torch)


def smoke(env: Installed, checks: Sequence[Callable[[Installed], str]] = CHECKS) -> str:
    """These checks. Returns what they found, in a line. Raises SmokeError at the first that fails."""
    env.folder.mkdir(parents=True, exist_ok=True)
    return ", ".join(check(env) for check in checks)
