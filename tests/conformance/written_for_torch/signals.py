"""Signals to a process that has started workers by itself: `signals.py <kind of entry point>`."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes


def sleep() -> None:
    time.sleep(600)


def started(kind: str, folder: str) -> Any:
    entrypoint: Any = sleep if kind == "function" else sys.executable
    args: Any = {0: (), 1: ()} if kind == "function" else dict.fromkeys((0, 1), ("-c", "import time; time.sleep(600)"))
    return start_processes("n", entrypoint, args, {0: {}, 1: {}}, DefaultLogsSpecs(log_dir=folder))


def told(kind: str, folder: str, number: int, elsewhere: bool) -> Any:
    """A signal while the main thread waits, sent to the process or to one of its other threads."""
    context = started(kind, folder)
    over = threading.Event()

    def send() -> None:
        time.sleep(0.2)
        if elsewhere:
            signal.pthread_kill(threading.get_ident(), number)
        else:
            os.kill(os.getpid(), number)
        over.wait()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        context.wait(period=0.1)
    except SignalException as asked:
        pids = list(context.pids().values())
        context.close(asked.sigval, timeout=5)
        alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        return [asked.sigval.name, int(asked.sigval), str(os.getpid()) in str(asked), len(pids), len(alive)]
    finally:
        over.set()
        sender.join()
    return "it was not heard"


def main() -> None:
    kind = sys.argv[1]
    said: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        said += [told(kind, folder, signal.SIGTERM, elsewhere) for elsewhere in (False, True)]
        said.append(told(kind, folder, signal.SIGINT, False))
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR1"
        said.append(told(kind, folder, signal.SIGUSR1, False))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
