"""Each bad value of each flag: one sentence with the flag, the value and what is allowed, and torchrun's exit code.

Ours are real processes, whose worker would leave a mark; torchrun's answers come from one process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from rallypoint.cli.flags import FLAGS
from tests.conformance.record import From, Record
from tests.jobs.launching import RALLYRUN

pytestmark = pytest.mark.torch


class Bad(NamedTuple):
    """One mistake: `said` are words of the sentence, of flag (or variable), value and what is allowed."""

    dest: str
    flags: list[str]
    said: list[str]
    code: int
    environ: dict[str, str]
    command: list[str] = RALLYRUN

    def arguments(self, script: str) -> list[str]:
        return [*self.flags, *([] if "expected one argument" in self.said else [script])]

    def must_be_said(self) -> list[str]:
        """Words of the sentence; the flag is always among them, or the variable in its place."""
        named = [f"PET_{self.dest.upper()}"] if f"PET_{self.dest.upper()}" in self.environ else []
        return [*self.said, *(named or [f"--{self.dest.replace('_', '-')}"])]


def bad(flags: list[str], *said: str, **environ: str) -> Bad:
    """One that is found after the command line has been parsed; the first of `flags` is at fault."""
    return Bad(dest_of(flags[0].partition("=")[0]), flags, list(said), 1, environ)


def value(flag: str, text: str, *said: str, code: int = 1, also: tuple[str, ...] = ()) -> Bad:
    return Bad(dest_of(flag), [*also, f"{flag}={text}"], [flag, text, *said], code, {})


def variable(flag: str, text: str, *said: str, code: int = 1) -> Bad:
    name = f"PET_{dest_of(flag).upper()}"
    return Bad(dest_of(flag), [], [name, text, *said], code, {name: text})


def dest_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


SWITCHES = ["--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank"]
WHOLE = ["--max-restarts", "--node-rank", "--master-port", "--shutdown-timeout"]
DYNAMIC = ("--nnodes=2", "--rdzv-backend=c10d")

BAD = [
    *[value("--nnodes", text, "write 2 or 1:4") for text in ("1:2:3", "a", "", "1:", "2.5")],
    *[value("--nnodes", text, "smallest is 1") for text in ("0", "2:1", "0:1", "-1")],
    *[value("--nproc-per-node", text, "smallest number is 1") for text in ("0", "-1")],
    *[value("--nproc-per-node", text, "cpu, gpu, xpu or auto") for text in ("GPU", "mps", "", "1.5")],
    bad(["--nproc-per-node=gpu"], "--nproc-per-node=gpu", "cpu or auto", CUDA_VISIBLE_DEVICES=""),
    bad(["--nproc-per-node=xpu"], "--nproc-per-node=xpu", "cpu or auto", ZE_AFFINITY_MASK="x"),
    *[bad([f"--rdzv-backend={text}", "--nnodes=2"], "rendezvous backend", "c10d", text) for text in ("zookeeper", "")],
    *[value("--rdzv-endpoint", f"h:{port}", "65535", also=DYNAMIC) for port in ("99999", "x", "-1")],
    value("--rdzv-endpoint", "a b:1", "host:port", also=DYNAMIC),
    value("--rdzv-endpoint", "h", "port", also=("--nnodes=2",)),
    *[value("--rdzv-conf", text, "=value") for text in ("foo", "a=1,b")],
    value("--rdzv-conf", "=x"),
    *[
        bad([f"--rdzv-conf={key}=x"], "--rdzv-conf", repr(key), "flag of its own")
        for key in ("backend", "endpoint", "run_id", "local_addr")
    ],
    *[bad([f"--rdzv-conf=join_timeout={text}", "--standalone"], "join_timeout=", text, "=30") for text in ("abc", "0")],
    *[value(flag, text, "whole number", code=2) for flag in WHOLE for text in ("abc", "", "1.5")],
    *[variable(flag, text, "whole number", code=2) for flag in WHOLE for text in ("abc", "")],
    value("--max-restarts", "-1", "0 or more"),
    value("--shutdown-timeout", "-1", "0 seconds or more"),
    value("--monitor-interval", "x", "not a number", code=2),
    variable("--monitor-interval", "", "not a number", code=2),
    *[value("--monitor-interval", text, "above 0") for text in ("0.0", "-1.0", "nan")],
    value("--start-method", "bogus", "spawn", "fork", "forkserver", code=2),
    value("--numa-binding", "bogus", "node", "socket", "exclusive", "core-complex", code=2),
    *[
        bad([f"--numa-binding={mode}"], f"--numa-binding={mode}", "GPU", CUDA_VISIBLE_DEVICES="")
        for mode in ("node", "socket", "exclusive", "core-complex")
    ],
    value("--event-log-handler", "nope", "console", "null"),
    value("--logs-specs", "nope", "default"),
    value("--logs-specs", "", "default"),
    *[
        value(flag, text, "[0-3]")
        for flag in ("--redirects", "--tee")
        for text in ("4", "", "x", "10:1", "0:1,", "0:4")
    ],
    *[value("--local-ranks-filter", text, "0,2") for text in ("a", "0,", "0;1", "1.5")],
    value("--log-dir", __file__, "folder"),
    *[
        bad(
            [f"--duplicate-{name}-filters=a", "--log-dir=/dev/null", "--tee=3"],
            f"--duplicate-{name}-filters",
            "/dev/null",
        )
        for name in ("stdout", "stderr")
    ],
    value("--master-addr", "a/b", "host", also=("--nnodes=2",)),
    *[value("--master-port", port, "65535", also=("--nnodes=2",)) for port in ("99999", "-1")],
    bad(["--virtual-local-rank", "--nproc-per-node=2"], "--virtual-local-rank", "'3'", CUDA_VISIBLE_DEVICES="3"),
    bad(["--no-python", "--module"], "--no-python", "--module"),
    *[value(flag, "1", "takes no value", code=2) for flag in SWITCHES],
    *[variable(flag, text, "1 for on or 0 for off") for flag in SWITCHES for text in ("abc", "", "yes")],
    *[
        Bad(flag.dest, [flag.name], [flag.name, "expected one argument"], 2, {})
        for flag in FLAGS
        if flag.read is not None
    ],
]

OF_OURS = [("lease", "x"), ("lease", "0"), ("notice_timeout", "-1"), ("same_failure_limit", "x")]
"""Keys of --rdzv-conf that torchrun does not have, and what they cannot be."""

ONLY_OURS = [
    value("--node-rank", "2", "from 0 to 1", also=("--nnodes=2", "--master-port=1"), code=2),
    *[bad([f"--rdzv-conf={key}={text}", "--standalone"], key, text)._replace(code=2) for key, text in OF_OURS],
    value("--signals-to-handle", "SIGKILL", "leave it out"),
    *[value("--preload", text, "name of a module", "such as torch", code=2) for text in ("a-b", "torch,", "1")],
    *[value("--worker-env", text, "none of torch, jax, tf, ompi", code=2) for text in ("horovod", "", "jax,,tf")],
    *[value("--socket-ifname", text, "not a network interface", "lo", code=2) for text in ("eth99", "lo,,lo", "Auto")],
    *[value("--store-peers", text, "members", "any", "10.0.0.0/8", code=2) for text in ("maybe", "10.0.0.0/33")],
    *[value("--host-prefix", text, "always", "never", "auto", code=2) for text in ("maybe", "")],
    *[value("--exit-codes", text, "torchrun", "classified", code=2) for text in ("mine", "")],
    *[value("--tee-collapse", text, "0 to 3600", code=2) for text in ("-1", "nan", "3601")],
    *[value("--preflight", text, "neither warn nor require", code=2) for text in ("maybe",)],
    *[value("--hang-timeout", text, "0 to 86400", code=2) for text in ("-1", "nan", "86401")],
    *[value("--on-hang", text, "none of report, restart, fail", code=2) for text in ("", "kill", "Report")],
    value("--tee-collapse", "x", "not a number", code=2),
    *[value("--preempt-signals", text, "not a signal", "SIGUSR2", code=2) for text in ("USR2", "12", "SIGUSR2,SIGX")],
    *[
        value("--preempt-signals", text, "cannot ask a job to save", code=2)
        for text in ("SIGKILL", "SIGSTOP", "SIGCHLD")
    ],
    value("--preempt-signals", "SIGTERM", "--signals-to-handle", "leave it out of one", code=2),
    bad(["--preempt-signals=SIGUSR2", "--signals-to-handle=SIGTERM,SIGUSR2"], "SIGUSR2", "leave it out")._replace(
        code=2
    ),
    *[value("--stop-before-end", text, "from 0 on", code=2) for text in ("-1", "nan", "inf")],
    value("--stop-before-end", "soon", "not a number", code=2),
    value("--requeue", "-1", "0 or more", code=2),
    value("--requeue", "often", "not a whole number", code=2),
    value("--requeue", "3", "--preempt-signals", "--stop-before-end", code=2),
    value("--requeue", "3", "SLURM_JOB_ID is not set", also=("--preempt-signals=SIGUSR2",), code=2),
    *[value("--cluster", text, "slurm", "mpi", "k8s", code=2) for text in ("pbs", "")],
    value("--cluster", "k8s", "JOB_COMPLETION_INDEX", code=2),
    *[value("--node-check-timeout", text, "above 0", code=2) for text in ("0", "-1", "nan", "inf", "86401")],
    value("--flight-recorder", "1", "takes no value", code=2),
    variable("--flight-recorder", "abc", "1 for on or 0 for off"),
    *[value("--inprocess-timeout", text, "above 0", code=2) for text in ("0", "-1", "nan", "inf", "86401")],
    value("--fence", "1", "takes no value", code=2),
    variable("--fence", "abc", "1 for on or 0 for off"),
    value("--inprocess-timeout", "soon", "not a number", code=2),
    value("--node-check-timeout", "soon", "not a number", code=2),
    value("--node-check", " ", "not a command", code=2),
    value("--progress-file", "/none/there", "no such folder"),
    value("--incident-dir", __file__, "name a folder of your own", code=2),
    variable("--preload", "a b", "name of a module", "such as torch", code=2),
]
"""What torchrun finds out by hanging, or never, or does not have."""

_LAUNCH = [sys.executable, "-m", "rallypoint.launch"]
OF_LAUNCH = [
    value("--use-env", "1", "takes no value", code=2)._replace(command=_LAUNCH),
    bad(["--no-python"], "--local-rank", "--use-env")._replace(command=_LAUNCH),
]
"""Those of the deprecated command; what torch's makes of them is in `side_by_side`."""

