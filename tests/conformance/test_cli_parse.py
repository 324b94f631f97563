"""The same command lines under torchrun 2.13 and rallyrun: values read, values refused, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.convert import config_from_options
from rallypoint.cli.parse import parse
from tests.environment import undisturbed
from tests.processes import completed

pytestmark = pytest.mark.torch

Case = tuple[list[str], dict[str, str]]

READ: list[Case] = [
    (["s.py"], {}),
    (["s.py", "a", "--b", "-c"], {}),
    (["--standalone", "s.py"], {}),
    (["--stand", "s.py"], {}),
    (["--nnode", "1", "s.py"], {}),
    (["--ro", "x", "s.py"], {}),
    (["--red=3", "s.py"], {}),
    (["--re=3", "s.py"], {}),
    (["s.py", "--version"], {}),
    (["--nproc-per-node", "2", "s.py"], {}),
    (["--nproc_per_node=2", "s.py"], {}),
    (["-m", "mod", "a"], {}),
    (["-mr3", "mod"], {}),
    (["-r", "3", "-t", "0:1,1:2", "s.py"], {}),
    (["-r3", "-t=1", "s.py"], {}),
    (["--standalone", "--", "s.py", "--x"], {}),
    (["s.py", "--", "a", "--", "b"], {}),
    (["s.py", "a", "--", "b"], {}),
    (["s.py", "--", "--", "b"], {}),
    (["--", "s.py", "--", "b"], {}),
    (["s.py", "--", "--log", "x"], {}),
    (["s.py", "--nproc-per-node", "2", "-m", "--help"], {}),
    (["-", "a"], {}),
    (["-5", "s.py"], {}),
    (["-x y", "a"], {}),
    (["", "a"], {}),
    (["--nnodes=2", "--nnodes=3", "s.py"], {}),
    (["--max-restarts", " 3", "s.py"], {}),
    (["--max-restarts", "1_0", "s.py"], {}),
    (["--monitor-interval", "inf", "s.py"], {}),
    (["--node-rank", "-1", "s.py"], {}),
    (["--master-port", "0", "--master-addr", "h", "s.py"], {}),
    (["--local-addr", "", "--log-dir", "", "--role", "", "s.py"], {}),
    (["--logs-specs", "x", "--numa-binding", "core-complex", "s.py"], {}),
    (["--no-python", "--run-path", "--virtual-local-rank", "s.py"], {}),
    (["--signals-to-handle", "SIGUSR1", "--shutdown-timeout", "5", "s.py"], {}),
    *[
        ([f"--duplicate-{stream}-filters", text, "s.py"], {})
        for stream in ("stdout", "stderr")
        for text in ("a", "a,,b,c", ",", ",,", ",,,a", ",,,,", "a, b", ",a,,", "")
    ],
    (["s.py"], {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "4", "PET_RDZV_BACKEND": "c10d"}),
    (["--nproc-per-node", "3", "s.py"], {"PET_NPROC_PER_NODE": "4"}),
    (["s.py"], {"PET_NNODES": "", "PET_LOG_DIR": "", "PET_RDZV_ENDPOINT": "h:1", "PET_RDZV_ID": "job"}),
    (["s.py"], {"PET_MAX_RESTARTS": "3", "PET_MONITOR_INTERVAL": "0.5", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "5"}),
    (["s.py"], {"PET_START_METHOD": "bogus"}),
    (["s.py"], {"PET_STANDALONE": "1", "PET_MODULE": "2", "PET_NO_PYTHON": "0", "PET_RUN_PATH": " 1 "}),
    (["--standalone", "s.py"], {"PET_STANDALONE": "0"}),
    (["s.py"], {"PET_VIRTUAL_LOCAL_RANK": "1", "PET_SHUTDOWN_TIMEOUT": "9", "PET_SIGNALS_TO_HANDLE": "SIGHUP"}),
    (["s.py"], {"PET_M": "1", "PET_R": "3", "PET_T": "3", "PET_REDIRECTS": "1", "PET_TEE": "2"}),
    (["s.py"], {"PET_LOGS_SPECS": "x", "PET_NUMA_BINDING": "node", "PET_TRAINING_SCRIPT": "y.py"}),
    (["s.py"], {"PET_DUPLICATE_STDOUT_FILTERS": "a,,b,c", "PET_DUPLICATE_STDERR_FILTERS": ""}),
    (["s.py"], {"PET_ROLE": "r", "PET_LOCAL_ADDR": "h", "PET_MASTER_ADDR": "m", "PET_RDZV_CONF": "a=b"}),
    (["s.py"], {"PET_EVENT_LOG_HANDLER": "console", "PET_LOCAL_RANKS_FILTER": "0"}),
]

CONVERTED: list[Case] = [
    (["--master-port=1", "s.py", "a"], {}),
    (["--nnodes=2", "--master-port=7", "--master-addr=h", "--node-rank=1", "s.py"], {}),
    (["--nnodes=1:2", "--rdzv-endpoint=h:3", "--rdzv-conf=rank=9,timeout=5", "s.py"], {}),
    (["--nnodes= 1 : 2 ", "--rdzv-backend=c10d", "--rdzv-endpoint=h", "--rdzv-id=a,b", "-m", "mod", "x"], {}),
    (["--rdzv-backend=c10d", "--rdzv-conf=a=1,b=2=3, c = 4 ,a=5", "--no-python", "/bin/echo", "x"], {}),
    (["--rdzv-backend=c10d", "--rdzv-conf= ", "--nproc-per-node=3", "s.py"], {}),
    (["--rdzv-backend=etcd-v2", "--nproc-per-node=cpu", "--role=", "s.py"], {}),
    (["--rdzv-backend=c10d", "--nproc-per-node=auto", "--max-restarts=4", "s.py"], {"CUDA_VISIBLE_DEVICES": ""}),
    (["--rdzv-backend=c10d", "--nproc-per-node= 1_0 ", "--monitor-interval=2", "s.py"], {}),
    (["--rdzv-backend=c10d", "-r", "3", "-t", "0:1,1:2", "--local-ranks-filter=0, 1,2", "s.py"], {}),
    (["--rdzv-backend=c10d", "-r", "0:1,0:2", "--local-ranks-filter=", "s.py"], {}),
    (["--rdzv-backend=c10d", "--local-ranks-filter=-1", "--start-method=fork", "s.py"], {}),
    (["--rdzv-backend=c10d", "--virtual-local-rank", "--event-log-handler=console", "s.py"], {}),
    (["--rdzv-backend=c10d", "--duplicate-stdout-filters=a,,b,c", "--duplicate-stderr-filters=d", "s.py"], {}),
    (["--rdzv-backend=c10d", "--shutdown-timeout=0", "--local-addr=h", "s.py"], {"PYTHON_EXEC": "/usr/bin/py"}),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "s.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}),
    (["--rdzv-backend=c10d", "--signals-to-handle=SIGTERM, SIGUSR1", "s.py"], {"PYTHON_EXEC": ""}),
    (["--rdzv-backend=c10d", "s.py"], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}),
]

REFUSED: list[Case] = [
    ([], {}),
    ([], {"PET_TRAINING_SCRIPT": "x.py"}),
    (["--standalone"], {}),
    (["--nproc", "2", "s.py"], {}),
    (["--max", "1", "s.py"], {}),
    (["--r", "1", "s.py"], {}),
    (["--unknown", "s.py"], {}),
    (["--use-env", "s.py"], {}),
    (["--v", "s.py"], {}),
    (["--ver", "s.py"], {}),
    (["--versions", "s.py"], {}),
    (["-r"], {}),
    (["--nnodes", "--", "s.py"], {}),
    (["--standalone=1", "s.py"], {}),
    (["--max-restarts", "0x1", "s.py"], {}),
    (["--max-restarts=", "s.py"], {}),
    (["--start-method", "bogus", "s.py"], {}),
    (["--numa-binding", "bogus", "s.py"], {}),
    (["s.py"], {"PET_MAX_RESTARTS": "abc"}),
    (["s.py"], {"PET_MAX_RESTARTS": ""}),
    (["s.py"], {"PET_MONITOR_INTERVAL": "x"}),
    (["--help"], {}),
    (["--unknown", "-h"], {}),
    (["s.py"], {"PET_STANDALONE": "abc"}),
    (["s.py"], {"PET_STANDALONE": ""}),
    (["--help"], {"PET_STANDALONE": "abc"}),
    (["s.py"], {"PET_NNODES": ""}),
    (["s.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "abc"}),
    *[
        (["--standalone", f"{flag}={value}", "s.py"], {})
        for flag, values in {
            "--nnodes": ["1:2:3", "a", "0", "2:1", "0:1", ":2", "-1"],
            "--nproc-per-node": ["0", "-1", "GPU", "xpu", "foo", "privateuseone", ""],
            "--max-restarts": ["-1"],
            "--monitor-interval": ["0", "-1", "nan"],
            "--shutdown-timeout": ["-1"],
            "--local-ranks-filter": ["a", "0,"],
            "--redirects": ["4", "", "10:1", "0:1,"],
            "--tee": ["x", "10:1"],
            "--log-dir": [__file__],
            "--rdzv-conf": ["foo", "=x", "a=", ",", "a=1,", "backend=x", "endpoint=x", "run_id=x", "local_addr=x"],
            "--logs-specs": ["nope", ""],
        }.items()
        for value in values
    ],
    (["--standalone", "--nproc-per-node=gpu", "s.py"], {"CUDA_VISIBLE_DEVICES": ""}),
    (["--standalone", "--no-python", "-m", "s.py"], {}),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=h:99999", "s.py"], {}),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=h:x", "s.py"], {}),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=a b:1", "s.py"], {}),
    (["--nnodes=2", "--rdzv-endpoint=h", "s.py"], {}),
    (["--nnodes=2", "--master-addr=a/b", "s.py"], {}),
]
"""Command lines that torchrun ends before any worker runs."""

TORCH_LOOKS_AT_THE_SCRIPTS_ARGUMENTS: list[Case] = [
    (["s.py", "--log", "x"], {}),
    (["s.py", "a", "--max=3"], {}),
    (["s.py", "--=x"], {}),
]
"""Refused by torchrun on this Python, though what follows the script is not its own. We pass it on."""


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What torch answers to all cases, asked in one process."""
    folder = tmp_path_factory.mktemp("torchrun")
    asked = {
        "read": [("parse", *case) for case in READ],
        "converted": [("convert", *case) for case in CONVERTED],
        "refused": [("run", *case) for case in REFUSED],
        "looked at": [("parse", *case) for case in TORCH_LOOKS_AT_THE_SCRIPTS_ARGUMENTS],
    }
    program = Path(__file__).with_name("torch_cli.py")
    done = completed(
        [sys.executable, str(program)],
        input=json.dumps([case for cases in asked.values() for case in cases]),
        env=undisturbed("CUDA_") | {"TMPDIR": str(folder)},
        cwd=folder,
        check=True,
    )
    answers = iter(json.loads(done.stdout))
    return {name: [next(answers) for _ in cases] for name, cases in asked.items()}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_the_same_is_read(torchrun: dict[str, list[Any]]) -> None:
    for (arguments, environ), answer in zip(READ, torchrun["read"], strict=True):
        options = vars(parse(arguments, environ))
        theirs = answer["value"]
        theirs.pop("print_completion", None)  # since 2.14; it exits
        assert options.keys() - theirs.keys() <= {"sources", "features", "environment", "log_line_prefix_template"}
        assert _as_json({name: options[name] for name in theirs}) == theirs, (arguments, environ)


