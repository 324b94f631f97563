"""Sections 2 to 7 of the contract: ranks, restarts, signals, log folders, error files and reports, two nodes."""

from __future__ import annotations

import json
import signal

from tests.conformance.side_by_side.case import Case, Entry, Side
from tests.conformance.side_by_side.workers import (
    BY_HAND,
    DEAF,
    FIRST_FAILS,
    FIRST_FAILS_SOON,
    GRANDCHILD,
    HEARS,
    NESTED,
    NODE_FAILS_ONCE,
    ODD_BYTES,
    ONCE,
    RAISES,
    RECORDED_EXIT,
    RECORDS,
    RECORDS_OURS,
    SHOW,
    TALK,
    TALK_AND_FAIL_ONCE,
    dies,
    exits,
)

_LOGS = "--log-dir=logs"

STREAMS = [
    Case(f"6.4 {flags}", f"{_LOGS} --nproc-per-node=2 {flags}", TALK)
    for flags in (
        "",
        "-r 1",
        "-r 2",
        "-r 3",
        "-t 1",
        "-t 2",
        "-t 3",
        "-r 3 -t 1",
        "-r 1 -t 2",
        "-r 0:1,1:2",
        "-t 1:3",
        "-r 0:3 -t 1:1",
        "-r 0:0,5:3",
        "-t 3 --local-ranks-filter=1",
        "-r 1 --local-ranks-filter=1",
        "--local-ranks-filter=0",
        "-t 1 --local-ranks-filter=7",
        "-t 3 --role=r --local-ranks-filter=0,1",
    )
]

