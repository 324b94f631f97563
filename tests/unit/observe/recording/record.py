"""Records a run of 20 injected failures, and beside it what a person with a watch would note down.

    python tests/unit/observe/recording/record.py FOLDER        some five minutes, as root (for host names)

Three agents on this machine, as the hosts n0 to n2, with two workers each. The workers finish a step every 0.1 s,
report it, save every 40 steps, continue from their save, and take 2.5 seconds to end. Seventeen times a worker is
killed, three times two in a row before they have got further than ever, so that the next rounds are held back; three
times an agent is killed and started again twenty seconds later. Afterwards FOLDER has the events (n0.jsonl, ...) and
`noted.json`: each kill with its time, and when each worker started, finished each step, and ended, by the workers' own
account. Nothing in `noted.json` comes from the events, or from any part of Rallypoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKER = """
import os, signal, sys, time
from rallypoint import notices
folder, rank, round_ = sys.argv[1], int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
log = open(f"{folder}/{time.time():.3f}.{rank}.{os.getpid()}.log", "a", buffering=1)
def say(what, value=0):
    log.write(f"{what} {value} {time.time():.6f}\\n")
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) + 0.5  # of a tick that has begun, its middle
uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
log.write(f"start {os.getpid()} {time.time() - uptime + ticks / os.sysconf('SC_CLK_TCK'):.6f}\\n")
def end(*_):
    say("term")
    time.sleep(2.5)
    say("exit")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
saved = f"{folder}/saved"
step = int(open(saved).read()) if os.path.exists(saved) else 0
begin, first = time.monotonic(), step
while not os.path.exists(f"{folder}/done"):
    step += 1
    time.sleep(max(0.0, begin + (step - first) * 0.1 - time.monotonic()))
    notices.progress(step)
    say("step", step)
    if rank == 0 and step % 40 == 0:
        with open(saved + ".new", "w") as file:
            file.write(str(step))
        os.replace(saved + ".new", saved)
say("exit")
"""

KILLS = ["worker"] * 5 + ["early"] * 2 + ["agent"] + ["worker"] * 3 + ["early"] * 2 + ["agent"] + ["worker"] * 2
KILLS += ["agent", "early", "early", "worker"]
HOSTS = ("n0", "n1", "n2")


def main(folder: Path) -> None:
    """Record."""
    assert len(KILLS) == 20
    work = folder / "work"
    work.mkdir(parents=True)
    (work / "worker.py").write_text(WORKER)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    agents = {host: _agent(folder, host, port) for host in HOSTS}
    _wait(lambda: _listens(port))  # until then it is the interpreter that begins, and no agent
    noted: dict[str, Any] = {"began": time.time(), "kills": []}
    dice = random.Random(14)
    for kind in KILLS:
        started = _wait_for_workers(work)
        _sleep_until(max(started) + (0.5 if kind == "early" else dice.uniform(5.5, 9.5)))
        host = HOSTS[dice.randrange(1, 3)]
        before = set(work.glob("*.log"))
        victim = agents[host].pid if kind == "agent" else _a_worker_of(agents[host].pid, work)
        at = time.time()
        os.kill(victim, signal.SIGKILL)
        noted["kills"].append({"kind": kind, "host": host, "at": at})
        print(f"{kind} on {host}", flush=True)
        if kind == "agent":
            agents[host].wait()
            time.sleep(20.0)
            agents[host] = _agent(folder, host, port)
        _wait(lambda before=before: len(set(work.glob("*.log")) - before) == 6)
    _sleep_until(max(_wait_for_workers(work)) + 5.0)
    (work / "done").touch()
    for each in agents.values():
        assert each.wait(timeout=60) == 0
    noted["ended"] = time.time()
    noted["workers"] = [_brief(_account(each)) for each in sorted(work.glob("*.log"))]
    (folder / "noted.json").write_text(json.dumps(noted, separators=(",", ":")) + "\n")
    for path in folder.glob("*.jsonl"):  # what torch's names say is not read, and is most of it
        path.write_text("".join(line for line in path.open() if '"event":"torch"' not in line))


def _agent(folder: Path, host: str, port: int) -> subprocess.Popen[bytes]:
    run = [sys.executable, "-m", "rallypoint.run", "--nnodes=3", "--nproc-per-node=2", "--max-restarts=100"]
    run += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=recorded"]
    run += [f"--rdzv-conf=restart_backoff=5,is_host={str(host == 'n0').lower()}"]
    run += [
        f"--event-log-handler=jsonl:{folder}/{host}.jsonl",
        str(folder / "work" / "worker.py"),
        str(folder / "work"),
    ]
    named = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh", *run]
    return subprocess.Popen(named, stderr=subprocess.DEVNULL)


def _listens(port: int) -> bool:
    """Whether somebody listens at a port, asked without a connection."""
    rows = (line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:])
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def _newest(work: Path) -> list[dict[str, Any]]:
    """What the workers that run have noted, if there are six."""
    found = [_account(each) for each in sorted(work.glob("*.log"))]
    running = [each for each in found if "exit" not in each and os.path.exists(f"/proc/{each.get('pid')}/stat")]
    return running if len(running) == 6 else []


def _wait_for_workers(work: Path) -> list[float]:
    _wait(lambda: len([each for each in _newest(work) if each["steps"]]) == 6)
    return [each["start"] for each in _newest(work)]


def _a_worker_of(agent: int, work: Path) -> int:
    pids = {each["pid"] for each in _newest(work)}
    return next(pid for pid in _descendants(agent) if pid in pids)


def _descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in map(int, child.read_text().split()):
            yield each
            yield from _descendants(each)


def _account(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": int(path.name.split(".")[2]), "steps": []}
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):  # being written
            break
        what, value, at = line.split()
        if what == "step":
            found["steps"].append([int(value), round(float(at), 3)])
        else:
            found[what] = round(float(at), 3)
            if what == "start":
                found["pid"] = int(value)
    return found


def _brief(account: dict[str, Any]) -> dict[str, Any]:
    """Of the steps only those that are counted by: the first, the last, and those after which was saved."""
    steps = account["steps"]
    return account | {"steps": [each for each in steps if each in (steps[0], steps[-1]) or each[0] % 40 == 0]}


def _wait(holds: Any) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.02)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