def test_the_same_is_launched(torchrun: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    for (arguments, environ), answer in zip(CONVERTED, torchrun["converted"], strict=True):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            config, program, rest = config_from_options(parse(arguments, environ), environ)
        theirs = answer["value"]
        ours = {name: getattr(config, name) for name in theirs["config"]}
        assert _as_json(ours) == theirs["config"], (arguments, environ)
        assert (program, list(rest)) == (theirs["program"], theirs["arguments"]), (arguments, environ)
        assert _streams(config.logs_specs) == theirs["streams"], (arguments, environ)


def _streams(specs: Any) -> dict[str, Any]:
    shown = _as_json({name: getattr(specs, name) for name in ("_redirects", "_tee")})
    ranks = specs._local_ranks_filter
    return {**shown, "_local_ranks_filter": None if ranks is None else sorted(ranks)}


def _exit_of_ours(arguments: list[str], environ: dict[str, str]) -> object:
    try:
        config_from_options(parse(arguments, environ), environ)
    except SystemExit as end:
        return end.code
    except UserError:
        return 1
    return None


def test_the_same_is_refused(torchrun: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for (arguments, environ), answer in zip(REFUSED, torchrun["refused"], strict=True):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            assert _exit_of_ours(arguments, environ) == answer.get("exit", answer), (arguments, environ)


def test_what_follows_the_script_is_left_alone(torchrun: dict[str, list[Any]]) -> None:
    for (arguments, environ), answer in zip(TORCH_LOOKS_AT_THE_SCRIPTS_ARGUMENTS, torchrun["looked at"], strict=True):
        if sys.version_info < (3, 12):
            assert answer == {"exit": 2}
        assert parse(arguments, environ).training_script_args == tuple(arguments[1:])
