"""Each bad value of each flag: one sentence with the flag, the value and the allowed values, and torchrun's exit code.

This process reads and converts them; real processes handle a few, whose worker would leave a mark. torchrun's answers
come from one process. Bad values of flags that torchrun does not have are in their rows (`agent.options`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from rallypoint.base.errors import UsageError, UserError
from rallypoint.cli.convert import config_from_options
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import parse
from rallypoint.cli.rallyrun import by_cluster
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.params import RendezvousParameters
from tests.conformance.record import From, Record
from tests.environment import undisturbed
from tests.jobs.launching import RALLYRUN
from tests.processes import completed

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
    *[value("--nnodes", text, "such as 2 or 1:4") for text in ("1:2:3", "a", "", "1:", "2.5")],
    *[value("--nnodes", text, "minimum must be 1 or more") for text in ("0", "2:1", "0:1", "-1")],
    *[value("--nproc-per-node", text, "minimum is 1") for text in ("0", "-1")],
    *[value("--nproc-per-node", text, "cpu, gpu, xpu, auto") for text in ("GPU", "mps", "", "1.5")],
    bad(["--nproc-per-node=gpu"], "--nproc-per-node=gpu", "cpu or auto", CUDA_VISIBLE_DEVICES=""),
    bad(["--nproc-per-node=xpu"], "--nproc-per-node=xpu", "cpu or auto", ZE_AFFINITY_MASK="x"),
    *[bad([f"--rdzv-backend={text}", "--nnodes=2"], "rendezvous backend", "c10d", text) for text in ("zookeeper", "")],
    *[value("--rdzv-endpoint", f"h:{port}", "65535", also=DYNAMIC) for port in ("99999", "x", "-1")],
    value("--rdzv-endpoint", "a b:1", "host:port", also=DYNAMIC),
    value("--rdzv-endpoint", "h", "port", also=("--nnodes=2",)),
    *[value("--rdzv-conf", text, "=value") for text in ("foo", "a=1,b")],
    value("--rdzv-conf", "=x"),
    *[
        bad([f"--rdzv-conf={key}=x"], "--rdzv-conf", repr(key), "its own flag")
        for key in ("backend", "endpoint", "run_id", "local_addr")
    ],
    *[bad([f"--rdzv-conf=join_timeout={text}", "--standalone"], "join_timeout=", text, "=30") for text in ("abc", "0")],
    *[value(flag, text, "whole number", code=2) for flag in WHOLE for text in ("abc", "", "1.5")],
    *[variable(flag, text, "whole number", code=2) for flag in WHOLE for text in ("abc", "")],
    value("--max-restarts", "-1", "0 to 2147483648"),
    value("--shutdown-timeout", "-1", "0 or more seconds"),
    value("--monitor-interval", "x", "not a number", code=2),
    variable("--monitor-interval", "", "not a number", code=2),
    *[value("--monitor-interval", text, "more than 0") for text in ("0.0", "-1.0", "nan")],
    value("--start-method", "bogus", "spawn", "fork", "forkserver", code=2),
    value("--numa-binding", "bogus", "node", "socket", "exclusive", "core-complex", code=2),
    *[
        bad([f"--numa-binding={mode}"], f"--numa-binding={mode}", "accelerator", CUDA_VISIBLE_DEVICES="")
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
    *[variable(flag, text, "it to 1 (on) or 0 (off)") for flag in SWITCHES for text in ("abc", "", "yes")],
    *[
        Bad(flag.dest, [flag.name], [flag.name, "expected one argument"], 2, {})
        for flag in FLAGS
        if flag.read is not None
    ],
]

BAD_AS_TORCHRUNS = {"progress_file"}
"""Flags of ours for whose bad values the exit code is 1."""

OF_OURS = [("lease", "x"), ("lease", "0"), ("notice_timeout", "-1"), ("same_failure_limit", "x")]
"""Keys of --rdzv-conf that torchrun does not have, and what they cannot be."""

ONLY_OURS = [
    value("--nnodes", "2", "--standalone", "remove one of them", also=("--standalone",), code=2),
    value("--rdzv-id", "$SLURM_JOB_ID", "which was not expanded", code=2),
    value("--rdzv-id", "", "is empty", also=("--nnodes=2",), code=2),
    value("--node-rank", "2", "from 0 to 1", also=("--nnodes=2", "--master-port=1"), code=2),
    *[bad([f"--rdzv-conf={key}={text}", "--standalone"], key, text)._replace(code=2) for key, text in OF_OURS],
    value("--signals-to-handle", "SIGKILL", "remove it"),
    bad(["--preempt-signals=SIGUSR2", "--signals-to-handle=SIGUSR2"], "SIGUSR2", "remove it")._replace(code=2),
    value("--requeue", "3", "SLURM_JOB_ID is not set", also=("--preempt-signals=SIGUSR2",), code=2),
    value("--incident-dir", __file__, "choose a folder that you own", code=2),
    value("--config", "no-such-file.toml", "cannot be read", code=2),
]
"""What torchrun finds out by hanging, or never."""

BEYOND = [
    Bad(flag.dest, [f"{flag.name}={text}"], [flag.name, text], 1 if flag.dest in BAD_AS_TORCHRUNS else 2, {})
    for flag in FLAGS
    for text in flag.bad
]

_LAUNCH = [sys.executable, "-m", "rallypoint.launch"]
OF_LAUNCH = [
    value("--use-env", "1", "takes no value", code=2)._replace(command=_LAUNCH),
    bad(["--no-python"], "--local-rank", "--use-env")._replace(command=_LAUNCH),
]
"""Those of the deprecated command; what torch's makes of them is in `side_by_side`."""

