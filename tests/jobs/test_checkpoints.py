"""Checkpoints written in place, and last writes of a worker's helpers, when another process dies."""

from __future__ import annotations

import signal
from functools import partial

from tests.jobs.launching import AtOnce, Launcher
from tests.ports import free_port

TRAINING = """
import json, os, time
from rallypoint import notices
def write(piece):
    with open("checkpoint.json", "w") as file:
        file.write("[0")
        pieces, more = 0, 10  # of which the last come when others have stopped waiting
        while more:
            file.write(piece)
            file.flush()
            pieces, more = pieces + 1, more - os.path.exists("enough")
            pieces == 1 and print("saving", flush=True)
            time.sleep(0.03)
        print("wrote", pieces, flush=True)
        file.write("]")
if os.environ["NODE"] == "B":
    time.sleep(600)
if not os.path.exists("checkpoint.json"):
    {save}
    time.sleep(600)
with open("checkpoint.json") as file:
    print("loaded", len(json.load(file)), flush=True)
"""
SAVES = {
    "in place": 'write(", 1" * 20_000)',
    "in small pieces, and says so": 'with notices.saving(): write(", 1")',
}


def test_a_checkpoint_that_is_written_while_another_node_dies_is_whole(at_once: AtOnce) -> None:
    at_once(*(partial(a_checkpoint_is_whole, how=how) for how in SAVES))


def a_checkpoint_is_whole(rallyrun: Launcher, *, how: str) -> None:
    script = rallyrun.script(TRAINING.replace("{save}", SAVES[how]))
    flags = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    a = rallyrun(*flags, "--rdzv-conf=is_host=true", script, env={"NODE": "A"})
    b = rallyrun(*flags, "--rdzv-conf=is_host=false", script, env={"NODE": "B"})
    a.until(lambda lines: "saving" in lines, "the checkpoint is begun")
    b.signal(signal.SIGKILL)
    a.until_err("it will be stopped when that is done" if how == "in place" else "closing signal SIGTERM")
    (rallyrun.folder / "enough").touch()
    assert a.ends() == 0, a.err
    (pieces,) = [int(line.split()[1]) for line in a.out if line.startswith("wrote")]
    of_one = 20_000 if how == "in place" else 1
    assert a.out[-1] == f"loaded {pieces * of_one + 1}", a.err
    assert ("checkpoint.json; it will be stopped when that is done" in a.err) is (how == "in place")


def test_a_helper_that_outlives_its_worker_may_write_to_the_end(rallyrun: Launcher) -> None:
    helper = "import os, signal, time\n"
    helper += "def write():\n    with open('records', 'w') as file:\n"
    helper += "        for _ in range(4): time.sleep(0.02); print('record', file=file, flush=True)\n"
    helper += "signal.signal(15, lambda *_: (write(), os._exit(0))); print(flush=True)\n"
    helper += "while True: time.sleep(0.01)\n"  # a signal right before a pause would not end it
    script = rallyrun.script(
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {helper!r}]\n"
        "helper = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "helper.stdout.readline()\nos._exit(0)\n"
    )
    job = rallyrun("--standalone", script)
    assert job.ends() == 0, job.err
    assert (rallyrun.folder / "records").read_text() == "record\n" * 4
