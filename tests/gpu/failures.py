"""How the report names CUDA's errors, evidence of a hang, and the results of a stop and of an incident."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.gpu.jobs import RALLYRUN, RESUME, Done, events_of, program, run, running
from tests.gpu.rows import Bench, Check, Needs, Unexpected

_GROUP = "failures"
_SILENCE = 5
"""Seconds of --hang-timeout."""


def _root_cause(text: str) -> str:
    """The lines of the report from its root cause on."""
    _, found, rest = text.partition("Root Cause")
    return rest if found else ""


def _names(kind: str, *words: str) -> Check:
    def check(bench: Bench) -> str:
        done = run([*RALLYRUN, "--standalone", "--nproc-per-node=1", program("failing"), kind])
        cause = _root_cause(done.err)
        found = next((word for word in words if word in cause), None)
        if done.code != 1 or found is None or "rank      : 0" not in cause:
            raise Unexpected(f"exit code {done.code}; {(cause or done.err)[-600:]}")
        line = next(line for line in cause.splitlines() if found in line)
        return f"{line.strip()} ({done.seconds:.1f} s)"

    what = {"assert": "device-side assertion", "address": "illegal address", "memory": "out of memory"}[kind]
    return Check(_GROUP, f"a CUDA error: {what}", f"the root cause names it: {words[0]!r}", check)


def _hangs(bench: Bench, kind: str, *flags: str, workers: int = 1, folder: Path) -> Done:
    command = [*RALLYRUN, "--standalone", f"--nproc-per-node={workers}", f"--hang-timeout={_SILENCE}"]
    command += ["--on-hang=fail", f"--log-dir={folder}", *flags, program("hanging"), kind, bench.device]
    done = run(command)
    if done.code != 124:
        raise Unexpected(f"exit code {done.code} where 124 is expected: {done.err[-600:]}")
    return done


def _hang_in_kernel(bench: Bench) -> str:
    folder = bench.new_folder("hang-kernel")
    done = _hangs(bench, "kernel", "--redirects=3", folder=folder)
    written = "".join(path.read_text(errors="replace") for path in folder.rglob("stderr.log"))
    place = "wait_for_device"
    where = "the report" if place in done.err else "the worker's standard error" if place in written else ""
    if not where:
        raise Unexpected(f"no stack names {place}: {done.err[-400:]}; {written[-400:]}")
    return f"exit code 124 after {done.seconds:.1f} s; the stack is in {where}"


def _hang_in_nccl(bench: Bench, kind: str, workers: int) -> str:
    folder = bench.new_folder(f"hang-{kind}")
    done = _hangs(bench, kind, "--flight-recorder", workers=workers, folder=folder)
    dumps = [path for path in folder.rglob("rank_*") if path.is_file() and path.stat().st_size]
    lines = [
        line.strip() for line in done.err.splitlines() if "flight recorder" in line and "all_reduce" in line.lower()
    ]
    if len(dumps) < workers or not lines:
        raise Unexpected(f"{len(dumps)} dumps, {lines}: {done.err[-800:]}")
    return f"{len(dumps)} dump{'s' if workers > 1 else ''}; {lines[0]}"


def _missing_rank(bench: Bench) -> str:
    last = len(bench.machine.gpus) - 1
    told = _hang_in_nccl(bench, "missing", last + 1)
    if f"not by rank {last}" not in told:
        raise Unexpected(told)
    return told


def _stops_with_checkpoint(bench: Bench) -> str:
    folder = bench.new_folder("stop")
    arguments = [f"--device={bench.device}", "--backend=gloo", f"--checkpoint-dir={folder}"]
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=2", program("training"), *arguments, "--save-on-sigterm"]
    with running(command) as job:
        job.step(5)
        began = time.monotonic()
        os.kill(job.agent.pid, signal.SIGTERM)
        job.event("done", RESUME)
        last = max(event["step"] for event in job.seen if event["event"] == "step")
        code = job.agent.process.wait(RESUME)
        took = time.monotonic() - began
    again = run([*command, f"--stop-after={last + 3}"])
    first = next((event["step"] for event in events_of(again.out) if event["event"] == "training"), -1)
    if first != last or again.code:
        raise Unexpected(f"saved after step {last}, resumed after step {first}: {again.err[-300:]}")
    return f"saved after step {last} and ended in {took:.1f} s with exit code {code}; the next run resumed there"


def _bundle(bench: Bench) -> str:
    folder = bench.new_folder("incident")
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=1", f"--incident-dir={folder}"]
    run([*command, program("failing"), "assert"])
    files = {path.name: path for path in folder.rglob("*") if path.is_file()}
    if "nvidia-smi.txt" not in files:
        raise Unexpected(f"the bundle has {sorted(files)}")
    text = files["nvidia-smi.txt"].read_text(errors="replace")
    missing = [gpu.uuid for gpu in bench.machine.listed if gpu.uuid not in text]
    if missing or "device-side assert" not in files["failure.txt"].read_text(errors="replace"):
        raise Unexpected(f"without {missing or 'the assertion'}: {text[:300]}")
    return f"{len(files)} files; nvidia-smi.txt has {len(text.splitlines())} lines"


_ANYWHERE = Needs(rehearsal=True)
CHECKS = (
    _names("assert", "device-side assert"),
    _names("address", "illegal memory access"),
    _names("memory", "out of memory"),
    Check(_GROUP, "a hang in a kernel", "exit code 124, and where the worker is waiting", _hang_in_kernel, _ANYWHERE),
    Check(
        _GROUP,
        "a hang in NCCL: a collective behind a kernel that never ends",
        "a flight recorder dump, and a line that names all_reduce",
        lambda bench: _hang_in_nccl(bench, "collective", 1),
    ),
    Check(
        _GROUP,
        "a hang in NCCL: a rank that never arrives",
        "a dump of each rank, and a line that names the missing rank",
        _missing_rank,
        Needs(gpus=2),
    ),
    Check(
        _GROUP,
        "SIGTERM and a checkpoint of the device's tensors",
        "all ranks save in the same step and end; the next run resumes there",
        _stops_with_checkpoint,
        _ANYWHERE,
    ),
    Check(_GROUP, "the incident bundle", "contains the state from nvidia-smi and the CUDA error", _bundle),
)
