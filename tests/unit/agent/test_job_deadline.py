"""The end of a job's time: from the environment, from Slurm's answer, or unknown."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
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


class Hands:
    """Both clocks, which stand until they are moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return NOW + self.now - 100.0


class Watched:
    """One deadline, what it has reported, and a `squeue` that answers what the test says."""

    def __init__(
        self, folder: Path, before_end: float, end: str = "", job: str = "7", array: Mapping[str, str] = {}
    ) -> None:
        self.hands, self.leads = Hands(), True
        self.told: list[PreemptionRequested] = []
        self._folder = folder
        environ = {**array, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": job, "SLURM_JOB_END_TIME": end}
        self.deadline = JobDeadline(
            before_end,
            lambda left: left - 10,
            lambda: self.leads,
            self.told.append,
            {name: value for name, value in environ.items() if value},
            self.hands,
            self.hands.wall,
        )

    def slurm_says(self, text: str, code: int = 0) -> None:
        self.answers("squeue", text, code)

    def answers(self, program: str, text: str, code: int = 0) -> None:
        script = self._folder / program
        script.write_text(
            f'#!/bin/sh\necho "$@" "$SLURM_TIME_FORMAT" >>{self._folder}/asked\necho "{text}"\nexit {code}\n'
        )
        script.chmod(0o755)

    def slurm_is_asked_and_hangs(self) -> None:
        """A query is under way, 60 s before the end."""
        script = self._folder / "squeue"
        script.write_text("#!/bin/sh\nexec sleep 1000\n")
        script.chmod(0o755)
        self.hands.now += 240
        self.deadline.step()

    @property
    def asked(self) -> int:
        log = self._folder / "asked"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def passes(self, seconds: float) -> None:
        """So much time goes by, and whatever Slurm is asked is answered."""
        self.hands.now += seconds
        for _ in range(4):
            self.deadline.step()
            if self.deadline.fds():
                until_readable(self.deadline.fds(), 30.0)
                deadline = time.monotonic() + 30
                while self.deadline.fds() and time.monotonic() < deadline:
                    self.deadline.step()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (str(int(NOW) + 60), NOW + 60),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("0", None),
        ("nan", None),
        ("1e9", None),
        ("9" * 40, None),
        ("٣" * 10, None),
        (str(int(NOW) + 20 * 366 * 86400), None),
    ],
)
def test_what_the_environment_says(text: str, found: float | None) -> None:
    assert end_time({"SLURM_JOB_END_TIME": text}, NOW) == found


def test_the_moment_that_the_environment_names_is_confirmed_by_slurm(tmp_path: Path) -> None:
    seen = Watched(tmp_path, 60, str(int(NOW) + 300))
    seen.slurm_says(str(int(NOW) + 300))
    seen.passes(239)
    assert (seen.told, seen.asked) == ([], 0), "Slurm is not asked before"
    assert seen.deadline.wake_at() == seen.hands.now + 1
    seen.passes(1)
    assert seen.told == [PreemptionRequested(50.0, "reports that Slurm job 7 ends in 60 s")]
    assert seen.asked == 1
    assert (tmp_path / "asked").read_text() == "--noheader --jobs=7 --format=%e %s\n"
    seen.passes(100)
    assert len(seen.told) == 1
    assert seen.deadline.wake_at() == math.inf


