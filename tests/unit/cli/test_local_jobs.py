"""Finding a job by the names that people use."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.cli import local_jobs
from rallypoint.cli.job_verbs import given_endpoint
from rallypoint.cli.local_jobs import (
    NoJobError,
    either_order,
    is_endpoint,
    job_named,
    past_jobs,
    past_jobs_named,
    running_jobs,
    show_jobs,
    show_past,
)
from rallypoint.cli.rallyctl import build_parser
from rallypoint.features import kept_reports
from rallypoint.features.kept_reports import KeptReport, RankEnd
from rallypoint.features.local_jobs import EndedJob
from rallypoint.rendezvous.handler import LocalJob

UUID = "3d2754c7-f1c6-4315-b465-30afa32ec2c9"
AGENTS = (
    LocalJob(14, "none", "static", "127.0.0.1:29611", "train.py", 1000.0, 0),
    LocalJob(12, "none", "static", "127.0.0.1:29612", "eval.py", 1001.0, 0),
    LocalJob(13, UUID, "c10d", "127.0.0.1:43333", "train.py", 999.0, 0),
    LocalJob(15, "opjob", "c10d", "node1:29400", "__main__", 1002.0, 0),
    LocalJob(16, "opjob", "c10d", "node1:29400", "__main__", 1003.0, 0),
)
ANY = re.compile(".+")


def ended(job: LocalJob, at: float, outcome: str = "failed") -> EndedJob:
    return EndedJob(job, at, outcome, "rank 0 failed", 1, 1, 3, "")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[EndedJob]:
    past: list[EndedJob] = []
    monkeypatch.setattr(local_jobs, "local_jobs", lambda: iter(AGENTS))
    monkeypatch.setattr(local_jobs, "ended_jobs", lambda: iter(past))
    for name in ("RALLYPOINT_ENDPOINT", "PET_RDZV_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return past


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def test_running_jobs() -> None:
    assert [[agent.pid for agent in job.agents] for job in running_jobs()] == [[13], [14], [12], [15, 16]]


@pytest.mark.parametrize(
    ("word", "pid"),
    [
        *(("14", 14), ("29612", 12), ("eval.py", 12), ("./examples/eval.py", 12), (UUID, 13), ("3d2754c7", 13)),
        *(("opjob", 15), ("opj", None), ("opjo", 15), ("16", 15), ("node1", None)),
    ],
)
def test_names_of_a_job(word: str, pid: int | None) -> None:
    found = job_named(word, "")
    assert (None if found is None else found.first_agent.pid) == pid


def test_unknown_names() -> None:
    assert job_named("opjobs", "") is None
    with pytest.raises(NoJobError, match=r"no job on this machine is named 'OpJob'; did you mean opjob\?"):
        job_named("OpJob", "")
    for word in ("4242", "no.py", "there/is/none"):
        with pytest.raises(NoJobError, match=f"no job of this user is named '{word}'"):
            job_named(word, "")


@pytest.mark.parametrize("word", ["none", "train.py", ""])
def test_ambiguous_names(word: str) -> None:
    with pytest.raises(UsageError, match="use the number, port or endpoint of one") as refused:
        job_named(word, "")
    named = {"none": (14, 12), "train.py": (14, 13), "": (12, 13, 14, 15)}[word]
    listed = [line.split()[0] for line in str(refused.value).splitlines()[2:]]
    assert sorted(map(int, listed)) == sorted(named)
    found = job_named("train.py", "none")
    assert found is not None
    assert found.first_agent.pid == 14, "an id helps"
    with pytest.raises(UsageError, match="'none' matches 2 jobs"):
        job_named("", "none")


def test_an_ended_job_is_not_a_host(machine: list[EndedJob]) -> None:
    job = LocalJob(9, "gone", "c10d", "localhost:29400", "a.py", 990.0, 0)
    machine.append(ended(job, time.time() - 12.5)._replace(log_dir="/logs/gone"))
    with pytest.raises(
        NoJobError,
        match="no job 'gone' is running on this machine; the last one failed 12s ago: rank 0 failed; its logs",
    ):
        job_named("gone", "")


def test_names_of_ended_jobs(machine: list[EndedJob]) -> None:
    job = LocalJob(9, UUID, "c10d", "localhost:29400", "a.py", 990.0, 0)
    machine.extend([ended(job._replace(pid=10, began=2000.0), 2010.0), ended(job, 1000.0)])
    for word in (UUID, "3d2754c7", "29400", "a.py", "x/a.py", "localhost:29400", "127.0.0.1:29400"):
        assert [past.job.pid for past in past_jobs_named(word, "")] == [10, 9], word
    assert [past.job.pid for past in past_jobs_named("9", "")] == [9]
    assert past_jobs_named("node1:29400", "") == []
    assert past_jobs_named("29400", "other") == []


@pytest.mark.parametrize("unknown", ["left", "killed"])
def test_the_last_agent_that_knows_the_outcome_counts(machine: list[EndedJob], unknown: str) -> None:
    job = LocalJob(9, "job", "c10d", "localhost:29400", "a.py", 990.0, 0)
    left = ended(job, 1005.0, unknown)
    other = ended(job._replace(pid=10), 1004.0)
    before = ended(job._replace(pid=8, began=900.0), 980.0)
    machine.extend([left, other, before])
    assert past_jobs() == [other, before]
    assert past_jobs_named("9", "") == [other], "by the number of any agent"


@pytest.mark.parametrize(
    ("words", "operand", "job"),
    [
        (["drain", "node7", "node1:29400"], "node7", "node1:29400"),
        (["drain", "node1:29400", "node7"], "node7", "node1:29400"),
        (["drain", "0", "opjob"], "0", "opjob"),
        (["drain", "opjob", "0"], "0", "opjob"),
        (["drain", "29612", "1"], "1", "29612"),
        (["drain", "node7", "node1"], "node7", "node1"),
        (["drain", "node7"], "node7", ""),
        (["resize", "1:2", "opjob"], "1:2", "opjob"),
        (["resize", "opjob", "1:2"], "1:2", "opjob"),
        (["resize", "node1:29400", "4"], "4", "node1:29400"),
        (["resize", "4:8", "node1:29400"], "4:8", "node1:29400"),
        (["resize", "29612", "4"], "4", "29612"),
        (["resize", "opjob", "four"], "four", "opjob"),
        (["resize", "node1:29400", "four"], "four", "node1:29400"),
        (["resize", "four", "opjob"], "four", "opjob"),
    ],
)
def test_job_and_operand_in_either_order(words: list[str], operand: str, job: str) -> None:
    options, name = parsed(*words), "node" if words[0] == "drain" else "size"
    either_order(options, name, ANY if name == "node" else re.compile(r"[0-9]+(:[0-9]+)?"))
    assert (getattr(options, name), options.endpoint) == (operand, job)


@pytest.mark.parametrize("words", [["drain", "29611", "29612"], ["drain", "node1:29400", "node2:29400"]])
def test_ambiguous_order(words: Sequence[str]) -> None:
    with pytest.raises(UsageError, match="could be the job; select the job with --rdzv-endpoint"):
        either_order(parsed(*words), "node", ANY)


def test_the_environment_names_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_endpoint(parsed("stop")) == ""
    for name, value in {"ENDPOINT": "etcd1:2379", "BACKEND": "etcd", "ID": "job7", "CONF": "a=b"}.items():
        monkeypatch.setenv(f"PET_RDZV_{name}", value)
    options = parsed("stop")
    assert given_endpoint(options) == "etcd1:2379"
    assert (options.rdzv_backend, options.rdzv_id, options.rdzv_conf) == ("etcd", "job7", "a=b")
    options = parsed("stop", "--rdzv-id=other")
    given_endpoint(options)
    assert options.rdzv_id == "other"
    monkeypatch.setenv("RALLYPOINT_ENDPOINT", "opjob")
    options = parsed("stop")
    assert (given_endpoint(options), options.rdzv_id) == ("opjob", "")
    assert given_endpoint(parsed("stop", "node2:29400")) == "node2:29400"


def test_show_jobs(machine: list[EndedJob], capsys: pytest.CaptureFixture[str]) -> None:
    machine.append(ended(LocalJob(9, "gone", "c10d", "localhost:29400", "a.py", 990.0, 0), 1000.0))
    show_jobs(running_jobs(), past_jobs(), parsed("status"))
    head, *rows, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["JOB", "PHASE", "AGE", "NODES", "RESTARTS", "SCRIPT", "USER", "ENDPOINT", "NUMBER"]
    assert [row.split()[0] for row in rows] == ["3d2754c7", "none", "none", "opjob"]
    assert [row.split()[-1] for row in rows] == ["13", "14", "12", "15"]
    assert note == "1 has ended here: rallyctl status --all"
    show_jobs([], past_jobs(), parsed("status", "--all"))
    none, _, title, head, row, note = capsys.readouterr().out.splitlines()
    assert (none.partition(";")[0], title) == ("no job of this user is running on this machine", "ended")
    assert head.split() == ["JOB", "OUTCOME", "ENDED", "TOOK", "RESTARTS", "SCRIPT", "NUMBER", "WHY"]
    assert row.split()[:2] == ["gone", "failed"]
    assert row.endswith("rank 0 failed")
    assert note == "'rallyctl status NUMBER' shows the report of one"


@pytest.mark.parametrize(
    ("outcome", "code"), [("failed", 4), ("stopped", 4), ("succeeded", 5), ("left", 1), ("killed", 1)]
)
def test_exit_codes_of_ended_jobs(outcome: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = ended(AGENTS[3], 1012.0, outcome)._replace(log_dir="/logs")
    assert show_past(found, parsed("status")) == code
    shown = capsys.readouterr().out
    for text in ("opjob", "10s", "1 of 3 used", "__main__", "/logs", "rank 0 failed"):
        assert text in shown
    assert is_endpoint(found.job.endpoint)


# Reports of ended jobs

TRACEBACK = "Traceback (most recent call last):"
REPORT = ("=====", "train.py FAILED", f"  traceback : {TRACEBACK}", "  ValueError: boom", "=====")
FAILED = RankEnd(1, 1, 101, 1, "failed", "/logs/1/out", "", tuple(map(str, range(30))), (TRACEBACK, "ValueError: boom"))
STOPPED = RankEnd(0, 0, 100, -15, "stopped", "", "", ("of rank 0",), ())


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[int, KeptReport]:
    """The reports of agents, by their pids."""
    reports: dict[int, KeptReport] = {}
    monkeypatch.setattr(kept_reports, "kept_report", lambda job: reports.get(job.pid))
    return reports


def shown(capsys: pytest.CaptureFixture[str], job: EndedJob, *words: str) -> list[str]:
    """The lines shown below those of the job itself."""
    show_past(job, parsed("status", *words))
    return capsys.readouterr().out.rstrip("\n").split("\n")[8:]


def test_an_ended_job_with_its_report(kept: dict[int, KeptReport], capsys: pytest.CaptureFixture[str]) -> None:
    kept[15] = KeptReport("node1", 0, True, REPORT, (FAILED, STOPPED))
    job = ended(AGENTS[3], 1012.0)
    assert shown(capsys, job) == [
        "",
        *REPORT,
        "",
        "rank 1 (failed, exit code 1), standard output, all of it in /logs/1/out:",
        *(f"  {number}" for number in range(20, 30)),
        "",
        "'rallyctl status 15 --all' shows the last output of each rank",
    ], "the report is not repeated"
    lines = shown(capsys, job, "--all")
    assert lines[7:9] == ["rank 0 (stopped, SIGTERM), standard output:", "  of rank 0"]
    assert lines[-3] == "rank 1 (failed, exit code 1), standard error:"
    assert lines[-1] == "  ValueError: boom"
    assert "  0" in lines
    show_past(job, parsed("status", "--json"))
    (fields,) = json.loads(capsys.readouterr().out)["ended"]
    assert fields["report"] == "\n".join(REPORT)
    assert [(rank["rank"], rank["ending"], rank["host"]) for rank in fields["ranks"]] == [
        (0, "stopped", "node1"),
        (1, "failed", "node1"),
    ]
    assert fields["ranks"][1]["stdout"].endswith("\n29")


def test_the_report_of_the_first_failure_is_shown(
    machine: list[EndedJob], kept: dict[int, KeptReport], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.extend([ended(AGENTS[3], 1012.0), ended(AGENTS[4], 1011.0)])
    kept[15] = KeptReport("node1", 0, False, ("on another node",), (STOPPED,))
    kept[16] = KeptReport("node2", 0, True, REPORT, (FAILED,))
    (job,) = past_jobs()
    assert shown(capsys, job)[1 : 1 + len(REPORT)] == [*REPORT]
    assert "rank 0 (stopped, SIGTERM), standard output:" in shown(capsys, job, "--all")


@pytest.mark.parametrize(
    ("outcome", "first"), [("killed", "its last failure before that, in round 2:"), ("stopped", "=====")]
)
def test_the_last_output_of_a_job_without_a_failed_rank(
    outcome: str, first: str, kept: dict[int, KeptReport], capsys: pytest.CaptureFixture[str]
) -> None:
    kept[15] = KeptReport("node1", 2, False, REPORT, (STOPPED,))
    lines = shown(capsys, ended(AGENTS[3], 1012.0, outcome))
    assert lines[1] == first
    assert "rank 0 (stopped, SIGTERM), standard output:" in lines


def test_the_last_output_of_a_success(kept: dict[int, KeptReport], capsys: pytest.CaptureFixture[str]) -> None:
    kept[15] = KeptReport("node1", 0, False, (), (STOPPED._replace(exit_code=0, ending="succeeded"),))
    job = ended(AGENTS[3], 1012.0, "succeeded")
    assert shown(capsys, job) == ["", "'rallyctl status 15 --all' shows the last output of each rank"]
    assert shown(capsys, job, "--all")[1:] == ["rank 0 (succeeded, exit code 0), standard output:", "  of rank 0"]
