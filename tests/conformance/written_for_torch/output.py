"""Output of processes and of this one, with torch's helpers."""

import io
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from typing import Any

from torch.distributed.elastic.control_plane import worker_main
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext, start_processes, to_map
from torch.distributed.elastic.multiprocessing.api import get_std_cm
from torch.distributed.elastic.multiprocessing.redirects import redirect, redirect_stderr, redirect_stdout
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.multiprocessing.tail_log import TailLog, tail_logfile
from torch.distributed.elastic.utils.log_level import get_log_level
from torch.distributed.elastic.utils.logging import get_logger


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def redirects(folder: str) -> list[Any]:
    out, err, both = f"{folder}/out", f"{folder}/err", f"{folder}/both"
    with redirect_stdout(out), redirect_stderr(err):
        print("printed")
        os.write(1, b"written\n")
        os.system("echo child; echo complaint >&2")
    with get_std_cm(both, redirect_stdout), get_std_cm("", redirect_stderr):
        print("again")
    try:
        with redirect("stdin", out):
            raised = False
    except ValueError:
        raised = True
    return [sorted(read(out).split()), read(err), read(both), raised]


def tails(folder: str) -> list[Any]:
    first, late = f"{folder}/first", f"{folder}/late"
    with open(first, "w") as file:
        file.write("one\ntwo\n")
    shown = io.StringIO()
    tail = TailLog("t", {0: first, 1: late}, shown, {1: "late: "}, interval_sec=0.01).start()
    with open(late, "w") as file:
        file.write("three\n")
    running = tail.stopped()
    tail.stop()
    finished = threading.Event()
    finished.set()
    some, none = io.StringIO(), io.StringIO()
    tail_logfile("h ", first, some, finished, 0.01, lambda line: "two" in line)
    tail_logfile("h ", first, none, finished, 0.01)
    return [sorted(shown.getvalue().splitlines()), running, tail.stopped(), some.getvalue(), none.getvalue()]


def handlers(folder: str) -> list[Any]:
    out, err = f"{folder}/h.out", f"{folder}/h.err"
    told = "import os, sys; print(os.environ['SAID'], sys.argv[1]); print('e', file=sys.stderr)"
    handler = get_subprocess_handler(sys.executable, ("-c", told, 7), {"SAID": "env"}, out, err, 0)
    ended = handler.proc.wait(60)
    sleeper = get_subprocess_handler(
        sys.executable, ("-c", "import time; time.sleep(600)"), {}, out + "2", err + "2", 1
    )
    sleeper.close(death_sig=signal.SIGKILL)
    return [ended, read(out), read(err), sleeper.local_rank_id, sleeper.proc.wait(60)]


def processes(folder: str) -> list[Any]:
    specs = DefaultLogsSpecs(log_dir=f"{folder}/logs", redirects={0: Std.OUT, 1: Std.ALL})
    args = {rank: ("-c", f"print({rank}); import sys; sys.exit({rank} * 3)") for rank in range(2)}
    started = start_processes("n", sys.executable, args, {0: {}, 1: {}}, specs)
    result = started.wait(60)
    assert result is not None
    made = SubprocessContext(
        "n", sys.executable, {0: ("-c", "pass")}, {0: {}}, DefaultLogsSpecs(log_dir=folder), {0: "p"}
    )
    made.start()
    good = made.wait(60)
    assert good is not None
    failure = result.failures[1]
    return [
        result.is_failed(),
        sorted(result.failures),
        [failure.local_rank, failure.exitcode, failure.signal_name()],
        read(result.stdouts[1]),
        good.is_failed(),
        good.return_values,
        {rank: int(std) for rank, std in to_map({1: Std.ERR}, 3).items()},
        {rank: int(std) for rank, std in to_map(Std.ALL, local_world_size=2).items()},
    ]


def logs() -> list[Any]:
    os.environ["LOGLEVEL"] = "ERROR"
    loggers = [get_logger(), get_logger("mine.own")]
    return [[each.name, each.level == logging.ERROR] for each in loggers] + [get_log_level()]


def worker() -> list[Any]:
    seen = []
    with worker_main():
        seen.append("inside")
    try:
        with worker_main():
            raise ValueError("out of it")
    except ValueError as error:
        seen.append(str(error))
    return seen


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = [redirects(folder), tails(folder), handlers(folder), processes(folder), logs(), worker()]
    print(json.dumps(told))


main()
