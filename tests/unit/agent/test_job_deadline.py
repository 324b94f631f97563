"""The end of a job's time: from the environment, from the scheduler's answer, or unknown."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.agent.feature import Agent
from rallypoint.agent.options import Features, PreemptionOptions
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.errors import UsageError
from rallypoint.base.kernel import until_readable
from rallypoint.features.preemption import commands
from rallypoint.features.preemption.agent import DEFAULT_NOTICE, WholeJobPreemption
from rallypoint.features.preemption.deadline import JobDeadline, end_time
from rallypoint.features.preemption.limits import SCHEDULERS, scheduler_of
from rallypoint.features.preemption.rules import PreemptionRequested
from tests.effort import examples

pytestmark = pytest.mark.process
NOW = 1_800_000_000.0
END = str(int(NOW) + 300)


class Watched:
    """A deadline with clocks that a test moves, its reports, and schedulers that answer as the test says."""

    def __init__(self, folder: Path, end: str = END, job: str = "7", **variables: str) -> None:
        self.now, self.leads = 100.0, True
        self.reported: list[PreemptionRequested] = []
        self.folder = folder
        environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": job, "SLURM_JOB_END_TIME": end} | variables
        self.deadline = JobDeadline(
            60,
            lambda left: left - 10,
            lambda: self.leads,
            self.reported.append,
            {name: value for name, value in environ.items() if value},
            self,
            lambda: NOW + self.now - 100.0,
        )

    def monotonic(self) -> float:
        return self.now

    def install(self, program: str, text: str) -> None:
        (self.folder / program).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / program).chmod(0o755)

    def answer(self, text: str, code: int = 0, program: str = "squeue") -> None:
        asked = f'echo "$@" "$SLURM_TIME_FORMAT" >>{self.folder}/asked'
        self.install(program, f'{asked}\necho "{text}"\nexit {code}')

    @property
    def asked(self) -> list[str]:
        log = self.folder / "asked"
        return log.read_text().splitlines() if log.exists() else []

    def whys(self) -> list[str]:
        return [report.why for report in self.reported]

    def passes(self, seconds: float) -> None:
        """Let time pass, and wait for the answers to all queries."""
        self.now += seconds
        for _ in range(4):
            self.deadline.step()
            if self.deadline.fds():
                until_readable(self.deadline.fds(), 30.0)
                deadline = time.monotonic() + 30
                while self.deadline.fds() and time.monotonic() < deadline:
                    self.deadline.step()


@pytest.mark.parametrize(
    "text", ["", "soon", "-5", "0", "nan", "1e9", "9" * 40, "\u0663" * 10, str(int(NOW) + 20 * 366 * 86400)]
)
def test_the_end_in_the_environment(text: str) -> None:
    assert end_time({"SLURM_JOB_END_TIME": text}, NOW) is None
    assert end_time({"SLURM_JOB_END_TIME": END}, NOW) == NOW + 300


def test_slurm_is_asked_at_the_moment_in_the_environment(tmp_path: Path) -> None:
    job = Watched(tmp_path)
    job.answer(END)
    job.passes(239)
    assert (job.reported, job.asked) == ([], []), "Slurm is not asked before"
    assert job.deadline.wake_at() == job.now + 1
    job.passes(1)
    assert job.reported == [PreemptionRequested(50.0, "reports that Slurm job 7 ends in 60 s")]
    assert job.asked == ["--noheader --jobs=7 --format=%e %s"]
    job.passes(100)
    assert len(job.reported) == 1
    assert job.deadline.wake_at() == math.inf


def test_only_one_node_reports(tmp_path: Path) -> None:
    job = Watched(tmp_path)
    job.answer(END)
    job.leads = False
    job.passes(500)
    assert (job.reported, job.asked, job.deadline.wake_at()) == ([], [], math.inf)
    job.leads = True  # the node that did was lost
    job.passes(0)
    assert len(job.reported) == 1


def test_slurm_is_asked_for_one_task_of_an_array(tmp_path: Path) -> None:
    """The job id of one of the tasks is that of the array, for which Slurm answers with the ends of all tasks."""
    job = Watched(tmp_path, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    job.answer(END)
    job.passes(240)
    assert job.asked == ["--noheader --jobs=7_3 --format=%e %s"]
    assert job.whys() == ["reports that Slurm job 7_3 ends in 60 s"]


def test_an_extended_job_is_reported_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Watched(tmp_path)
    job.answer(str(int(NOW) + 900))
    job.passes(240)
    assert "Slurm job 7 was extended by 600 s" in caplog.text
    job.passes(599)
    assert job.reported == []
    job.passes(1)
    assert len(job.reported) == 1


def test_without_the_variable_slurm_is_asked_a_moment_after_the_start(tmp_path: Path) -> None:
    job = Watched(tmp_path, end="")
    job.answer(END)
    job.passes(1)
    assert job.asked == []
    job.passes(job.deadline.wake_at() - job.now)
    assert len(job.asked) == 1
    job.passes(300 - 60 - 4)
    assert job.reported == []
    job.passes(1)
    assert (len(job.reported), len(job.asked)) == (1, 2)


@pytest.mark.parametrize(
    ("job_id", "answer", "code", "asked", "words"),
    [
        ("7", "Unable to contact slurm controller", 1, 1, "Unable to contact slurm controller"),
        ("", "", 0, 0, "this is not a job of Slurm, PBS, LSF or Flux"),
        ("7", "NONE", 0, 1, "has no time limit"),
    ],
    ids=["no answer", "outside of a job", "no limit"],
)
def test_an_unknown_end_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, job_id: str, answer: str, code: int, asked: int, words: str
) -> None:
    job = Watched(tmp_path, end="", job=job_id)
    job.answer(answer, code)
    for _ in range(3):
        job.passes(100)
    assert (job.reported, len(job.asked), job.deadline.wake_at()) == ([], asked, math.inf)
    (line,) = caplog.messages
    assert words in line


def test_without_an_answer_of_slurm_the_known_end_counts(tmp_path: Path) -> None:
    failing, hanging = Watched(tmp_path), Watched(tmp_path)
    failing.answer("slurm_load_jobs error: Unable to contact slurm controller", 1)
    failing.passes(240)
    assert len(failing.reported) == 1
    hanging.install("squeue", "exec sleep 1000")
    hanging.now += 240
    hanging.deadline.step()
    assert hanging.deadline.fds()
    hanging.deadline.step()
    assert hanging.reported == []
    hanging.now = hanging.deadline.wake_at()
    hanging.deadline.step()
    assert len(hanging.reported) == 1
    assert not hanging.deadline.fds(), "the process was ended"


def test_a_query_whose_output_stays_open_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child holds the pipe, in its own session, which our signals to the query do not reach."""
    monkeypatch.setattr(commands, "_KILLED", 1000.0)  # a wait for the query itself would outlast this test
    job = Watched(tmp_path)
    job.install("squeue", f"setsid sleep 1000 &\necho $! >{tmp_path}/pid\nexit 0")
    job.now += 240
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            job.deadline.step()
            if job.deadline.fds():
                until_readable(job.deadline.fds(), 0.1)
        job.now = job.deadline.wake_at()
        job.deadline.step()
        assert len(job.reported) == 1
        job.deadline.close()
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_running_query_ends_with_the_run(tmp_path: Path) -> None:
    job = Watched(tmp_path)
    job.install("squeue", "exec sleep 1000")
    job.now += 240
    job.deadline.step()
    job.deadline.close()
    assert (job.deadline.fds(), job.deadline.wake_at()) == ([], math.inf)