def test_of_an_array_slurm_is_asked_for_the_task_alone(tmp_path: Path) -> None:
    """One of the tasks has the number of the array, for which Slurm answers with the ends of all."""
    seen = Watched(tmp_path, 60, str(int(NOW) + 300), array={"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    seen.slurm_says(str(int(NOW) + 300))
    seen.passes(240)
    assert (tmp_path / "asked").read_text() == "--noheader --jobs=7_3 --format=%e %s\n"
    assert [each.why for each in seen.told] == ["reports that Slurm job 7_3 ends in 60 s"]


def test_more_time_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = Watched(tmp_path, 60, str(int(NOW) + 300))
    seen.slurm_says(str(int(NOW) + 900))
    seen.passes(240)
    assert seen.told == []
    assert "Slurm job 7 was extended by 600 s" in caplog.text
    seen.passes(599)
    assert seen.told == []
    seen.passes(1)
    assert len(seen.told) == 1


def test_slurm_is_asked_where_the_environment_says_nothing_but_not_at_the_start(tmp_path: Path) -> None:
    seen = Watched(tmp_path, 60)
    seen.slurm_says(str(int(NOW) + 300))
    seen.passes(1)
    assert seen.asked == 0
    seen.passes(seen.deadline.wake_at() - seen.hands.now)
    assert seen.asked == 1
    seen.passes(300 - 60 - 4)
    assert seen.told == []
    seen.passes(1)
    assert len(seen.told) == 1
    assert seen.asked == 2


def test_only_one_node_looks(tmp_path: Path) -> None:
    seen = Watched(tmp_path, 60, str(int(NOW) + 300))
    seen.slurm_says(str(int(NOW) + 300))
    seen.leads = False
    seen.passes(500)
    assert (seen.told, seen.asked, seen.deadline.wake_at()) == ([], 0, math.inf)
    seen.leads = True  # as after the loss of the one that did
    seen.passes(0)
    assert len(seen.told) == 1


def test_where_slurm_cannot_be_asked_the_known_moment_holds(tmp_path: Path) -> None:
    seen = Watched(tmp_path, 60, str(int(NOW) + 300))
    seen.slurm_says("slurm_load_jobs error: Unable to contact slurm controller", 1)
    seen.passes(240)
    assert len(seen.told) == 1


@pytest.mark.parametrize(
    ("job", "says", "code", "asked", "words"),
    [
        ("7", "Unable to contact slurm controller", 1, 1, "Unable to contact slurm controller"),
        ("", "", 0, 0, "this is not a job of Slurm, PBS, LSF or Flux"),
        ("7", "NONE", 0, 1, "has no time limit"),
    ],
    ids=["no answer", "outside of a job", "no limit"],
)
def test_what_cannot_be_known_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, job: str, says: str, code: int, asked: int, words: str
) -> None:
    seen = Watched(tmp_path, 60, job=job)
    seen.slurm_says(says, code)
    for _ in range(3):
        seen.passes(100)
    assert (seen.told, seen.asked, seen.deadline.wake_at()) == ([], asked, math.inf)
    (line,) = caplog.messages
    assert words in line


def test_a_slurm_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    seen = Watched(tmp_path, 60, str(int(NOW) + 300))
    seen.slurm_is_asked_and_hangs()
    assert seen.deadline.fds()
    seen.deadline.step()
    assert seen.told == []
    seen.hands.now = seen.deadline.wake_at()
    seen.deadline.step()
    assert len(seen.told) == 1
    assert not seen.deadline.fds(), "the process was ended"


def test_a_query_whose_output_stays_open_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has started holds the pipe, in a session of its own, where no signal of ours to the query reaches it."""
    monkeypatch.setattr(commands, "_KILLED", 1000.0)  # what waits for the query itself outlasts this test
    seen = Watched(tmp_path, 60, str(int(NOW) + 300))
    script = tmp_path / "squeue"
    script.write_text(f"#!/bin/sh\nsetsid sleep 1000 &\necho $! >{tmp_path}/pid\nexit 0\n")
    script.chmod(0o755)
    seen.hands.now += 240
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            seen.deadline.step()
            if seen.deadline.fds():
                until_readable(seen.deadline.fds(), 0.1)
        seen.hands.now = seen.deadline.wake_at()
        seen.deadline.step()
        assert len(seen.told) == 1
        seen.deadline.close()
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_query_under_way_ends_with_the_run(tmp_path: Path) -> None:
    seen = Watched(tmp_path, 60, str(int(NOW) + 300))
    seen.slurm_is_asked_and_hangs()
    seen.deadline.close()
    assert (seen.deadline.fds(), seen.deadline.wake_at()) == ([], math.inf)


# Other schedulers: their answers are transcribed from their documents

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
def test_what_each_scheduler_answers(
    environ: dict[str, str], command: str, answer: list[str], end: float | None
) -> None:
    scheduler = scheduler_of(environ)
    assert scheduler is not None
    assert " ".join(scheduler.command(scheduler.job(environ))) == command
    assert scheduler.read(answer, NOW) == end
    assert scheduler.read([], NOW) is None


@settings(max_examples=examples(200))
@given(st.lists(st.text(max_size=30) | st.sampled_from([*QSTAT, "9" * 400, "999999:99 L", "stime = "])))
def test_any_answer_is_read_in_peace(lines: list[str]) -> None:
    for scheduler in SCHEDULERS:
        end = scheduler.read(lines, NOW)
        assert end is None or end == math.inf or abs(end - NOW) < 11 * 366 * 86400


@pytest.mark.parametrize(
    "environ", [{}, {"PBS_JOBID": "-x"}, {"LSB_JOBID": "1 2"}, {"FLUX_JOB_ID": "--help"}, {"PBS_JOBID": "1;rm"}]
)
def test_what_is_no_job_is_not_asked_for(environ: dict[str, str]) -> None:
    assert scheduler_of(environ) is None


@pytest.mark.parametrize(
    ("environ", "program", "answer", "told"),
    [
        (FLUX, "flux", "300", "reports that Flux job fJq ends in 60 s"),
        (PBS, "qstat", "Walltime.Remaining = 300", "reports that PBS job 1234.server ends in 60 s"),
        (LSF, "bjobs", "0:05 L", "reports that LSF job 3856[2] ends in 60 s"),
    ],
)
def test_the_end_that_a_scheduler_answers_is_waited_for(
    tmp_path: Path, environ: dict[str, str], program: str, answer: str, told: str
) -> None:
    seen = Watched(tmp_path, 60, job="", array=environ)
    seen.answers(program, answer)
    seen.passes(3)
    assert (seen.told, seen.asked) == ([], 1)
    seen.answers(program, answer.replace("300", "60").replace("05", "01"))
    seen.passes(240)
    assert [each.why for each in seen.told] == [told]
    assert seen.asked == 2


def test_what_a_scheduler_does_not_know_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = Watched(tmp_path, 60, job="", array=FLUX)
    seen.answers("flux", "no \033[31m job", 1)
    seen.passes(3)
    seen.passes(300)
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        "Flux cannot be queried: no ?[31m job; use --preempt-signals with 'flux run --signal=USR2@SECONDS' instead"
        in line
    )


# How long the workers have


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


@pytest.mark.parametrize(
    ("left", "stop", "least", "most"), [(1000, 30, 60, 60), (70, 30, 33, 35.1), (40, 30, 19, 20.1)]
)
def test_a_signal_gives_no_more_than_is_left(
    monkeypatch: pytest.MonkeyPatch, left: int, stop: float, least: float, most: float
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left))
    assert least <= triggers(0.0, stop).of_signal(12).seconds <= most


def test_an_end_that_is_past_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 5))
    assert triggers(0.0, 30.0).of_signal(12).seconds == DEFAULT_NOTICE


@pytest.mark.parametrize("names", ["USR2", "12", "SIGUSR2,SIGNAL", "SIGKILL", "SIGCHLD", "SIGSEGV"])
def test_names_that_are_no_signals(names: str) -> None:
    with pytest.raises(UsageError, match="SIGUSR2"):
        print(PreemptionOptions(preempt_signals=names).signals)


def test_no_names_are_no_signals() -> None:
    assert PreemptionOptions().signals == PreemptionOptions(preempt_signals=" , ").signals == frozenset()