ANYTHING_GOES = {"rdzv_id", "role", "local_addr"}
"""Flags for which torchrun and we take any text."""


def test_every_flag_has_its_bad_values() -> None:
    found = {each.dest for each in [*BAD, *ONLY_OURS] if "expected one argument" not in each.said}
    assert {flag.dest for flag in FLAGS} - ANYTHING_GOES == found


def clean(environ: dict[str, str]) -> dict[str, str]:
    steering = ("PET_", "OMP_", "TORCH", "CUDA_", "ZE_", "LOGLEVEL", "PYTHON_EXEC")
    return {**{name: text for name, text in os.environ.items() if not name.startswith(steering)}, **environ}


def test_one_sentence_and_the_exit_code_and_no_worker(tmp_path: Path) -> None:
    mark, script = tmp_path / "a worker ran", tmp_path / "script.py"
    script.write_text(f"open({str(mark)!r}, 'w')")

    def fault(case: Bad) -> str:
        command = [*case.command, *case.arguments(str(script))]
        done = subprocess.run(
            command, env=clean(case.environ), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        sentences = re.findall(r"^.*?error: (.*)$", done.stderr, re.MULTILINE)
        missing = [word for word in case.must_be_said() if word not in " ".join(sentences)]
        fine = (done.returncode, len(sentences), done.stdout) == (case.code, 1, "") and "Traceback" not in done.stderr
        return "" if fine and not missing else f"{case}: {done.returncode}, without {missing}: {done.stderr}"

    with ThreadPoolExecutor(4) as pool:
        faults = [found for found in pool.map(fault, [*BAD, *ONLY_OURS, *OF_LAUNCH]) if found]
    assert not faults, "\n".join(faults)
    assert not mark.exists()


def test_torchrun_ends_with_the_same_code(tmp_path: Path, record: Record) -> None:
    (tmp_path / "script.py").write_text("")
    cases = [("run", case.arguments("script.py"), case.environ) for case in BAD]

    def ask() -> list[object]:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("torch_cli.py"))],
            input=json.dumps(cases),
            env=clean({"TMPDIR": str(tmp_path)}),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        return [answer.get("exit", answer) for answer in json.loads(done.stdout)]

    theirs = record.answer("bad_values", "exit codes", cases, ask, From.PYTHON)
    different = [(case, code) for case, code in zip(BAD, theirs, strict=True) if code != case.code]
    assert not different, different