# Other schedulers, with answers from their documents

STIME = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(NOW - 600))
QSTAT = [
    "Job Id: 1234.server",
    "job_state = R",
    f"stime = {STIME}",
    "Resource_List.ncpus = 64",
    "Resource_List.walltime = 01:00:00",
    "resources_used.walltime = 00:09:50",
]
FLUX, PBS, LSF = {"FLUX_JOB_ID": "\u0192Jq"}, {"PBS_JOBID": "1234.server"}, {"LSB_JOBID": "3856", "LSB_JOBINDEX": "2"}


@pytest.mark.parametrize(
    ("environ", "command", "answer", "end"),
    [
        (FLUX, "flux job timeleft fJq", ["3000"], NOW + 3000),
        (FLUX, "flux job timeleft fJq", ["0"], NOW),
        (FLUX, "flux job timeleft fJq", ["4294967295"], math.inf),
        (FLUX, "flux job timeleft fJq", ["flux-job: ERROR: not found"], None),
        (PBS, "qstat -f 1234.server", QSTAT, NOW + 3000),
        (PBS, "qstat -f 1234.server", [*QSTAT[:4], "Resource_List.walltime = 90:00"], NOW + 4800),
        (PBS, "qstat -f 1234.server", [*QSTAT, "Walltime.Remaining = 2500"], NOW + 2500),
        (PBS, "qstat -f 1234.server", QSTAT[:4], math.inf),
        (PBS, "qstat -f 1234.server", [*QSTAT[:2], "stime = soon", *QSTAT[3:]], None),
        (PBS, "qstat -f 1234.server", ["qstat: Unknown Job Id 1234.server"], None),
        (LSF, "bjobs -noheader -o time_left 3856[2]", ["0:50 L"], NOW + 3000),
        (LSF, "bjobs -noheader -o time_left 3856[2]", ["-"], math.inf),
        (LSF, "bjobs -noheader -o time_left 3856[2]", ["0:50 E"], None),
        (LSF, "bjobs -noheader -o time_left 3856[2]", ["Job <3856> is not found"], None),
        ({"SLURM_JOB_ID": "7"}, "squeue --noheader --jobs=7 --format=%e", ["NONE"], math.inf),
        ({"SLURM_JOB_ID": "7"}, "squeue --noheader --jobs=7 --format=%e", [str(int(NOW) + 9)], NOW + 9),
    ],
)
def test_answers_of_schedulers(environ: dict[str, str], command: str, answer: list[str], end: float | None) -> None:
    scheduler = scheduler_of(environ)
    assert scheduler is not None
    assert " ".join(scheduler.command(scheduler.job(environ))) == command
    assert scheduler.read(answer, NOW) == end
    assert scheduler.read([], NOW) is None