FOLDERS = [
    Case("6.3 without --log-dir", "-r 3", TALK),
    Case("6.3 --log-dir=/dev/null", "--log-dir=/dev/null -t 3 -r 3", TALK),
    Case("6.3 a new folder in a new folder", "--log-dir={here}/new/er -r 3", TALK),
    Case(
        "6.3 an id with a slash",
        "--log-dir=logs -r 3 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=a/b",
        TALK,
        differs=("any id",),
        code=1,
    ),
    Case("6.3 an id with blanks", ("--log-dir=logs", "-r=3", "--master-port={port}", "--rdzv-id=a b"), TALK),
    Case("6.3 a restart", f"{_LOGS} -r 1 -t 2 --max-restarts=1", TALK_AND_FAIL_ONCE),
    Case("6.3 nothing is said", f"{_LOGS} -r 3", "pass"),
    Case("6.4 odd bytes in files", f"{_LOGS} -r 3", ODD_BYTES),
    Case("6.4 what a worker's child says", f"{_LOGS} -r 1 --nproc-per-node=2", GRANDCHILD),
    Case(
        "6.5 a prefix",
        f"{_LOGS} -t 3",
        "print('hello')",
        env=(("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${role_name}/$rank ${x} "),),
    ),
    Case(
        "6.5 a prefix by a flag",
        (*f"{_LOGS} -t 3".split(), "--log-line-prefix-template=${hostname}|${role_name}|${rank}|$local_rank|${x} "),
        "print('hello')",
        env=(("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "not this "),),
        since="2.14",
    ),
    Case("6.6 filters", f"{_LOGS} -t 3 --duplicate-stdout-filters=out,ñ --duplicate-stderr-filters=no,,", TALK),
    Case("6.6 filters without a tee", f"{_LOGS} --duplicate-stdout-filters=out --nproc-per-node=2", TALK),
]

RESTARTS = [
    Case("5.2 one failure and one restart", f"{_LOGS} --max-restarts=1", ONCE),
    Case("5.2 failures without end", f"{_LOGS} --max-restarts=2", exits("3"), code=1),
    Case("5.2 a restart of a static job", "--max-restarts=1 --master-port={port} --rdzv-id=i", ONCE),
    Case("5.7 one of three fails and the others are shown", f"{_LOGS} -t 3 --nproc-per-node=3", FIRST_FAILS, code=1),
    Case("5.7 one of two ends early", "--nproc-per-node=2", SHOW + "\nif rank == 0:\n    time.sleep(0.5)\n"),
]

EXITS = [
    *[Case(f"7.6 exit {code}", (), exits(code), code=1) for code in ("1", "255", "'a text'")],
    *[Case(f"7.6 exit {code}", (), exits(code)) for code in ("256", "None")],
    *[
        Case(f"7.6 {name}", (), dies(name), code=1)
        for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGABRT", "SIGSEGV", "SIGUSR1", "SIGPIPE")
    ],
    Case("7.6 an exception", (), RAISES, code=1),
    Case("7.6 an exception, redirected", f"{_LOGS} -r 3", "raise SystemExit(3)", code=1),
    Case(
        "7.6 a script that is missing",
        (),
        words=("no-such-script.py",),
        code=1,
        differs=("a missing script starts nothing",),
    ),
    Case("7.6 a script that is a folder", (), words=("tmp",), code=1),
    Case("7.6 a script that is no Python", (), "this is no Python", code=1),
]

_TORCHRUN, _RALLYRUN = (Entry.COMMAND.command(side)[0] for side in Side)
_MINE = ("TORCHELASTIC_ERROR_FILE", "{here}/mine.json")
_OLD = json.dumps(
    {"message": {"message": "E: x", "extraInfo": {"py_callstack": "Traceback ...\nE: x\n", "timestamp": "100"}}}
)
_NEW = json.dumps({"message": "E: y", "timestamp": 100})

ERROR_FILES = [
    Case("7.1 torch's record", _LOGS, RECORDS, code=1),
    Case("7.1 our record", _LOGS, RECORDS_OURS, code=1),
    Case("7.2 record and an exit code", _LOGS, RECORDED_EXIT, code=1),
    Case("7.1 a file by hand", _LOGS, BY_HAND, ("script.py", _OLD, "5"), code=1),
    Case("7.1 a file by hand in the other form", _LOGS, BY_HAND, ("script.py", _NEW, "5"), code=1),
    Case("7.1 a file and success", _LOGS, BY_HAND, ("script.py", _OLD, "0")),
    Case(
        "7.1 a file that is no JSON", _LOGS, BY_HAND, ("script.py", "{", "5"), differs=("a damaged error file",), code=1
    ),
    Case("7.1 no log folder", "--log-dir=/dev/null", RECORDS_OURS, code=1),
    Case("7.4 the launcher's own file", _LOGS, RECORDS_OURS, env=(_MINE,), code=1),
    Case(
        "7.4 the launcher's own file without a worker's",
        _LOGS,
        exits("3"),
        env=(_MINE,),
        differs=("the launcher's own file is written",),
        code=1,
    ),
    Case("7.4 the launcher's own file after success", _LOGS, SHOW, env=(_MINE,)),
    Case(
        "7.4 the launcher's own file after a bad value",
        "--max-restarts=-1",
        SHOW,
        env=(_MINE,),
        differs=("other words",),
        code=1,
    ),
    Case(
        "7.4 a torchrun in the job",
        _LOGS,
        NESTED,
        ("script.py", _TORCHRUN),
        files=(("inner.py", RECORDS_OURS),),
        code=1,
    ),
    Case(
        "7.4 a rallyrun in the job",
        _LOGS,
        NESTED,
        ("script.py", _RALLYRUN),
        files=(("inner.py", RECORDS_OURS),),
        code=1,
    ),
]

_S = signal.Signals

_ALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job", "--log-dir=logs")
_INFO = (("LOGLEVEL", "INFO"),)

SIGNALS = [
    *[
        Case(f"5.6 {each.name}", "--nproc-per-node=2", HEARS, send=each, ups=2, code=1)
        for each in (_S.SIGTERM, _S.SIGINT, _S.SIGHUP, _S.SIGQUIT)
    ],
    Case("5.6 SIGINT that is not in the list", "--signals-to-handle=SIGTERM", HEARS, send=_S.SIGINT, code=-2),
    Case("5.6 SIGTERM and workers that fail", (), HEARS, ("script.py", "9"), send=_S.SIGTERM, code=1),
    Case(
        "5.6 SIGUSR1 in the list",
        "--signals-to-handle=SIGTERM,SIGUSR1",
        HEARS,
        send=_S.SIGUSR1,
        differs=("a telling signal",),
        code=1,
    ),
    Case("5.6 an unknown name in the list", "--signals-to-handle=SIGTERM,SIGNONE", HEARS, send=_S.SIGTERM, code=1),
    Case("5.6 --shutdown-timeout", "--shutdown-timeout=1", DEAF, send=_S.SIGTERM, code=1),
    Case(
        "5.6 a shutdown timeout as a variable",
        (),
        DEAF,
        env=(("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1"),),
        send=_S.SIGTERM,
        code=1,
    ),
    Case(
        "5.6 a signal with --run-path",
        "--run-path",
        HEARS,
        send=_S.SIGTERM,
        differs=("functions lead a session", "functions write at once"),
        code=1,
    ),
]

_STATIC = "--nnodes=2 --rdzv-id=job --master-addr=127.0.0.1 --master-port={port} --log-dir=logs{node}"
_C10D = "--nnodes=2 --rdzv-id=job --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --log-dir=logs{node}"
_HOST, _GUEST = "--rdzv-conf=is_host=1", "--rdzv-conf=is_host=0"
_RANKS = (("--node-rank=0",), ("--node-rank=1", "--nproc-per-node=2"))
_EQUAL = (("--node-rank=0",), ("--node-rank=1",))

NODES = [
    Case("3.1 static", _STATIC, SHOW, nodes=_RANKS),
    Case(
        "3.2 static with roles",
        _STATIC,
        SHOW,
        nodes=(("--node-rank=0", "--role=A", "--nproc-per-node=2"), ("--node-rank=1", "--role=B")),
    ),
    Case("3.2 c10d with two workers each", f"{_C10D} --nproc-per-node=2", SHOW, nodes=((), ())),
    Case("3.2 c10d, nodes between two numbers", _C10D.replace("=2", "=1:2", 1), SHOW, nodes=((), ())),
    Case(
        "3.2 identical workers",
        f"{_C10D} --nproc-per-node=2",
        SHOW,
        nodes=((), ()),
        env=(("TORCH_ELASTIC_WORKER_IDENTICAL", "1"),),
    ),
    Case("7.6 c10d, one node fails", _C10D, FIRST_FAILS, nodes=((_HOST,), (_GUEST,)), code=1),
    Case(
        "5.3 c10d, one node fails once",
        f"{_C10D} --max-restarts=1",
        NODE_FAILS_ONCE,
        nodes=((_HOST,), (_GUEST,)),
        differs=("one restart count", "earlier logs are kept"),
    ),
    Case("7.6 static, one node fails", _STATIC, FIRST_FAILS_SOON, nodes=_EQUAL, differs=("all nodes stop",), code=1),
    Case("5.6 SIGTERM to both nodes", _STATIC, HEARS, nodes=_EQUAL, send=_S.SIGTERM, code=1),
    Case(
        "3.1 no other node comes",
        f"{_C10D} --rdzv-conf=join_timeout=1",
        SHOW,
        differs=("no folder without workers",),
        code=1,
    ),
]

EVENTS = [
    Case("5.9 events of a success", "--event-log-handler=console --nproc-per-node=2 --role=r", SHOW),
    Case(
        "5.9 events of a failure",
        "--event-log-handler=console",
        exits("3"),
        differs=("a failed job's agent has failed",),
        code=1,
    ),
    Case(
        "5.9 events of a restart",
        "--event-log-handler=console --max-restarts=1",
        exits("1 - int(os.environ['TORCHELASTIC_RESTART_COUNT'])"),
        differs=("each failure is an event",),
    ),
]

TOLD = [
    Case("5.8 a job alone", "--standalone", SHOW, env=_INFO, differs=("no folder yet",)),
    Case(
        "5.8 a static job",
        "--master-port={port} --rdzv-id=i --log-dir=logs --max-restarts=2 --role=r --monitor-interval=2 "
        "--nproc-per-node=2 --duplicate-stdout-filters=a,,b,c --event-log-handler=null --rdzv-conf=timeout=50",
        SHOW,
        env=_INFO,
    ),
    Case("5.8 a program", (*_ALONE, "--no-python"), words=("true",), env=_INFO),
    Case("5.8 a failure and a restart", (*_ALONE, "--max-restarts=1"), ONCE, env=_INFO),
]

CASES = [*TOLD, *STREAMS, *FOLDERS, *RESTARTS, *EXITS, *ERROR_FILES, *SIGNALS, *NODES, *EVENTS]