ANYTHING_GOES = {"role", "local_addr", "log_line_prefix_template"}
"""Flags for which torchrun and we take any text that a shell has expanded."""


def test_every_flag_has_its_bad_values() -> None:
    found = {each.dest for each in [*BAD, *ONLY_OURS, *BEYOND] if "expected one argument" not in each.said}
    assert {flag.dest for flag in FLAGS} - ANYTHING_GOES == found


def clean(environ: dict[str, str]) -> dict[str, str]:
    return undisturbed("CUDA_", "ZE_") | environ


def fault(case: Bad, code: int | str | None, sentences: list[str], printed: str) -> str:
    """What is wrong with how a case ended; empty if nothing."""
    missing = [word for word in case.must_be_said() if word not in " ".join(sentences)]
    fine = (code, len(sentences), printed) == (case.code, 1, "")
    return "" if fine and not missing else f"{case}: {code}, without {missing}: {sentences} {printed}"


def test_one_sentence_and_the_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    for case in [*BAD, *ONLY_OURS, *BEYOND]:
        environ = clean(case.environ)
        code: int | str | None = 0
        sentences: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environ)
            try:
                options = parse(case.arguments("script.py"), environ)
                config = config_from_options(by_cluster(options), environ)[0]
                settings_of(RendezvousParameters(config.rdzv_backend, "h:1", "job", 1, 1, **config.rdzv_configs))
            except SystemExit as end:
                code = end.code
            except UserError as error:
                code, sentences = 2 if isinstance(error, UsageError) else 1, [str(error)]
        shown = capsys.readouterr()
        sentences += re.findall(r"^.*?error: (.*)$", shown.err, re.MULTILINE)
        faults.append(fault(case, code, sentences, shown.out))
    assert not any(faults), "\n".join(filter(None, faults))


_SOME = [BAD[0], BEYOND[0], BEYOND[-1], ONLY_OURS[0], *OF_LAUNCH]
"""Cases of each kind: of torchrun's flags and of ours, refused by the parser and after it."""


def test_a_process_ends_with_it_and_no_worker_runs(tmp_path: Path) -> None:
    mark, script = tmp_path / "a worker ran", tmp_path / "script.py"
    script.write_text(f"open({str(mark)!r}, 'w')")
    faults = []
    for case in _SOME:
        command = [*case.command, *case.arguments(str(script))]
        done = completed(command, env=clean(case.environ), cwd=tmp_path)
        assert "Traceback" not in done.stderr
        sentences = re.findall(r"^.*?error: (.*)$", done.stderr, re.MULTILINE)
        faults.append(fault(case, done.returncode, sentences, done.stdout))
    assert not any(faults), "\n".join(filter(None, faults))
    assert not mark.exists()


def test_torchrun_ends_with_the_same_code(tmp_path: Path, record: Record) -> None:
    (tmp_path / "script.py").write_text("")
    cases = [("run", case.arguments("script.py"), case.environ) for case in BAD]

    def ask() -> list[object]:
        done = completed(
            [sys.executable, str(Path(__file__).with_name("torch_cli.py"))],
            input=json.dumps(cases),
            env=clean({"TMPDIR": str(tmp_path)}),
            cwd=tmp_path,
            check=True,
        )
        return [answer.get("exit", answer) for answer in json.loads(done.stdout)]

    theirs = record.answer("bad_values", "exit codes", cases, ask, From.PYTHON)
    different = [(case, code) for case, code in zip(BAD, theirs, strict=True) if code != case.code]
    assert not different, different