@settings(max_examples=examples(200))
@given(st.lists(st.text(max_size=30) | st.sampled_from([*QSTAT, "9" * 400, "999999:99 L", "stime = "])))
def test_any_answer_can_be_read(lines: list[str]) -> None:
    for scheduler in SCHEDULERS:
        end = scheduler.read(lines, NOW)
        assert end is None or end == math.inf or abs(end - NOW) < 11 * 366 * 86400


@pytest.mark.parametrize(
    "environ", [{}, {"PBS_JOBID": "-x"}, {"LSB_JOBID": "1 2"}, {"FLUX_JOB_ID": "--help"}, {"PBS_JOBID": "1;rm"}]
)
def test_invalid_job_ids(environ: dict[str, str]) -> None:
    assert scheduler_of(environ) is None


@pytest.mark.parametrize(
    ("environ", "program", "answer", "why"),
    [
        (FLUX, "flux", "300", "reports that Flux job fJq ends in 60 s"),
        (PBS, "qstat", "Walltime.Remaining = 300", "reports that PBS job 1234.server ends in 60 s"),
        (LSF, "bjobs", "0:05 L", "reports that LSF job 3856[2] ends in 60 s"),
    ],
)
def test_ends_of_schedulers(tmp_path: Path, environ: dict[str, str], program: str, answer: str, why: str) -> None:
    job = Watched(tmp_path, end="", job="", **environ)
    job.answer(answer, program=program)
    job.passes(3)
    assert (job.reported, len(job.asked)) == ([], 1)
    job.answer(answer.replace("300", "60").replace("05", "01"), program=program)
    job.passes(240)
    assert (job.whys(), len(job.asked)) == ([why], 2)


def test_a_scheduler_without_an_answer_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Watched(tmp_path, end="", job="", **FLUX)
    job.answer("no \033[31m job", 1, "flux")
    job.passes(3)
    job.passes(300)
    (line,) = caplog.messages
    assert "Flux cannot be queried: no ?[31m job; use --preempt-signals with 'flux run --signal=USR2@SECONDS'" in line


def triggers(notice: float, stop: float) -> WholeJobPreemption:
    workers = SimpleNamespace(
        group=SimpleNamespace(spec=SimpleNamespace(features=Features.of(preempt_signals="SIGUSR2, SIGUSR1"))),
        rendezvous=SimpleNamespace(notice_timeout=notice),
        grace=SimpleNamespace(stop=stop),
    )
    return WholeJobPreemption(Agent(workers, print, SYSTEM_CLOCK, print))  # type: ignore[arg-type]


def test_a_signal_gives_the_notice_timeout_or_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert triggers(0.0, 30.0).of_signal(12) == PreemptionRequested(DEFAULT_NOTICE, "received SIGUSR2")
    assert triggers(7.0, 30.0).of_signal(10) == PreemptionRequested(7.0, "received SIGUSR1")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 5))  # which has passed
    assert triggers(0.0, 30.0).of_signal(12).seconds == DEFAULT_NOTICE


@pytest.mark.parametrize(
    ("left", "stop", "least", "most"), [(1000, 30, 60, 60), (70, 30, 33, 35.1), (40, 30, 19, 20.1)]
)
def test_a_signal_gives_no_more_than_is_left(
    monkeypatch: pytest.MonkeyPatch, left: int, stop: float, least: float, most: float
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left))
    assert least <= triggers(0.0, stop).of_signal(12).seconds <= most


@pytest.mark.parametrize("names", ["USR2", "12", "SIGUSR2,SIGNAL", "SIGKILL", "SIGCHLD", "SIGSEGV"])
def test_preempt_signals(names: str) -> None:
    with pytest.raises(UsageError, match="SIGUSR2"):
        print(PreemptionOptions(preempt_signals=names).signals)
    assert PreemptionOptions().signals == PreemptionOptions(preempt_signals=" , ").signals == frozenset()
